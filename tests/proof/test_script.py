"""Tests the judge of scripts, `tests/proof/stateful/script.py`: what it says if a script or the library is wrong."""

import ast
from pathlib import Path
from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.slots.commands import CommandBuffer
from tests.proof.mutation.catalogue import MUTANTS
from tests.proof.stateful.script import Play, script
from tests.support.sources import ROOT

pytestmark = pytest.mark.script
REFERENCE = Backend("reference", "cpu")
T = list(range(1, 16))


def failure(of: object) -> list[str]:
    """Returns the lines that a failing script prints: its error, settings and calls."""
    with pytest.raises(Exception) as caught:
        of(REFERENCE)  # type: ignore[operator]
    return [*str(caught.value).splitlines(), *"\n".join(caught.value.__notes__).splitlines()]


def test_a_failing_script_prints_its_settings_its_calls_and_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = CommandBuffer.release
    monkeypatch.setattr(CommandBuffer, "release", lambda self, given: release(self, list(given)[1:]))

    @script(strategy="ping-pong", slots=8)
    def of(play: Play) -> None:
        play.turn(T, how="release")

    lines = failure(of)
    assert lines[0] == "held on the host: [row 1 live] True, expected False"
    assert lines[1].startswith("Settings(strategy='ping-pong', slots=8, rows=4")
    assert lines[2:] == [f"1. turn({T}, how='release')"]


def test_a_refusal_must_carry_the_numbers_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ms.OutOfRows.__init__
    monkeypatch.setattr(
        ms.OutOfRows, "__init__", lambda self, requested, *more, **of: told(self, requested + 1, *more, **of)
    )

    @script(rows=2)
    def of(play: Play) -> None:
        play.admit(T, T, T)

    assert "expected (3, 2)" in failure(of)[0]


def test_a_refusal_that_a_script_does_not_name_fails_it() -> None:
    @script(rows=2)
    def of(play: Play) -> None:
        play.admit(T, T, T)

    assert failure(of)[0].startswith("calls were refused: name ['OutOfRows'] in reached()")


def test_a_script_that_does_not_reach_its_state_fails() -> None:
    @script(rows=2)
    def of(play: Play) -> None:
        play.turn(T, how="release")
        play.reached("OutOfSlots", "snapshots", kept=0)

    assert failure(of)[0].startswith("the script does not reach ['OutOfSlots', 'snapshots', 'kept']")


def test_an_error_of_a_call_is_explained_too() -> None:
    @script(rows=2)
    def of(play: Play) -> None:
        play.admit(5)

    assert failure(of)[-1] == "1. admit(5)"


def test_contributing_shows_a_script_and_a_mutant_of_the_project() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    shown = [block for block in text.split("```") if "@script(" in block or "| memstate/" in block]
    there = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.*") if path.suffix in (".py", ".txt"))
    assert [block.removeprefix("python").strip() in there for block in shown] == [True, True]


@pytest.mark.parametrize(
    ("axes", "words"),
    [({"slots": ()}, "a script without cases"), ({"of": ({"slots": 9},), "slots": (8, 9)}, "two axes give the same")],
    ids=str,
)
def test_axes_that_are_no_cases_are_refused(axes: dict[str, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        script(**axes)


def test_what_never_runs_is_no_script() -> None:
    @script()
    def of(play: Play) -> Any:
        yield play.turn(T)

    assert failure(of)[0] == "a script returns nothing, and is no generator"


def test_each_script_has_the_number_of_a_behaviour_or_kills_a_mutant() -> None:
    killers = {mutant.killer.partition("[")[0] for mutant in MUTANTS}
    bare = [
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in _scripts(path)
        if not (name.split("_")[1][:1].isupper() or f"{path.relative_to(ROOT)}::{name}" in killers)
    ]
    assert bare == []


def _scripts(path: Path) -> list[str]:
    """Returns the names of the scripts in a file."""
    of = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [one.name for one in of if any("script(" in ast.unparse(mark) for mark in one.decorator_list)]
