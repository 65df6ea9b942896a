"""The upload ring on a stream that lags behind: a host buffer is not touched before the copy out of it has happened."""

import random
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import memstate.slots.upload
from memstate.kernels.dispatch import Backend
from memstate.slots.upload import RING, UploadRing


class LaggingStream:
    """A stream that copies late: it takes the bytes that the host buffer has at that time."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, list[int]]] = []
        self.kept: list[Target] = []  # device buffers that torch must not reuse before this stream is done
        self.done = self.queued = self.waits = 0

    def advance(self, until: int) -> None:
        while self.done < until:
            buffer, sent = self.queue.pop(0)
            assert buffer.tolist() == sent, "a buffer was overwritten while its copy was in flight"
            self.done += 1


class Target:
    """A device buffer, or a part of one."""

    def __init__(self, ints: int, stream: LaggingStream) -> None:
        self.ints, self.stream = ints, stream

    def numel(self) -> int:
        return self.ints

    def __getitem__(self, part: slice) -> "Target":
        assert part.stop <= self.ints
        return Target(part.stop, self.stream)

    def record_stream(self, stream: LaggingStream) -> None:
        stream.kept.append(self)

    def copy_(self, buffer: torch.Tensor, non_blocking: bool = False) -> None:
        assert non_blocking, "a blocking copy waits for the device"
        assert buffer.numel() == self.ints
        self.stream.queue.append((buffer, buffer.tolist()))
        self.stream.queued += 1


class FakeTorch:
    """The parts of torch that the ring uses, without a device: pinned memory, device memory, events."""

    int32 = torch.int32

    def __init__(self, stream: LaggingStream) -> None:
        self.pinned: list[bool] = []
        fake = self

        class Event:
            def __init__(self) -> None:
                self.at = stream.queued

            def query(self) -> bool:
                return stream.done >= self.at

            def synchronize(self) -> None:
                stream.waits += not self.query()
                stream.advance(self.at)

        self.mark = lambda device: Event()
        self.cuda = SimpleNamespace(current_stream=lambda device: stream)

        def empty(ints: int, dtype: torch.dtype, device: object = None, pinned: bool = False) -> object:
            if device is not None:
                return Target(ints, stream)
            fake.pinned.append(pinned)
            return torch.full((ints,), -1, dtype=dtype)

        self.empty = empty


@pytest.fixture
def stream() -> LaggingStream:
    return LaggingStream()


@pytest.fixture
def ring(stream: LaggingStream, monkeypatch: pytest.MonkeyPatch) -> UploadRing:
    fake = FakeTorch(stream)
    monkeypatch.setattr(memstate.slots.upload, "torch", fake)
    monkeypatch.setattr(memstate.slots.upload, "lasting", fake)
    monkeypatch.setattr(memstate.slots.upload, "mark", fake.mark)
    monkeypatch.setattr(memstate.slots.upload, "on", nullcontext)
    backend = Backend("reference", "cpu")
    backend.device = torch.device("cuda")
    ring = UploadRing(backend, ints=8)
    assert all(fake.pinned)
    return ring


def packet(size: int, value: int) -> np.ndarray:
    return np.full(size, value, np.int32)


def test_a_full_ring_waits_for_its_oldest_copy_and_counts_it(ring: UploadRing, stream: LaggingStream) -> None:
    for value in range(RING):
        ring.send(packet(8, value))
    assert (ring.waits, stream.done) == (0, 0)
    ring.send(packet(8, 99))
    assert (ring.waits, stream.waits, stream.done) == (1, 1, 1)
    assert ring._backend.counts.syncs == 1
    stream.advance(stream.queued)


def test_growth_leaves_copies_in_flight_alone(ring: UploadRing, stream: LaggingStream) -> None:
    for value, size in enumerate((8, 3, 9, 8, 40, 8, 8, 8, 200)):
        ring.send(packet(size, value))
    # sizes of buffers that were freed while the stream could still read them
    assert [target.ints for target in stream.kept] == [8, 18, 80]
    stream.advance(stream.queued)
    assert stream.done == 9


@pytest.mark.parametrize("turn", range(4))
def test_no_packet_is_lost_on_a_stream_of_any_speed(
    ring: UploadRing, stream: LaggingStream, generator: torch.Generator, turn: int
) -> None:
    """Packets of random sizes go to a stream that stalls and catches up.

    Now and then a packet is larger than all before.
    """
    rng = random.Random(generator.initial_seed() + turn)
    total = 0
    for value in range(60):
        size = rng.choice((1, 4, 8, 8, 8, rng.randint(1, 2 ** rng.randint(1, 9))))
        ring.send(packet(size, value))
        total += size
        stream.advance(min(stream.queued, stream.done + rng.choice((0, 0, 1, 2, 8))))
    stream.advance(stream.queued)
    counts = ring._backend.counts
    assert (stream.done, counts.uploads, counts.upload_bytes) == (60, 60, 4 * total)
    assert ring.waits == stream.waits == counts.syncs


def test_a_ring_that_found_no_memory_works_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = UploadRing(Backend("reference"), ints=4)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch, "empty", mock.Mock(side_effect=MemoryError))
        ring.send(packet(8, 1))
    assert ring.send(packet(8, 2)).tolist() == ring.send(packet(8, 2)).tolist() == packet(8, 2).tolist()
