"""Compares claim and release on bitmaps of awkward sizes with sets of integers: ids, all words and all counters."""

import random

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import COUNTERS, Count
from tests.support.packets import bits

SIZES = (1, 31, 32, 33, 63, 64, 1000, 2047, 2048, 65535, 65536, 1_000_000)  # below and above each new level
SMALL = tuple(size for size in SIZES if size <= 1000)
PATTERNS = ("all free", "none free", "odd", "last only", "first and last", "sparse", "dense")


class Pool:
    """A bitmap on the backend, and the expected free slots and counters."""

    def __init__(self, capacity: int, free: set[int], backend: Backend) -> None:
        self.capacity, self.free, self.backend = capacity, set(free), backend
        self.bitmap = torch.tensor(self._words(), dtype=torch.int32, device=backend.device)
        self.counts = dict.fromkeys(Count, 0) | {Count.FREE: len(free)}
        self.counters = torch.tensor(self._cells(), dtype=torch.int32, device=backend.device)

    def _words(self) -> list[int]:
        return bits(self.free, self.capacity)

    def _cells(self) -> list[int]:
        return [self.counts[Count(cell)] if cell < len(Count) else 0 for cell in range(COUNTERS)]

    def claim(self, n: int) -> Tensor:
        ids: Tensor = self.backend.claim(self.bitmap, n, self.counters)
        expected = sorted(self.free)[:n]
        self.free -= set(expected)
        self.counts[Count.FREE] -= len(expected)
        self.counts[Count.CLAIMED] += len(expected)
        self.counts[Count.CLAIM_SHORT] += n - len(expected)
        assert ids.dtype == torch.int32
        assert ids.tolist() == expected + [0] * (n - len(expected))
        return ids

    def release(self, ids: list[int], dtype: torch.dtype = torch.int32) -> None:
        given = torch.tensor(ids, dtype=dtype, device=self.backend.device)
        self.backend.release(self.bitmap, given, self.capacity, self.counters)
        doubles, strays = [], [slot for slot in ids if slot > self.capacity]
        for slot in ids:
            if 0 < slot <= self.capacity:
                doubles += [slot] if slot in self.free else []
                self.counts[Count.RELEASED] += slot not in self.free
                self.free.add(slot)
        self.counts[Count.FREE] = len(self.free)
        for kind, offenders in ((Count.DOUBLE_RELEASE, doubles), (Count.OUT_OF_RANGE, strays)):
            self.counts[kind] += len(offenders)
            if offenders and not self.counts[Count.OFFENDER_KIND]:
                self.counts[Count.OFFENDER_KIND] = kind
                self.counts[Count.OFFENDER] = min(min(offenders), 2**31 - 1)

    def check(self) -> None:
        assert self.bitmap.tolist() == self._words()
        assert self.counters.tolist() == self._cells()


def fragmented(pattern: str, capacity: int, rng: random.Random) -> set[int]:
    slots = range(1, capacity + 1)
    return {
        "all free": lambda: set(slots),
        "none free": set,
        "odd": lambda: set(slots[::2]),
        "last only": lambda: {capacity},
        "first and last": lambda: {1, capacity},
        "sparse": lambda: {slot for slot in slots if rng.random() < 0.03},
        "dense": lambda: {slot for slot in slots if rng.random() < 0.9},
    }[pattern]()


@pytest.fixture
def rng(generator: torch.Generator) -> random.Random:
    return random.Random(generator.initial_seed())


@pytest.mark.sample(16)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("capacity", SMALL)
def test_B2_claim_takes_the_lowest_free_slots(
    backend: Backend, rng: random.Random, capacity: int, pattern: str
) -> None:
    pool = Pool(capacity, fragmented(pattern, capacity, rng), backend)
    for n in (1, rng.randint(0, 3) * 11 + 1, capacity + 1):
        pool.claim(n)
        pool.check()


@pytest.mark.parametrize("capacity", SMALL)
def test_B4_releasing_everything_in_any_order_makes_everything_free(
    backend: Backend, rng: random.Random, capacity: int
) -> None:
    pool = Pool(capacity, set(), backend)
    ids = list(range(1, capacity + 1))
    rng.shuffle(ids)
    pool.release(ids)
    pool.check()
    pool.claim(capacity)
    pool.check()


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", SIZES)
def test_B5_B6_faults_are_counted_and_corrupt_nothing(
    backend: Backend, rng: random.Random, capacity: int, dtype: torch.dtype
) -> None:
    """Releases right ids together with wrong ones: repeated in the call, released before, null, negative or unknown."""
    pool = Pool(capacity, fragmented("dense", min(capacity, 3000), rng), backend)
    top = 2**31 - 1 if dtype is torch.int32 else 2**40
    odd = [0, -1, -(2**31), -capacity, capacity + 1, capacity + 31, capacity + 32, capacity + 64, top]
    for size in (1, 40, 1100):
        good = [rng.randint(1, capacity) for _ in range(size)]
        ids = good + rng.sample(odd, 5) + good[: size // 3]
        rng.shuffle(ids)
        pool.release(ids, dtype)
        pool.check()


def test_B4_calls_may_name_slots_in_32_or_64_bits(backend: Backend) -> None:
    """A launch is not kept for ids of another dtype."""
    pool = Pool(200, set(), backend)
    for first, dtype in ((1, torch.int32), (41, torch.int64), (81, torch.int32)):
        pool.release(list(range(first, first + 32)), dtype)
        pool.check()
