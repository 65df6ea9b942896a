"""Keeps the lengths besides the multiples of `every` at which a row's snapshot is due.

The register file has one cell a row for them. This file keeps the rest and moves the next one in. It knows no slot.
"""

from collections.abc import KeysView, Sequence

import numpy as np

from memstate.errors import InvalidArgument
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs


class Boundaries:
    """The lengths still to come, by row.

    Args:
        commands: records the changes of the cells.
        reads_old_slot: the boundary is found before the step that leaves it (Redirect), not by the step that reaches
            it.
    """

    def __init__(self, commands: CommandBuffer, reads_old_slot: bool) -> None:
        self._commands, self._file = commands, commands.registers
        self._reached = int(not reads_old_slot)
        self._coming: dict[int, list[int]] = {}

    def reset(self) -> None:
        """Forgets all lengths."""
        self._coming = {}

    def start(self, rows: Longs, lengths: Sequence[Sequence[int]]) -> None:
        """Notes the lengths of new rows, ascending. Rows without one get a 0 in their cell, which the caller writes."""
        if not any(lengths):
            self._file.snapshot_at[rows] = 0
            return
        self._file.snapshot_at[rows] = [wanted[0] if wanted else 0 for wanted in lengths]
        for row, wanted in zip(rows.tolist(), lengths, strict=True):
            if len(wanted) > 1:
                self._coming[row] = list(wanted[1:])

    @property
    def rows(self) -> KeysView[int]:
        """Rows with lengths still to come."""
        return self._coming.keys()

    def end(self, rows: Longs) -> None:
        """Forgets rows that have ended."""
        for row in () if not self._coming else self._coming.keys() & set(rows.tolist()):
            del self._coming[row]

    def advance(self, rows: Longs, lengths: Longs) -> None:
        """Moves the next length in, for rows that have passed theirs."""
        if not self._coming:
            return
        moved = []
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            coming = self._coming.get(row)
            while coming and self._file.snapshot_at[row] < length + self._reached:
                self._file.snapshot_at[row] = coming.pop(0)
                moved.append(row)
            if coming is not None and not coming:
                del self._coming[row]
        if moved:
            which = np.unique(moved)
            self._commands.write(self._file.address("snapshot_at", which), self._file.snapshot_at[which])

    def require_within(self, rows: Longs, before: Longs, after: Longs) -> None:
        """Requires that no step goes beyond a length at which a row's snapshot is due.

        Raises:
            InvalidArgument: a row's step crosses one.
        """
        if not self._coming:
            return
        for row, length, reach in zip(rows.tolist(), before.tolist(), after.tolist(), strict=True):
            wanted = self.after(row, length)
            if wanted and reach > wanted:
                raise InvalidArgument(
                    f"row {row}: a chunk from {length} to {reach} crosses {wanted}, where a snapshot is due: end it at "
                    "next_boundary(row)"
                )

    def after(self, row: int, length: int) -> int:
        """Returns the row's next length beyond this one, 0 for none."""
        wanted = [int(self._file.snapshot_at[row]), *self._coming.get(row, ())]
        return next((snapshot_at for snapshot_at in wanted if snapshot_at > length), 0)
