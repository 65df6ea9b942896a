"""Finds slots that a forward has not stored in, or has changed without permission, if `debug=True`.

plan   fill   forward   look   fault: an error in the call that closes the step

fill   writes a canary, a pattern that no forward stores, to slots that the forward must store in and does not read.
       Computes a sum over each slot that the forward may only read
look   a slot that still holds the canary was not stored in. A slot with another sum was changed

Two things get no canary: slots that the step reads, and planes that memstate copies itself. Where rows have tails, the
device says which entries store a state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from memstate import lasting
from memstate.errors import ForwardFault
from memstate.kernels.tables import StepRecord
from memstate.requests.steps import Step, StepLog
from memstate.state.layout import Plane
from memstate.state.planes import Planes

NAN = bytes.fromhex("faff")  # repeated: a NaN that no computation gives, in any float of 2 bytes or more
NUMBERS = bytes.fromhex("c35a9e17d2864bf1396da0e87c25b40f")  # for other dtypes; no state has these bytes by chance
LEAST = 4  # bytes; a smaller block could equal a part of NUMBERS by chance
SCRATCH = 1 << 26  # bytes of slots that are compared in one operation
ODD = -0x61C8864680B583EB  # factor that spreads the weights of a sum over 64 bits


class PlaneLayer(NamedTuple):
    """One layer of a plane.

    Attributes:
        plane: the plane to which the layer belongs.
        layer: number of the layer.
        data: bytes of the layer without padding, uint8 `slot byte`.
        pattern: the canary, uint8 `byte`.
        unit: number of bytes that prove a missing store if all of them hold the canary.
        is_nan: whether the canary is NaN.
    """

    plane: Plane
    layer: int
    data: Tensor
    pattern: Tensor
    unit: int
    is_nan: bool

    def holds(self, slots: Tensor) -> Tensor:
        """Returns which slots still hold the canary, or a part of it: bool `slot`."""
        equal = self.data.index_select(0, slots) == self.pattern
        whole = self.plane.nbytes // self.unit * self.unit
        return rearrange(equal[:, :whole], "slot (part unit) -> slot part unit", unit=self.unit).all(2).any(1)

    def all_nan(self, slots: Tensor) -> Tensor:
        """Returns which slots hold only NaN, the result of a computation on a canary: bool `slot`."""
        if not self.is_nan:
            return torch.zeros_like(slots, dtype=torch.bool)
        return self.data.index_select(0, slots).view(self.plane.dtype).isnan().all(1)

    def sums(self, slots: Tensor) -> Tensor:
        """Returns a checksum of the bytes of each slot: int64 `slot`. If one byte changes, so does the checksum."""
        data = self.data.index_select(0, slots)
        words = data.view(torch.int64) if data.shape[1] % 8 == 0 else data.long()
        return (words * (torch.arange(1, 2 * words.shape[1], 2, device=words.device) * ODD)).sum(1)


class WrongBytes(NamedTuple):
    """A slot of a step whose bytes are wrong, in one layer of a plane.

    Attributes:
        vector: "read", "write", "snapshot" or "mark".
        entry: entry of the batch.
        plane: name of the plane.
        layer: number of the layer.
    """

    vector: str
    entry: int
    plane: str
    layer: int


class Canary:
    """Fills slots before a forward, and checks them after it.

    Args:
        planes: the bytes of slots.
        log: has the marks and tails of a step.
        copied: planes that memstate copies itself.
        moves: whether a step can read another slot than it writes.
        snapshots: whether a step can have a vector of snapshots.
        marks: whether a step can have marks.
    """

    def __init__(
        self, planes: Planes, log: StepLog, copied: Sequence[str], *, moves: bool, snapshots: bool, marks: bool
    ) -> None:
        self._log, self._moves, self._snapshots, self._marks = log, moves, snapshots, marks
        self._counts = planes.backend.counts
        self._blocks, self._stored = list[PlaneLayer](), list[PlaneLayer]()
        for region in planes.regions:
            plane, nbytes = region.plane, region.plane.nbytes
            number = plane.dtype.itemsize // (2 if plane.dtype.is_complex else 1)
            is_nan = (plane.dtype.is_floating_point or plane.dtype.is_complex) and number > 1
            unit = number if is_nan else min(len(NUMBERS), nbytes)
            repeated = np.resize(np.frombuffer(NAN if is_nan else NUMBERS, np.uint8), nbytes)
            pattern = lasting.tensor(repeated, torch.uint8, planes.device)
            blocks = [
                PlaneLayer(plane, region.first + layer, data[:, :nbytes], pattern, unit, is_nan)
                for layer, data in enumerate(region.blocks if nbytes else ())
            ]
            self._blocks += blocks
            if plane.name not in copied and (is_nan or nbytes >= LEAST):
                self._stored += blocks
        self._sums = lasting.zeros((len(self._blocks), log.max_batch), torch.int64, planes.device)
        self.forget()

    def forget(self) -> None:
        """Stops watching a step."""
        self._step: Step | None = None
        self._wrong: list[WrongBytes] | None = None  # wrong slots of the watched step, if a graph has replayed it

    def planned(self, step: Step, due: bool, replayed: bool) -> None:
        """Watches a step from now on.

        Args:
            step: the planned step.
            due: whether the step stores in a slot that it does not read. A step with drafts is always watched, because
                it must not change slots of entries that store no state.
            replayed: whether a replay has launched the forward already. `fill` was part of this replay.

        Syncs: if `replayed`.
        """
        if replayed:
            self._step, self._wrong = step, self._look(step)
        elif due or step.drafted:
            self.fill(step.record, step.marked)
            self._step = step

    def fill(self, record: StepRecord, marked: int | None = None) -> None:
        """Fills the slots of a step. A CUDA graph can contain these launches.

        Args:
            record: the vectors of the step.
            marked: number of marks of the step; None: read it on the device.

        Syncs: no.
        """
        if (read := self._only_read(record)) is not None:
            for block, sums in zip(self._blocks, self._sums, strict=True):
                for part, of in zip(read.split(_most(block)), sums[: len(read)].split(_most(block)), strict=True):
                    of.copy_(block.sums(part))
        slots = torch.cat([slots for _, slots in self._targets(record, marked)])
        if not len(slots):
            return
        one = slots.max()  # entries without a slot fill this slot again; it is 0 if no slot is filled
        slots = torch.where(slots > 0, slots, one)
        for block in self._stored:
            block.data[slots] = torch.where(one > 0, block.pattern, block.data[0])

    def fault(self, step: Step | None, relied: Callable[[Step], NDArray[np.bool_]]) -> ForwardFault | None:
        """Returns the error of the watched step if that is the given step, or if it was replayed; otherwise None.

        Each error is returned once.

        Args:
            step: the step whose forward was launched.
            relied: returns for each entry of a step whether later calls use its states: bool `batch`.

        Syncs: yes.
        """
        watched, places = self._step, self._wrong
        if watched is None or (places is None and watched is not step):
            return None
        self.forget()
        if places is None and (places := self._look(watched)):
            chosen = relied(watched)
            places = [place for place in places if chosen[place.entry]]
        if not places:
            return None
        first, rows = places[0], [int(watched.numbers[place.entry]) for place in places]
        return ForwardFault(
            first.vector, first.plane, first.layer, rows[0], watched.serial, sorted({*rows}), len(places)
        )

    def _only_read(self, record: StepRecord) -> Tensor | None:
        """Returns the slot of each entry that the step reads and must not change, 0 for none: `batch`."""
        stores = self._stores(record)
        if not (self._moves or stores is not None) or not len(record.read):
            return None
        changed = record.read == record.write
        if stores is not None:
            changed &= stores
        return (record.read * ((record.read > 0) & ~changed)).long()

    def _stores(self, record: StepRecord) -> Tensor | None:
        """Returns which entries store a state, by the device's plan: bool `batch`; None where rows have no tails."""
        return None if self._log.tails is None else self._log.tails.store[: len(record.read)] >= 0

    def _targets(self, record: StepRecord, marked: int | None) -> list[tuple[str, Tensor]]:
        """Returns (vector, slots that the step stores in and does not read, 0 for none), for each vector of a step."""
        read, write, snapshot, stores = record.read, record.write, record.snapshot, self._stores(record)
        nothing = write[:0]
        if stores is not None:
            write = write * stores
        targets = {
            "write": write * ((write > 0) & (write != read)) if self._moves else nothing,
            "snapshot": snapshot * ((snapshot > 0) & (snapshot != read)) if self._snapshots else nothing,
            "mark": self._marked_slots(marked) if self._marks else nothing,
        }
        return [(vector, slots.long()) for vector, slots in targets.items()]

    def _marked_slots(self, marked: int | None) -> Tensor:
        count, slots = self._log.marks.count, self._log.marks.slot
        if marked is not None:
            return slots[:marked]
        return slots * (torch.arange(len(slots), device=slots.device) < count)

    def _look(self, step: Step) -> list[WrongBytes]:
        """Returns the slots of a step that have wrong bytes: first slots that it may only read, then by vector."""
        self._counts.syncs += 1
        record, wrong = step.record, list[WrongBytes]()
        if (read := self._only_read(record)) is not None and len(at := read.nonzero()[:, 0]):
            for block, sums in zip(self._blocks, self._sums, strict=True):
                for part in at.split(_most(block)):
                    changed = part[block.sums(read[part]) != sums[part]]
                    wrong += [WrongBytes("read", entry, block.plane.name, block.layer) for entry in changed.tolist()]
        for vector, slots in self._targets(record, step.marked):
            if not len(at := slots.nonzero()[:, 0]):
                continue
            for block in self._stored:
                for part in at.split(_most(block)):
                    left = block.holds(slots[part])
                    if vector == "write":
                        left |= block.all_nan(slots[part]) & ~block.all_nan(record.read[part].long())
                    places = part[left]
                    entries = self._log.marks.entry[places] if vector == "mark" else places
                    wrong += [WrongBytes(vector, entry, block.plane.name, block.layer) for entry in entries.tolist()]
        return wrong


def _most(block: PlaneLayer) -> int:
    """Returns how many slots of a layer are compared in one operation."""
    return max(1, SCRATCH // block.plane.nbytes)
