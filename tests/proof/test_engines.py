"""Tests `make engine-proof` without running engines: pins, names, comparison of answers, exit status."""

import re
import sys
from pathlib import Path

import pytest

from tests.proof import sglang_tests
from tests.proof.engines.__main__ import main, run
from tests.proof.engines.environment import HERE, engines, pins
from tests.proof.engines.vllm.compared import compared
from tests.proof.engines.vllm.job import Job
from tests.proof.engines.vllm.scenarios import Scenario
from tests.support.processes import ROOT, ran

FAKE = "import sys; print('it runs'); print('fake 1.0: 3 requests: {word}'); sys.exit({status})"


@pytest.mark.parametrize("engine", engines())
def test_every_package_of_an_engine_has_one_exact_version(engine: str) -> None:
    names = [re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins(HERE / engine / "pins.txt")]
    assert "torch" in names and len(set(names)) == len(names)
    assert not [name for name in names if name.startswith("nvidia")]  # packages for GPUs do not belong there


def test_a_range_is_no_pin(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("# comment\ntorch==2.13.0\nnumpy>=2\n")
    with pytest.raises(ValueError, match=r"'numpy>=2' is not an exact version"):
        pins(tmp_path / "pins.txt")


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nonesuch"])
    assert ended.value.code == 2 and "no engine ['nonesuch']: expected some of" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "word"), [(0, "ok"), (1, "failed")])
def test_an_engine_ends_the_proof_with_its_line_and_its_status(tmp_path: Path, status: int, word: str) -> None:
    program = tmp_path / "tests" / "proof" / "engines" / "fake" / "run.py"
    program.parent.mkdir(parents=True)
    for folder in (program.parent, *program.parent.parents[:3]):
        (folder / "__init__.py").touch()
    program.write_text(FAKE.format(word=word, status=status))
    result = run("fake", Path(sys.executable), [], tmp_path)
    where = ", see build/engines/fake.log" if status else ""
    assert result == {"status": status, "line": f"fake 1.0: 3 requests: {word}{where}", "report": None}


def test_an_engine_that_breaks_off_has_failed(tmp_path: Path) -> None:
    result = run("missing", Path(sys.executable), [], tmp_path)
    assert result["line"] == "missing: ended with 1, see build/engines/missing.log"
    assert "No module named" in (tmp_path / "build" / "engines" / "missing.log").read_text()


def test_every_engine_has_a_program() -> None:
    assert "vllm" in engines()
    assert all((HERE / engine / "run.py").is_file() for engine in engines())
    assert "tests.proof.engines" in (ROOT / "Makefile").read_text()


RIGHT = {"tokens": [5, 6], "logprobs": [-1.0, -2.0], "cached": 64, "prompt": 100, "aborted": False}


@pytest.mark.parametrize(
    ("changed", "loaded", "why"),
    [
        ({}, 3, []),
        ({"tokens": [5, 7]}, 3, ["answers are not those of vLLM without a cache"]),
        ({"tokens": [5]}, 3, ["answers are not those of vLLM without a cache"]),
        ({"tokens": [5], "aborted": True}, 3, []),
        ({"logprobs": [-1.0, -2.0001]}, 3, ["answers are not those of vLLM without a cache"]),
        ({}, 0, ["loaded: 0, expected 1 or more"]),
    ],
)
def test_a_wrong_token_and_a_run_without_hits_fail(changed: dict[str, object], loaded: int, why: list[str]) -> None:
    result = {"answers": {"0.1": RIGHT | changed}, "counts": {"loaded": loaded}, "cost": {}, "left": []}
    assert compared(Scenario(Job()), [({"answers": {"0.1": RIGHT}}, result)]).failures == why


def test_a_control_without_a_wrong_token_is_a_failure() -> None:
    result = {"answers": {"0.1": RIGHT}, "counts": {"loaded": 1}, "cost": {}, "left": []}
    assert compared(Scenario(Job(), wrong=True), [({"answers": {"0.1": RIGHT}}, result)]).failures


# SGLang's own tests, with SGLang's classes and with memstate's. A made-up SGLang, which lacks modules, and a made-up
# `in_place` stand in for the real ones.

STANDING_IN = """
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

@contextmanager
def in_place():
    import sglang
    sglang.OWNER = "memstate"
    yield

def module(name, **what):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(what)

module("torch", cuda=SimpleNamespace(is_available=lambda: True))
module("memstate_tools.bench.no_torchvision", leave_out_torchvision=lambda: None)
module("memstate.integrations.sglang", **({"in_place": in_place} if IN_PLACE else {}))
"""
ITS_TESTS = {
    "test_pools.py": """
import sglang, pytest
def test_same(): pass
def test_theirs(): assert sglang.OWNER == "sglang"
def test_ours(): assert sglang.OWNER == "memstate"
def test_broken(): assert False
""",
    "test_lacks.py": "import sglang.srt.gone\ndef test_a(): pass",
    "test_once.py": "import sglang\nassert sglang.OWNER == 'sglang', 'made for one side'\ndef test_b(): pass",
}


def both_sides(tmp_path: Path, *names: str, in_place: bool = True) -> tuple[int, list[str]]:
    """Runs made-up tests on both sides. Returns the exit status, and the lines about the sides."""
    package, tree = tmp_path / "site" / "sglang", tmp_path / "tree"
    (package / "srt").mkdir(parents=True)
    tree.mkdir()
    (package / "__init__.py").write_text("OWNER = 'sglang'")
    (package / "srt" / "__init__.py").touch()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"IN_PLACE = {in_place}\n{STANDING_IN}")
    for name in names:
        (tree / name).write_text(ITS_TESTS[name])
    given = {"PYTHONPATH": tmp_path / "site", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1, "PYTEST_ADDOPTS": ""}
    done = ran(sys.executable, "-m", "tests.proof.sglang_tests", *names, SGLANG_TESTS=tree, **given)
    return done.returncode, [line for line in done.stdout.splitlines() if "with ours" in line or "with theirs" in line]


def test_what_a_side_lacks_is_said_and_the_rest_is_compared(tmp_path: Path) -> None:
    status, said = both_sides(tmp_path, *ITS_TESTS)
    lacks = [f"not run with {{}}: {name}: ModuleNotFoundError: No module named '{name}'"
             for name in (*sglang_tests.BEFORE, "sglang.srt.utils")]  # fmt: skip
    gone = "not run with {}: test_lacks.py: ModuleNotFoundError: No module named 'sglang.srt.gone'"
    once = "not run with ours: test_once.py: AssertionError: made for one side"
    assert status == 1
    for line in (each.format(side) for each in (*lacks, gone) for side in sglang_tests.SIDES):
        assert line.partition("ModuleNotFoundError")[0] in "\n".join(said), line
    assert once in said
    assert said[-4:] == [
        "passes with theirs alone: test_once.py::test_b (ours: not run)",
        "passes with theirs alone: test_pools.py::test_theirs (ours: failed)",
        "passes with ours alone: test_pools.py::test_ours (theirs: failed)",
        "1 of 3 tests that pass with SGLang's classes pass with ours; 1 with ours alone, 1 on neither side",
    ]


def test_without_our_side_nothing_is_compared(tmp_path: Path) -> None:
    status, said = both_sides(tmp_path, "test_pools.py", in_place=False)
    assert status == 2
    assert "not run with ours: everything: AttributeError: module 'memstate.integrations.sglang' has no" in said[-2]
    assert said[-1].startswith("nothing compared: ")


@pytest.mark.parametrize(
    ("theirs", "ours", "status"),
    [
        ({"a": "passed"}, {"a": "passed"}, 0), ({"a": "passed", "b": "failed"}, {"a": "passed", "b": "failed"}, 0),
        ({"a": "passed"}, {"a": "skipped"}, 1), ({"a": "passed", "b": "passed"}, {"b": "passed"}, 1),
        ({"a": "failed"}, {"a": "failed"}, 2), ({"a": "passed"}, {}, 2), ({}, {"a": "passed"}, 2),
    ],
)  # fmt: skip
def test_outcomes_of_both_sides_make_a_status(theirs: dict[str, str], ours: dict[str, str], status: int) -> None:
    assert sglang_tests.compared(sglang_tests.Side(theirs), sglang_tests.Side(ours))[1] == status
