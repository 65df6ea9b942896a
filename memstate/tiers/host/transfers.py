"""Moves records between slots and host memory on streams, without waiting. Knows no key.

out    slots --pack--> staging                            on the caller's stream: after it the slots may be reused
                       staging --copy engine--> host      on a second stream
into   host --copy engine--> staging --unpack--> slots    on a third stream

The copy engine needs one copy for each run of neighbouring records. If the records of a batch are scattered over host
memory, one launch with few programs replaces these copies, on the same stream. In `out`, it copies from staging to host
memory; in `into`, directly from host memory to the slots.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from memstate import lasting
from memstate.checks import INT32_MAX
from memstate.slots.upload import UploadRing
from memstate.state.layout import Plane, StateLayout
from memstate.state.memory import TILE_ROW, tiles_of
from memstate.state.planes import Planes
from memstate.tiers.host.packing import ROW, Packing, table_bytes
from memstate.tiers.host.pool import RecordPool

NUMBER = 4  # bytes of an int32
RINGS, RING_INTS = 2, 1024  # number of upload buffers (one per direction); int32 values per buffer
COPIES = 4  # limit of the copies of one batch: each costs the host as much as a launch
LARGE = 2**23  # bytes; a copy of such a large record takes far longer than the call for it: joining calls saves nothing


def device_bytes(layout: StateLayout, record: int, staging: int) -> int:
    """Returns the bytes that `Transfers` and `Packing` take on the device for one kind of record.

    Args:
        layout: Layout of a slot. Records hold its planes without int8.
        record: Bytes of a record, header and body.
        staging: Number of records for which each of the two staging buffers has room.
    """
    buffers = 2 * staging * (record + NUMBER) + RINGS * RING_INTS * NUMBER
    return table_bytes(layout) + buffers + len(tiles_of(record)) * (TILE_ROW + ROW)


class Ticket:
    """Tells when the bytes of a transfer have arrived.

    Args:
        event: Event after the last copy; None on a CPU, where a copy is done when the call returns.
    """

    def __init__(self, event: "torch.cuda.Event | None" = None) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived.

        Syncs: no.
        """
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Makes the current stream wait for all bytes.

        Syncs: no.
        """
        if self._event is not None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)

    def synchronize(self) -> None:
        """Waits for all bytes.

        Syncs: yes.
        """
        if self._event is not None:
            self._event.synchronize()


def runs(to: Sequence[int], of: Sequence[int]) -> list[tuple[int, int, int]]:
    """Joins neighbouring records whose destinations are neighbours, too, into runs. One copy moves a run.

    Args:
        to: Destination of each record.
        of: Source of each record.

    Returns:
        For each run: its first destination, its first source, and its length.

    Example:
        >>> runs([4, 5, 9], [0, 1, 2])
        [(4, 0, 2), (9, 2, 1)]
    """
    joined: list[tuple[int, int, int]] = []
    for at, source in zip(to, of, strict=True):
        if joined and (at, source) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + 1)
        else:
            joined.append((at, source, 1))
    return joined


class Transfers:
    """Moves one kind of record between planes and a pool.

    The stream of the caller never waits for staging: callers look at `room` first, and call `out` for at most that
    many records.

    Args:
        packing: Moves the bytes of slots to and from records.
        pool: The records in host memory, each a header and a body.
        staging: Number of records for which each of the two staging buffers has room, 1 or more.
        slots: int32 `register`: the slot of each register. None: `out` and `into` get slot ids.
        inward: Number of records for which the staging buffer of `into` has room. None: `staging`.

    Attributes:
        moved_out: Number of records copied from slots to host memory.
        moved_in: Number of records copied from host memory to slots.
        staging_bytes: Bytes of the staging buffers on the device.
    """

    def __init__(
        self, packing: Packing, pool: RecordPool, staging: int, slots: Tensor | None = None, inward: int | None = None
    ) -> None:
        self.packing, self.pool, self.staging, self._slots = packing, pool, staging, slots
        self.moved_out = self.moved_in = 0
        self._header = pool.nbytes - packing.nbytes
        self._bodies = pool.memory[:, self._header :]
        device = packing.device
        self._device = device if device.type == "cuda" else None
        front = inward or staging
        shape = (front + staging, pool.nbytes)  # rows as in the pool, so that one copy moves neighbours
        both = lasting.zeros(shape, torch.uint8, device)  # zeros, because padding is never written
        self._inward, self._outward = both[:front], both[front:]
        self.staging_bytes = both.nbytes
        self._small = pool.nbytes < LARGE
        self._turn = 0  # place of the next record in outward staging
        self._leaving: deque[tuple[torch.cuda.Event, Sequence[int]]] = deque()  # (end event, records), oldest first
        self._reserved = 0
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device else []
        self._rings = [UploadRing(packing.backend, RING_INTS)]
        with self._on(1):  # torch's allocator binds memory to the stream that is current here
            self._rings.append(UploadRing(packing.backend, RING_INTS))
        # The outward records are slots 1 to `staging` of these planes. The last inward record is slot 0, never used.
        layout = StateLayout((Plane("record", (pool.nbytes,), torch.uint8),), layers=1)
        staged = Planes.from_tensors(layout, {"record": both[front - 1 :].unsqueeze(0)}, packing.backend)
        self._staged = Packing(staged)
        self._numbers = lasting.tensor(range(1, staging + 1), torch.int32, device)
        self._targets = lasting.zeros(staging, torch.int32, device)  # staged record -> host record

    @property
    def room(self) -> int:
        """Number of records for which `out` need not wait now; reserved ones are not counted.

        On a CPU it is unlimited, because a copy is done when the call returns.

        Syncs: no.
        """
        if self._device is None:
            return INT32_MAX
        return max(0, self._free() - self._reserved)

    def reserve(self, records: int) -> None:
        """Reserves a part of `room` for a later `out`. A negative number ends the reservation of that many."""
        self._reserved += records

    def _free(self) -> int:
        """Returns for how many records outward staging has room."""
        while self._leaving and self._leaving[0][0].query():
            self._leaving.popleft()
        if not self._leaving:
            self._turn = 0
        return self.staging - sum(len(records) for _, records in self._leaving)

    def out(self, index: Sequence[int], records: Sequence[int]) -> Ticket:
        """Copies slots to host records. Later work on the current stream may change the slots.

        The current stream waits for nothing. If staging is too small for all records, the host waits.

        Args:
            index: Registers or slots.
            records: Host records, one for each slot.

        Syncs: only if there are more records than `room` plus the reserved ones.
        """
        at = 0
        while at < len(index):
            while not (free := self._free()):
                self._leaving[0][0].synchronize()
            end = min(len(index), at + free, at + self.staging - self._turn)  # not beyond the end of the buffer
            self._out(index[at:end], records[at:end])
            at = end
        self.moved_out += len(records)
        return Ticket(self._record(0))

    def _out(self, index: Sequence[int], records: Sequence[int]) -> None:
        places = range(self._turn, self._turn + len(index))
        self._turn = places.stop % self.staging
        neighbours = runs(records, places)
        scattered = len(neighbours) > COPIES and self._small
        entries, to, *targets = self._send(0, index, places, *([records] if scattered else []))
        self.packing.pack(self._slots, entries, to, self._outward[:, self._header :])
        for column in targets:  # copied, because the next upload overwrites the column
            self._targets[places.start : places.stop].copy_(column, non_blocking=True)
        self._follow(0)
        with self._on(0):
            if scattered:
                staged = slice(places.start, places.stop)
                self._staged.pack(None, self._numbers[staged], self._targets[staged], self.pool.memory)
            for at, of, size in neighbours if not scattered else ():
                self.pool.memory[at : at + size].copy_(self._outward[of : of + size], non_blocking=True)
            if (event := self._record(0)) is not None:
                self._leaving.append((event, records))

    def into(self, index: Sequence[int], records: Sequence[int]) -> Ticket:
        """Copies host records to slots, after all work that the current stream has so far.

        Nothing may use the slots before the ticket is done.

        Args:
            index: Registers or slots.
            records: Host records, one for each slot.

        Syncs: no.
        """
        self.moved_in += len(records)
        wanted, scattered = set(records), self._small and len(runs(range(len(records)), records)) > COPIES
        step = len(index) if scattered else len(self._inward)
        places = records if scattered else [at % step for at in range(len(index))]
        self._follow(1)
        with self._on(1):
            for event, leaving in self._leaving:  # these records may not have arrived in host memory yet
                if not wanted.isdisjoint(leaving):
                    self._streams[1].wait_event(event)
            entries, of = self._send(1, index, places)
            for at in range(0, len(index), step):
                bodies = self._bodies if scattered else self._stage(records[at : at + step])
                self.packing.unpack(self._slots, entries[at : at + step], of[at : at + step], bodies)
            return Ticket(self._record(1))

    def _stage(self, records: Sequence[int]) -> Tensor:
        """Copies host records to inward staging. Returns their bodies there, uint8 `record byte`."""
        for at, of, size in runs(range(len(records)), records):
            self._inward[at : at + size].copy_(self.pool.memory[of : of + size], non_blocking=True)
        return self._inward[:, self._header :]

    def warm_up(self) -> None:
        """Compiles all kernels of `out` and `into`, by launches on entries that are skipped.

        Syncs: no.
        """
        nothing = torch.full((1,), -1, dtype=torch.int32, device=self.packing.device)
        self.packing.pack(self._slots, nothing, nothing, self._bodies)
        self.packing.unpack(self._slots, nothing, nothing, self._bodies)
        self._staged.pack(None, nothing, nothing, self.pool.memory)

    def reset(self) -> None:
        """Waits for every copy, and forgets transfers and reservations.

        Syncs: yes.
        """
        for stream in self._streams:
            stream.synchronize()
        self._leaving.clear()
        self._turn = self._reserved = 0

    def _send(self, which: int, *columns: Sequence[int]) -> list[Tensor]:
        """Uploads columns of numbers to the device, each aligned to 16 bytes. Returns a tensor for each column."""
        n, padded = len(columns[0]), (len(columns[0]) + 3) // 4 * 4
        packet = np.zeros((len(columns), padded), np.int32)
        packet[:, :n] = columns
        sent = self._rings[which].send(packet.reshape(-1))
        return [sent[at : at + n] for at in range(0, packet.size, padded)]

    def _follow(self, which: int) -> None:
        """Makes a stream of transfers wait for all work that the current stream has so far."""
        if self._device:
            self._streams[which].wait_stream(torch.cuda.current_stream(self._device))

    def _on(self, which: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[which]) if self._device else nullcontext()

    def _record(self, which: int) -> "torch.cuda.Event | None":
        """Returns an event after all work that a stream of transfers has so far, None on a CPU."""
        if not self._device:
            return None
        event = torch.cuda.Event()
        event.record(self._streams[which])
        return event
