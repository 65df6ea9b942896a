"""The bitmap of free slots, word by word, with the summary that a claim of a large pool goes down."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from memstate.errors import InvalidArgument
from memstate.kernels.levels import bitmap_levels, bitmap_words, with_summary
from memstate.slots.inspect import Inspection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BITS = 32  # of a word
MOST_WORDS = 512
FEW_WORDS = 16  # up to which a bit has room for its slot, and a word for its value
SET, CLEAR, NO_BIT = "#cfe0ee", "#3b6ea5", "white"


def free_words(inspection: Inspection) -> list[list[int]]:
    """Returns the words of the bitmap as unsigned numbers, then those of each level of its summary.

    The bit of a slot is set while the slot is free. The bit of a word of the summary is set while the word below it
    is not 0. A bitmap of at most 64 words has no summary.

    Args:
        inspection: What `StateManager.inspect` returned.

    Raises:
        InvalidArgument: This is no inspection.

    Example:
        >>> from memstate.slots.inspect import Inspection
        >>> free = [False, False, True, True]
        >>> [hex(word) for word in free_words(Inspection(3, [0] * 4, free, [], [], {}, {}))[0]]
        ['0xc']

    Syncs: no.
    """
    if not isinstance(inspection, Inspection):
        raise InvalidArgument(f"{inspection!r}: expected what `StateManager.inspect` returns")
    count = bitmap_words(inspection.capacity)
    bits = np.zeros(BITS * count, bool)
    bits[: inspection.capacity + 1] = inspection.free[: inspection.capacity + 1]
    everything = with_summary(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))
    found, start = [], 0
    for size in bitmap_levels(count):
        found.append(everything[start : start + size].view(np.uint32).tolist())
        start += size
    return found


def bitmap(inspection: Inspection) -> "Figure":
    """Draws the bitmap of free slots: a line for each word, bit 0 on the left, a set bit pale and a clear one dark.

    If the pool is so large that the bitmap has a summary, its levels stand above, the highest first. Words of a small
    bitmap show their slots and their value. Beyond 512 words nothing is drawn.

    Args:
        inspection: What `StateManager.inspect` returned.

    Raises:
        InvalidArgument: This is no inspection, or there are too many words.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    levels = free_words(inspection)
    if len(levels[0]) > MOST_WORDS:
        raise InvalidArgument(
            f"bitmap: {len(levels[0])} words cannot be told apart, draw a pool of at most {BITS * MOST_WORDS - 1} slots"
        )
    legible = len(levels[0]) <= FEW_WORDS
    heights = [0.25 * len(level) if legible else max(0.3, 0.04 * len(level)) for level in levels][::-1]
    drawn = figure.drawing(9, 0.9 + sum(heights) + 0.4 * len(levels))
    grid = drawn.subplots(len(levels), 1, squeeze=False, height_ratios=[height + 0.01 for height in heights])[:, 0]
    for axes, level in zip(grid, reversed(range(len(levels))), strict=True):
        bits = inspection.capacity + 1 if level == 0 else len(levels[level - 1])
        _draw(axes, levels[level], bits, named=legible and level == 0)
        if len(levels) > 1:
            what = "bitmap: a bit for each slot" if level == 0 else f"level {level}: a bit for each word below"
            axes.set_title(f"{what}, {len(levels[level])} words", fontsize=9, loc="left")
    grid[-1].set_xlabel("bit of the word")
    names = ("bit 1: free", "bit 0: owned, or the null slot") if len(levels) == 1 else ("bit 1", "bit 0")
    drawn.legend(
        handles=figure.key(dict(zip(names, (SET, CLEAR), strict=True))), loc="outside upper right", ncols=2,
        frameon=False,
    )  # fmt: skip
    return drawn


def _draw(axes: "Axes", level: Sequence[int], bits: int, named: bool) -> None:
    """Draws the words of one level, which has so many bits; `named` ones with their slots and values."""
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
    axes.set_yticks(range(0, len(level), every), [f"word {at}" for at in range(0, len(level), every)], fontsize=7)
    axes.set_ylim(len(level) - 0.5, -0.5)
    axes.set_xticks(range(0, BITS, 4))
    axes.set_xlim(0, BITS + (4 if named else 0))
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)
