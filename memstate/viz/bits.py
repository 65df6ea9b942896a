"""Computes the words of the bitmap of free slots, and of the levels of its summary, from an inspection."""

import numpy as np

from memstate.errors import InvalidArgument
from memstate.kernels.levels import bitmap_levels, bitmap_words, with_summary
from memstate.slots.inspect import Inspection

BITS = 32  # bits of a word


def free_words(inspection: Inspection) -> list[list[int]]:
    """Returns lists of words as unsigned numbers: the words of the bitmap, then those of each level of its summary.

    A slot's bit is set while the slot is free. In the summary, each bit stands for a word of the level below, and is
    set while that word is not 0. A bitmap of at most 64 words has no summary.

    Args:
        inspection: A result of `StateManager.inspect`.

    Raises:
        InvalidArgument: `inspection` is not an inspection.

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
    levels, start = [], 0
    for size in bitmap_levels(count):
        levels.append(everything[start : start + size].view(np.uint32).tolist())
        start += size
    return levels
