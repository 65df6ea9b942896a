"""Tests the levels of a bitmap: which words a claim reads, and whether kernel and reference write the same summary."""

import numpy as np
import pytest
import torch

from memstate.kernels.dispatch import Backend
from memstate.kernels.levels import (
    TOP_WORDS,
    bitmap_ints,
    bitmap_levels,
    bitmap_words,
    summed_slots,
    with_summary,
    words_of,
    wrong_summary,
)
from memstate.kernels.tables import COUNTERS, Count
from tests.kernels.test_bitmap import Pool
from tests.support.packets import bits

LEVELS = {2_000: 1, 64_000: 2, 1_000_000: 3}  # slots -> length of a chain of dependent loads of the bitmap
PLACES = ("first", "last", "spread", "one a word", "across words", "few", "none")


def some(place: str, capacity: int) -> set[int]:
    """Returns the free slots of a case, at most 80 of them."""
    last = range(capacity + 1 - 64, capacity + 1)
    return set({
        "first": range(1, 65), "last": last, "none": (), "few": (last[3], last[63]),
        "spread": np.linspace(1, capacity, 64).astype(int).tolist(),
        "one a word": range(32 * (capacity // 32 - 62) + 1, capacity // 32 * 32, 32),
        "across words": range(capacity // 64 * 32 - 40, capacity // 64 * 32 + 40),
    }[place])  # fmt: skip


@pytest.mark.sample
@pytest.mark.parametrize("capacity", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_B11_a_claim_finds_the_lowest_wherever_they_lie(backend: Backend, capacity: int, place: str) -> None:
    free = some(place, capacity)
    pool = Pool(capacity, free, backend)
    for n in (3, 61, 1100):  # too few slots are free for the last claim, which several warps make
        pool.claim(n)
        pool.check()
    pool.release(sorted(free, reverse=True))
    pool.claim(64)
    pool.check()


def test_B2_a_claim_of_more_slots_than_a_pass_finds(backend: Backend) -> None:
    pool = Pool(64_000, set(range(1, 64_001)) - set(range(40, 64_000, 3)), backend)
    for _ in range(2):
        pool.claim(2_100)
        pool.check()


@pytest.mark.parametrize("capacity", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_a_claim_reads_one_list_of_words_a_level(capacity: int, place: str) -> None:
    """A claim loads once from each level of the bitmap. The interpreter counts these loads."""
    from tests.support.addresses import LOAD
    from tests.support.recorded import recorded

    pool = Pool(capacity, some(place, capacity), Backend("interpreter"))
    start = pool.bitmap.data_ptr()
    with recorded() as log:
        pool.claim(64)
    loads = [
        access.at.size
        for access in log.launches[0].accesses
        if access.kind == LOAD and start <= access.at[0] < start + pool.bitmap.nbytes
    ]
    assert len(loads) <= LEVELS[capacity] and max(loads) <= 64, loads
    assert len(loads) == LEVELS[capacity] or place == "none"


def test_a_summary_that_is_wrong_hangs_nothing(backend: Backend) -> None:
    """If the summary has bits for words that are empty or do not exist, the claim ends with too few slots, and counts a
    fault.
    """
    words = bitmap_words(3_000)
    for n, real in ((3, 2 if backend.name == "reference" else 1), (96, 2)):
        pool = Pool(3_000, {5, 2_999}, backend)
        pool.bitmap[words:] = -1
        ids = pool.backend.claim(pool.bitmap, n, pool.counters).tolist()
        assert ids == [*[5, 2_999][:real], *[0] * (n - real)]
        assert pool.bitmap[:words].count_nonzero() == 2 - real and int(pool.counters[Count.CLAIM_SHORT]) == n - real


def test_a_claim_passes_over_words_that_no_level_has(backend: Backend) -> None:
    """The last word of the summary also has bits for words that do not exist; at their places lies the summary."""
    capacity, free = 3_000, [5, 2_999]
    bitmap = torch.tensor(bits(free, capacity), dtype=torch.int32, device=backend.device)
    first = bitmap_words(capacity)
    bitmap[first], bitmap[first + 2] = 1, -1
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=backend.device)
    counters[Count.FREE] = len(free)
    assert backend.claim(bitmap, 40, counters).tolist() == [*free, *[0] * 38]


def test_levels_of_a_pool() -> None:
    assert [bitmap_levels(bitmap_words(capacity)) for capacity in LEVELS] == [[63], [2001, 63], [31251, 977, 31]]
    for capacity in (1, 31, 32, 2_047, 2_048, 65_535, 65_536, 2**31 - 32):
        levels = bitmap_levels(bitmap_words(capacity))
        assert words_of(bitmap_ints(capacity)) == levels[0] and levels[-1] <= TOP_WORDS
    for ints in (65, 66, 67):
        with pytest.raises(ValueError, match=f"no bitmap takes {ints} int32"):
            words_of(ints)


def test_the_summary_is_a_bit_for_each_word_that_is_not_0(generator: torch.Generator) -> None:
    rng = np.random.default_rng(generator.initial_seed())
    free = 1 + np.flatnonzero(rng.random(70_000) < 0.02)
    bitmap = np.array(bits(free.tolist(), 70_000), np.int32)
    assert np.array_equal(with_summary(bitmap[: bitmap_words(70_000)]), bitmap) and wrong_summary(bitmap) == []


@pytest.mark.parametrize(
    ("index", "level", "first", "last", "seen"),
    [
        (2188 + 3, 1, 3072, 4095, [2191]),
        (2188 + 68, 1, 69632, 70_000, [2256, 2188 + 69 + 2]),
        (2188 + 69 + 1, 2, 32768, 65535, [2258]),
        (2188 + 64, 1, 65536, 66559, [2252, 2188 + 69 + 2]),  # a word is 0, but its bit in the level above is 1
    ],
)
def test_a_wrong_word_of_the_summary_is_named(index: int, level: int, first: int, last: int, seen: list[int]) -> None:
    free = [slot for slot in range(1, 70_001) if slot < 60_000 or slot == 66_000]
    bitmap = np.array(bits(free, 70_000), np.int32)
    bitmap[index] ^= bitmap[index] if index == 2188 + 64 else 1
    assert wrong_summary(bitmap) == seen
    assert summed_slots(index, 70_000) == (level, first, last)
