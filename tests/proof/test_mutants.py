"""Tests that each mutant, a broken copy of memstate, is killed by the test that it names; see tests/proof/mutation.

`make test` tries every 120th mutant that needs no compiled kernel, `make proof` all.
"""

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.proof.mutation.__main__ import COLUMNS, RESULTS
from tests.proof.mutation.catalogue import MUTANTS, Mutant
from tests.proof.mutation.runner import DEAD, ROOT, SEED, Runner, Stale

LIMIT = 60.0  # limit for one test, in seconds
OFTEN = [mutant for mutant in MUTANTS if not mutant.compiled][::120]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(mutant, id=mutant.name, marks=() if mutant in OFTEN else pytest.mark.proof) for mutant in MUTANTS],
)
def test_a_mutant_is_killed(runner: Runner, mutant: Mutant) -> None:
    verdict = runner.killer(mutant, LIMIT)
    assert verdict.fate in DEAD, f"{mutant.killer}\n{verdict}\n{runner.diff(mutant)}"
    if mutant.compiled:
        verdict = runner.run(mutant, [mutant.killer], LIMIT, SEED)
        assert verdict.fate == "survived", f"the interpreter, too: {mutant.killer}\n{verdict}\n{runner.diff(mutant)}"


def test_the_catalogue_is_whole() -> None:
    """Names and changes are unique, each old text occurs exactly once in its file, and each killer exists."""
    for part in ([m.name for m in MUTANTS], [(m.file, m.old, m.new) for m in MUTANTS]):
        assert [entry for entry, times in Counter(part).items() if times > 1] == []
    assert [m.name for m in MUTANTS if m.old == m.new or (ROOT / m.file).read_text().count(m.old) != 1] == []
    killers = [m.killer.partition("[")[0].split("::") for m in MUTANTS]
    assert [
        test for path, test in killers if not re.search(rf"^(def )?{test}\b( =|\()", (ROOT / path).read_text(), re.M)
    ] == []


def test_the_results_are_those_of_the_catalogue() -> None:
    """If this fails, run `python -m tests.proof.mutation`, which writes the results."""
    head, *rows = [tuple(line.split("\t")) for line in RESULTS.read_text().splitlines()]
    assert head == COLUMNS and [name for name, _, _ in rows] == [m.name for m in MUTANTS]
    assert {fate for _, fate, _ in rows} <= set(DEAD)
    lives = {name for name, _, more in rows if more == "interpreter: lives"}
    assert lives == {mutant.name for mutant in MUTANTS if mutant.compiled}


# -- tests of the harness, in a small project ------------------------------------------


def small(name: str, old: str, new: str, test: str = "test_half") -> Mutant:
    return Mutant(name, "memstate/half.py", old, new, f"tests/test_half.py::{test}")


MUTATED = {
    "killed": small("half and one", "n // 2", "n // 2 + 1"),
    "survived": small("a local renamed", "    part = n // 2\n    return part", "    some = n // 2\n    return some"),
    "timed out": small("no end", "    part", "    __import__('time').sleep(99)\n    part"),
    "crashed": small("a wild address", "    part", "    __import__('ctypes').string_at(8)\n    part"),
    "broken": small("a name that is not there", "n // 2", "m // 2"),
    "error": small("no such test", "n // 2", "n // 3", "test_third"),
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    root = tmp_path_factory.mktemp("project")
    for folder in ("memstate", "tests"):
        (root / folder).mkdir()
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (root / "memstate" / "__init__.py").touch()
    (root / "memstate" / "half.py").write_text("def half(n):\n    part = n // 2\n    return part\n")
    test = "from memstate.half import half\n\ndef test_half():\n    assert half(7) == 3\n"
    (root / "tests" / "test_half.py").write_text(test)
    with Runner(root) as other:
        yield other


@pytest.mark.sample(3)
@pytest.mark.parametrize("fate", MUTATED)
def test_what_becomes_of_a_mutant_is_told(sandbox: Runner, fate: str) -> None:
    mutant = MUTATED[fate]
    before = {path: path.read_text() for path in sandbox.root.rglob("*.py")}
    verdict = sandbox.killer(mutant, 5.0 if fate == "timed out" else LIMIT)
    assert verdict.fate == fate, str(verdict)
    assert bool(verdict.failed) == (fate in ("killed", "broken"))
    assert {path: path.read_text() for path in sandbox.root.rglob("*.py")} == before


@pytest.mark.parametrize(("old", "times"), [("n // 4", 0), ("part", 2)])
def test_a_text_that_is_not_there_once_is_an_error(sandbox: Runner, old: str, times: int) -> None:
    with pytest.raises(Stale, match=f"mutant 'old': its old text is {times} times in memstate/half.py, expected once"):
        sandbox.run(small("old", old, "other"), ["tests"], LIMIT)
