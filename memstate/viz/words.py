"""Draws words of memstate's own tables: the bitmap of free slots, and the packet of one upload."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, Section
from memstate.slots.inspect import Inspection
from memstate.viz import figure, inputs
from memstate.viz.bits import BITS, free_words
from memstate.viz.figure import Axes, Figure
from memstate.viz.uploads import PacketSection, sections

MOST_BITMAP_WORDS = 512
FEW_WORDS = 16  # number of words up to which bits show their slots, and words their values
SET, CLEAR, NO_BIT = "#cfe0ee", "#3b6ea5", "white"
A_LINE = 16  # words of a packet per line: 64 bytes
MOST_PACKET_WORDS = 1024
HEADER, PADDING = "#6f6f6f", "#eeeeee"


def bitmap(inspection: Inspection) -> Figure:
    """Draws the bitmap of free slots: a line for each word, bit 0 on the left, set bits pale and other bits dark.

    The bitmap of a large pool has a summary: its levels are drawn above the bitmap, the highest first. A small bitmap
    also shows its slots and the values of its words. Beyond 512 words it raises an error.

    Args:
        inspection: A result of `StateManager.inspect`.

    Raises:
        InvalidArgument: `inspection` is not an inspection, or there are too many words.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    levels = free_words(inspection)
    count, slots = len(levels[0]), BITS * MOST_BITMAP_WORDS - 1
    inputs.few(count, MOST_BITMAP_WORDS, f"bitmap: {count} words", f"a pool of at most {slots} slots")
    legible = len(levels[0]) <= FEW_WORDS
    heights = [0.25 * len(level) if legible else max(0.3, 0.04 * len(level)) for level in levels][::-1]
    drawn = figure.drawing(9, 0.9 + sum(heights) + 0.4 * len(levels))
    grid = drawn.subplots(len(levels), 1, squeeze=False, height_ratios=[height + 0.01 for height in heights])[:, 0]
    for axes, level in zip(grid, reversed(range(len(levels))), strict=True):
        bits = inspection.capacity + 1 if level == 0 else len(levels[level - 1])
        _draw_level(axes, levels[level], bits, named=legible and level == 0)
        if len(levels) > 1:
            what = "bitmap: a bit for each slot" if level == 0 else f"level {level}: a bit for each word below"
            axes.set_title(f"{what}, {len(levels[level])} words", fontsize=9, loc="left")
    grid[-1].set_xlabel("bit of the word")
    names = ("bit 1: free", "bit 0: owned, or the null slot") if len(levels) == 1 else ("bit 1", "bit 0")
    figure.legend(drawn, figure.key(dict(zip(names, (SET, CLEAR), strict=True))))
    return drawn


def _draw_level(axes: Axes, level: Sequence[int], bits: int, named: bool) -> None:
    """Draws the words of one level of `bits` bits. If `named`, bits show their slots and words their values."""
    for at, word in enumerate(level):
        there = min(BITS, bits - BITS * at)
        for is_set, run in groupby(range(there), key=lambda bit, word=word: word >> bit & 1):  # type: ignore[misc]
            first, *others = run
            axes.barh(at, 1 + len(others), left=first, height=0.9, color=SET if is_set else CLEAR, linewidth=0)
        if named:
            for bit in range(there):
                slot, colour = BITS * at + bit, "#444444" if word >> bit & 1 else "white"
                axes.text(bit + 0.5, at, str(slot), ha="center", va="center", fontsize=6, color=colour)
            axes.text(BITS + 0.3, at, f"0x{word:08x}", va="center", fontsize=7, family="monospace")
    axes.vlines(range(1, BITS), -0.5, len(level) - 0.5, color=NO_BIT, linewidth=0.6)
    every = -(-len(level) // 20)
    axes.set_yticks(range(0, len(level), every), [f"word {at}" for at in range(0, len(level), every)])
    axes.set_ylim(len(level) - 0.5, -0.5)
    axes.set_xticks(range(0, BITS, 4))
    axes.set_xlim(0, BITS + (4 if named else 0))
    axes.tick_params(labelsize=7)
    figure.no_frame(axes)


def packet(packet: Sequence[int]) -> Figure:
    """Draws the words of a packet, 16 per line, with a colour for each section. Words that only pad a column are pale.

    The header has the number of entries of each section, the limit of optional claims, and the start of each section.
    Beyond 1024 words it raises an error.

    Args:
        packet: The words of an upload; see `sections`.

    Raises:
        InvalidArgument: `packet` is not the words of a packet, or there are too many words.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    parts = sections(packet)
    size = max([HEADER_INTS, *(part.end for part in parts)])
    inputs.few(size, MOST_PACKET_WORDS, f"packet: {size} words", "fewer")
    colours = {"header": HEADER, **figure.plane_colours(part.name for part in parts), "padding": PADDING}
    lines = -(-size // A_LINE)
    drawn = figure.drawing(9, 1.0 + 0.36 * lines)
    axes = drawn.subplots()
    for word, name in _words(parts):
        line, at = divmod(word, A_LINE)
        axes.barh(line, 1, left=at, height=0.9, color=colours[name], edgecolor="white", linewidth=1.0)
        if name != "padding":
            ink = figure.ink(colours[name])
            axes.text(at + 0.5, line, str(int(packet[word])), ha="center", va="center", fontsize=7, color=ink)
    figure.name_lines(axes, [f"byte {4 * A_LINE * line}" for line in range(lines)], size=7)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_xlim(0, A_LINE)
    axes.set_xticks([])
    figure.no_frame(axes)
    figure.legend(drawn, figure.key(colours))
    return drawn


def _words(parts: Sequence[PacketSection]) -> Iterator[tuple[int, str]]:
    """Yields (place in the packet, name of its section or `padding`) for each word."""
    for word in range(HEADER_INTS):
        yield word, "header" if word <= LIMIT_CELL or word < HEADER_INTS // 2 + len(Section) else "padding"
    for part in parts:
        for word in range(part.start, part.end):
            yield word, part.name if (word - part.start) % part.stride < part.count else "padding"
