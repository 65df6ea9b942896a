"""Slots to scale, and bars of numbers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memstate.sizes import format_bytes
from memstate.state.layout import StateLayout
from memstate.viz import given
from memstate.viz.given import Layouts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memstate.viz.figure import Colour


def slot(layouts: Layouts) -> "Figure":
    """Draws one slot of each layout to one scale: the blocks of a layer beside the slot over all layers.

    Padding is hatched.

    Args:
        layouts: Name -> layout, or one layout.

    Raises:
        InvalidArgument: These are no layouts.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    layouts = given.layouts(layouts)
    colours = figure.plane_colours(plane.name for layout in layouts.values() for plane in layout.planes)
    drawn = figure.drawing(9, 1.1 + 0.45 * len(layouts))
    left, right = drawn.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes, what in ((left, "one layer of one slot"), (right, "one slot, all layers")):
        layers = [layout.layers if axes is right else 1 for layout in layouts.values()]
        sizes = [layout.bytes_per_slot // layout.layers * n for layout, n in zip(layouts.values(), layers, strict=True)]
        unit, name = _unit(max(sizes))
        for at, layout in enumerate(layouts.values()):
            _stack(axes, at, layout, layers[at], unit, colours)
            if axes is right:
                label = f" {layout.layers} layers, {format_bytes(layout.bytes_per_slot)}"
                axes.text(sizes[at] / unit, at, label, va="center", fontsize=8)
        axes.set_xlim(0, (1.9 if axes is right else 1.02) * max(*sizes, 1) / unit)
        axes.set_xlabel(f"{what}, {name}")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yticks(range(len(layouts)), [figure.plain(name) for name in layouts])
    left.invert_yaxis()
    padded = any(layout.bytes_per_slot > layout.payload_bytes_per_slot for layout in layouts.values())
    handles = figure.key(colours, padded)
    drawn.legend(handles=handles, loc="outside upper right", ncols=min(len(handles), figure.COLUMNS), frameon=False)
    return drawn


def _stack(axes: "Axes", at: int, layout: StateLayout, layers: int, unit: int, colours: "Mapping[str, Colour]") -> None:
    """Draws a layout's planes one behind the other, each with its padding."""
    from memstate.viz import figure

    start = 0.0
    for row in layout.table():
        size, padding = row.payload * layers / unit, row.padding * layers / unit
        axes.barh(at, size, left=start, height=0.6, color=colours[row.name], edgecolor=figure.EDGE, linewidth=0.4)
        if padding:
            axes.barh(
                at, padding, left=start + size, height=0.6, facecolor="white", edgecolor=figure.PADDING,
                hatch=figure.HATCH, linewidth=0.6,
            )  # fmt: skip
        start += size + padding


def _unit(most: int) -> tuple[int, str]:
    """Returns the unit in which so many bytes are a readable number: its bytes and its name."""
    power = min(3, max(0, most.bit_length() - 1) // 10)
    return 1024**power, ("bytes", "KiB", "MiB", "GiB")[power]


def bars(numbers: Mapping[str, Mapping[str, float]], unit: str, *, log: bool = False) -> "Figure":
    """Draws numbers as groups of bars with their values, such as MiB of several models by dtype.

    Args:
        numbers: Group -> name -> value, with the same names in every group.
        unit: Unit of the values, for the axis.
        log: Whether the axis is logarithmic; a 0 is a number without a bar then.

    Raises:
        InvalidArgument: A value is no number, or groups differ in their names.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    groups = given.bars(numbers, log)
    names = list(next(iter(groups.values())))
    colours = figure.plane_colours(names)
    drawn = figure.drawing(9, 0.9 + 0.2 * (len(names) + 0.5) * len(groups))
    axes = drawn.subplots()
    height = 0.8 / len(names)
    logarithmic = log and any(value > 0 for group in groups.values() for value in group.values())
    for turn, name in enumerate(names):
        places = [at + (turn - (len(names) - 1) / 2) * height for at in range(len(groups))]
        container = axes.barh(
            places, [group[name] for group in groups.values()], height=0.92 * height, color=colours[name]
        )
        axes.bar_label(container, fmt=" {:,.6g}", fontsize=7)
        for at, bar in zip(places, container, strict=True):
            if logarithmic and bar.get_width() == 0:  # which has no place on the axis, and so no label either
                axes.text(0, at, " 0", transform=axes.get_yaxis_transform(), va="center", fontsize=7)
    axes.set_yticks(range(len(groups)), [figure.plain(group) for group in groups])
    axes.invert_yaxis()
    axes.set_xlabel(figure.plain(str(unit)))
    axes.margins(x=0.12)
    if logarithmic:
        axes.set_xscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(
        handles=figure.key(colours), loc="outside upper right", ncols=min(len(names), figure.COLUMNS), frameon=False
    )
    return drawn
