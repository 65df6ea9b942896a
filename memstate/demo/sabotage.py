"""Puts a wrong state on the shelf when it is about to be used: the comparison must notice. Only bytes change."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from memstate.demo.shelf import Shelf
from memstate.demo.transcript import slot_and_label, state_bytes
from memstate.demo.work import Work
from memstate.engine import StateManager
from memstate.holders import Snapshot
from memstate.requests import Row


class Sabotage:
    """Strikes once: at the first hit whose request goes on to generate something; again if that came to nothing.

    kind: "swap" exchanges the snapshot's bytes with another's on the shelf, "stale" replaces them by the state one
    token earlier. state_after: the bytes of the state that stands for some tokens, computed apart.
    """

    def __init__(
        self, kind: str, mem: StateManager, shelf: Shelf, state_after: Callable[[Sequence[int]], bytes]
    ) -> None:
        self.kind, self.mem, self.shelf, self.state_after = kind, mem, shelf, state_after
        self.strikes = 0
        self._victim: tuple[Work, Row, int] | None = None

    @property
    def _armed(self) -> bool:
        if self._victim is None:
            return True
        work, row, known = self._victim
        return work.row is not row and len(work.tokens) == known

    def strike(self, snapshot: Snapshot, work: Work) -> None:
        """Spoils a snapshot that `work` is about to resume from. Syncs: yes, where it strikes."""
        if not self._armed or not work.rule.cap:
            return
        slot, _ = slot_and_label(self.mem, snapshot.register)
        mine = state_bytes(self.mem.planes, slot)
        if self.kind == "swap":
            others = {other: state_bytes(self.mem.planes, other) for other in self._neighbours(snapshot)}
            other = next((other for other, data in others.items() if data != mine), None)
            if other is None:
                return
            write_state(self.mem, slot, others[other])
            write_state(self.mem, other, mine)
        else:
            write_state(self.mem, slot, self.state_after(work.tokens[: snapshot.length - 1]))
        self.strikes += 1
        self._victim = (work, work.handle, len(work.tokens))

    def _neighbours(self, snapshot: Snapshot) -> list[int]:
        """Slots of the other snapshots, nearest length first."""
        others = [entry for entry in self.shelf.entries.values() if entry is not snapshot]
        others.sort(key=lambda entry: abs(entry.length - snapshot.length))
        return [slot_and_label(self.mem, entry.register)[0] for entry in others]


def write_state(mem: StateManager, slot: int, data: bytes) -> None:
    """Overwrites every byte of a slot; the inverse of `state_bytes`."""
    values, at = np.frombuffer(data, np.uint8), 0
    for target in (layer[slot] for plane in mem.planes.values() for layer in plane):
        size = target.numel() * target.element_size()
        part = torch.from_numpy(values[at : at + size].copy()).view(target.dtype).reshape(target.shape)
        target.copy_(part)
        at += size
