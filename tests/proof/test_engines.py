"""Tests `make engine-proof` without running engines: pins, names, comparison of answers, exit status."""

import re
import sys
from pathlib import Path

import pytest

from tests.proof.engines.__main__ import main, run
from tests.proof.engines.environment import HERE, engines, pins
from tests.proof.engines.vllm.compared import compared
from tests.proof.engines.vllm.job import Job
from tests.proof.engines.vllm.scenarios import Scenario
from tests.support.processes import ROOT

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
