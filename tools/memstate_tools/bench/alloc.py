"""Benchmarks claims, releases and moves of 1, 64 and 256 slots: device time.

Half of the slots of the pool are held, and the free slots are scattered. Claims of 1 and 64 slots are also timed in a
pool of a million slots that is almost full: its free slots are the first ones, the last ones, or scattered.
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
from memstate_tools.bench.task import Measured, Setting, Task, differing

SIZES, TOY_SIZES = (1, 64, 256), (3,)
# While a graph is captured, released ids are not yet free again: enough other slots must be free.
CAPACITY, TOY_CAPACITY = 16384, 256
LARGE, TOY_LARGE = 1_000_000, 2048
LARGE_SIZES = (1, 64)
PLACES = ("first", "last", "fragmented")  # where the free slots of a large pool lie
CELL_COLUMNS = ("tracked", "source")  # cells that an admission writes for each row


class _Pools:
    """The allocator and register file that are timed, and those of the reference. Both hold the same slots.

    Args:
        setting: The setting of the benchmark.
        held: Whether a slot is held, bool `slot`.
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
        """Returns which of owners, free slots and cells differ from the reference; empty if none does."""
        (mine, twin), names = self.files, ("owners", "register cells")
        pairs = (mine.owners(), twin.owners()), (mine.cells, twin.cells)
        return differing((name, *pair) for name, pair in zip(names, pairs, strict=True))

    def there_and_back(
        self, do: Act, undo: Act, names: tuple[tuple[str, str], ...], both: Act | None
    ) -> list[Measured]:
        """Times a call, the call that undoes it, and both in one graph if `both` is given.

        Args:
            do: The call to time.
            undo: Undoes the call. It does nothing if there was no call.
            names: (operation, case) of each of these three measurements.
            both: Makes the call and undoes it.
        """
        (mine, _), setting = self.allocators, self.setting

        def clean() -> None:
            undo()
            mine.check()  # without this check a later claim would wait for the device

        try:
            figures = setting.alone(*names[0], do, clean)
            clean()
            if both:
                figures += setting.alone(*names[1], undo, do)
                clean()
                figures += setting.in_graph(*names[2], both)
        finally:
            clean()  # a call that is too slow leaves its slots claimed, but the next case uses the same pool
        return figures

    def claims(self, size: int, case: str, graph: bool) -> Task:
        """Returns the task that claims `size` slots, lowest first, and releases them."""
        mine, held = self.allocators[0], list[Tensor]()

        def give_back() -> None:
            while held:
                mine.release(held.pop())

        def check() -> str:
            ours, other = (allocator.claim(size) for allocator in self.allocators)
            lowest = (self.free.nonzero().flatten()[:size] + 1).to(ours)
            wrong = differing([("ids", ours, other), ("lowest first", ours, lowest)]) or self.wrong()
            for allocator, each in zip(self.allocators, (ours, other), strict=True):
                allocator.release(each)
                allocator.check()
            return wrong or self.wrong()

        names = ("claim", case), ("release", case), ("claim and release", f"{case}, in a graph")
        both = (lambda: mine.release(mine.claim(size))) if graph else None
        measure = partial(self.there_and_back, lambda: held.append(mine.claim(size)), give_back, names, both)
        return Task(f"claim, {case}", check, measure)

    def ownership(self, size: int) -> Task:
        """Returns the task that sends a packet that admits `size` rows (claims, cells), then one that releases them."""
        file, rows = self.files[0], np.arange(1, size + 1)
        registers = (rows * REGISTERS_PER_ROW).tolist()
        cells = [cell for column in CELL_COLUMNS for cell in file.address(column, rows.tolist())]

        def packet(section: int, value: int) -> Tensor:
            written = (WRITES, cells, [value] * len(cells), ())
            return torch.from_numpy(Packet([(section, registers, registers, ()), written]).encode())

        packets = [packet(CLAIMS, 7), packet(RELEASES, 0)]
        admit, end = (partial(file.ownership, each.to(file.cells.device)) for each in packets)

        def check() -> str:
            wrong = ""
            for each in packets:
                for one in self.files:
                    one.ownership(each.to(one.cells.device))
                wrong = wrong or self.wrong()
            return wrong

        def both() -> None:
            admit()
            end()

        case = f"R={size}"
        names = [("ownership", f"{case}, {what}") for what in ("claims", "releases", "claims and releases, in a graph")]
        return Task(f"ownership, {case}", check, partial(self.there_and_back, admit, end, tuple(names), both))


def _held_but(place: str, capacity: int, size: int) -> Tensor:
    """Returns which slots of a large pool are held, bool `slot`: all except 4 * `size` free ones."""
    held = torch.ones(capacity, dtype=torch.bool, device="cpu")
    if place == "fragmented":
        held[capacity // (4 * size) // 2 :: capacity // (4 * size)] = False  # the free slots are evenly spread
    else:
        held[slice(0, 4 * size) if place == "first" else slice(capacity - 4 * size, None)] = False
    return held


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of claims, releases and packets of ownership changes."""
    capacity, sizes = setting.sizes(CAPACITY, TOY_CAPACITY), setting.sizes(SIZES, TOY_SIZES)
    held = torch.rand(capacity, dtype=torch.float32, device="cpu") < 0.5
    held[: capacity // 4] = False  # this quarter makes sure that enough slots are free
    pools = _Pools(setting, held, max(sizes))
    for size in sizes:
        yield pools.claims(size, f"R={size}", graph=True)
        yield pools.ownership(size)
    large = setting.sizes(LARGE, TOY_LARGE)
    for size, place in product(setting.sizes(LARGE_SIZES, sizes[:1]), PLACES):
        full = _Pools(setting, _held_but(place, large, size), rows=1)
        yield full.claims(size, f"R={size}, {place} free of {large}", graph=False)
