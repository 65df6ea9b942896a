"""The upload ring on a stream that lags behind: a host buffer is not touched before the copy out of it has happened."""

import random
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from memstate.kernels.dispatch import Backend
from memstate.slots.upload import RING, UploadRing
from tests.support.fake_cuda import FakeCuda, fake_cuda


@pytest.fixture
def poison() -> None:
    """Does nothing: poison reads the device, so that the host would wait."""


class Late:
    """A ring whose stream lags behind. Each copy must find the packet unchanged in the buffer of the host."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.done = cuda, 0
        self.ring = UploadRing(Backend("reference", "cuda:0"), ints=8)
        assert len(cuda.pinned_on) == RING
        self.stream = cuda.current_stream(0)
        cuda.lag(self.stream)

    def send(self, size: int, value: int) -> None:
        self.ring.send(packet(size, value))
        work, copy = self.cuda.lagging[self.stream].pop()

        def checked() -> None:
            assert copy().tolist() == [value] * size, "a buffer was overwritten while its copy was in flight"
            self.done += 1

        self.cuda.lagging[self.stream].append((work, checked))

    def advance(self, most: int = 999) -> int:
        """Lets copies happen. Returns their number."""
        before = self.done
        self.cuda.advance(self.stream, most)
        return self.done - before


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    with fake_cuda(monkeypatch) as cuda:
        yield Late(cuda)


def packet(size: int, value: int) -> np.ndarray:
    return np.full(size, value, np.int32)


def test_a_full_ring_waits_for_its_oldest_copy_and_counts_it(late: Late) -> None:
    for value in range(RING):
        late.send(8, value)
    assert (late.ring.waits, late.done) == (0, 0)
    late.send(8, 99)
    assert (late.ring.waits, late.ring._backend.counts.syncs, late.done) == (1, 1, 1)
    assert late.advance() == RING


def test_growth_leaves_copies_in_flight_alone(late: Late) -> None:
    for value, size in enumerate((8, 3, 9, 8, 40, 8, 8, 8, 200)):
        late.send(size, value)
    # sizes of buffers that were freed while the stream could still read them
    assert [(target.numel(), stream) for target, stream in late.cuda.kept] == [(n, late.stream) for n in (8, 18, 80)]
    assert late.advance() == 9


@pytest.mark.parametrize("turn", range(4))
def test_no_packet_is_lost_on_a_stream_of_any_speed(late: Late, generator: torch.Generator, turn: int) -> None:
    """Packets of random sizes go to a stream that stalls and catches up.

    Now and then a packet is larger than all before.
    """
    rng = random.Random(generator.initial_seed() + turn)
    total = let = 0
    for value in range(60):
        size = rng.choice((1, 4, 8, 8, 8, rng.randint(1, 2 ** rng.randint(1, 9))))
        late.send(size, value)
        total += size
        let += late.advance(rng.choice((0, 0, 1, 2, 8)))
    let += late.advance()
    counts = late.ring._backend.counts
    assert (late.done, counts.uploads, counts.upload_bytes) == (60, 60, 4 * total)
    assert late.ring.waits == counts.syncs == 60 - let  # each wait is for one copy


def test_a_ring_that_found_no_memory_works_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = UploadRing(Backend("reference"), ints=4)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "empty", mock.Mock(side_effect=MemoryError))
        ring.send(packet(8, 1))
    assert ring.send(packet(8, 2)).tolist() == ring.send(packet(8, 2)).tolist() == packet(8, 2).tolist()
