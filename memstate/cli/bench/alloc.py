"""Slots claimed, given back, and changing owners by packets: device time for 1, 64 and 256 of them.

The pool is in the middle of its life: half of the slots are held, the free ones lie scattered. Besides, 1 and 64 slots
are claimed in a pool of a million slots that is full but for a few: the first ones, the last ones, or scattered ones.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from memstate.cli.bench.task import Figure, Setting, Task, differing
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.slots.allocator import SlotAllocator
from memstate.slots.packet import CLAIMS, RELEASES, WRITES, Packet
from memstate.slots.registers import Longs, RegisterFile

SIZES, TOY_SIZES = (1, 64, 256), (3,)
# Releases of ids in hand stay unconfirmed while a graph is captured: so many must be free beside them.
CAPACITY, TOY_CAPACITY = 16384, 256
LARGE, TOY_LARGE = 1_000_000, 2048
LARGE_SIZES = (1, 64)
PLACES = ("first", "last", "fragmented")  # where the free slots of a large pool are
CELL_COLUMNS = ("tracked", "source")  # what an admission writes for every row


class _Slots:
    """Allocator and register file of one backend; twins made with one `held` are equal."""

    def __init__(self, backend: Backend, capacity: int, held: Tensor, rows: int) -> None:
        self.allocator = SlotAllocator(capacity, backend)
        self.file = RegisterFile(self.allocator, rows, 0)
        ids = self.allocator.claim(capacity)
        self.allocator.release(ids[~held.to(ids.device)])
        self.allocator.check()

    def packet(self, section: int, registers: Longs, cells: list[int], value: int) -> Tensor:
        """Registers that claim or release a slot, and cells that all get one value."""
        claimed, written = registers.tolist(), (WRITES, cells, [value] * len(cells), ())
        packet = Packet([(section, claimed, claimed, ()), written]).encode()
        return torch.from_numpy(packet).to(self.file.cells.device)

    def wrong(self, twin: "_Slots") -> str:
        """What differs in owners, free slots or cells."""
        pairs = (self.file.owners(), twin.file.owners()), (self.file.cells, twin.file.cells)
        return differing((name, *pair) for name, pair in zip(("owners", "register cells"), pairs, strict=True))


def _claims(setting: Setting, size: int, mine: _Slots, twin: _Slots) -> Task:
    case, allocator, clock = f"R={size}", mine.allocator, setting.clock
    held: list[Tensor] = []

    def claim() -> None:
        held.append(allocator.claim(size))

    def give_back() -> None:
        while held:
            allocator.release(held.pop())

    def undo() -> None:
        give_back()
        allocator.check()  # or a later claim would wait for the device

    def check() -> str:
        ours, theirs = mine.allocator.claim(size), twin.allocator.claim(size)
        found = differing([("ids", ours, theirs)]) or mine.wrong(twin)
        for slots, ids in ((mine, ours), (twin, theirs)):
            slots.allocator.release(ids)
            slots.allocator.check()
        return found or mine.wrong(twin)

    def measure() -> list[Figure]:
        try:
            alone = clock.alone(claim, undo)
            undo()
            released = clock.alone(give_back, claim)
            undo()
            both = clock.in_graph(lambda: allocator.release(allocator.claim(size)))
        finally:
            undo()  # a call that is too slow leaves its slots claimed, and the next case takes the same pool
        return [
            *setting.both("claim", case, alone),
            *setting.both("release", case, released),
            setting.micros("claim and release", f"{case}, in a graph", both),
        ]

    return Task(f"claim, {case}", check, measure)


def _ownership(setting: Setting, size: int, mine: _Slots, twin: _Slots) -> Task:
    """What an admission of so many rows sends: a claim each, and cells; then their release."""
    case, clock, rows = f"R={size}", setting.clock, np.arange(1, size + 1)
    registers = rows * REGISTERS_PER_ROW
    cells = [cell for column in CELL_COLUMNS for cell in mine.file.address(column, rows.tolist())]
    packets = {
        slots: (slots.packet(CLAIMS, registers, cells, 7), slots.packet(RELEASES, registers, cells, 0))
        for slots in (mine, twin)
    }
    admit, end = (partial(mine.file.ownership, packet) for packet in packets[mine])

    def both() -> None:
        admit()
        end()

    def check() -> str:
        found = ""
        for turn in range(2):
            for slots in (mine, twin):
                slots.file.ownership(packets[slots][turn])
            found = found or mine.wrong(twin)
        return found

    def measure() -> list[Figure]:
        try:
            claims = clock.alone(admit, end)  # the first one ends what holds nothing, and releases nothing
            end()
            releases = clock.alone(end, admit)
            repeated = clock.in_graph(both)
        finally:
            end()
            mine.allocator.check()
        return [
            *setting.both("ownership", f"{case}, claims", claims),
            *setting.both("ownership", f"{case}, releases", releases),
            setting.micros("ownership", f"{case}, claims and releases, in a graph", repeated),
        ]

    return Task(f"ownership, {case}", check, measure)


def _held_but(place: str, capacity: int, size: int) -> Tensor:
    """Which slots of a large pool are held, `slot`: all but a few."""
    held = torch.ones(capacity, dtype=torch.bool)
    if place == "fragmented":
        held[capacity // (4 * size) // 2 :: capacity // (4 * size)] = False  # four times as many, evenly spread
    else:
        held[slice(0, 4 * size) if place == "first" else slice(capacity - 4 * size, None)] = False
    return held


def _large_claims(setting: Setting, size: int, place: str, capacity: int) -> Task:
    """A claim in a large pool, and the release that undoes it."""
    case, clock = f"R={size}, {place} free of {capacity}", setting.clock
    held: list[Tensor] = []
    made: list[SlotAllocator] = []

    def check() -> str:
        free = ~_held_but(place, capacity, size)
        for backend in (setting.make_backend(), setting.reference()):
            made.append(SlotAllocator(capacity, backend))
            ids = made[-1].claim(capacity)
            made[-1].release(ids[free.to(ids.device)])
            made[-1].check()
        mine, twin = (allocator.claim(size) for allocator in made)
        for allocator, ids in zip(made, (mine, twin), strict=True):
            allocator.release(ids)
            allocator.check()
        expected = (free.nonzero().flatten()[:size] + 1).to(mine)
        return differing([("ids", mine, twin), ("lowest first", mine, expected)])

    def measure() -> list[Figure]:
        allocator = made[0]

        def undo() -> None:
            while held:
                allocator.release(held.pop())
            allocator.check()

        times = clock.alone(lambda: held.append(allocator.claim(size)), undo)
        undo()
        return setting.both("claim", case, times)

    return Task(f"claim, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields claims, releases and packets of ownership changes."""
    capacity = TOY_CAPACITY if setting.toy else CAPACITY
    sizes = TOY_SIZES if setting.toy else SIZES
    held = torch.rand(capacity) < 0.5
    held[: capacity // 4] = False  # enough are free in any case
    backends = (setting.make_backend(), setting.reference())
    mine, twin = (_Slots(backend, capacity, held, max(sizes)) for backend in backends)
    for size in sizes:
        yield _claims(setting, size, mine, twin)
        yield _ownership(setting, size, mine, twin)
    for size, place in product((min(sizes),) if setting.toy else LARGE_SIZES, PLACES):
        yield _large_claims(setting, size, place, TOY_LARGE if setting.toy else LARGE)
