"""Says where the words of a bitmap of free slots and of its summary lie. Knows no kernel and no Triton.

One int32 tensor has the words of all levels, level behind level:

    words of the bitmap            a set bit for each free slot
    level 1 of the summary         a set bit for each word of the bitmap that is not 0
    level 2 of the summary         a set bit for each word of level 1 that is not 0

A level of more than `TOP_WORDS` words has another level above it. A bitmap of at most `TOP_WORDS` words has no summary.
"""

from bisect import bisect_left
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

TOP_WORDS = 64  # limit of the words of the highest level: two for each thread of one warp
Ints = NDArray[np.int32]


def bitmap_levels(words: int) -> list[int]:
    """Returns the number of words of each level, from the bitmap upwards.

    Args:
        words: words of the bitmap itself.

    Example:
        >>> bitmap_levels(31251)  # a bitmap of a million slots
        [31251, 977, 31]
    """
    levels = [words]
    while levels[-1] > TOP_WORDS:
        levels.append(-(-levels[-1] // 32))
    return levels


def bitmap_words(capacity: int) -> int:
    """Returns the number of words of a bitmap without summary: a bit for each slot, and one for the null slot."""
    return capacity // 32 + 1


def bitmap_ints(capacity: int) -> int:
    """Returns the number of int32 of a bitmap with its summary."""
    return sum(bitmap_levels(bitmap_words(capacity)))


@lru_cache
def words_of(ints: int) -> int:
    """Returns the number of words of a bitmap, given its number of int32 with the summary.

    Args:
        ints: int32 of the bitmap and its summary.

    Raises:
        ValueError: no bitmap has this length with its summary.
    """
    words = 1 + bisect_left(range(1, ints + 1), ints, key=lambda words: sum(bitmap_levels(words)))
    if sum(bitmap_levels(words)) != ints:
        raise ValueError(f"bitmap: no bitmap takes {ints} int32 with its summary")
    return words


def with_summary(words: Ints) -> Ints:
    """Returns the words of a bitmap, and its summary behind them."""
    levels = [words]
    while levels[-1].size > TOP_WORDS:
        levels.append(_above(levels[-1]))
    return np.concatenate(levels)


def wrong_summary(bitmap: Ints) -> list[int]:
    """Returns the indices of the words of a summary that disagree with the level below."""
    wrong: list[int] = []
    start, size = 0, words_of(bitmap.size)
    while size > TOP_WORDS:
        above = _above(bitmap[start : start + size])
        start += size
        size = above.size
        wrong += (start + np.flatnonzero(bitmap[start : start + size] != above)).tolist()
    return wrong


def summed_slots(index: int, capacity: int) -> tuple[int, int, int]:
    """Returns the level of a word of the summary, and the first and last slot that the word stands for.

    Args:
        index: index of the word in the tensor, as `wrong_summary` returns it.
        capacity: the highest slot.
    """
    level, slots, sizes = 0, 32, bitmap_levels(bitmap_words(capacity))
    while index >= sizes[level]:
        index -= sizes[level]
        level, slots = level + 1, slots * 32
    return level, index * slots, min((index + 1) * slots - 1, capacity)


def _above(words: Ints) -> Ints:
    """Returns the level above a level."""
    bits = np.zeros(-(-words.size // 32) * 32, bool)
    bits[: words.size] = words != 0
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
