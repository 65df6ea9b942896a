"""What the rows of a decode step read, write, snapshot and keep at marks, on the host. Knows no plane and no op."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import Cursor, Marks, Tail

NEVER = 2**31  # tokens that no step has


def row_slots(
    state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor, most: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """The real rows: number, slots to read, write and snapshot (0 for ids outside 1..slot-1), and real tokens.

    Args:
        state: `slot ...`.
        read: slots to read, `batch`.
        write: slots to store, `batch`.
        snapshot: second slots to store, `batch`.
        tokens: tokens of each row, `batch`.
        most: the most tokens of a row.

    Syncs: yes.
    """
    last = state.shape[0] - 1
    for row, (*slots, count) in enumerate(torch.stack([read, write, snapshot, tokens], dim=1).tolist()):
        source, target, copy = (slot if 0 < slot <= last else 0 for slot in slots)
        if target:
            yield row, source, target, copy, max(0, min(count, most))


def row_marks(marks: Marks | None, last: int) -> dict[tuple[int, int], list[int]]:
    """Returns (row, tokens up to the mark) -> slots in 1..last that keep the state there.

    Syncs: yes.
    """
    found: dict[tuple[int, int], list[int]] = {}
    if marks is not None:
        for entry, offset, slot in torch.stack(marks[1:], 1)[: int(marks.count)].tolist():
            if 0 < slot <= last:
                found.setdefault((entry, offset), []).append(slot)
    return found


class RowTail(NamedTuple):
    """The tail of one row: rings, the row of memory or 0, place of the first pending token, how many are, and `store`.

    Without memory nothing is pending, and the state is stored behind the last token of the step.
    """

    rings: Any = ()
    memory: int = 0
    place: int = 0
    pending: int = 0
    store: int = NEVER

    def at(self, token: int) -> Any:
        """What is kept of a token, counted from the first pending one."""
        places = (
            ring if ring is None else ring[self.memory, (self.place + token) % ring.shape[1]] for ring in self.rings
        )
        return type(self.rings)(*places)

    def keep(self, token: int, values: Tail) -> None:
        """Keeps a token, unless it is in the state that is stored."""
        if self.memory and token >= self.store:
            for place, value in zip(self.at(token), values, strict=True):
                if place is not None:
                    place.copy_(value)


def row_tails(tail: Tail | None, cursor: Cursor | None, batch: int) -> list[RowTail]:
    """Returns the tail of each of `batch` rows. A row outside of the rings has no memory.

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
