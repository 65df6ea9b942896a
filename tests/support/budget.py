"""Reads the bars of tests/budget.txt, and compares measures with them: too large, or far below the bar."""

from collections.abc import Mapping
from typing import NamedTuple

from tests.support.sources import ROOT

FILE = ROOT / "tests" / "budget.txt"
SLACK = 0.03  # a measure may be below its bar by this share
EXACT = ("frames",)  # measures that must equal their bar


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
