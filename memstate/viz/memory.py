"""Pictures of memory to scale: slots, arenas from first byte to last, and the pages that an access touches."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product

from memstate import checks
from memstate.sizes import format_bytes
from memstate.state.layout import StateLayout
from memstate.viz import figure, inputs
from memstate.viz.figure import Axes, Colour, Figure
from memstate.viz.inputs import Layouts
from memstate.viz.touch import blocks, shares, touched

MOST_BLOCKS = 2000  # limit of the blocks that a reader can tell apart
MOST_PAGES = 2**20
LEVELS = 4  # number of shades for pages that are touched in part


def slot(layouts: Layouts) -> Figure:
    """Draws one slot of each layout, to the same scale: the blocks of one layer, and beside them the whole slot.

    Padding is hatched.

    Args:
        layouts: Layouts by name, or one layout.

    Raises:
        InvalidArgument: `layouts` is neither a layout nor a dict of layouts.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    layouts = inputs.layouts(layouts)
    colours = figure.plane_colours(plane.name for layout in layouts.values() for plane in layout.planes)
    drawn = figure.drawing(9, 1.1 + 0.45 * len(layouts))
    left, right = drawn.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for axes, what in ((left, "one layer of one slot"), (right, "one slot, all layers")):
        whole = axes is right
        sizes = [
            layout.bytes_per_slot if whole else sum(map(layout.block_bytes, layout.planes))
            for layout in layouts.values()
        ]
        unit, name = _unit(max(sizes))
        for at, layout in enumerate(layouts.values()):
            _stack(axes, at, layout, whole, unit, colours)
            if whole:
                label = f"\u00a0{layout.layers} layers, {format_bytes(layout.bytes_per_slot)}"
                axes.text(sizes[at] / unit, at, label, va="center", fontsize=8)
        axes.set_xlim(0, (1.9 if axes is right else 1.02) * max(*sizes, 1) / unit)
        axes.set_xlabel(f"{what}, {name}")
        figure.half_frame(axes)
    figure.name_lines(left, layouts)
    padded = any(layout.bytes_per_slot > layout.payload_bytes_per_slot for layout in layouts.values())
    figure.legend(drawn, figure.key(colours, padded))
    return drawn


def _stack(axes: Axes, at: int, layout: StateLayout, whole: bool, unit: int, colours: Mapping[str, Colour]) -> None:
    """Draws the planes of a layout one after the other, with their padding. `whole`: all layers, not only one."""
    start = 0.0
    for plane, row in zip(layout.planes, layout.table(), strict=True):
        layers = layout.layers_of(plane) if whole else 1
        size, padding = row.payload * layers / unit, row.padding * layers / unit
        axes.barh(at, size, left=start, height=0.6, color=colours[row.name], edgecolor=figure.EDGE, linewidth=0.4)
        if padding:
            axes.barh(
                at, padding, left=start + size, height=0.6, facecolor="white", edgecolor=figure.PADDING,
                hatch=figure.HATCH, linewidth=0.6,
            )  # fmt: skip
        start += size + padding


def _unit(most: int) -> tuple[int, str]:
    """Returns (bytes, name) of the unit in which `most` bytes are a readable number, such as KiB."""
    power = min(3, max(0, most.bit_length() - 1) // 10)
    return 1024**power, ("bytes", "KiB", "MiB", "GiB")[power]


def arena(layouts: Layouts, slots: int, ids: Sequence[int] = ()) -> Figure:
    """Draws the arenas of each layout from first byte to last, with a colour for each plane and a shade for each layer.

    Args:
        layouts: Layouts by name, or one layout; at most 2000 blocks together.
        slots: Number of slots, without the null slot.
        ids: Slots to highlight, 1..slots; blocks of other slots are pale.

    Raises:
        InvalidArgument: An id is not a slot, or there are too many blocks to tell apart.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    layouts, slots = inputs.layouts(layouts), checks.whole("slots", slots)
    ids = inputs.ids("slots", ids, range(1, slots + 1))
    most = max(sum(map(layout.layers_of, layout.planes)) for layout in layouts.values()) * (slots + 1)
    inputs.few(most, MOST_BLOCKS, f"arena: {most} blocks", "fewer slots or layers")
    colours = figure.plane_colours(plane.name for layout in layouts.values() for plane in layout.planes)
    sizes = {name: layout.arena_bytes(slots) for name, layout in layouts.items()}
    widest = max(1, *(size for each in sizes.values() for size in each))
    drawn = figure.drawing(9, 0.9 + 0.62 * sum(map(len, sizes.values())))
    axes = drawn.subplots()
    labels: list[str] = []
    for name, layout in layouts.items():
        _lay_out(axes, len(labels), layout, slots, ids, colours, widest / 60)
        labels += [f"{name}\narena {number}" for number in range(len(sizes[name]))]
    figure.name_lines(axes, labels)
    axes.set_xlabel("bytes from the start of the arena")
    axes.set_xlim(0, 1.01 * widest)
    figure.half_frame(axes)
    figure.legend(drawn, figure.key(colours))
    return drawn


def _lay_out(
    axes: Axes, first: int, layout: StateLayout, slots: int, ids: Sequence[int], colours: Mapping[str, Colour],
    legible: float,
) -> None:  # fmt: skip
    """Draws every block of a layout, from line `first` on. Blocks of more than `legible` bytes show their slot."""
    for plane, place in zip(layout.planes, layout.placements(slots), strict=True):
        block, line = layout.block_bytes(plane), first + place.arena
        for layer, slot in product(range(layout.layers_of(plane)), range(slots + 1)) if block else ():
            start = place.offset + layer * place.layer_stride + slot * place.slot_stride
            own = slot in ids
            pale = 0.45 * layer / layout.layers if own or not ids else 0.85
            axes.barh(
                line, block, left=start, height=0.7, facecolor=figure.lighter(colours[plane.name], pale),
                edgecolor=figure.EDGE, linewidth=1.0 if own else 0.25, zorder=3 if own else 2,
            )  # fmt: skip
            if own and block > legible:
                ink = figure.ink(colours[plane.name])
                axes.text(start + block / 2, line, str(slot), ha="center", va="center", fontsize=7, color=ink, zorder=4)


def pages(
    layouts: Layouts, slots: int, ids: Sequence[int], page_bytes: int, layers: Iterable[int] | None = None
) -> Figure:
    """Draws the pages of each layout's arenas. Pages that a forward touches when it reads some slots are red.

    The larger the part of a page that is touched, the stronger is its colour.

    Args:
        layouts: Layouts by name, or one layout; at most 2**20 pages of arenas together.
        slots: Number of slots.
        ids: Slots that are read, 1..slots.
        page_bytes: Bytes of a page.
        layers: Layers that are read (default: all).

    Raises:
        InvalidArgument: An id is not a slot, a layer does not exist, or there are too many pages to tell apart.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    layouts, page_bytes = inputs.layouts(layouts), checks.whole("page_bytes", page_bytes)
    chosen = None if layers is None else list(layers)
    most = sum(size // page_bytes for layout in layouts.values() for size in layout.arena_bytes(slots))
    what = f"pages: {most} pages of {page_bytes} bytes"
    inputs.few(most, MOST_PAGES, what, "fewer slots")
    strips = []
    for name, layout in layouts.items():
        pieces = blocks(layout, slots, ids, chosen)
        count, needed = touched(pieces, page_bytes), sum(piece.nbytes for piece in pieces)
        title = f"{figure.plain(name)}: {count} pages of {format_bytes(page_bytes)} for {format_bytes(needed)}"
        strips += [(title, *part) for part in enumerate(shares(pieces, page_bytes, layout.arena_bytes(slots)))]
    drawn = figure.drawing(9, 0.5 + 0.75 * len(strips))
    grid = drawn.subplots(len(strips), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, number, part) in zip(grid, strips, strict=True):
        if number == 0:
            axes.set_title(title, fontsize=9, loc="left")
        axes.barh(0, len(part), height=1, left=0, facecolor="white", edgecolor=figure.EDGE, linewidth=0.6)
        # rounded up, so that every touched page is visible
        levels = [-int(-share * LEVELS // 1) for share in part.tolist()]
        for level, run in groupby(range(len(levels)), levels.__getitem__):
            first, *others = run
            if level:
                colour = figure.lighter("#c03a66", 0.75 * (1 - level / LEVELS))
                axes.barh(0, 1 + len(others), height=1, left=first, color=colour, linewidth=0)
        axes.set_yticks([0], [f"arena {number}"])
        axes.set_ylim(-0.5, 0.5)
        axes.set_xlim(0, 1.01 * max(len(part) for _, _, part in strips))
        figure.no_frame(axes)
    grid[-1].set_xlabel(f"page of {format_bytes(page_bytes)}")
    return drawn
