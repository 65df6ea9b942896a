"""What the rows of a decode step read, write, snapshot and keep at marks, on the host. Knows no plane and no op."""

from collections.abc import Iterator

import torch
from torch import Tensor

from memstate.kernels.tables import Cursor, Marks


def row_slots(
    state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor, most: int, stores: bool
) -> Iterator[tuple[int, int, int, int, int]]:
    """The real rows: number, slots to read, write and snapshot (0 for ids outside 1..slot-1), and real tokens.

    Args:
        state: `slot ...`.
        read: slots to read, `batch`.
        write: slots to store, `batch`.
        snapshot: second slots to store, `batch`.
        tokens: tokens of each row, `batch`.
        most: the most tokens of a row.
        stores: whether slots are stored at all; if not, `write` says only whether the row is real.

    Syncs: yes.
    """
    last = state.shape[0] - 1
    for row, (*slots, count) in enumerate(torch.stack([read, write, snapshot, tokens], dim=1).tolist()):
        source, target, copy = (slot if 0 < slot <= last else 0 for slot in slots)
        if target or (slots[1] > 0 and not stores):
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


def row_tails(cursor: Cursor | None, rows: int, ring: int) -> list[tuple[int, int, int, int]]:
    """Returns of each row its memory, the place of its first pending token, pending tokens and where to store.

    A row outside 1..rows-1 has no memory, and is (0, 0, 0, -1). Without a cursor there is nothing in the list.

    Args:
        cursor: the columns, or None.
        rows: rows of memory.
        ring: places of a row.

    Syncs: yes.
    """
    if cursor is None:
        return []
    columns = torch.stack([column.long() for column in cursor], 1).tolist()
    return [
        (row, max(label, 0) % ring, min(max(pending, 0), ring), store) if 0 < row < rows else (0, 0, 0, -1)
        for row, label, pending, store in columns
    ]
