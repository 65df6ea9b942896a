"""Finds what the forward of a step did to its slots that it must not do. Only a manager with `debug=True` has it.

plan   fill   forward   look   fault: an error in the call that closes the step

fill   slots that the forward must store in, and does not read, get a canary: a pattern that no forward stores.
       Of slots that it may only read, sums are taken
look   what still holds the canary was not stored. A slot with another sum was changed

No canary: in a slot that the step reads, and for planes that memstate copies itself. Where rows have tails, the device
says which entries store a state at all.
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

NAN = bytes.fromhex("faff")  # repeated: NaN in every float of two bytes or more, as no computation gives it
NUMBERS = bytes.fromhex("c35a9e17d2864bf1396da0e87c25b40f")  # where a number can have any bits: no state by chance
LEAST = 4  # bytes of the latter: fewer can be a state by chance
SCRATCH = 1 << 26  # bytes of slots side by side
ODD = -0x61C8864680B583EB  # spreads the positions of a sum over 64 bits


class Block(NamedTuple):
    """One layer of a plane.

    Attributes:
        plane: the plane.
        layer: the layer.
        data: its bytes, uint8 `slot byte`, without padding.
        pattern: the canary, uint8 `byte`.
        unit: bytes that are a canary together.
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
        """Returns which slots hold nothing but NaN, as what was computed from a canary does: bool `slot`."""
        if not self.is_nan:
            return torch.zeros_like(slots, dtype=torch.bool)
        return self.data.index_select(0, slots).view(self.plane.dtype).isnan().all(1)

    def sums(self, slots: Tensor) -> Tensor:
        """Returns a number for the bytes of each slot: int64 `slot`. Another byte gives another number."""
        found = self.data.index_select(0, slots)
        words = found.view(torch.int64) if found.shape[1] % 8 == 0 else found.long()
        return (words * (torch.arange(1, 2 * words.shape[1], 2, device=words.device) * ODD)).sum(1)


class Place(NamedTuple):
    """A slot of a step whose bytes are wrong, in one layer of a plane.

    Attributes:
        vector: "read", "write", "snapshot" or "mark".
        entry: entry of the batch.
        plane: name of the plane.
        layer: the layer.
    """

    vector: str
    entry: int
    plane: str
    layer: int


class Canary:
    """Fills slots before a forward, and looks at them behind it.

    Args:
        planes: the bytes of slots.
        log: has the marks of a step.
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
        self._blocks, self._stored = list[Block](), list[Block]()
        for region in planes.regions:
            plane, nbytes = region.plane, region.plane.nbytes
            number = plane.dtype.itemsize // (2 if plane.dtype.is_complex else 1)
            is_nan = (plane.dtype.is_floating_point or plane.dtype.is_complex) and number > 1
            unit = number if is_nan else min(len(NUMBERS), nbytes)
            repeated = np.resize(np.frombuffer(NAN if is_nan else NUMBERS, np.uint8), nbytes)
            pattern = lasting.tensor(repeated, torch.uint8, planes.device)
            blocks = [
                Block(plane, region.first + layer, data[:, :nbytes], pattern, unit, is_nan)
                for layer, data in enumerate(region.blocks if nbytes else ())
            ]
            self._blocks += blocks
            if plane.name not in copied and (is_nan or nbytes >= LEAST):
                self._stored += blocks
        self._sums = lasting.zeros((len(self._blocks), log.max_batch), torch.int64, planes.device)
        self.forget()

    def forget(self) -> None:
        """Forgets the step that it watches."""
        self._step: Step | None = None
        self._found: list[Place] | None = None  # of a step that was replayed

    def planned(self, step: Step, due: bool, replayed: bool) -> None:
        """Watches a step from now on.

        Args:
            step: the step.
            due: whether it stores in a slot that it does not read. One with drafts perhaps stores not even in the slot
                that it reads.
            replayed: whether its forward is launched already. `fill` came in the replay then.

        Syncs: if its forward is launched.
        """
        if replayed:
            self._step, self._found = step, self._look(step)
        elif due or step.drafted:
            self.fill(step.record, step.marked)
            self._step = step

    def fill(self, record: StepRecord, marked: int | None = None) -> None:
        """Fills the slots of a step. A CUDA graph can hold it.

        Args:
            record: the vectors of the step.
            marked: number of its marks; None: what the device says.

        Syncs: no.
        """
        read = self._only_read(record)
        if read is not None:
            for block, sums in zip(self._blocks, self._sums, strict=True):
                for part, of in zip(read.split(_most(block)), sums[: len(read)].split(_most(block)), strict=True):
                    of.copy_(block.sums(part))
        slots = torch.cat([slots for _, slots in self._targets(record, marked)])
        if not len(slots):
            return
        one = slots.max()  # padding stands for a slot that is filled anyway, or leaves the null slot as it is
        slots = torch.where(slots > 0, slots, one)
        for block in self._stored:
            block.data[slots] = torch.where(one > 0, block.pattern, block.data[0])

    def fault(self, step: Step | None, relied: Callable[[Step], NDArray[np.bool_]]) -> ForwardFault | None:
        """Returns what is wrong with the step that it watches, if that is the given one, or was replayed.

        It is told once.

        Args:
            step: the step whose forward is launched.
            relied: says which entries of a step later calls rely on, `batch`.

        Syncs: yes.
        """
        watched, found = self._step, self._found
        if watched is None or (found is None and watched is not step):
            return None
        self.forget()
        if found is None and (found := self._look(watched)):
            chosen = relied(watched)
            found = [place for place in found if chosen[place.entry]]
        if not found:
            return None
        first, rows = found[0], [int(watched.numbers[place.entry]) for place in found]
        return ForwardFault(
            first.vector, first.plane, first.layer, rows[0], watched.serial, sorted({*rows}), len(found)
        )

    def _only_read(self, record: StepRecord) -> Tensor | None:
        """The slots that a step reads and must not change, 0 for none: `batch`."""
        stores = self._stores(record)
        if not (self._moves or stores is not None) or not len(record.read):
            return None
        changed = record.read == record.write
        if stores is not None:
            changed &= stores
        return (record.read * ((record.read > 0) & ~changed)).long()

    def _stores(self, record: StepRecord) -> Tensor | None:
        """Which entries store a state, as the device has it: bool `batch`; None where rows have no tails."""
        return None if self._log.tails is None else self._log.tails.store[: len(record.read)] >= 0

    def _targets(self, record: StepRecord, marked: int | None) -> list[tuple[str, Tensor]]:
        """The slots that a step stores in and does not read, 0 for none: of each vector, `batch` or `mark`."""
        read, write, snapshot, stores = record.read, record.write, record.snapshot, self._stores(record)
        nothing = write[:0]
        if stores is not None:
            write = write * stores
        found = {
            "write": write * ((write > 0) & (write != read)) if self._moves else nothing,
            "snapshot": snapshot * ((snapshot > 0) & (snapshot != read)) if self._snapshots else nothing,
            "mark": self._marked_slots(marked) if self._marks else nothing,
        }
        return [(vector, slots.long()) for vector, slots in found.items()]

    def _marked_slots(self, marked: int | None) -> Tensor:
        count, slots = self._log.marks.count, self._log.marks.slot
        if marked is not None:
            return slots[:marked]
        return slots * (torch.arange(len(slots), device=slots.device) < count)

    def _look(self, step: Step) -> list[Place]:
        """Returns the slots of a step whose bytes are wrong: first those that were changed, then by vector."""
        self._counts.syncs += 1
        record, found = step.record, list[Place]()
        if (read := self._only_read(record)) is not None and len(at := read.nonzero()[:, 0]):
            for block, sums in zip(self._blocks, self._sums, strict=True):
                for part in at.split(_most(block)):
                    changed = part[block.sums(read[part]) != sums[part]]
                    found += [Place("read", entry, block.plane.name, block.layer) for entry in changed.tolist()]
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
                    found += [Place(vector, entry, block.plane.name, block.layer) for entry in entries.tolist()]
        return found


def _most(block: Block) -> int:
    """Returns how many slots of a layer are looked at side by side."""
    return max(1, SCRATCH // block.plane.nbytes)
