"""Offers memstate's own slots, groups and requests as a pool that `memstate check` can check."""

from typing import Any

import torch

import memstate as ms
from memstate.requests.handles import Row, Snapshot
from memstate.slots.allocator import ClaimGroup

LAYOUT = ms.StateLayout(planes=(ms.Plane("state", (1,), torch.float32),), layers=1)


class Manager:
    """A `StateManager` and its pool of slots by id, on a CPU.

    Args:
        capacity: number of slots.
        rows: number of rows.
    """

    def __init__(self, capacity: int = 8, rows: int = 2) -> None:
        self.capacity, self.rows = capacity, rows
        self._mem = ms.StateManager(
            LAYOUT, slots=capacity, max_requests=rows, tracking=ms.Redirect(every=2), backend="reference"
        )
        self._allocator = self._mem.pool.allocator
        self._groups: list[ClaimGroup] = []
        self._handles: dict[int, Row] = {}
        self._published: dict[int, Snapshot] = {}

    def of_size(self, slots: int) -> "Manager":
        """See `Sized`."""
        return Manager(slots)

    def claim(self, n: int) -> Any:
        """See `SlotPool`. A claim of one slot takes it from the newest group, if that has one left."""
        if n == 1 and self._groups and self._groups[-1].left:
            return self._groups[-1].claim(1)
        return self._mem.pool.claim(n, zero=False)

    def release(self, ids: list[int]) -> None:
        """See `SlotPool`. If the slot was published, its handle is dropped."""
        rest = []
        for slot in ids:
            if handle := self._published.pop(slot, None):
                self._mem.drop([handle])
            else:
                rest.append(slot)
        self._mem.pool.release(rest)

    def free(self) -> int:
        """See `SlotPool`."""
        self._allocator.follow()
        return self._mem.free_slots + sum(group.left for group in self._groups)

    def clear(self) -> None:
        """See `Clears`."""
        self._mem.recover(keep=False)
        self._groups, self._published = [], {}

    def open_group(self, n: int) -> None:
        """See `Groups`."""
        self._groups.append(self._allocator.group(n))

    def close_group(self) -> None:
        """See `Groups`."""
        if self._groups:
            self._groups.pop().close()

    def admit(self, key: str) -> int:
        """See `RowPool`."""
        (row,) = self._mem.admit([ms.Request(key)])
        self._handles[row.index] = row
        return row.index

    def _registers(self, row: int) -> list[tuple[int, int, str]]:
        """Returns slot, length of the state and kind of each register that holds a slot of a row."""
        now = self._mem.inspect()
        return [
            (now.slots[register], now.labels[register], now.kinds[register])
            for register, name in now.names.items()
            if name.startswith(f"row {row} (")
        ]

    def slots_of(self, row: int) -> list[int]:
        """See `RowPool`."""
        return [slot for slot, _, _ in self._registers(row)]

    def end(self, row: int) -> None:
        """See `RowPool`."""
        self._mem.end([self._handles[row]])

    def generation(self, row: int) -> int:
        """See `Generations`."""
        return self._handles[row].generation

    def track(self, row: int) -> None:
        """See `Tracks`. The first step after a boundary keeps the state of the boundary."""
        handle = self._handles[row]
        before = self._mem.info(handle)
        for _ in range(before.next_boundary + 1 - before.length):
            self._mem.settle(self._mem.plan([handle]))

    def tracked(self, row: int) -> int | None:
        """See `Tracks`."""
        kept = [(length, slot) for slot, length, kind in self._registers(row) if kind == "lane" and length]
        return max(kept)[1] if kept else None

    def publish(self, row: int) -> int | None:
        """See `Tracks`."""
        (handle,) = self._mem.publish([self._handles[row]])
        if handle is None:
            return None
        (slot,) = self._mem.device.read_slots([handle]).wait().tolist()
        self._published[slot] = handle
        return int(slot)
