"""Memory as strips of addresses: where the blocks of slots lie, and which pages an access touches."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from memstate import checks
from memstate.errors import InvalidArgument
from memstate.sizes import format_bytes
from memstate.state.layout import StateLayout
from memstate.viz import given
from memstate.viz.given import Layouts
from memstate.viz.touch import blocks, shares, touched

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memstate.viz.figure import Colour

MOST_BLOCKS = 2000  # more can be neither seen nor told apart
MOST_PAGES = 2**20
LEVELS = 4  # shades of a page that is touched in part


def arena(layouts: Layouts, slots: int, ids: Sequence[int] = ()) -> "Figure":
    """Draws the arenas of each layout from first byte to last, a colour per plane and a shade per layer.

    Args:
        layouts: Name -> layout, or one layout. They may have 2000 blocks in all.
        slots: Number of slots, without the null slot.
        ids: Slots whose blocks stand out, 1..slots; the others are pale.

    Raises:
        InvalidArgument: There are no such slots, or too many blocks to tell apart.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    layouts, slots = given.layouts(layouts), checks.whole("slots", slots)
    ids = given.numbers("slots", ids, range(1, slots + 1))
    most = max(len(layout.planes) * layout.layers for layout in layouts.values()) * (slots + 1)
    if most > MOST_BLOCKS:
        raise InvalidArgument(
            f"arena: {most} blocks cannot be told apart, draw fewer slots or layers (<= {MOST_BLOCKS})"
        )
    colours = figure.plane_colours(plane.name for layout in layouts.values() for plane in layout.planes)
    sizes = {name: layout.arena_bytes(slots) for name, layout in layouts.items()}
    widest = max(1, *(size for each in sizes.values() for size in each))
    drawn = figure.drawing(9, 0.9 + 0.62 * sum(map(len, sizes.values())))
    axes = drawn.subplots()
    labels: list[str] = []
    for name, layout in layouts.items():
        _lay_out(axes, len(labels), layout, slots, ids, colours, widest / 60)
        labels += [f"{figure.plain(name)}\narena {number}" for number in range(len(sizes[name]))]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("bytes from the start of the arena")
    axes.set_xlim(0, 1.01 * widest)
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(
        handles=figure.key(colours), loc="outside upper right", ncols=min(len(colours), figure.COLUMNS), frameon=False
    )
    return drawn


def _lay_out(
    axes: "Axes", first: int, layout: StateLayout, slots: int, ids: Sequence[int], colours: "Mapping[str, Colour]",
    legible: float,
) -> None:  # fmt: skip
    """Draws every block of a layout, its first arena on line `first`; `legible` blocks carry their slot's number."""
    from memstate.viz import figure

    for plane, place in zip(layout.planes, layout.placements(slots), strict=True):
        block, line = layout.block_bytes(plane), first + place.arena
        for layer, slot in product(range(layout.layers), range(slots + 1)) if block else ():
            start = place.offset + layer * place.layer_stride + slot * place.slot_stride
            own = slot in ids
            pale = 0.45 * layer / layout.layers if own or not ids else 0.85
            axes.barh(
                line, block, left=start, height=0.7, facecolor=figure.lighter(colours[plane.name], pale),
                edgecolor=figure.EDGE, linewidth=1.0 if own else 0.25, zorder=3 if own else 2,
            )  # fmt: skip
            if own and block > legible:
                axes.text(
                    start + block / 2, line, str(slot), ha="center", va="center", fontsize=7, color="white", zorder=4
                )


def pages(
    layouts: Layouts, slots: int, ids: Sequence[int], page_bytes: int,
    layers: Iterable[int] | None = None,
) -> "Figure":  # fmt: skip
    """Draws the pages of each layout's arenas; what a forward over these slots touches is dark.

    The fuller a page, the darker.

    Args:
        layouts: Name -> layout, or one layout. Their arenas may have 2**20 pages in all.
        slots: Number of slots.
        ids: Slots that are read, 1..slots.
        page_bytes: Bytes of a page.
        layers: Layers that are read (default: all).

    Raises:
        InvalidArgument: There are no such slots or layers, or too many pages to tell apart.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    layouts, page_bytes = given.layouts(layouts), checks.whole("page_bytes", page_bytes)
    chosen = None if layers is None else list(layers)
    most = sum(size // page_bytes for layout in layouts.values() for size in layout.arena_bytes(slots))
    if most > MOST_PAGES:
        raise InvalidArgument(
            f"pages: {most} pages of {page_bytes} bytes cannot be told apart, draw fewer slots (<= {MOST_PAGES} pages)"
        )
    rows = []
    for name, layout in layouts.items():
        pieces = blocks(layout, slots, ids, chosen)
        parts = shares(pieces, page_bytes, layout.arena_bytes(slots))
        needed = sum(piece.nbytes for piece in pieces)
        count = touched(pieces, page_bytes)
        rows.append(
            (f"{figure.plain(name)}: {count} pages of {format_bytes(page_bytes)} for {format_bytes(needed)}", parts)
        )
    drawn = figure.drawing(9, 0.5 + 0.75 * sum(len(parts) for _, parts in rows))
    grid = drawn.subplots(sum(len(parts) for _, parts in rows), 1, squeeze=False, sharex=True)[:, 0]
    longest = max(len(part) for _, parts in rows for part in parts)
    strips = ((title, number, part) for title, parts in rows for number, part in enumerate(parts))
    for axes, (title, number, part) in zip(grid, strips, strict=True):
        if number == 0:
            axes.set_title(title, fontsize=9, loc="left")
        axes.barh(
            0, len(part), height=1, align="center", left=0, facecolor="white", edgecolor=figure.EDGE, linewidth=0.6
        )
        for first, count, level in _levels(part.tolist()):
            colour = figure.lighter("#7a1f3d", 0.75 * (1 - level / LEVELS))
            axes.barh(0, count, height=1, left=first, color=colour, linewidth=0)
        axes.set_yticks([0], [f"arena {number}"])
        axes.set_ylim(-0.5, 0.5)
        axes.set_xlim(0, 1.01 * longest)
        axes.spines[:].set_visible(False)
    grid[-1].set_xlabel(f"page of {format_bytes(page_bytes)}")
    return drawn


def _levels(part: Sequence[float]) -> list[tuple[int, int, int]]:
    """Returns touched pages, neighbours of one shade joined: the first page, how many, and the shade, 1..LEVELS."""
    found: list[tuple[int, int, int]] = []
    for at, share in enumerate(part):
        level = -int(-share * LEVELS // 1)  # rounded up: what is touched is seen
        if level and found and found[-1][0] + found[-1][1] == at and found[-1][2] == level:
            found[-1] = (found[-1][0], found[-1][1] + 1, level)
        elif level:
            found.append((at, 1, level))
    return found
