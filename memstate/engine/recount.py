"""Counts rows, pages, pins, leases and slots at those who hold them, and names the counts that are wrong.

An audit of slots compares registers with the bitmap. This is the rest: what only the host keeps.
"""

from collections import Counter

import numpy as np

from memstate.engine.parts import Parts
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.slots.inspect import Inspection
from memstate.slots.registers import RegisterFile


class Recount(Parts):
    """Finds counts of the host that do not agree with their owners, or with the device."""

    def _miscounts(self, seen: Inspection, names: dict[int, tuple[str, str]], read: RegisterFile) -> list[str]:
        """Returns a sentence for each count that is wrong.

        Args:
            seen: what the device says, after all recorded changes.
            names: register -> (kind, owner), for the registers that hold a slot according to the host.
            read: the registers that `seen` was read from.
        """
        leases = [session.lease for session in self._sessions.opened.values() if session.lease is not None]
        return [
            *self._table.miscounts(),
            *self._wrong_rows(),
            *self._pages.allocator.miscounts(self._page_holders()),
            *self._snapshots.miscounts(),
            *self._wrong_holders(),
            *self._sessions.miscounts(),
            *self._cache.miscounts(leases),
            *(self.tiers.miscounts() if self.tiers is not None else ()),
            *self._wrong_labels(seen, names),
            *(self._pages.miscounts(read.page_table.cpu().numpy()) if self._pages.allocator.pages else ()),
        ]

    def _wrong_rows(self) -> list[str]:
        """Rows without a request that still have something, and rows with a request and no slot."""
        held = self._registers.held[: self._registers.first_holder].reshape(-1, REGISTERS_PER_ROW)
        has = {
            "slots": np.flatnonzero(held.any(1)).tolist(),
            "KV pages": self._pages.held,
            "a lease": self._cache.leases,
            "a turn of a session": self._sessions.by_row,
            "states at marks": self._marks.rows,
            "a first read": self._snapshots.first_reads,
        }
        used = set(np.flatnonzero(self._table.used).tolist())
        found = [f"row {row} has {what} and no request" for what, rows in has.items() for row in set(rows) - used]
        return found + [f"row {row} has a request and no slot" for row in sorted(used) if not held[row, 0]]

    def _page_holders(self) -> Counter[int]:
        """How many holders each KV page has."""
        kept = [*self._snapshots.kept.values(), *self._snapshots.ending]
        holders = Counter(page for pages in self._pages.held.values() for page in pages)
        holders.update(page for snap in kept for page in snap.pages)
        holders.update(page for session in self._sessions.opened.values() for page in session.pages)
        holders.update(page for _, node in self._cache.tree.walk() for page in node.pages)
        return holders

    def _wrong_holders(self) -> list[str]:
        """Registers of snapshots that hold a slot without a snapshot, or a snapshot without a slot."""
        first = self._registers.first_holder
        held = set((np.flatnonzero(self._registers.held[first:]) + first).tolist())
        kept = {snap.register: snap for snap in (*self._snapshots.ending, *self._snapshots.kept.values())}
        found = [f"{self._snapshots.name(register)} has no slot" for register in sorted(kept.keys() - held)]
        found += [f"register {register} holds a slot and no snapshot" for register in sorted(held - kept.keys())]
        labels = self._registers.labels
        return found + [
            f"{self._snapshots.name(register)} has a state of {labels[register]} tokens"
            for register, snap in kept.items()
            if register in held and labels[register] != snap.length
        ]

    def _wrong_labels(self, seen: Inspection, names: dict[int, tuple[str, str]]) -> list[str]:
        """Lengths of states that host and device do not agree on, and a wrong count of free slots."""
        there = np.array(seen.labels)
        wrong = np.flatnonzero(self._registers.held & (self._registers.labels != there)).tolist()
        found = [
            f"{names[register][1]}: {self._registers.labels[register]} tokens for the host, {there[register]} for "
            "the device"
            for register in wrong
        ]
        if (free := sum(seen.free[1:])) != self._allocator.free and not self._allocator.unconfirmed:
            found.append(f"{self._allocator.free} slots are counted as free, {free} are")
        return found
