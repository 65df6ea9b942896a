"""Compares the size of the project with tests/budget.txt: a size above its bar fails, and so does one far below."""

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.budget import FILE, Bar, bars, complaints
from tests.support.journeys import count, frames
from tests.support.measures import arrows, code_lines, imported, lines, nones, room, words

MEASURES: dict[str, Callable[[], Mapping[str, int]]] = {
    "lines": lines,
    "frames": frames,
    "none": nones,
    "arrows": arrows,
    "words": words,
}


@pytest.fixture(autouse=True)
def kept() -> None:
    """Replaces the fixture `kept` of all tests: its checks of calls would be counted as frames."""


@pytest.fixture(autouse=True)
def poison() -> None:
    """Replaces the fixture `poison` of all tests, for the same reason."""


@pytest.mark.parametrize("what", MEASURES)
def test_the_project_keeps_its_budget(what: str) -> None:
    faults = complaints(what, bars(FILE.read_text("utf-8")), MEASURES[what]())
    assert faults == [], "\n".join(["tests/budget.txt:", *faults])


def test_every_bar_has_a_measure() -> None:
    assert {bar.what for bar in bars(FILE.read_text("utf-8"))} == set(MEASURES)


@pytest.mark.parametrize(
    ("what", "measured", "said"),
    [
        ("lines", {"kernels": 1000}, ""),
        ("lines", {"kernels": 970}, ""),
        ("lines", {"kernels": 1001}, "lines kernels: 1001, the bar is 1000 (why not); make it smaller"),
        ("lines", {"kernels": 1050}, "raise the bar and say there why"),
        ("lines", {"kernels": 969}, "lines kernels: 969, the bar is 1000 (why not); lower the bar"),
        ("lines", {"kernels": 950}, "lower the bar, to keep the saving"),
        ("lines", {"kernels": 1000, "new": 3}, "lines new: 3, without a bar"),
        ("lines", {}, "lines kernels: nothing is there"),
        ("frames", {"admit": 40}, ""),
        ("frames", {"admit": 41}, "frames admit: 41, the bar is 40 (a cache); make it smaller"),
        ("frames", {"admit": 39}, "frames admit: 39, the bar is 40 (a cache); lower the bar"),
    ],
)
def test_a_budget_is_kept_from_both_sides(what: str, measured: dict[str, int], said: str) -> None:
    budget = [Bar("lines", "kernels", 1000, "why not"), Bar("frames", "admit", 40, "a cache")]
    faults = complaints(what, budget, measured)
    assert len(faults) == bool(said) and said in "".join(faults)


@pytest.mark.parametrize(
    ("text", "said"), [("lines kernels 10", "what where bar why"), ("lines a 1 x\nlines a 2 y", "two bars")]
)
def test_a_bar_stands_once_and_has_a_reason(text: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        bars(text)


def test_lines_of_code_are_neither_blank_nor_words_about_it() -> None:
    text = '''"""Module,
of two lines."""
# a comment
"held"

@twice
def f(
    x,
):
    # a comment
    """Says what."""
    a = """held

    # held"""
    return [  # counts

        x,
        # does not
        a,
    ]
'''
    assert code_lines(text) == 12


def test_every_python_counts_the_same_frames() -> None:
    def some() -> Iterator[int]:
        yield from (1, 2, 3)

    def act() -> None:
        assert [each for each in some()] == list(some())  # noqa: C416
        next(iter(some()))

    assert count(act, __file__.__eq__) == 4


def test_an_arrow_is_an_import_that_runs() -> None:
    text = """import memstate.errors
if TYPE_CHECKING:
    from memstate.viz import html
def f():
    from memstate.tiers import keys
"""
    assert [*imported(ast.parse(text))] == ["memstate.errors", "memstate.tiers.keys"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("memstate/__init__.py", "door"),
        ("memstate/errors.py", "files"),
        ("memstate/tiers/host/arena.py", "tiers"),
        ("memstate/integrations/vllm/pool.py", "integrations/vllm"),
        ("kernels/reference/copy.py", "kernels"),
        ("tools/memstate_tools/tuning/grid.py", "tools"),
    ],
)
def test_rooms(path: str, name: str) -> None:
    assert room(Path(path)) == name
