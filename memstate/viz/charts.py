"""Slots to scale, and bars of numbers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memstate.errors import InvalidArgument
from memstate.layout import StateLayout, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memstate.viz.figure import Colour


def slot(layouts: Mapping[str, StateLayout]) -> "Figure":
    """One slot of each layout, all to one scale: the blocks of a layer beside the slot over all layers.

    layouts: name -> layout. Padding is hatched. Syncs: no. Raises: InvalidArgument; ImportError without matplotlib.
    """
    from memstate.viz import figure

    if not layouts:
        raise InvalidArgument("slot: no layout to draw")
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
    left.set_yticks(range(len(layouts)), list(layouts))
    left.invert_yaxis()
    padded = any(layout.bytes_per_slot > layout.payload_bytes_per_slot for layout in layouts.values())
    shown = colours | ({"padding": figure.PADDING} if padded else {})
    drawn.legend(handles=figure.key(shown), loc="outside upper right", ncols=len(shown), frameon=False)
    return drawn


def _stack(axes: "Axes", at: int, layout: StateLayout, layers: int, unit: int, colours: "Mapping[str, Colour]") -> None:
    """A layout's planes one behind the other, each with its padding."""
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
    """The unit in which so many bytes are a number that can be read: its bytes and its name."""
    power = min(3, max(0, most.bit_length() - 1) // 10)
    return 1024**power, ("bytes", "KiB", "MiB", "GiB")[power]


def bars(numbers: Mapping[str, Mapping[str, float]], unit: str, *, log: bool = False) -> "Figure":
    """Numbers as groups of bars with their values, such as MiB of several models by dtype.

    numbers: group -> name -> value, with the same names in every group. unit: of the values, for the axis.
    Syncs: no. Raises: InvalidArgument; ImportError without matplotlib.
    """
    from memstate.viz import figure

    names = list(next(iter(numbers.values()), {}))
    if not names or any(list(group) != names for group in numbers.values()):
        raise InvalidArgument(f"bars: expected the names {names} in every group of {list(numbers)}")
    colours = figure.plane_colours(names)
    drawn = figure.drawing(9, 0.9 + 0.2 * (len(names) + 0.5) * len(numbers))
    axes = drawn.subplots()
    height = 0.8 / len(names)
    for turn, name in enumerate(names):
        places = [at + (turn - (len(names) - 1) / 2) * height for at in range(len(numbers))]
        container = axes.barh(
            places, [group[name] for group in numbers.values()], height=0.92 * height, color=colours[name]
        )
        axes.bar_label(container, fmt=" {:,.6g}", fontsize=7)
    axes.set_yticks(range(len(numbers)), list(numbers))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    if log:
        axes.set_xscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(handles=figure.key(colours), loc="outside upper right", ncols=len(names), frameon=False)
    return drawn
