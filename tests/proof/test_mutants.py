"""Broken copies of the library: the test that each of them names must fail for it. In full: tests/proof/mutation.

`make test` tries one mutant of every category, and every 200th of the rest.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proof.mutation.catalogue import MUTANTS, mutant_of, parse
from tests.proof.mutation.mutant import CATEGORIES, Mutant
from tests.proof.mutation.near import near
from tests.proof.mutation.runner import Runner, Stale, Tree
from tests.proof.mutation.table import PAGE, Line, kept, page, row, stale

LIMIT = 60.0  # seconds for one test
OFTEN = {*{mutant.category: mutant for mutant in MUTANTS}.values(), *MUTANTS[::200]}


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
    assert verdict.fate in ("killed", mutant.fate), f"{mutant.killer}\n{verdict}\n{runner.tree.diff(mutant)}"


def test_the_catalogue_is_whole() -> None:
    """Every category has mutants, no name and no change is there twice, and each changes what it says."""
    assert set(CATEGORIES) == {mutant.category for mutant in MUTANTS}
    for part in ([m.name for m in MUTANTS], [(m.file, m.old, m.new) for m in MUTANTS]):
        assert [entry for entry, times in Counter(part).items() if times > 1] == []
    assert all(mutant.old != mutant.new and mutant.fate in ("killed", "crashed", "timed out") for mutant in MUTANTS)


@pytest.mark.parametrize(
    "block", ["a | leak | b.py\n-x\n+y", "a | leak\n-x\ntests/t.py", "a | leak | b.py\n-x\ny\ntests/t.py"]
)
def test_a_block_of_another_form_is_no_mutant(block: str) -> None:
    with pytest.raises(ValueError, match=r"no mutant: a \| leak"):
        mutant_of(*next(parse(f"# comment\n\n{block}\n")))


def test_each_changes_a_text_that_is_there_once() -> None:
    root = Path(__file__).parents[2]
    texts = {file: (root / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    assert [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1] == []


def test_the_page_lists_the_mutants_that_there_are() -> None:
    assert stale(PAGE.read_text(), MUTANTS) == []


def test_files_near_a_mutant_exist() -> None:
    root = Path(__file__).parents[2]
    files = {name.partition("::")[0] for mutant in MUTANTS for name in near(mutant) if name.startswith("tests/")}
    assert {name for name in files if not (root / name).is_file()} == set()


# -- a small project, in which the harness itself is tried ------------------------------------------


def small(name: str, old: str, new: str, test: str = "test_half") -> Mutant:
    return Mutant(name, "wrong count", "memstate/half.py", old, new, f"tests/test_half.py::{test}")


EQUIVALENT = small("a local renamed", "    part = n // 2\n    return part\n", "    some = n // 2\n    return some\n")
MUTATED = {
    "killed": small("half and one", "n // 2", "n // 2 + 1"),
    "survived": EQUIVALENT,
    "timed out": small("no end", "    part", "    while True: pass\n    part"),
    "crashed": small("a wild address", "    part", "    __import__('ctypes').string_at(8)\n    part"),
    "broken": small("a name that is not there", "n // 2", "m // 2"),
    "error": small("no such test", "n // 2", "n // 3", "test_third"),
}


@pytest.fixture(scope="module")
def sandbox(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    root = tmp_path_factory.mktemp("project")
    for folder in ("memstate", "tests"):
        (root / folder).mkdir()
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (root / "memstate" / "__init__.py").touch()
    (root / "memstate" / "half.py").write_text("def half(n):\n    part = n // 2\n    return part\n")
    test = "from memstate.half import half\n\ndef test_half():\n    assert half(7) == 3\n"
    (root / "tests" / "test_half.py").write_text(test)
    with Runner(root, beside=runner) as other:
        yield other


@pytest.mark.parametrize("fate", MUTATED)
def test_what_becomes_of_a_mutant_is_told(sandbox: Runner, fate: str) -> None:
    mutant = MUTATED[fate]
    before = {path: path.read_text() for path in sandbox.tree.root.rglob("*.py")}
    verdict = sandbox.killer(mutant, 1.5 if fate == "timed out" else LIMIT)
    assert verdict.fate == fate, str(verdict)
    assert bool(verdict.failed) == (fate in ("killed", "broken"))
    assert {path: path.read_text() for path in sandbox.tree.root.rglob("*.py")} == before


def test_an_equivalent_change_is_reported_as_a_survivor(sandbox: Runner) -> None:
    """What `test_a_mutant_is_killed` says of a mutant that no test notices: its name, its test and its lines."""
    with pytest.raises(AssertionError, match=r"(?s)test_half\.py::test_half\s+survived after .*-    part = n // 2"):
        test_a_mutant_is_killed(sandbox, EQUIVALENT)
    assert sandbox.run(None, ["tests"], LIMIT).fate == "survived", "without a mutant"


@pytest.mark.parametrize(("old", "times"), [("n // 4", 0), ("part", 2)])
def test_a_text_that_is_not_there_once_is_an_error(sandbox: Runner, old: str, times: int) -> None:
    with pytest.raises(Stale, match=f"mutant 'old': its old text is {times} times in memstate/half.py, expected once"):
        sandbox.run(small("old", old, "other"), ["tests"], LIMIT)


def test_a_file_that_is_not_there_is_an_error(sandbox: Runner) -> None:
    with pytest.raises(Stale, match=r"0 times in memstate/third\.py"):
        sandbox.run(EQUIVALENT._replace(file="memstate/third.py"), ["tests"], LIMIT)


def test_a_copy_has_the_library_its_kernels_and_its_tests(runner: Runner) -> None:
    tree: Tree = runner.tree
    assert (tree.root / "memstate" / "kernels" / "bitmap.py").resolve() == (tree.root / "kernels" / "bitmap.py")
    assert (tree.root / "tests" / "conftest.py").is_file() and not (tree.root / ".venv").exists()


def test_pages_that_differ_from_the_catalogue_are_told(sandbox: Runner) -> None:
    mutants = [MUTATED["killed"], EQUIVALENT]
    verdicts = [sandbox.killer(mutant, LIMIT) for mutant in mutants]
    lines = [Line(mutant, verdict, verdict) for mutant, verdict in zip(mutants, verdicts, strict=True)]
    text = page(mutants, {line.mutant.name: row(line) for line in lines})
    assert kept(text, mutants[1:]) == {mutants[1].name: row(lines[1])}
    assert kept(text, [mutants[0]._replace(killer="tests/test_other.py::test_it")]) == {}
    assert "2 mutants; of 2 that the tests near were run on, they notice 1." in text
    assert "| half and one | wrong count | `memstate/half.py` | `tests/test_half.py::test_half` | killed | 1: " in text
    assert stale(text, mutants) == []
    assert stale(text, mutants[::-1]) == ["the order is not that of the catalogue"]
    assert stale(text, mutants[:1]) == ["not in the catalogue, or not so: a local renamed"]
    assert len(stale(text, [mutants[0]._replace(category="leak"), mutants[1]])) == 2
    assert stale("", mutants[:1]) == ["not in the page, or not so: half and one"]
