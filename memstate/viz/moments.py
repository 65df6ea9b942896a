"""Who owned which slot, step by step."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from memstate.errors import InvalidArgument
from memstate.viz import given, kinds
from memstate.viz.given import Inspections
from memstate.viz.owners import holdings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE = 16  # letters of a name at most; fewer where there are many moments
WIDTH = 10.4  # inches of all cells
KEY = 1.45  # inches of a column of the legend
MOST_CELLS = 20_000  # slots times moments
LEGIBLE = (100, 48)  # slots and moments up to which a cell has room for its edges and a name
LABELS = 24  # moments that have room for a label
BETWEEN = 0.04  # inches between two labels at least
LONGEST = 30  # letters of a label that stands upright


def occupancy(inspections: Inspections, steps: Sequence[str] = ()) -> "Figure":
    """Draws slots from top to bottom and moments from left to right, coloured by the kind of owner, with names.

    `viz.kinds.KINDS` has the colours. What an audit finds wrong is hatched. A long name is cut to its end, such as
    `..n-17`. Beyond 100 slots or 48 moments names are left out, and neighbours of a kind are drawn as one. Beyond
    20,000 cells nothing is drawn.

    Args:
        inspections: One, or several of one manager in the order they were taken.
        steps: A label for each (default: 0, 1, ...). Labels stand upright where they do not fit a line.

    Raises:
        InvalidArgument: Inspections differ in their slots, labels do not fit, or there are too many cells.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    taken = given.inspections(inspections)
    capacities = {inspection.capacity for inspection in taken}
    if len(capacities) != 1 or isinstance(steps, str) or len(steps) not in (0, len(taken)):
        raise InvalidArgument(
            f"occupancy: {len(taken)} pictures of {sorted(capacities)} slots and {len(steps)} labels, "
            "expected one or more of the same number of slots, and a label for each or none"
        )
    capacity = capacities.pop()
    if capacity * len(taken) > MOST_CELLS:
        raise InvalidArgument(
            f"occupancy: {len(taken)} pictures of {capacity} slots cannot be told apart, draw fewer"
            f" (<= {MOST_CELLS} cells)"
        )
    columns = [holdings(inspection) for inspection in taken]
    legible = capacity <= LEGIBLE[0] and len(columns) <= LEGIBLE[1]
    seen = {kind for column in columns for kind, _ in column}
    longest = max((len(name) for column in columns for _, name in column), default=0) if legible else 0
    inch = max(0.3, min(0.075 * min(longest, WIDE) + 0.12, WIDTH / len(columns)))  # width of a cell
    shown_steps = range(0, len(columns), -(-len(columns) // LABELS))
    labels = [str(steps[at]) if steps else str(at) for at in shown_steps]
    widest = max(map(figure.inches, labels)) + BETWEEN
    upright = widest * len(labels) > WIDTH
    if upright:
        labels = [kinds.short(label, LONGEST) for label in labels]
    else:
        inch = max(inch, widest / shown_steps.step)
    letters = max(3, int((inch - 0.1) / 0.075))
    tall = max(map(figure.inches, labels)) if upright else 0.0
    width = min(12.0, max(5.0, 1.6 + inch * len(columns)))
    drawn = figure.drawing(width, 1.3 + tall + 0.24 * min(capacity, LEGIBLE[0]))
    axes = drawn.subplots()
    axes.set_facecolor(kinds.kind("free").colour)
    for at, column in enumerate(columns):
        for slot, count, kind, name in _cells(column, joined=not legible):
            shown, middle = kinds.kind(kind), slot + (count - 1) / 2
            axes.barh(
                middle, 1, left=at, height=count, facecolor=shown.colour, edgecolor="white",
                linewidth=0.8 if legible else 0, hatch=figure.HATCH if shown.faulty else "",
            )  # fmt: skip
            if legible and name:
                text = figure.plain(kinds.short(name, letters))
                axes.text(at + 0.5, slot, text, ha="center", va="center", fontsize=7, color=shown.ink)
    axes.set_yticks(range(1, capacity + 1, -(-capacity // LEGIBLE[0])))
    axes.set_ylabel("slot")
    axes.set_ylim(capacity + 0.5, 0.5)
    axes.set_xticks(
        [at + 0.5 for at in shown_steps],
        [figure.plain(label) for label in labels],
        rotation=90 if upright else 0,
    )
    axes.set_xlim(0, len(columns))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    entries = max(2, int(drawn.get_size_inches()[0] / KEY))  # a legend of more columns would be wider than the figure
    drawn.legend(handles=figure.kind_key(seen), loc="outside upper right", ncols=entries, frameon=False)
    return drawn


def _cells(column: Sequence[tuple[str, str]], joined: bool) -> Iterator[tuple[int, int, str, str]]:
    """Yields first slot, number of slots, kind and name of what is not free.

    Args:
        column: Kind and name of each slot's owner.
        joined: Whether to join neighbours of a kind, unnamed.
    """
    cells = list(enumerate(column, 1))
    for kind, run in groupby(cells, key=lambda cell: cell[1][0]):
        here = [] if kind == "free" else list(run)
        if here and joined:
            yield here[0][0], len(here), kind, ""
        else:
            yield from ((slot, 1, kind, name) for slot, (_, name) in here)
