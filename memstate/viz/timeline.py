"""Who owned which slot, step by step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memstate.errors import InvalidArgument
from memstate.snapshot import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "free": "#eeeeee",
    "live": "#3b6ea5",
    "lane": "#e08e2d",
    "snapshot": "#5b9a68",
    "in hand": "#8a63a8",
    "unknown": "#6f6f6f",
    "leaked": "#d23b3b",
    "contested": "#000000",
}
SHORT = 4  # letters of an owner's name that fit a cell


def holdings(picture: Picture) -> list[tuple[str, str]]:
    """Kind and name, or tag, of the owner of each slot 1..capacity; no name where there is none or more than one.

    Kinds are those of the picture, and `free`, `in hand` (an open claim group), `leaked` (neither free nor owned) and
    `contested` (several owners, or an owner of a slot that is marked free). Syncs: no.
    """
    owners: list[list[tuple[str, str]]] = [[] for _ in range(picture.capacity + 1)]
    for register, name in picture.names.items():
        if 0 < picture.slots[register] <= picture.capacity:
            owners[picture.slots[register]].append((picture.kinds[register], picture.tags.get(register, name)))
    for slot in picture.in_hand:
        owners[slot].append(("in hand", ""))
    found = []
    for free, mine in zip(picture.free[1 : picture.capacity + 1], owners[1:], strict=True):
        if len(mine) + free > 1:
            found.append(("contested", ""))
        elif free:
            found.append(("free", ""))
        else:
            found.append(mine[0] if mine else ("leaked", ""))
    return found


def occupancy(pictures: Sequence[Picture], steps: Sequence[str] = ()) -> "Figure":
    """Slots from top to bottom, moments from left to right, coloured by the kind of owner; short names are written in.

    pictures: of one manager, in the order they were taken. steps: a label for each (default: 0, 1, ...).
    Syncs: no. Raises: InvalidArgument; ImportError without matplotlib.
    """
    from memstate.viz import figure

    capacities = {picture.capacity for picture in pictures}
    if len(capacities) != 1 or len(steps) not in (0, len(pictures)):
        raise InvalidArgument(
            f"occupancy: {len(pictures)} pictures of {sorted(capacities)} slots and {len(steps)} labels, "
            "expected one or more of the same number of slots, and a label for each or none"
        )
    columns = [holdings(picture) for picture in pictures]
    capacity = capacities.pop()
    drawn = figure.drawing(min(12.0, 1.6 + 0.42 * len(columns)), 1.0 + 0.24 * capacity)
    axes = drawn.subplots()
    axes.set_facecolor(COLOURS["free"])
    for at, column in enumerate(columns):
        for slot, (kind, name) in enumerate(column, 1):
            if kind == "free":
                continue
            colour = COLOURS.get(kind, COLOURS["unknown"])
            axes.barh(slot, 1, left=at, height=1, facecolor=colour, edgecolor="white", linewidth=0.8)
            if len(name) <= SHORT:
                axes.text(at + 0.5, slot, name, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(1, capacity + 1))
    axes.set_ylabel("slot")
    axes.set_ylim(capacity + 0.5, 0.5)
    axes.set_xticks([at + 0.5 for at in range(len(columns))], steps or [str(at) for at in range(len(columns))])
    axes.set_xlim(0, len(columns))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    seen = {kind for column in columns for kind, _ in column}
    shown: dict[str, figure.Colour] = {kind: colour for kind, colour in COLOURS.items() if kind in seen}
    drawn.legend(handles=figure.key(shown), loc="outside upper right", ncols=len(shown), frameon=False)
    return drawn
