"""Tests `make peer-proof` with a made-up suite: what is lost, what is known, and what cannot run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.proof.peers.__main__ import Loss, judged, known, main, run
from tests.proof.peers.sources import ROOT, CannotRun, tree
from tests.proof.peers.suites import SUITES, TREES, Suite

PLUGINS = ROOT / "tests" / "proof" / "peers" / "inside"
TESTS = """
import random
import numbers_of_others as numbers
def test_same(): assert numbers.two() == 2
def test_changed(): assert numbers.three() == 3
def test_never(): assert numbers.two() == 3
def test_other_tokens(): assert numbers.four() == 4
def test_same_random_numbers(): numbers.three(); assert random.random() == random.Random(0).random()
"""
PLUGIN = """
import numbers_of_others as numbers
from notes import INSIDE
two, three = numbers.two, numbers.three
def ours():
    INSIDE.used += INSIDE.on
    return two()
numbers.two = ours
numbers.three = lambda: 30 if INSIDE.on else three()
INSIDE.last.append(lambda: ["a slot is left"] if numbers.left.pop("four", None) else [])
"""
OTHERS = """
left = {}
def two(): return 2
def three(): return 3
def four(): left["four"] = True; return 4
"""


def note(test: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    """Returns a note as inside/notes.py writes it."""
    return {"test": test, "outcome": outcome, "why": "", "used": 1, "compared": 0, "refused": [], "faults": []} | more


LOST = note("t.py::one", "failed", without="passed", why="other numbers")
LINE = Loss("mine", 1, "t.py::o*", "ours is another")


def test_a_suite_notes_what_memstate_did_and_what_is_lost(tmp_path: Path) -> None:
    for name, text in (("test_one.py", TESTS), ("in_numbers.py", PLUGIN), ("numbers_of_others.py", OTHERS)):
        (tmp_path / name).write_text(text)
    (tmp_path / "test_two.py").write_text("import nowhere")
    made = Suite(lambda: (tmp_path, Path(sys.executable)), "in_numbers", ["."], 1, {}, [])
    notes = {each["test"].partition("::")[2]: each for each in run("made-up", made)}
    assert "nowhere" in notes.pop("")["uncollected"]
    outcomes = {name: (each["outcome"], each.get("without"), each["used"]) for name, each in notes.items()}
    assert outcomes == {
        "test_same": ("passed", None, 1), "test_changed": ("failed", "passed", 0),
        "test_never": ("failed", "failed", 1), "test_other_tokens": ("passed", None, 0),
        "test_same_random_numbers": ("passed", None, 0),
    }  # fmt: skip
    assert (
        notes["test_other_tokens"]["faults"] == ["a slot is left"] and "assert 30 == 3" in notes["test_changed"]["why"]
    )
    wrong, _ = judged("made-up", 3, list(notes.values()), [])
    assert [line.partition(" (")[0] for line in wrong] == [
        "lost: test_one.py::test_changed: " + notes["test_changed"]["why"],
        "lost: test_one.py::test_other_tokens: a slot is left; ",
        "only 2 tests had memstate inside, expected at least 3",
    ]


@pytest.mark.parametrize(
    ("notes", "losses", "wrong"),
    [
        ([LOST], [LINE], ""),
        ([LOST], [], "lost: t.py::one: other numbers"),
        ([LOST], [Loss("another", 1, "*", "")], "lost: t.py::one: other numbers"),
        ([note("t.py::one")], [LINE], "lost.txt says that 1 of t.py::o* are lost, but 0 are: ours is another"),
        ([LOST, LOST | {"test": "t.py::other"}], [LINE], "lost.txt says that 1 of t.py::o* are lost, but 2 are"),
        ([LOST | {"without": "failed"}], [], ""),
        ([note("t.py::one", faults=["a slot is left"])], [], "lost: t.py::one: a slot is left"),
        ([note("t.py::two", used=0)], [], "only 0 tests had memstate inside, expected at least 1"),
        ([note("x"), {"test": "t.py", "uncollected": "no module"}], [], "t.py cannot be collected: no module"),
    ],
)
def test_losses_are_exactly_the_known_ones(notes: list[dict[str, Any]], losses: list[Loss], wrong: str) -> None:
    said, line = judged("mine", 1, notes, losses)
    assert len(said) == bool(wrong) and all(each.startswith(wrong) for each in said)
    assert line.endswith(f"{len(said)} surprises")


def test_every_known_loss_belongs_to_a_suite_and_has_a_reason() -> None:
    assert all(loss.suite in SUITES and loss.count > 0 and loss.reason for loss in known())


def test_a_suite_without_its_tree_is_skipped_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare() -> tuple[Path, Path]:
        raise CannotRun("no tree")

    monkeypatch.setattr("tests.proof.peers.__main__.SUITES", {"one": Suite(prepare, "in_one", [], 1, {}, [])})
    assert main(["one"]) == 1 and main([]) == 1  # nothing ran
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "one: failed: no tree" and said[2] == "one: skipped: no tree"
    assert said[3] == "1 suites: 0 ran, 1 skipped, 0 failed"


def test_a_variable_that_names_no_folder_says_what_to_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_TESTS", str(tmp_path))
    assert tree("SOME_TESTS", "abc", "owner/name") == tmp_path
    monkeypatch.delenv("SOME_TESTS")
    with pytest.raises(CannotRun, match="SOME_TESTS names no source tree of owner/name; clone it at abc"):
        tree("SOME_TESTS", "abc", "owner/name")


def test_the_job_clones_every_pinned_tree_and_runs_every_suite() -> None:
    job = (ROOT / ".github" / "workflows" / "peers.yml").read_text()
    assert all(part in job for pinned in TREES for part in pinned)
    assert f'make peer-proof PYTHON=python3.12 ARGS="{" ".join(SUITES)}"' in job
    assert all((PLUGINS / f"{suite.plugin}.py").is_file() for suite in SUITES.values())
