"""What each step of a decode loop reads, writes and keeps, slot by slot, and how numbers go from step to step."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.viz import kinds
from memstate.viz.owners import holdings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 4000  # slots times moments, over all panels
MOST_STEPS = 24  # that have room for what a cell says
NARROWEST = 6.5  # inches: a legend of all kinds of owners fits
THINNEST, THICKER = 1.4, 1.3  # points: each line is thinner than the one below it, so that equal numbers show them all


class PlannedStep(NamedTuple):
    """What was planned for one step.

    Attributes:
        label: Its name on the axis.
        inspection: What `StateManager.inspect` returned between the plan and the forward.
        read: Slots that the forward reads: `step.read.tolist()`.
        write: Slots that it writes: `step.write.tolist()`.
        snapshot: Slots that it writes as well: `step.snapshot.tolist()`.
    """

    label: str
    inspection: Inspection
    read: Sequence[int] = ()
    write: Sequence[int] = ()
    snapshot: Sequence[int] = ()


def steps(runs: Mapping[str, Sequence[PlannedStep]]) -> "Figure":
    """Draws a panel for each run: slots from top to bottom, steps from left to right, coloured by the kind of owner.

    A cell says what the forward does with the slot (r reads, w writes, s writes as a snapshot), and the length in
    tokens that its state has after the forward.

    Args:
        runs: Name -> its steps, such as the same loop under several strategies. At most 24 steps each.

    Raises:
        InvalidArgument: There is nothing to draw, or too much to tell apart.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    taken = _checked(runs)
    slots = {name: moments[0].inspection.capacity for name, moments in taken.items()}
    longest = max(map(len, taken.values()))
    drawn = figure.drawing(
        max(NARROWEST, 1.2 + 0.56 * longest), 0.7 + sum(0.65 + 0.24 * count for count in slots.values())
    )
    grid = drawn.subplots(len(taken), 1, squeeze=False, height_ratios=[1 + count for count in slots.values()])[:, 0]
    seen: set[str] = set()
    for axes, (name, moments) in zip(grid, taken.items(), strict=True):
        seen |= _panel(axes, moments, longest)
        axes.set_title(figure.plain(name), fontsize=9, loc="left")
    handles = figure.kind_key(seen)
    drawn.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), figure.COLUMNS), frameon=False)
    return drawn


def _checked(runs: Mapping[str, Sequence[PlannedStep]]) -> dict[str, list[PlannedStep]]:
    lists = isinstance(runs, Mapping) and all(isinstance(moments, Sequence) and moments for moments in runs.values())
    if not runs or not lists:
        raise InvalidArgument(f"steps: {runs!r}, expected a dict of lists of `viz.PlannedStep`, none of them empty")
    taken = {str(name): list(moments) for name, moments in runs.items()}
    for name, moments in taken.items():
        if not all(isinstance(moment, PlannedStep) and isinstance(moment.inspection, Inspection) for moment in moments):
            raise InvalidArgument(f"steps: {name}: expected a list of `viz.PlannedStep`, each with its inspection")
        capacities = sorted({moment.inspection.capacity for moment in moments})
        if len(capacities) > 1 or len(moments) > MOST_STEPS:
            raise InvalidArgument(
                f"steps: {name}: {len(moments)} steps of {capacities} slots, expected at most {MOST_STEPS} steps of "
                "the same number of slots"
            )
    cells = sum(len(moments) * moments[0].inspection.capacity for moments in taken.values())
    if cells > MOST_CELLS:
        raise InvalidArgument(f"steps: {cells} cells cannot be told apart, draw fewer slots or steps (<= {MOST_CELLS})")
    return taken


def _panel(axes: "Axes", moments: Sequence[PlannedStep], longest: int) -> set[str]:
    """Draws one run, and returns the kinds of owner that it has."""
    from memstate.viz import figure

    seen, capacity = set(), moments[0].inspection.capacity
    axes.set_facecolor(kinds.kind("free").colour)
    for at, moment in enumerate(moments):
        taken = moment.inspection
        lengths = {slot: taken.labels[register] for register, slot in enumerate(taken.slots) if slot}
        uses = {"r": moment.read, "w": moment.write, "s": moment.snapshot}
        for slot, (kind, _) in enumerate(holdings(taken), 1):
            seen.add(kind)
            used = " ".join(letter for letter, slots in uses.items() if slot in slots)
            look = kinds.kind(kind)
            if kind != "free":
                axes.barh(
                    slot, 1, left=at, height=1, facecolor=look.colour, edgecolor="white", linewidth=0.8,
                    hatch=figure.HATCH if look.faulty else "",
                )  # fmt: skip
            said = " ".join(filter(None, (used, str(lengths.get(slot) or ""))))
            axes.text(at + 0.5, slot, said, ha="center", va="center", fontsize=8, color=look.ink)
    axes.set_xticks([at + 0.5 for at in range(len(moments))], [figure.plain(str(each.label)) for each in moments])
    axes.set_yticks(range(1, capacity + 1))
    axes.set_ylim(capacity + 0.5, 0.5)
    axes.set_xlim(0, longest)
    axes.set_ylabel("slot", fontsize=8)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    return seen


def curves(numbers: Mapping[str, Mapping[str, Sequence[float]]], labels: Sequence[str] = ()) -> "Figure":
    """Draws a panel for each unit: a line for each name, one number a step.

    Args:
        numbers: Unit -> name -> its numbers, with the same names and as many numbers everywhere.
        labels: A label for each step (default: 0, 1, ...).

    Raises:
        InvalidArgument: There is nothing to draw, names or lengths differ, or a value is no number.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    names, count = _named(numbers, labels)
    colours = figure.plane_colours(names)
    drawn = figure.drawing(9, 0.8 + 1.5 * len(numbers))
    grid = drawn.subplots(len(numbers), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (unit, lines) in zip(grid, numbers.items(), strict=True):
        for turn, (name, values) in enumerate(lines.items()):
            axes.plot(
                range(count), values, color=colours[name], drawstyle="steps-mid", label=figure.plain(name),
                linewidth=THINNEST + THICKER * (len(names) - 1 - turn), solid_joinstyle="miter",
            )  # fmt: skip
        axes.set_ylabel(figure.plain(str(unit)), fontsize=8)
        found = [value for values in lines.values() for value in values]
        axes.set_ylim(bottom=min(0, *found))
        axes.yaxis.get_major_locator().set_params(integer=all(value == int(value) for value in found))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    shown = [str(label) for label in labels] or [str(at) for at in range(count)]
    every = -(-count // 24)
    grid[-1].set_xticks(range(0, count, every), [figure.plain(label) for label in shown[::every]])
    drawn.legend(*grid[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(names), frameon=False)
    return drawn


def _named(numbers: Mapping[str, Mapping[str, Sequence[float]]], labels: Sequence[str]) -> tuple[list[str], int]:
    """Returns the names of the lines and how many numbers each has."""
    if not isinstance(numbers, Mapping) or not all(isinstance(lines, Mapping) and lines for lines in numbers.values()):
        raise InvalidArgument(f"curves: {numbers!r}, expected a dict of units, each a dict of numbers by name")
    if not all(isinstance(values, Sequence) for lines in numbers.values() for values in lines.values()):
        raise InvalidArgument(f"curves: {numbers!r}, expected a list of numbers for each name")
    names = list(next(iter(numbers.values()), {}))
    counts = {len(values) for lines in numbers.values() for values in lines.values()}
    if not names or any(list(lines) != names for lines in numbers.values()):
        raise InvalidArgument(f"curves: expected the names {names} in every unit of {list(numbers)}")
    if len(counts) != 1 or 0 in counts or isinstance(labels, str) or len(labels) not in (0, *counts):
        raise InvalidArgument(
            f"curves: lines of {sorted(counts)} numbers and {len(labels)} labels, expected as many everywhere"
        )
    for unit, lines in numbers.items():
        for name, values in lines.items():
            wrong = [v for v in values if not isinstance(v, int | float | np.number) or not isfinite(v)]
            if wrong:
                raise InvalidArgument(f"curves: {unit}, {name} has {wrong[0]!r}, expected numbers")
    return names, counts.pop()
