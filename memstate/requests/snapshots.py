"""Snapshots kept after publication: handles to holder registers, with pins and KV pages. Knows no slot and no plane."""

from collections import deque
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

import numpy as np

from memstate.errors import InvalidArgument, StaleHandle
from memstate.slots.registers import Ints


@dataclass(frozen=True)
class Snapshot:
    """A published state: it stands for `length` tokens and keeps the KV pages of these tokens alive."""

    register: int
    generation: int
    length: int
    pages: tuple[int, ...] = ()


def risen(generation: Ints) -> Ints:
    """The generations after these; after the largest int32 comes 0."""
    return ((generation.astype(np.int64) + 1) % 2**31).astype(np.int32)


class Holders:
    """Gives out holder registers, oldest released first, so that one is rarely reused within a command buffer."""

    def __init__(self, first: int, count: int, first_generation: int = 0) -> None:
        self.first, self.count = first, count
        self.generation = np.full(count, first_generation, np.int32)
        self.reset()

    def reset(self) -> None:
        """Forgets every snapshot; handles given out before become stale."""
        self.generation = risen(self.generation)
        self._free = deque(range(self.first, self.first + self.count))
        self._pins: dict[int, int] = {}
        self._dropped: dict[int, Snapshot] = {}  # dropped while pinned: released with the last pin
        self.kept: dict[int, Snapshot] = {}

    @property
    def free(self) -> int:
        """Holder registers that hold nothing."""
        return len(self._free)

    def pins(self, register: int) -> int:
        """How many are about to read a register."""
        return self._pins.get(register, 0)

    @property
    def pinned(self) -> KeysView[int]:
        """Registers that somebody is about to read."""
        return self._pins.keys()

    @property
    def evictable(self) -> int:
        """Snapshots that nobody is about to read."""
        return sum(register not in self._pins for register in self.kept)

    def keep(self, length: int, pages: Sequence[int]) -> Snapshot:
        """Takes a register for a snapshot. Only where `free` is positive."""
        register = self._free.popleft()
        snapshot = Snapshot(register, int(self.generation[register - self.first]), length, tuple(pages))
        self.kept[register] = snapshot
        return snapshot

    def require(self, snapshots: Iterable[Snapshot]) -> None:
        """Raises: StaleHandle for a snapshot that was dropped, InvalidArgument for something that is none."""
        for snapshot in snapshots:
            if not isinstance(snapshot, Snapshot):
                raise InvalidArgument(
                    f"{snapshot!r} is no snapshot: use the handles that publish() and release() returned"
                )
            if type(snapshot.register) is not int or self.kept.get(snapshot.register) != snapshot:
                at = snapshot.register - self.first
                now = int(self.generation[at]) if 0 <= at < self.count else 0
                raise StaleHandle(f"snapshot in register {snapshot.register}", snapshot.generation, now)

    def pin(self, register: int) -> None:
        """Keeps a register's snapshot until `unpin`, even when it is dropped meanwhile."""
        self._pins[register] = self._pins.get(register, 0) + 1

    def unpin(self, register: int) -> Snapshot | None:
        """Takes a pin away; returns the snapshot to release now, if it was dropped meanwhile and no pin is left."""
        self._pins[register] -= 1
        if self._pins[register]:
            return None
        del self._pins[register]
        snapshot = self._dropped.pop(register, None)
        return snapshot and self._forget(snapshot)

    def drop(self, snapshot: Snapshot) -> Snapshot | None:
        """Ends a handle; returns the snapshot to release now, or None where a pin still holds it."""
        del self.kept[snapshot.register]
        at = snapshot.register - self.first
        self.generation[at : at + 1] = risen(self.generation[at : at + 1])
        if snapshot.register in self._pins:
            self._dropped[snapshot.register] = snapshot
            return None
        return self._forget(snapshot)

    def _forget(self, snapshot: Snapshot) -> Snapshot:
        self._free.append(snapshot.register)
        return snapshot

    def name(self, register: int) -> str:
        """Who owns a holder register, for audits."""
        snapshot = self.kept.get(register) or self._dropped.get(register)
        return f"snapshot {register} of {snapshot.length} tokens" if snapshot else f"holder {register} (given up)"
