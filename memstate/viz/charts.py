"""Charts of numbers: bars, stacked bars, lines over a setting, and curves over steps."""

from collections.abc import Mapping, Sequence

from memstate import checks
from memstate.errors import InvalidArgument
from memstate.viz import figure, inputs
from memstate.viz.figure import Axes, Figure

NARROW = 0.05  # share of the longest bar; the number of a narrower part is left out
MARKERS = "osD^vX"
THICKER = 1.3  # points by which a line is thinner than the one below it, so that equal lines stay visible
LABELS = 24  # limit of the labels of steps
Numbers = Mapping[str, Mapping[str, float]]  # group -> name -> value


def bars(numbers: Numbers, unit: str, *, log: bool = False) -> Figure:
    """Draws numbers as groups of bars with their values, such as the MiB of several models for each dtype.

    Args:
        numbers: For each group, its values by name. All groups have the same names.
        unit: Unit of the values, for the axis.
        log: Whether the axis is logarithmic; then a 0 shows its number, but no bar.

    Raises:
        InvalidArgument: A value is not a number, or groups differ in their names.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    names = _groups("bars", numbers, least=0 if log else None)
    colours = figure.plane_colours(names)
    drawn = figure.drawing(9, 0.9 + 0.2 * (len(names) + 0.5) * len(numbers))
    axes = drawn.subplots()
    height = 0.8 / len(names)
    logarithmic = log and any(value > 0 for group in numbers.values() for value in group.values())
    for turn, name in enumerate(names):
        places = [at + (turn - (len(names) - 1) / 2) * height for at in range(len(numbers))]
        values = [group[name] for group in numbers.values()]
        container = axes.barh(places, values, height=0.92 * height, color=colours[name])
        axes.bar_label(container, fmt="\u00a0{:,.6g}", fontsize=7)
        for at, bar in zip(places, container, strict=True):
            if logarithmic and bar.get_width() == 0:  # bar_label skips a 0, which has no place on a logarithmic axis
                axes.text(0, at, "\u00a00", transform=axes.get_yaxis_transform(), va="center", fontsize=7)
    axes.margins(x=0.12)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
    _finish(drawn, axes, numbers, unit, colours)
    return drawn


def stacked(numbers: Numbers, unit: str) -> Figure:
    """Draws a bar for each group, stacked from its parts, such as the bytes of a plan or the tokens of a trace.

    Args:
        numbers: For each group, the values of its parts by name, from 0 on. All groups have the same parts.
        unit: Unit of the values, for the axis.

    Raises:
        InvalidArgument: A value is not a number from 0 on, or groups differ in their parts.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    colours = figure.plane_colours(_groups("bars", numbers, least=0))
    drawn = figure.drawing(9, 0.9 + 0.36 * len(numbers))
    axes = drawn.subplots()
    longest = max(sum(group.values()) for group in numbers.values()) or 1
    for at, group in enumerate(numbers.values()):
        start = 0.0
        for part, value in group.items():
            axes.barh(at, value, left=start, height=0.7, color=colours[part], edgecolor="white", linewidth=0.5)
            if value >= NARROW * longest:
                text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                ink = figure.ink(colours[part])
                axes.text(start + value / 2, at, text, ha="center", va="center", fontsize=7, color=ink)
            start += value
    axes.set_xlim(0, longest)
    _finish(drawn, axes, numbers, unit, colours)
    return drawn


def _groups(what: str, numbers: Numbers, least: float | None) -> list[str]:
    names = inputs.groups(what, numbers)
    for group, each in numbers.items():
        for name, value in each.items():
            inputs.number(f"{what}: {group}, {name}", value, least=least)
    return names


def _finish(drawn: Figure, axes: Axes, groups: Numbers, unit: str, colours: Mapping[str, figure.Colour]) -> None:
    """Adds the names of the groups, the unit and the legend to a chart of bars."""
    figure.name_lines(axes, groups)
    axes.set_xlabel(figure.plain(unit))
    figure.half_frame(axes)
    figure.legend(drawn, figure.key(colours))


def lines(
    numbers: Mapping[str, Mapping[int, float]], setting: str, unit: str, *, log: bool = False,
    limits: Mapping[str, float] | None = None,
) -> Figure:  # fmt: skip
    """Draws a line for each name over the values of a setting, such as each policy's hit rate over numbers of states.

    Args:
        numbers: For each name, a dict from values of the setting, 1 or more, to numbers. The axis of the setting is
            logarithmic.
        setting: Text of the axis of the setting.
        unit: Unit of the numbers, for their axis.
        log: Whether the axis of the numbers is logarithmic; then they must be above 0.
        limits: For each name, the number at which a dashed line crosses the picture.

    Raises:
        InvalidArgument: A value is not a number, or there is nothing to draw.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    inputs.groups("lines", numbers, alike=False)
    limits, above = {} if limits is None else limits, 0 if log else None
    for name, points in numbers.items():
        for place, value in points.items():
            if not checks.is_whole(place) or place < 1:
                raise InvalidArgument(f"lines: {name} at {place!r}, expected a whole number from 1 on")
            inputs.number(f"lines: {name} at {place}", value, above=above)
    if not isinstance(limits, Mapping):
        raise InvalidArgument(f"limits: {limits!r}, expected a dict of numbers by name")
    colours = figure.plane_colours(numbers)
    drawn = figure.drawing(9, 3.4)
    axes = drawn.subplots()
    for at, (name, points) in enumerate(numbers.items()):
        places = sorted(points)
        # the first line is the widest, so that lines drawn over it do not hide it
        width = 1.5 + THICKER * (len(numbers) - 1 - at)
        axes.plot(
            places, [points[place] for place in places], color=colours[name], marker=MARKERS[at % len(MARKERS)],
            linewidth=width, markersize=4 + width, label=figure.plain(name),
        )  # fmt: skip
    for name, value in limits.items():
        inputs.number(f"limits: {name}", value, above=above)
        axes.axhline(value, color=figure.EDGE, linestyle="--", linewidth=1)
        axes.annotate(
            figure.plain(name), (0.01, value), (0, 2), axes.get_yaxis_transform(), "offset points", va="bottom",
            fontsize=8,
        )  # fmt: skip
    places = sorted({place for points in numbers.values() for place in points})
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places], fontsize=8)
    axes.set_xticks([], minor=True)
    if log:
        axes.set_yscale("log")
    else:
        axes.margins(y=0.1)
        axes.set_ylim(bottom=min(0, *(value for points in numbers.values() for value in points.values())))
    axes.set_xlabel(figure.plain(setting))
    axes.set_ylabel(figure.plain(unit))
    axes.grid(alpha=0.25)
    figure.half_frame(axes)
    figure.legend(drawn, axes.get_legend_handles_labels()[0])
    return drawn


def curves(numbers: Mapping[str, Mapping[str, Sequence[float]]], labels: Sequence[str] = ()) -> Figure:
    """Draws a panel for each unit, and in it a line for each name, over steps.

    Args:
        numbers: For each unit and in it for each name, one number for each step. All units have the same names, and all
            names have the same number of steps.
        labels: A label for each step (default: 0, 1, ...).

    Raises:
        InvalidArgument: There is nothing to draw, names or lengths differ, or a value is not a number.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    names = inputs.groups("curves", numbers)
    count = _length(numbers, labels)
    colours = figure.plane_colours(names)
    drawn = figure.drawing(9, 0.8 + 1.5 * len(numbers))
    grid = drawn.subplots(len(numbers), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (unit, each) in zip(grid, numbers.items(), strict=True):
        for turn, (name, values) in enumerate(each.items()):
            axes.plot(
                range(count), values, color=colours[name], drawstyle="steps-mid", label=figure.plain(name),
                linewidth=1.4 + THICKER * (len(names) - 1 - turn), solid_joinstyle="miter",
            )  # fmt: skip
        axes.set_ylabel(figure.plain(unit), fontsize=8)
        points = [value for values in each.values() for value in values]
        axes.set_ylim(bottom=min(0, *points))
        axes.yaxis.get_major_locator().set_params(integer=all(value == int(value) for value in points))
        figure.half_frame(axes)
        axes.tick_params(labelsize=8)
    every = -(-count // LABELS)
    shown = [figure.plain(label) for label in (labels or range(count))]
    grid[-1].set_xticks(range(0, count, every), shown[::every])
    grid[-1].set_xlabel("step", fontsize=8)
    figure.legend(drawn, grid[0].get_legend_handles_labels()[0])
    return drawn


def _length(numbers: Mapping[str, Mapping[str, Sequence[float]]], labels: Sequence[str]) -> int:
    """Checks the lines and labels of `curves`, and returns the number of steps."""
    if not all(isinstance(values, Sequence) for each in numbers.values() for values in each.values()):
        raise InvalidArgument(f"curves: {numbers!r}, expected a list of numbers for each name")
    counts = {len(values) for each in numbers.values() for values in each.values()}
    if len(counts) != 1 or 0 in counts or isinstance(labels, str) or len(labels) not in (0, *counts):
        raise InvalidArgument(
            f"curves: lines of {sorted(counts)} numbers and {len(labels)} labels, expected as many everywhere"
        )
    for unit, each in numbers.items():
        for name, values in each.items():
            for value in values:
                inputs.number(f"curves: {unit}, {name}", value)
    return counts.pop()
