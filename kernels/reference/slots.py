"""Reads the slots, tails and marks of the rows of a decode step on the host. Knows no plane and no op."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import Cursor, StepMarks, Tail

NEVER = 2**31  # more tokens than any step has


def row_slots(
    state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor, most: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields (row, read slot, write slot, snapshot slot, real tokens) of each row with a write slot.

    Args:
        state: `slot ...`; slot ids outside it become 0.
        read: slot of each row to read, `batch`.
        write: slot of each row to store, `batch`.
        snapshot: second slot of each row to store, `batch`.
        tokens: tokens of each row, `batch`.
        most: limit of the tokens of a row; larger numbers count as this limit.

    Syncs: yes.
    """
    last = state.shape[0] - 1
    for row, (*slots, count) in enumerate(torch.stack([read, write, snapshot, tokens], dim=1).tolist()):
        source, target, copy = (slot if 0 < slot <= last else 0 for slot in slots)
        if target:
            yield row, source, target, copy, max(0, min(count, most))


def row_marks(marks: StepMarks | None, last: int) -> dict[tuple[int, int], list[int]]:
    """Returns the slots that keep the states at marks, without slots outside 1..last.

    The keys of the dict are (row, offset of the mark).

    Syncs: yes.
    """
    kept: dict[tuple[int, int], list[int]] = {}
    if marks is not None:
        for entry, offset, slot in torch.stack(marks[1:], 1)[: int(marks.count)].tolist():
            if 0 < slot <= last:
                kept.setdefault((entry, offset), []).append(slot)
    return kept


class RowTail(NamedTuple):
    """The tail of one row. If `memory` is 0, no tokens are pending, and the state is stored after the whole step."""

    rings: Any = ()
    memory: int = 0  # row whose memory has the tail, 0 for none
    place: int = 0  # place of the first pending token
    pending: int = 0  # number of pending tokens
    store: int = NEVER  # see `Cursor.store`

    def at(self, token: int) -> Any:
        """Returns the places of a token in all rings; tokens count from the first pending one."""
        places = (
            ring if ring is None else ring[self.memory, (self.place + token) % ring.shape[1]] for ring in self.rings
        )
        return type(self.rings)(*places)

    def keep(self, token: int, values: Tail) -> None:
        """Copies a token to the rings, unless the stored state has it."""
        if self.memory and token >= self.store:
            for place, value in zip(self.at(token), values, strict=True):
                if place is not None:
                    place.copy_(value)


def row_tails(tail: Tail | None, cursor: Cursor | None, batch: int) -> list[RowTail]:
    """Returns the tail of each of `batch` rows; a row outside the rings has no memory.

    Syncs: yes.
    """
    if tail is None or cursor is None:
        return [RowTail()] * batch
    rows, ring = tail[0].shape[:2]
    columns = torch.stack([column.long() for column in cursor], 1).tolist()
    return [
        RowTail(tail, row, max(label, 0) % ring, min(max(pending, 0), ring), store) if 0 < row < rows else RowTail()
        for row, label, pending, store in columns
    ]
