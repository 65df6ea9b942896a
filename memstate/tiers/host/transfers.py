"""Moves records between slots and host memory, in the order of streams and without waiting. Knows no key.

out    slots --pack--> staging        on the stream of the caller: the slots may change owners right behind it
                       staging --copy engine--> host         on a stream of its own
into   host --copy engine--> staging --unpack--> slots       on another, one group of layers after the other
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from memstate.slots.upload import UploadRing
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool


class Ticket:
    """Tells when the bytes of a transfer have arrived.

    Args:
        groups: Layers of each group, in the order in which they arrive.
        events: An event for each group; none on a CPU.
    """

    def __init__(self, groups: Sequence[range], events: Sequence["torch.cuda.Event"] = ()) -> None:
        self.groups, self._events = list(groups), list(events)

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived.

        Syncs: no.
        """
        return all(event.query() for event in self._events)

    def wait(self, layer: int | None = None) -> None:
        """Makes the current stream wait for a layer, or for everything.

        Args:
            layer: The layer, None for all.

        Syncs: no.
        """
        for layers, event in zip(self.groups, self._events, strict=False):
            if layer is None or layer in layers:
                torch.cuda.current_stream(event.device).wait_event(event)

    def synchronize(self) -> None:
        """Waits for all bytes.

        Syncs: yes.
        """
        for event in self._events:
            event.synchronize()

    def __repr__(self) -> str:
        return f"Ticket({len(self.groups)} groups of layers, {'done' if self.done else 'on its way'})"


def layer_groups(layers: int, groups: int) -> list[range]:
    """Returns the layers in at most so many groups of equal size, give or take one.

    Example:
        >>> layer_groups(5, 2)
        [range(0, 2), range(2, 5)]
    """
    cuts = [layers * at // groups for at in range(groups + 1)]
    return [range(start, end) for start, end in pairwise(cuts) if end > start]


def runs(to: Sequence[int], of: Sequence[int]) -> list[tuple[int, int, int]]:
    """Joins neighbours that go to neighbours, so that each run is one copy.

    Args:
        to: Where each record goes.
        of: Where each record comes from.

    Returns:
        Of each run its first destination, its first source, and its length.

    Example:
        >>> runs([4, 5, 9], [0, 1, 2])
        [(4, 0, 2), (9, 2, 1)]
    """
    found: list[tuple[int, int, int]] = []
    for at, source in zip(to, of, strict=True):
        if found and (at, source) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((at, source, 1))
    return found


class Transfers:
    """Moves one kind of record between planes and a pool.

    Args:
        planes: The slots.
        packing: Where the bytes of a slot lie in a record.
        pool: The records.
        header: Bytes in front of each record's body in `pool`.
        staging: Records that fit the device buffer of each direction. 0: kernels read and write host memory themselves,
            with few programs.
        groups: Groups of layers on the way in.
    """

    def __init__(
        self, planes: Planes, packing: Packing, pool: RecordPool, header: int, staging: int, groups: int
    ) -> None:
        self.packing, self.pool, self.staging = packing, pool, staging
        self.moved_out = self.moved_in = 0  # records
        self._bodies = pool.memory[:, header : header + packing.nbytes]
        device = planes.device
        self._device = device if device.type == "cuda" else None
        self._layer_bytes = packing.nbytes // packing.layers
        self._groups = layer_groups(packing.layers, groups)
        shape = (staging, pool.nbytes)  # rows as the pool's: neighbours go in one copy
        self._outward = torch.zeros(shape, dtype=torch.uint8, device=device)  # padding is never written
        self._inward = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._header = header
        self._turn = 0
        self._leaving: list[torch.cuda.Event | None] = [None] * staging  # when a staged record has left for the host
        self._arriving: dict[int, torch.cuda.Event] = {}  # host record -> when its bytes are there
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device else []
        self._rings = [UploadRing(planes.backend, 1024)]
        with self._on(1):  # memory belongs to the stream that uses it
            self._rings.append(UploadRing(planes.backend, 1024))

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers on the device."""
        return self._outward.numel() + self._inward.numel()

    def out(self, slots: Tensor | None, index: Sequence[int], records: Sequence[int]) -> Ticket:
        """Copies slots to host records. The current stream is done with the slots as soon as it has packed them.

        Where every staged record is still on its way, the stream waits for the oldest.

        Args:
            slots: int32 `register`, or None where `index` are slot ids.
            index: Registers or slots.
            records: Host records, as many.

        Syncs: no.
        """
        step = self.staging or len(index)
        for at in range(0, len(index), step):
            self._out(slots, index[at : at + step], records[at : at + step])
        self.pool.use(records)
        self.moved_out += len(records)
        return Ticket([range(self.packing.layers)], [self._record(0)] if self._device else [])

    def _out(self, slots: Tensor | None, index: Sequence[int], records: Sequence[int]) -> None:
        if not self.staging:
            self.packing.pack(slots, *self._send(0, index, records), self._bodies)
            if self._device:
                self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
            return
        first = self._turn if self._turn + len(index) <= self.staging else 0
        places, self._turn = range(first, first + len(index)), first + len(index)
        for event in {event for place in places if (event := self._leaving[place]) is not None}:
            torch.cuda.current_stream(self._device).wait_event(event)
        self.packing.pack(slots, *self._send(0, index, places), self._outward[:, self._header :])
        if self._device:
            self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
        with self._on(0):
            for at, of, size in runs(records, places):
                self.pool.memory[at : at + size].copy_(self._outward[of : of + size], non_blocking=True)
            if self._device:
                event = self._record(0)
                for place in places:
                    self._leaving[place] = event
                self._arriving |= dict.fromkeys(records, event)

    def into(self, slots: Tensor | None, index: Sequence[int], records: Sequence[int]) -> Ticket:
        """Copies host records to slots, layers in groups, behind everything that the current stream has been given.

        Nothing may touch the slots before the ticket says so.

        Args:
            slots: int32 `register`, or None where `index` are slot ids.
            index: Registers or slots.
            records: Host records, as many.

        Syncs: no.
        """
        self.pool.use(records)
        self.moved_in += len(records)
        step = self.staging or len(index)
        events: dict[int, torch.cuda.Event] = {}
        if self._device:
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))
        with self._on(1):
            for record in records:
                if self._device and (event := self._arriving.get(record)) is not None:
                    self._streams[1].wait_event(event)
            for at in range(0, len(index), step):
                places = records[at : at + step] if not self.staging else range(len(index[at : at + step]))
                sent = self._send(1, index[at : at + step], places)
                for number, layers in enumerate(self._groups):
                    self._into(slots, sent, records[at : at + step], layers)
                    if self._device:
                        events[number] = self._record(1)
        return Ticket(self._groups, list(events.values()))

    def _into(self, slots: Tensor | None, sent: tuple[Tensor, Tensor], records: Sequence[int], layers: range) -> None:
        if not self.staging:
            self.packing.unpack(slots, *sent, self._bodies, (layers[0], layers[-1]))
            return
        if len(self._groups) == 1:
            for at, of, size in runs(range(len(records)), records):
                self._inward[at : at + size].copy_(self.pool.memory[of : of + size], non_blocking=True)
        else:
            span = slice(
                self._header + layers.start * self._layer_bytes, self._header + layers.stop * self._layer_bytes
            )
            for place, record in enumerate(records):
                self._inward[place, span].copy_(self.pool.memory[record, span], non_blocking=True)
        self.packing.unpack(slots, *sent, self._inward[:, self._header :], (layers[0], layers[-1]))

    def end(self, records: Sequence[int]) -> None:
        """Ends the use of records whose ticket is done."""
        self.pool.unuse(records)
        for record in records:
            if (event := self._arriving.get(record)) is not None and event.query():
                del self._arriving[record]

    def reset(self) -> None:
        """Waits for every copy, whoever has its ticket, and forgets which records are on their way.

        Syncs: yes.
        """
        for stream in self._streams:
            stream.synchronize()
        self._arriving = {}

    def _send(self, which: int, index: Sequence[int], places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Uploads both columns, each from a 16-byte boundary on."""
        n, padded = len(index), (len(index) + 3) // 4 * 4
        packet = np.zeros(2 * padded, np.int32)
        packet[:n], packet[padded : padded + n] = index, places
        sent = self._rings[which].send(packet)
        return sent[:n], sent[padded : padded + n]

    def _on(self, which: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[which]) if self._device else nullcontext()

    def _record(self, which: int) -> "torch.cuda.Event":
        event = torch.cuda.Event()
        event.record(self._streams[which])
        return event
