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

SHORT = 4  # letters of an owner's name that fit a cell
MOST_CELLS = 20_000  # slots times moments
LEGIBLE = (100, 48)  # slots and moments up to which a cell has room for its edges and a name
LABELS = 24  # moments that have room for a label


def occupancy(inspections: Inspections, steps: Sequence[str] = ()) -> "Figure":
    """Draws slots from top to bottom and moments from left to right, coloured by the kind of owner, with short names.

    Beyond 100 slots or 48 moments names are left out, and neighbours of a kind are drawn as one. Beyond 20,000 cells
    nothing
    is drawn.

    Args:
        inspections: One, or several of one manager in the order they were taken.
        steps: A label for each (default: 0, 1, ...).

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
    drawn = figure.drawing(min(12.0, 1.6 + 0.42 * len(columns)), 1.0 + 0.24 * min(capacity, LEGIBLE[0]))
    axes = drawn.subplots()
    axes.set_facecolor(kinds.kind("free").colour)
    for at, column in enumerate(columns):
        for slot, count, kind, name in _cells(column, joined=not legible):
            colour, middle = kinds.kind(kind).colour, slot + (count - 1) / 2
            axes.barh(
                middle, 1, left=at, height=count, facecolor=colour, edgecolor="white", linewidth=0.8 if legible else 0
            )
            if legible and len(name) <= SHORT:
                axes.text(at + 0.5, slot, figure.plain(name), ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(1, capacity + 1, -(-capacity // LEGIBLE[0])))
    axes.set_ylabel("slot")
    axes.set_ylim(capacity + 0.5, 0.5)
    labels = [figure.plain(str(step)) for step in steps] or [str(at) for at in range(len(columns))]
    shown_steps = range(0, len(columns), -(-len(columns) // LABELS))
    axes.set_xticks([at + 0.5 for at in shown_steps], [labels[at] for at in shown_steps])
    axes.set_xlim(0, len(columns))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    seen = {kind for column in columns for kind, _ in column}
    shown: dict[str, figure.Colour] = {kind: colour for kind, (_, colour, *_) in kinds.KINDS.items() if kind in seen}
    drawn.legend(handles=figure.key(shown), loc="outside upper right", ncols=len(shown), frameon=False)
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
