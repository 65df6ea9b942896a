"""Numbers that make up a whole, and numbers that change with a setting."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memstate.viz import given

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NARROW = 0.05  # of the longest bar: a part that is narrower has no number in it
MARKERS = "osD^vX"


def stacked(numbers: Mapping[str, Mapping[str, float]], unit: str) -> "Figure":
    """Draws one bar for each group, made of its parts, such as the bytes of a plan or the tokens of a trace.

    Args:
        numbers: Group -> part -> value from 0 on, with the same parts in every group.
        unit: Unit of the values, for the axis.

    Raises:
        InvalidArgument: A value is no number from 0 on, or groups differ in their parts.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    groups = given.bars(numbers, least=0)
    colours = figure.plane_colours(next(iter(groups.values())))
    drawn = figure.drawing(9, 0.9 + 0.36 * len(groups))
    axes = drawn.subplots()
    longest = max(sum(group.values()) for group in groups.values()) or 1
    for at, group in enumerate(groups.values()):
        start = 0.0
        for part, value in group.items():
            axes.barh(at, value, left=start, height=0.7, color=colours[part], edgecolor="white", linewidth=0.5)
            if value >= NARROW * longest:
                axes.text(start + value / 2, at, _short(value), ha="center", va="center", fontsize=7, color="white")
            start += value
    axes.set_yticks(range(len(groups)), [figure.plain(group) for group in groups])
    axes.invert_yaxis()
    axes.set_xlim(0, longest)
    axes.set_xlabel(figure.plain(unit))
    axes.spines[["top", "right"]].set_visible(False)
    handles = figure.key(colours)
    drawn.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), figure.COLUMNS), frameon=False)
    return drawn


def lines(
    numbers: Mapping[str, Mapping[int, float]],
    setting: str,
    unit: str,
    *,
    log: bool = False,
    limits: Mapping[str, float] | None = None,
) -> "Figure":
    """Draws a line for each name over a setting, such as the hit rate of each policy over the number of states.

    Args:
        numbers: Name -> value of the setting, from 1 on -> number. The setting's axis is logarithmic.
        setting: What the setting is, for its axis.
        unit: Unit of the numbers, for their axis.
        log: Whether the axis of the numbers is logarithmic; they are above 0 then.
        limits: Name -> number of each dashed line over the whole width.

    Raises:
        InvalidArgument: A value is no number, or none is there to draw.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    found = given.series(numbers, log)
    marks = given.limits(limits or {}, log)
    colours = figure.plane_colours(found)
    drawn = figure.drawing(9, 3.4)
    axes = drawn.subplots()
    for at, (name, points) in enumerate(found.items()):
        width = 1.5 + 1.3 * (len(found) - 1 - at)  # the first is the widest: a line under another stays visible
        axes.plot(
            list(points), list(points.values()), color=colours[name], marker=MARKERS[at % len(MARKERS)],
            linewidth=width, markersize=4 + width, label=figure.plain(name),
        )  # fmt: skip
    for name, value in marks.items():
        axes.axhline(value, color=figure.EDGE, linestyle="--", linewidth=1)
        axes.text(0.01, value, figure.plain(name), transform=axes.get_yaxis_transform(), va="bottom", fontsize=8)
    places = sorted({place for points in found.values() for place in points})
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_xticks([], minor=True)
    if log:
        axes.set_yscale("log")
    else:
        axes.margins(y=0.1)
        axes.set_ylim(bottom=min(0, *(value for points in found.values() for value in points.values())))
    axes.set_xlabel(figure.plain(setting))
    axes.set_ylabel(figure.plain(unit))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper right", ncols=min(len(names), figure.COLUMNS), frameon=False)
    return drawn


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
