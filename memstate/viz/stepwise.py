"""Draws slots from top to bottom and moments from left to right: their owners, and what each step does with them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.viz import figure, inputs, kinds
from memstate.viz.figure import Axes, Figure
from memstate.viz.inputs import Inspections
from memstate.viz.owners import holdings

WIDE = 16  # limit of the letters of a name; smaller if there are many moments
WIDTH = 10.4  # inches of all cells
KEY = 1.45  # inches of one column of the legend
MOST_CELLS = 20_000  # limit of the number of slots times the number of moments
LEGIBLE = (100, 48)  # (slots, moments) up to which cells have edges and names
LABELS = 24  # limit of the labels of moments
BETWEEN = 0.04  # least inches between two labels
LONGEST = 30  # limit of the letters of an upright label
MOST_STEP_CELLS = 4000  # limit of the cells (slots times steps) of all panels together
MOST_STEPS = 24  # limit of the steps at which cells have room for their texts
NARROWEST = 6.5  # inches of width that a legend of all kinds of owners needs


def occupancy(inspections: Inspections, steps: Sequence[str] = ()) -> Figure:
    """Draws the owners of slots: slots from top to bottom, moments from left to right, a colour for each kind of owner.

    `viz.kinds.KINDS` has the colours. Slots that an audit reports as wrong are hatched. Of a long name, only the end is
    shown, such as `..n-17`. Beyond 100 slots or 48 moments, names are left out and neighbours of one kind are joined.
    Beyond 20,000 cells it raises an error.

    Args:
        inspections: One inspection, or several of one manager in the order in which they were taken.
        steps: A label for each inspection (default: 0, 1, ...). Labels stand upright if they do not fit in a line.

    Raises:
        InvalidArgument: Inspections differ in their slots, labels do not fit, or there are too many cells.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    taken = inputs.inspections(inspections)
    capacities = {inspection.capacity for inspection in taken}
    if len(capacities) != 1 or isinstance(steps, str) or len(steps) not in (0, len(taken)):
        raise InvalidArgument(
            f"occupancy: {len(taken)} pictures of {sorted(capacities)} slots and {len(steps)} labels, "
            "expected one or more of the same number of slots, and a label for each or none"
        )
    capacity = capacities.pop()
    what = f"occupancy: {len(taken)} pictures of {capacity} slots"
    inputs.few(capacity * len(taken), MOST_CELLS, what, "fewer")
    columns = [holdings(inspection) for inspection in taken]
    legible = capacity <= LEGIBLE[0] and len(columns) <= LEGIBLE[1]
    longest = max((len(name) for column in columns for _, name in column), default=0) if legible else 0
    inch = max(0.3, min(0.075 * min(longest, WIDE) + 0.12, WIDTH / len(columns)))  # inches of a cell's width
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
    for at, column in enumerate(columns):
        for slot, count, kind, name in _cells(column, joined=not legible):
            look = kinds.kind(kind)
            figure.cell(axes, at, slot + (count - 1) / 2, look, tall=count, edge=0.8 if legible else 0)
            if legible and name:
                text = figure.plain(kinds.short(name, letters))
                axes.text(at + 0.5, slot, text, ha="center", va="center", fontsize=7, color=look.ink)
    _slots(axes, capacity, len(columns), -(-capacity // LEGIBLE[0]))
    axes.set_ylabel("slot")
    names = [figure.plain(label) for label in labels]
    axes.set_xticks([at + 0.5 for at in shown_steps], names, rotation=90 if upright else 0)
    entries = max(2, int(drawn.get_size_inches()[0] / KEY))  # more columns would make the legend wider than the figure
    figure.legend(drawn, figure.kind_key({kind for column in columns for kind, _ in column}), entries)
    return drawn


def _cells(column: Sequence[tuple[str, str]], joined: bool) -> Iterator[tuple[int, int, str, str]]:
    """Yields (first slot, number of slots, kind, name) of each cell that is not free.

    Args:
        column: (kind, name) of each slot's owner.
        joined: Whether to join neighbours of one kind into a cell without a name.
    """
    cells = list(enumerate(column, 1))
    for kind, run in groupby(cells, key=lambda cell: cell[1][0]):
        here = [] if kind == "free" else list(run)
        if here and joined:
            yield here[0][0], len(here), kind, ""
        else:
            yield from ((slot, 1, kind, name) for slot, (_, name) in here)


def _slots(axes: Axes, capacity: int, moments: int, every: int = 1) -> None:
    """Prepares the axes: slots from top to bottom, and the colour of free slots as background."""
    axes.set_facecolor(kinds.kind("free").colour)
    axes.set_yticks(range(1, capacity + 1, every))
    axes.set_ylim(capacity + 0.5, 0.5)
    axes.set_xlim(0, moments)
    figure.no_frame(axes)


class PlannedStep(NamedTuple):
    """The plan of one step.

    Attributes:
        label: Label of the step on the axis.
        inspection: Result of `StateManager.inspect` between the plan and the forward.
        read: Slots that the forward reads: `step.read.tolist()`.
        write: Slots that the forward writes: `step.write.tolist()`.
        snapshot: Slots that the forward also writes, as snapshots: `step.snapshot.tolist()`.
    """

    label: str
    inspection: Inspection
    read: Sequence[int] = ()
    write: Sequence[int] = ()
    snapshot: Sequence[int] = ()


def steps(runs: Mapping[str, Sequence[PlannedStep]]) -> Figure:
    """Draws a panel for each run: slots from top to bottom, steps from left to right, a colour for each kind of owner.

    A cell says what the forward does with the slot (r reads, w writes, s writes as a snapshot), and the length in
    tokens of its state after the forward.

    Args:
        runs: The steps of each run by its name, such as the same loop under several strategies; at most 24 steps each.

    Raises:
        InvalidArgument: There is nothing to draw, or too many cells to tell apart.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    _require_steps(runs)
    slots = [moments[0].inspection.capacity for moments in runs.values()]
    longest = max(map(len, runs.values()))
    drawn = figure.drawing(max(NARROWEST, 1.2 + 0.56 * longest), 0.7 + sum(0.65 + 0.24 * count for count in slots))
    grid = drawn.subplots(len(runs), 1, squeeze=False, height_ratios=[1 + count for count in slots])[:, 0]
    seen: set[str] = set()
    for axes, (name, moments) in zip(grid, runs.items(), strict=True):
        seen |= _panel(axes, moments, longest)
        axes.set_title(figure.plain(name), fontsize=9, loc="left")
    grid[-1].set_xlabel("step: it reads r, writes w, writes s as a snapshot; numbers are tokens of a state", fontsize=8)
    figure.legend(drawn, figure.kind_key(seen))
    return drawn


def _require_steps(runs: Mapping[str, Sequence[PlannedStep]]) -> None:
    lists = isinstance(runs, Mapping) and all(isinstance(moments, Sequence) and moments for moments in runs.values())
    if not runs or not lists:
        raise InvalidArgument(f"steps: {runs!r}, expected a dict of lists of `viz.PlannedStep`, none of them empty")
    for name, moments in runs.items():
        if not all(isinstance(moment, PlannedStep) and isinstance(moment.inspection, Inspection) for moment in moments):
            raise InvalidArgument(f"steps: {name}: expected a list of `viz.PlannedStep`, each with its inspection")
        capacities = sorted({moment.inspection.capacity for moment in moments})
        if len(capacities) > 1 or len(moments) > MOST_STEPS:
            raise InvalidArgument(
                f"steps: {name}: {len(moments)} steps of {capacities} slots, expected at most {MOST_STEPS} steps of "
                "the same number of slots"
            )
    cells = sum(len(moments) * moments[0].inspection.capacity for moments in runs.values())
    inputs.few(cells, MOST_STEP_CELLS, f"steps: {cells} cells", "fewer slots or steps")


def _panel(axes: Axes, moments: Sequence[PlannedStep], longest: int) -> set[str]:
    """Draws one run, and returns the kinds of owners in it."""
    seen = set()
    for at, moment in enumerate(moments):
        taken = moment.inspection
        lengths = {slot: taken.labels[register] for register, slot in enumerate(taken.slots) if slot}
        uses = {"r": moment.read, "w": moment.write, "s": moment.snapshot}
        for slot, (kind, _) in enumerate(holdings(taken), 1):
            seen.add(kind)
            look = kinds.kind(kind)
            if kind != "free":
                figure.cell(axes, at, slot, look)
            said = [*(letter for letter, slots in uses.items() if slot in slots), str(lengths.get(slot) or "")]
            text = " ".join(filter(None, said))
            axes.text(at + 0.5, slot, text, ha="center", va="center", fontsize=8, color=look.ink)
    _slots(axes, moments[0].inspection.capacity, longest)
    axes.set_xticks([at + 0.5 for at in range(len(moments))], [figure.plain(each.label) for each in moments])
    axes.set_ylabel("slot", fontsize=8)
    axes.tick_params(labelsize=8)
    return seen
