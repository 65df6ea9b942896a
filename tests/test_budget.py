"""Compares the size of the project with tests/budget.txt: a size above its bar fails, and so does one far below."""

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import cputime
from tests.support.journeys import count, frames
from tests.support.measures import arrows, code_lines, imported, lines, nones, room, words
from tests.support.refusals import refusals
from tests.support.sources import ROOT

FILE = ROOT / "tests" / "budget.txt"
SLACK = 0.03  # a measure may be below its bar by this share
EXACT = ("frames",)  # measures that must equal their bar
MEASURES: dict[str, Callable[[], Mapping[str, int]]] = {
    "lines": lines,
    "frames": frames,
    "none": nones,
    "arrows": arrows,
    "words": words,
}


class Bar(NamedTuple):
    """A line of the file: a measure, the place that it measures, the largest value allowed, and the reason."""

    what: str
    where: str
    most: int
    why: str


def bars(text: str) -> list[Bar]:
    """Returns the bars of a budget. Refuses a bar without a reason, and a second bar of the same place."""
    budget: dict[tuple[str, str], Bar] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        words = line.split(None, 3)
        assert len(words) == 4, f"expected `what where bar why` in budget.txt, got {line!r}"
        what, where, most, why = words
        assert (what, where) not in budget, f"{what} {where} has two bars in budget.txt"
        budget[what, where] = Bar(what, where, int(most), why)
    return [*budget.values()]


def complaints(what: str, budget: list[Bar], measured: Mapping[str, int]) -> list[str]:
    """Returns a line for each place where a measure does not fit its bar."""
    own = {bar.where: bar for bar in budget if bar.what == what}
    lines = [f"{what} {where}: {measured[where]}, without a bar" for where in sorted(measured.keys() - own.keys())]
    for where, bar in own.items():
        if where not in measured:
            lines.append(f"{what} {where}: nothing is there; take its bar out")
            continue
        now, least = measured[where], bar.most - (0 if what in EXACT else SLACK * bar.most)
        if now > bar.most:
            advice = "make it smaller, or raise the bar and say there why"
            lines.append(f"{what} {where}: {now}, the bar is {bar.most} ({bar.why}); {advice}")
        elif now < least:
            lines.append(f"{what} {where}: {now}, the bar is {bar.most} ({bar.why}); lower the bar, to keep the saving")
    return lines


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


test_a_bar_stands_once_and_has_a_reason = refusals(
    AssertionError,
    ("lines kernels 10", "what where bar why"),
    ("lines a 1 x\nlines a 2 y", "two bars"),
    call=bars,
)


def test_dear_cases_are_there_and_have_reasons() -> None:
    for case in cputime.reasons(cputime.FILE.read_text("utf-8")):
        file, test = case.partition("[")[0].split("::")
        assert f"def {test}(" in (ROOT / file).read_text("utf-8"), case


def test_a_dear_case_without_a_reason_is_said() -> None:
    meter = cputime.Meter()
    meter.cases.update(
        {"tests/a/test_b.py::test_c[d e]": 4.0, "tests/test_f.py::test_g": 3.5, "tests/test_f.py::h": 2.0}
    )
    known = cputime.reasons("# case  why\n\ntests/a/test_b.py::test_c[d e]  it waits")
    assert meter.unexplained(known) == ["tests/test_f.py::test_g: 3.5 CPU s"]
    assert [line.split()[:2] for line in meter.table()[:2]] == [["5.5", "tests"], ["4.0", "tests/a"]]
    for bad in ("tests/test_f.py::test_g", "a  b\na  c"):
        with pytest.raises(AssertionError, match=r"dear\.txt"):
            cputime.reasons(bad)


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
