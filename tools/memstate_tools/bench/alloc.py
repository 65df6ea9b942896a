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

from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.slots.allocator import SlotAllocator
from memstate.slots.packet import CLAIMS, RELEASES, WRITES, Packet
from memstate.slots.registers import RegisterFile
from memstate_tools.bench.clock import Act
from memstate_tools.bench.task import Figure, Setting, Task, differing

SIZES, TOY_SIZES = (1, 64, 256), (3,)
# Releases of ids in hand stay unconfirmed while a graph is captured: so many must be free beside them.
CAPACITY, TOY_CAPACITY = 16384, 256
LARGE, TOY_LARGE = 1_000_000, 2048
LARGE_SIZES = (1, 64)
PLACES = ("first", "last", "fragmented")  # where the free slots of a large pool are
CELL_COLUMNS = ("tracked", "source")  # what an admission writes for every row


class _Pools:
    """Allocator and register file of what is timed and of the reference, with the same slots held.

    Args:
        setting: Where they are.
        held: Which slots are held, bool `slot`.
        rows: Rows of the register files.
    """

    def __init__(self, setting: Setting, held: Tensor, rows: int) -> None:
        self.setting, self.free = setting, ~held
        self.allocators = [SlotAllocator(len(held), each) for each in (setting.make_backend(), setting.reference())]
        self.files = [RegisterFile(allocator, rows, 0) for allocator in self.allocators]
        for allocator in self.allocators:
            ids = allocator.claim(len(held))
            allocator.release(ids[self.free.to(ids.device)])
            allocator.check()

    def wrong(self) -> str:
        """What differs in owners, free slots or cells."""
        (mine, twin), names = self.files, ("owners", "register cells")
        pairs = (mine.owners(), twin.owners()), (mine.cells, twin.cells)
        return differing((name, *pair) for name, pair in zip(names, pairs, strict=True))

    def there_and_back(self, do: Act, undo: Act, names: tuple[tuple[str, str], ...], both: Act | None) -> list[Figure]:
        """Times a call, the one that undoes it, and both in a graph, where `both` is given.

        Args:
            do: The call.
            undo: Undoes it; does nothing where it was not called.
            names: Operation and case of each.
            both: Does and undoes.
        """
        (mine, _), setting = self.allocators, self.setting

        def clean() -> None:
            undo()
            mine.check()  # or a later claim would wait for the device

        try:
            found = setting.alone(*names[0], do, clean)
            clean()
            if both:
                found += setting.alone(*names[1], undo, do)
                clean()
                found += setting.in_graph(*names[2], both)
        finally:
            clean()  # a call that is too slow leaves its slots claimed, and the next case takes the same pool
        return found

    def claims(self, size: int, case: str, graph: bool) -> Task:
        """So many slots are claimed, lowest first, and released."""
        mine, held = self.allocators[0], list[Tensor]()

        def give_back() -> None:
            while held:
                mine.release(held.pop())

        def check() -> str:
            ours, other = (allocator.claim(size) for allocator in self.allocators)
            lowest = (self.free.nonzero().flatten()[:size] + 1).to(ours)
            found = differing([("ids", ours, other), ("lowest first", ours, lowest)]) or self.wrong()
            for allocator, each in zip(self.allocators, (ours, other), strict=True):
                allocator.release(each)
                allocator.check()
            return found or self.wrong()

        names = ("claim", case), ("release", case), ("claim and release", f"{case}, in a graph")
        both = (lambda: mine.release(mine.claim(size))) if graph else None
        measure = partial(self.there_and_back, lambda: held.append(mine.claim(size)), give_back, names, both)
        return Task(f"claim, {case}", check, measure)

    def ownership(self, size: int) -> Task:
        """What an admission of so many rows sends: a claim each, and cells; then their release."""
        file, rows = self.files[0], np.arange(1, size + 1)
        registers = (rows * REGISTERS_PER_ROW).tolist()
        cells = [cell for column in CELL_COLUMNS for cell in file.address(column, rows.tolist())]

        def packet(section: int, value: int) -> Tensor:
            written = (WRITES, cells, [value] * len(cells), ())
            return torch.from_numpy(Packet([(section, registers, registers, ()), written]).encode())

        packets = [packet(CLAIMS, 7), packet(RELEASES, 0)]
        admit, end = (partial(file.ownership, each.to(file.cells.device)) for each in packets)

        def check() -> str:
            found = ""
            for each in packets:
                for one in self.files:
                    one.ownership(each.to(one.cells.device))
                found = found or self.wrong()
            return found

        def both() -> None:
            admit()
            end()

        case = f"R={size}"
        names = [("ownership", f"{case}, {what}") for what in ("claims", "releases", "claims and releases, in a graph")]
        return Task(f"ownership, {case}", check, partial(self.there_and_back, admit, end, tuple(names), both))


def _held_but(place: str, capacity: int, size: int) -> Tensor:
    """Which slots of a large pool are held, `slot`: all but a few."""
    held = torch.ones(capacity, dtype=torch.bool, device="cpu")
    if place == "fragmented":
        held[capacity // (4 * size) // 2 :: capacity // (4 * size)] = False  # four times as many, evenly spread
    else:
        held[slice(0, 4 * size) if place == "first" else slice(capacity - 4 * size, None)] = False
    return held


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields claims, releases and packets of ownership changes."""
    capacity, sizes = setting.sizes(CAPACITY, TOY_CAPACITY), setting.sizes(SIZES, TOY_SIZES)
    held = torch.rand(capacity, dtype=torch.float32, device="cpu") < 0.5
    held[: capacity // 4] = False  # enough are free in any case
    pools = _Pools(setting, held, max(sizes))
    for size in sizes:
        yield pools.claims(size, f"R={size}", graph=True)
        yield pools.ownership(size)
    large = setting.sizes(LARGE, TOY_LARGE)
    for size, place in product(setting.sizes(LARGE_SIZES, sizes[:1]), PLACES):
        full = _Pools(setting, _held_but(place, large, size), rows=1)
        yield full.claims(size, f"R={size}, {place} free of {large}", graph=False)
