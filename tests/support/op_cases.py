"""Makes small launches of each operation by its name, and moves launches to another device.

Launches of operations on slots and registers are made here. Each has one program; most run twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.dispatch import OPS, Backend
from memstate.kernels.own import KERNELS
from memstate.kernels.tables import PlaneMap, RecordMap, RingMap, Rules, ScaledMap, Section, StepMarks, StepRecord
from memstate_tools import maker
from tests.kernels.test_ownership import random_packet
from tests.kernels.test_plan_kernel import NO_LIMIT, VARIANTS, RandomFile, batch_packet, random_batch, random_marks
from tests.support import byte_cases
from tests.support.addresses import Limits
from tests.support.op_case import CPU, Case, Maker
from tests.support.packets import Device, Model, bits

REFERENCE = Backend("reference")
ONE_PROGRAM = {"claim", "release", "ownership", "audit", "plan"}  # operations whose launches have one program
TABLES = {PlaneMap: "tiles", RecordMap: "tiles", ScaledMap: "layers", RingMap: "table"}  # column 0 holds addresses
BATCHES = (1, 3, 33)  # of operations of one's own
MOST = 64  # limit of the seeds that `several` tries


def claim(make: Maker) -> Case:
    words = make.one(1, 3, 33, 70, 300)
    chosen = [make.one(0, 0, 1, -1, make.rng.getrandbits(32)) for _ in range(words)]
    free = [32 * at + bit for at, word in enumerate(chosen) for bit in range(32) if word >> bit & 1]
    bitmap = make.ints(bits(free, 32 * words - 1))
    counters = make.ints(range(16))
    arguments = {"bitmap": bitmap, "n": make.one(0, 1, 5, 40), "counters": counters}
    return Case("claim", arguments, Limits(), times=2)


def release(make: Maker) -> Case:
    capacity, word = make.one(1, 31, 32, 70, 2100), make.one(0, 2, -1)
    free = [slot for slot in range(capacity + 1) if word >> slot % 32 & 1]
    bitmap, counters = make.ints(bits(free, capacity)), make.ints([9, 1, *[0] * 14])
    ids = [make.one(0, -3, capacity + 1, 2**31 - 1, make.rng.randint(1, capacity)) for _ in range(make.one(0, 3, 40))]
    arguments = {"bitmap": bitmap, "ids": make.ints(ids, make.one(True, False)), "capacity": capacity}
    return Case("release", arguments | {"counters": counters}, Limits(changes=[bitmap, counters]), times=2)


def model(make: Maker) -> Model:
    model = Model(make.one(5, 33, 60), make.one(12, 40), 2)
    model.populate(make.rng, 0.5)
    return model


def ownership(make: Maker) -> Case:
    told = model(make)
    device, packet = Device(told, REFERENCE), random_packet(told, make.rng, make.one(0.3, 1.0))
    width = told.rows + 1
    packet.writes = [(device.starts[2 + cell // width] + cell % width, value) for cell, value in packet.writes]
    sent = make.ints(packet.pack(CPU).tolist())
    columns = [*device.table[:4], device.table.bitmap, device.table.counters]
    return Case("ownership", {"registers": device.table, "packet": sent}, Limits(changes=columns), times=2)


def resolve(make: Maker) -> Case:
    told = model(make)
    n = make.one(1, 257, 600)
    wanted = make.ints([make.one(0, -1, told.count, 2**31 - 1, make.rng.randrange(told.count)) for _ in range(n)])
    out = make.empty(n, dtype=torch.int32)
    return Case(
        "resolve", {"registers": Device(told, REFERENCE).table, "wanted": wanted, "out": out}, Limits(changes=[out])
    )


def audit(make: Maker) -> Case:
    told = model(make)
    told.slots[make.one(0, 5)] = make.one(-1, told.capacity + 1, 2**31 - 1, told.slots[4])
    out = make.empty(told.capacity + 1, dtype=torch.int32)
    return Case(
        "audit", {"registers": Device(told, REFERENCE).table, "out": out}, Limits(changes=[out]), times=2
    )  # fmt: skip


def beyond(make: Maker, rows: Sequence[int]) -> list[int]:
    """Returns rows in which some entries of padding have row numbers outside of any table."""
    return [row if row > 0 else make.one(0, row, 2**31 - 1) for row in rows]


def plan(make: Maker, variant: str | None = None) -> Case:
    variant, batch = variant or make.one(*VARIANTS), 33 if variant == "none" else make.one(0, 1, 5, 33)
    strategy, lanes, in_place = VARIANTS[variant]
    file = RandomFile(make.rng, REFERENCE, batch, lanes)
    table, (rows, tokens) = file.file.table, random_batch(make.rng, file, batch)
    record = StepRecord(*(make.empty(batch, dtype=torch.int32) for _ in StepRecord._fields))
    given = random_marks(make.rng, file, batch)
    sent = batch_packet((beyond(make, rows), tokens), make.one(NO_LIMIT, 0, 2), table.cells, given)
    packet = make.ints(sent.tolist())
    packet[: Section.BATCH] = make.one(0, 1, 3)  # numbers of changes, as if the ownership launch had run them
    room = make.one(1, 5, 64)
    marks = StepMarks(*(make.empty(size, dtype=torch.int32) for size in (1, room, room, room)))
    arguments = {
        "registers": table, "packet": packet, "record": record, "marks": marks,
        "rules": Rules(strategy, lanes, file.every, in_place),
    }  # fmt: skip
    counts = packet[: Section.BATCH], packet[Section.MARKS : Section.MARKS + 1]
    changes = [*table[:6], table.counters, *counts, *record, marks.count, *(c[: len(given)] for c in marks[1:])]
    return Case("plan", arguments, Limits(changes=changes), times=2)


# op -> function of its name, here or in byte_cases, which makes a launch
MAKERS = {op: one for op in OPS if (one := globals().get(op, vars(byte_cases).get(op)))}


def made(op: str, seed: int) -> Case:
    """Returns a launch of an operation with random arguments. One of one's own runs on its case, with padding."""
    if op in KERNELS:
        arguments = KERNELS[op].case(BATCHES[seed % len(BATCHES)], maker.Maker(CPU, seed, padded=True))
        return Case(op, arguments, Limits(), exact=False)
    case: Case = MAKERS[op](Maker(seed))
    return case


def several(op: str, least: int = 3) -> Iterator[Case]:
    """Yields `least` launches of an operation, then more until each optional argument, such as a tree, has occurred."""
    given: set[str] = set()
    for seed in count():
        case = made(op, seed)
        new = {name for name, value in case.arguments.items() if value is not None} - given
        if seed < least or new:
            yield case
        given |= new
        if seed + 1 >= least and given == set(case.arguments):
            return
        assert seed < MOST, f"{op}: never given: {', '.join(sorted(set(case.arguments) - given))}"


class Moving:
    """Moves tensors to a device with their whole storage. Tensors that shared bytes still share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[int, Tensor] = {}  # id of a tensor -> the moved one
        self._memory: dict[int, tuple[int, Tensor]] = {}  # old address -> number of bytes, and the moved memory

    def tensor(self, old: Tensor) -> Tensor:
        """Moves the storage of a tensor, unless it was moved before. Returns the tensor on the moved storage."""
        if id(old) not in self._tensors:  # an argument that is given twice stays one tensor
            self._tensors[id(old)] = self._moved(old)
        return self._tensors[id(old)]

    def _moved(self, old: Tensor) -> Tensor:
        storage = old.untyped_storage()
        if storage.data_ptr() not in self._memory:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._memory[storage.data_ptr()] = storage.nbytes(), whole.to(self._device, copy=True)
        whole = self._memory[storage.data_ptr()][1]
        new = torch.empty(0, dtype=old.dtype, device=self._device)
        return new.set_(whole.untyped_storage(), old.storage_offset(), old.shape, old.stride())

    def address(self, old: int) -> int:
        """Returns the new address of a byte whose memory has been moved."""
        for start, (nbytes, whole) in self._memory.items():
            if start <= old < start + nbytes:
                return whole.data_ptr() + old - start
        raise AssertionError(f"address {old:#x} is in no tensor of this launch")

    def anything(self, given: Any) -> Any:
        """Moves all tensors of an argument, at any depth. Tables get the addresses of the moved memory."""
        if isinstance(given, Tensor):
            return self.tensor(given)
        if isinstance(given, dict):
            return {name: self.anything(part) for name, part in given.items()}
        if not isinstance(given, tuple):
            return given
        parts = [self.anything(part) for part in given]
        if not hasattr(given, "_fields"):
            return tuple(parts)
        new = type(given)(*parts)
        if name := TABLES.get(type(given)):
            table = getattr(new, name)
            table[:, 0] = torch.tensor([self.address(old) for old in table[:, 0].tolist()], dtype=torch.int64)
        return new


def moved(case: Case, device: torch.device) -> Case:
    """Returns the same launch in new memory on a device."""
    return replace(case, arguments=Moving(device).anything(case.arguments), limits=Limits(), memory=[])
