"""Claims and releases slots in a bitmap, in plain numpy.

Tests compare `memstate.kernels.bitmap` with this reference, which replaces the kernels where Triton is missing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.kernels.checks import check_columns, check_count
from memstate.kernels.levels import bitmap_levels, words_of
from memstate.kernels.reference.host import Ints, on_host
from memstate.kernels.tables import Count

Longs = NDArray[np.int64]


def take_lowest(bitmap: Ints, n: int) -> Ints:
    """Clears the n lowest set bits, or all if there are fewer, and returns their positions."""
    if n <= 0:
        return np.zeros(0, np.int32)
    words = np.flatnonzero(bitmap[: words_of(bitmap.size)])[:n]  # n words with a free slot hold n free slots
    bits = np.unpackbits(bitmap[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    slots = (words[word] * 32 + bit)[:n].astype(np.int32)
    np.bitwise_and.at(bitmap, slots >> 5, ~_bit(slots))
    _clear_above(bitmap, words)
    return slots


def _clear_above(bitmap: Ints, words: Longs) -> None:
    """Clears the bits of the summary above words of the bitmap that have become 0, level by level."""
    start = 0
    levels = bitmap_levels(words_of(bitmap.size))
    for size in levels[:-1]:
        words = words[bitmap[start + words] == 0]
        start += size
        np.bitwise_and.at(bitmap, start + (words >> 5), ~_bit(words))
        words = np.unique(words >> 5)


def _set_above(bitmap: Ints, word: int) -> None:
    """Sets the bits of the summary above a word of the bitmap."""
    start = 0
    for size in bitmap_levels(words_of(bitmap.size))[:-1]:
        start += size
        bitmap[start + (word >> 5)] |= _bit(np.int32(word))
        word >>= 5


def give_back(bitmap: Ints, counters: Ints, slots: list[int], capacity: int) -> None:
    """Sets the bits of slots; counts releases, double releases and slots out of range, and notes the first fault."""
    doubles = []
    strays = [slot for slot in slots if slot > capacity or slot < 0]
    for slot in (s for s in slots if 0 < s <= capacity):
        bit = _bit(np.int32(slot))
        if bitmap[slot >> 5] & bit:
            doubles.append(slot)
        bitmap[slot >> 5] |= bit
        _set_above(bitmap, slot >> 5)
    released = sum(0 < s <= capacity for s in slots) - len(doubles)
    counters[Count.FREE] += released
    counters[Count.RELEASED] += released
    note_offenders(counters, Count.DOUBLE_RELEASE, doubles)
    note_offenders(counters, Count.OUT_OF_RANGE, strays)


def note_offenders(counters: Ints, kind: Count, offenders: list[int]) -> None:
    """Counts faults of one kind, and stores their lowest slot or register if they are the first fault."""
    counters[kind] += len(offenders)
    if offenders and not counters[Count.OFFENDER_KIND]:
        counters[Count.OFFENDER] = min(min(offenders), 2**31 - 1)
        counters[Count.OFFENDER_KIND] = kind


def _bit(slot: Ints | Longs | np.int32) -> Ints:
    return np.left_shift(np.int32(1), (slot & 31).astype(np.int32), dtype=np.int32)


def claim(bitmap: Tensor, n: int, counters: Tensor) -> Tensor:
    """Claims the n lowest free slots.

    Args:
        bitmap: int32 `word`, a set bit for each free slot, and its summary (`memstate.kernels.levels`). Changed.
        n: number of slots.
        counters: int32, see `memstate.kernels.tables.Count`. Changed.

    Returns:
        Slot ids, int32 `n`, ascending. If fewer slots are free, the other ids are 0, and CLAIM_SHORT counts them.

    Raises:
        ValueError: n is negative, or no bitmap has this length with its summary.

    Syncs: no.
    """
    check_count(n)
    out = np.zeros(n, np.int32)
    with on_host(bitmap, counters) as (words, counts):
        slots = take_lowest(words, n)
        out[: len(slots)] = slots
        counts[Count.FREE] -= len(slots)
        counts[Count.CLAIMED] += len(slots)
        counts[Count.CLAIM_SHORT] += n - len(slots)
    return torch.from_numpy(out).to(bitmap.device)


def release(bitmap: Tensor, ids: Tensor, capacity: int, counters: Tensor) -> None:
    """Makes slots free again.

    Args:
        bitmap: int32 `word`, a set bit for each free slot, and its summary (`memstate.kernels.levels`). Changed.
        ids: int32 or int64 `n`. 0 and negative ids are ignored. Ids above `capacity` and ids that are free already are
            counted as faults; the lowest id of the first fault is stored.
        capacity: the highest slot.
        counters: int32, see `memstate.kernels.tables.Count`. Changed.

    Raises:
        ValueError: the ids are not contiguous integers `n` on the device of the bitmap.

    Syncs: no.
    """
    check_columns(bitmap.device, None, ids=ids)
    with on_host(bitmap, counters) as (words, counts):
        give_back(words, counts, [slot for slot in ids.tolist() if slot > 0], capacity)
