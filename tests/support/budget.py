"""The bars of tests/budget.txt, and what is wrong when a measure is above its bar or far below it."""

from collections.abc import Mapping
from typing import NamedTuple

from tests.support.sources import ROOT

FILE = ROOT / "tests" / "budget.txt"
SLACK = 0.03  # the part of a bar that may stay unused
EXACT = ("frames",)  # small numbers, the same in every run


class Bar(NamedTuple):
    """A line of the file: the measure, the place that is measured, the most that is allowed, and the reason."""

    what: str
    where: str
    most: int
    why: str


def bars(text: str) -> list[Bar]:
    """The bars of a budget; one without a reason, and a second one of the same place, are refused."""
    found: dict[tuple[str, str], Bar] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        words = line.split(None, 3)
        assert len(words) == 4, f"expected `what where bar why` in budget.txt, got {line!r}"
        what, where, most, why = words
        assert (what, where) not in found, f"{what} {where} has two bars in budget.txt"
        found[what, where] = Bar(what, where, int(most), why)
    return [*found.values()]


def complaints(what: str, budget: list[Bar], measured: Mapping[str, int]) -> list[str]:
    """What is wrong with one measure, a line for each place."""
    own = {bar.where: bar for bar in budget if bar.what == what}
    found = [f"{what} {where}: {measured[where]}, without a bar" for where in sorted(measured.keys() - own.keys())]
    for where, bar in own.items():
        if where not in measured:
            found.append(f"{what} {where}: nothing is there; take its bar out")
            continue
        now, least = measured[where], bar.most - (0 if what in EXACT else SLACK * bar.most)
        if now > bar.most:
            advice = "make it smaller, or raise the bar and say there why"
            found.append(f"{what} {where}: {now}, the bar is {bar.most} ({bar.why}); {advice}")
        elif now < least:
            found.append(f"{what} {where}: {now}, the bar is {bar.most} ({bar.why}); lower the bar, to keep the saving")
    return found
