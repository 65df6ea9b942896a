"""Claims and releases slots in a bitmap (bit set = free), lowest slot first. Knows no register and no plane.

One program finds the n lowest free slots by popcount, prefix sum and rank-select. So the result depends on the bitmap
alone, never on a race between atomics. A claim does not scan the bitmap: it goes down the levels of the summary
(`memstate.kernels.levels`), and reads at each level only words that have bits which the claim needs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.checks import check_columns, check_count
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.levels import TOP_WORDS as MOST_WORDS
from memstate.kernels.levels import words_of
from memstate.kernels.tables import Count
from memstate.kernels.warps import LANES, all_loaded, block_for, warps_for

FREE = tl.constexpr(int(Count.FREE))
CLAIMED = tl.constexpr(int(Count.CLAIMED))
RELEASED = tl.constexpr(int(Count.RELEASED))
DOUBLE_RELEASE = tl.constexpr(int(Count.DOUBLE_RELEASE))
OUT_OF_RANGE = tl.constexpr(int(Count.OUT_OF_RANGE))
CLAIM_SHORT = tl.constexpr(int(Count.CLAIM_SHORT))
OFFENDER = tl.constexpr(int(Count.OFFENDER))
OFFENDER_KIND = tl.constexpr(int(Count.OFFENDER_KIND))
BIG = tl.constexpr(2**31 - 1)
TOP_WORDS = tl.constexpr(MOST_WORDS)


@triton.jit
def popcount(word):
    """Returns the number of set bits of each int32 word (SWAR; Warren, Hacker's Delight, 5-1).

    Compiles to popc.b32 on NVIDIA and to v_bcnt_u32_b32 on AMD.
    """
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def nth_set_bit(word, n):
    """Returns the position of the n-th (from 0) set bit of each word, by binary descent over halves."""
    x = word.to(tl.uint32, bitcast=True)
    position = n * 0
    for step in tl.static_range(5):
        below = popcount((x & ((1 << (16 >> step)) - 1)).to(tl.int32, bitcast=True))
        upper = n >= below
        n = tl.where(upper, n - below, n)
        x = tl.where(upper, x >> (16 >> step), x)
        position += tl.where(upper, 16 >> step, 0)
    return position


@triton.jit
def lowest_bits(word, at, n, CHUNK: tl.constexpr):
    """Returns the n lowest set bits of a list of words, or all set bits if there are fewer than n.

    Args:
        word: one word in each lane.
        at: index of each word in its level, ascending.
        n: number of bits, at most CHUNK.
        CHUNK: number of lanes.

    Returns:
        Three values. In lane r, the index in the level of the returned bit with number r, counted from 0. The number of
        returned bits. In lane i, the number of set bits before word i.
    """
    rank = tl.arange(0, CHUNK)
    free = popcount(word)
    through = tl.cumsum(free, 0)
    where = rank * 0  # lane of the word with the bit of this rank: a binary search for the first with through > rank
    for step in tl.static_range(1, 11):
        if CHUNK >> step > 0:
            probe = tl.gather(through, where + (CHUNK >> step) - 1, 0)
            where = tl.where(probe <= rank, where + (CHUNK >> step), where)
    before = tl.gather(through - free, where, 0)
    bit = nth_set_bit(tl.gather(word, where, 0), rank - before)
    return tl.gather(at, where, 0) * 32 + bit, tl.minimum(n, tl.sum(free, 0)), through - free


@triton.jit
def take_lowest(bitmap_ptr, words, n, rank, CHUNK: tl.constexpr):
    """Clears the n lowest set bits, and returns (slots, number of slots claimed).

    `rank` has one number per lane. A lane of rank r gets the r-th of these slots, counted from 0, or 0 if there is
    none. A pass starts at the lowest level that has at most CHUNK words, and finds up to CHUNK slots. At each level, it
    lists words of the next level down that are not 0: n such words have at least n set bits. A pass clears the lowest
    bits of the bitmap; a word that becomes 0 then clears its bit in the level above.

    Every warp must have the same n: a barrier must follow the loads on which n depends. If n > 0, the function passes
    a barrier before the first store, and another after the last store.
    """
    lane = tl.arange(0, CHUNK)
    slot = rank * 0
    taken = n * 0
    more = taken < n
    while more:
        start = words * 0
        size = words
        shift = words * 0  # 5 times the number of levels between this level and the bitmap
        while size > CHUNK:
            start += size
            size = (size + 31) // 32
            shift += 5
        want = tl.minimum(n - taken, CHUNK)
        listed = size
        below = lane
        at = lane * 0  # not plain `lane`: Triton would not carry `at` from one iteration to the next
        word = lane
        before = lane
        while shift >= 0:
            at = below
            word = tl.load(bitmap_ptr + start + at, mask=(lane < listed) & (at < size), other=0)
            all_loaded()  # otherwise a late warp counts words that are cleared already, and leaves the loop elsewhere
            below, listed, before = lowest_bits(word, at, want, CHUNK)
            shift -= 5
            size = ((words - 1) >> tl.maximum(shift, 0)) + 1
            start -= size
        local = rank - taken
        here = (local >= 0) & (local < listed) & (rank < n)
        slot = tl.where(here, tl.gather(below, tl.where(here, local, 0), 0), slot)

        take = tl.minimum(tl.maximum(want - before, 0), popcount(word))
        last = nth_set_bit(word, take - 1)  # means nothing where take == 0; the mask below stores nothing there
        kept = word & (-2 << last)
        tl.store(bitmap_ptr + at, kept, mask=take > 0)
        emptied = (take > 0) & (kept == 0)
        start = words * 0
        size = words
        while size > TOP_WORDS:
            start += size
            bit = tl.full(at.shape, 1, tl.int32) << at % 32
            at //= 32
            old = tl.atomic_and(bitmap_ptr + start + at, ~bit, mask=emptied, sem="relaxed")
            emptied &= old == bit  # of the lanes that clear bits of a word, only one clears the last of them
            size = (size + 31) // 32
        taken += listed
        more = (taken < n) & (listed == want)
        tl.debug_barrier()  # the next pass and the next claim read words that this pass cleared
    return slot, taken


@triton.jit
def bump(counters_ptr, cell: tl.constexpr, by):
    """Adds `by` to one counter.

    At any time, at most one program writes counters, and only one of its threads stores. The values that the other
    threads load are not used.
    """
    tl.store(counters_ptr + cell, tl.load(counters_ptr + cell) + by)


@triton.jit
def note_offender(counters_ptr, kind: tl.constexpr, count, lowest):
    """Stores the kind and the lowest slot of a fault, unless an earlier fault waits for `check()`.

    No barrier stands between two calls. As in `bump`, only one thread stores, and it sees what it has stored itself;
    what the other threads load decides nothing.
    """
    first = (count > 0) & (tl.load(counters_ptr + OFFENDER_KIND) == 0)
    tl.store(counters_ptr + OFFENDER, lowest, mask=first)
    tl.store(counters_ptr + OFFENDER_KIND, kind, mask=first)


@triton.jit
def give_back(bitmap_ptr, slot, valid, capacity):
    """Sets the bits of `slot` where valid; returns for each lane whether its slot was free already (double release)."""
    bit = slot % 32
    at = slot // 32
    old = tl.atomic_or(bitmap_ptr + at, tl.full(slot.shape, 1, tl.int32) << bit, mask=valid, sem="relaxed")
    first = valid & (old == 0)  # of the lanes that set bits of a word, only one finds that it was 0
    start = capacity * 0
    size = capacity // 32 + 1
    while size > TOP_WORDS:
        start += size
        above = tl.full(slot.shape, 1, tl.int32) << at % 32
        at //= 32
        first &= tl.atomic_or(bitmap_ptr + start + at, above, mask=first, sem="relaxed") == 0
        size = (size + 31) // 32
    return valid & (((old >> bit) & 1) != 0)


@triton.jit
def book_releases(counters_ptr, released, doubles, strays, lowest_double, lowest_stray):
    """Counts releases and their faults, and stores the lowest faulty slot if it is the first fault."""
    bump(counters_ptr, FREE, released)
    bump(counters_ptr, RELEASED, released)
    bump(counters_ptr, DOUBLE_RELEASE, doubles)
    bump(counters_ptr, OUT_OF_RANGE, strays)
    note_offender(counters_ptr, DOUBLE_RELEASE, doubles, lowest_double)
    note_offender(counters_ptr, OUT_OF_RANGE, strays, lowest_stray)


@triton.jit(do_not_specialize=["words", "n"])
def _claim(bitmap_ptr, out_ptr, counters_ptr, words, n, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    done = 0
    while done < n:
        rank = tl.arange(0, BLOCK)
        size = tl.minimum(n - done, BLOCK)
        slot, taken = take_lowest(bitmap_ptr, words, size, rank, CHUNK)
        tl.store(out_ptr + done + rank, slot, mask=rank < size)
        bump(counters_ptr, FREE, -taken)
        bump(counters_ptr, CLAIMED, taken)
        bump(counters_ptr, CLAIM_SHORT, size - taken)
        done += size


@triton.jit(do_not_specialize=["ids_ptr", "n", "capacity"])
def _release(bitmap_ptr, ids_ptr, counters_ptr, n, capacity, BLOCK: tl.constexpr):
    released = 0
    doubles = 0
    strays = 0
    lowest_double = BIG
    lowest_stray = BIG
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        wide = tl.load(ids_ptr + index, mask=index < n, other=0)
        stray = wide > capacity
        valid = (wide > 0) & (wide <= capacity)
        slot = tl.where(valid, wide, 0).to(tl.int32)
        double = give_back(bitmap_ptr, slot, valid, capacity)
        released += tl.sum((valid & (double == 0)).to(tl.int32), 0)
        doubles += tl.sum(double.to(tl.int32), 0)
        strays += tl.sum(stray.to(tl.int32), 0)
        lowest_double = tl.minimum(lowest_double, tl.min(tl.where(double, slot, BIG), 0))
        lowest_stray = tl.minimum(lowest_stray, tl.min(tl.where(stray, tl.minimum(wide, BIG).to(tl.int32), BIG), 0))
    book_releases(counters_ptr, released, doubles, strays, lowest_double, lowest_stray)


def chunk_words(warps: int) -> int:
    """Returns the number of words of the bitmap that a claim loads at a time, one or two per thread.

    With 16 warps of 64 threads, only every other thread has a word: 1024 words would spill.
    """
    return min(LANES * warps, 512)


CLAIM = KeptLaunch(_claim)
RELEASE = KeptLaunch(_release)


def _alike(*tensors: Tensor) -> bool:
    """Returns whether all tensors are int32 and begin on 16-byte boundaries, as `KeptLaunch` requires for `alike`."""
    return all(one.dtype == torch.int32 and not one.data_ptr() % 16 for one in tensors)


def claim(bitmap: Tensor, n: int, counters: Tensor) -> Tensor:
    """Launches the op; see `memstate.kernels.reference.bitmap.claim`."""
    check_count(n)
    out = torch.empty(n, dtype=torch.int32, device=bitmap.device)
    words = words_of(bitmap.numel())
    block = block_for(n)
    warps = warps_for(block)
    args, sizes = (bitmap, out, counters, words, n), {"BLOCK": block, "CHUNK": chunk_words(warps)}
    CLAIM.launch(args, sizes, warps, bitmap.device, _alike(out, bitmap, counters))
    return out


def release(bitmap: Tensor, ids: Tensor, capacity: int, counters: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.bitmap.release`."""
    check_columns(bitmap.device, None, ids=ids)
    block = block_for(ids.numel())
    args = bitmap, ids, counters, ids.numel(), capacity
    RELEASE.launch(args, {"BLOCK": block}, warps_for(block), bitmap.device, _alike(ids, bitmap, counters))
