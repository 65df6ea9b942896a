"""Keeps the request table: rows, their generations and their progress.

All columns have one entry for each row. This file knows no slot and no plane.
"""

import heapq
import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np

from memstate.checks import INT32_MAX, sequence
from memstate.errors import InvalidArgument, StaleHandle
from memstate.requests.handles import Row, Rows, first_generation, risen
from memstate.slots.registers import Longs

INDEX: Final = attrgetter("index")


class RequestTable:
    """Hands out rows 1..rows, lowest first. Row 0 is the null row and stands for padding.

    Args:
        rows: number of rows.
        clock: returns the time in seconds. It is read once in each `claim`.

    Attributes:
        generation: generation of each row, int32 `row`; it grows by one when a request ends.
        running: for each row, the handle of its request; None for a row without a request.
        used: whether a request has the row, bool `row`.
        finished: whether a settled step finished the row, bool `row`. It stays True until the next request.
        over: number of rows that a settled step finished and whose request has not ended.
        confirmed: confirmed length of each row, int64 `row`.
        confirmed_at: the memory of `confirmed`, whose entries are read as plain numbers.
        ids: id of each row's request.
        admitted: when the request took the row, in seconds of the clock, `row`.
        version: how often the set of running rows has changed. While it is the same, checked handles stay valid.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows, self.clock = rows, clock
        self.generation = np.full(rows + 1, first_generation(), np.int32)
        self.used = np.zeros(rows + 1, bool)
        self.version = 0
        self._everyone: tuple[int, Rows] = 0, Rows((), self)  # (version, handles of all rows then)
        self.reset()

    def reset(self, how: str = "") -> None:
        """Frees every row; all handles become stale.

        Args:
            how: what ended the requests, for the errors of stale handles; "": those errors name no request.
        """
        self.version += 1
        ended = np.flatnonzero(self.used).tolist() if how else ()
        self._ended: dict[int, tuple[int, Hashable, str]] = {  # row -> last generation, its request, how it ended
            row: (int(self.generation[row]), self.ids[row], how) for row in ended
        }
        self.running: list[Row | None] = [None] * (self.rows + 1)
        self.generation = risen(self.generation)
        self._free = list(range(1, self.rows + 1))
        self.used = np.zeros(self.rows + 1, bool)
        self.over = 0
        self.finished = np.zeros(self.rows + 1, bool)
        self.confirmed = np.zeros(self.rows + 1, np.int64)
        self.ids: list[Hashable] = [None] * (self.rows + 1)
        self.admitted = np.zeros(self.rows + 1)
        columns = self.generation, self.used, self.finished, self.confirmed, self.admitted
        self._at: list[Any] = [column.data for column in columns]  # memoryviews: an entry is a plain number
        self.confirmed_at = self._at[3]

    def miscounts(self) -> list[str]:
        """Returns a sentence if the list of free rows does not fit `used`, otherwise an empty list."""
        free = np.flatnonzero(~self.used[1:]) + 1
        if sorted(self._free) != free.tolist():
            return [f"rows {sorted(self._free)} are noted as free, and rows {free.tolist()} have no request"]
        return []

    @property
    def free(self) -> int:
        """Number of rows without a request."""
        return len(self._free)

    def claim(self, ids: Sequence[Hashable]) -> list[int]:
        """Takes the lowest free rows, one for each id. Call it only where `free` is large enough."""
        now = self.clock()  # before any change, because a clock of the caller can raise
        self.version += 1
        generation, used, finished, confirmed, admitted = self._at
        taken, free = [], self._free
        for name in ids:
            row = heapq.heappop(free)
            used[row], finished[row], confirmed[row], admitted[row] = True, False, 0, now
            self.ids[row], self.running[row] = name, Row(row, generation[row])
            taken.append(row)
        return taken

    def release(self, rows: Iterable[int], how: str = "released") -> None:
        """Frees rows and makes every handle to them stale.

        Args:
            rows: numbers of the rows.
            how: what ended their requests, for the errors of stale handles.
        """
        self.version += 1
        generation, used, finished, *_ = self._at
        for row in rows:
            self._ended[row] = generation[row], self.ids[row], how
            self.over -= finished[row]
            used[row], generation[row] = False, (generation[row] + 1) & INT32_MAX
            self.ids[row] = self.running[row] = None
            heapq.heappush(self._free, row)

    def finish(self, rows: Longs) -> None:
        """Notes that a settled step finished rows; from now on they are padding in a batch."""
        self.version += 1
        self.over += len(rows) - int(np.count_nonzero(self.finished[rows]))
        self.finished[rows] = True

    def index(self, row: Row) -> int:
        """Returns the number of a handle's row.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: the argument is not a row of this table.
        """
        if not isinstance(row, Row):
            raise InvalidArgument(f"{row!r} is no row: use the handles that admit() returned")
        if type(row.index) is not int or not 0 < row.index <= self.rows:
            raise InvalidArgument(f"{row!r}: this table has rows 1..{self.rows}; it is another manager's")
        if self.running[row.index] != row:
            generation, name, how = self._ended.get(row.index, (0, None, ""))
            why = f"request {name!r} was {how}" if generation == row.generation and how else ""
            raise StaleHandle(f"row {row.index}", row.generation, int(self.generation[row.index]), why)
        return row.index

    def batch(self, rows: Sequence[Row | None]) -> tuple[Longs, bool, bool]:
        """Returns (row numbers, 0 for None; whether no row comes twice; whether an entry is None).

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: an entry is not a row of this table.
        """
        if type(rows) is Rows and rows.table is self:
            numbers = rows.indices
            if ((self.generation[numbers] == rows.generations) & self.used[numbers]).all():
                return numbers, rows.distinct, False
        listed = self._look_up(rows)
        padded, numbers = 0 in listed, np.frombuffer(array("q", listed), np.int64)
        rest = [row for row in listed if row] if padded else listed
        return numbers, len(set(rest)) == len(rest), padded

    def _look_up(self, rows: Sequence[Row | None]) -> list[int]:
        """Returns the number of each handle's row, 0 for None."""
        given = rows if type(rows) is list else list(sequence("rows", rows, "[row]"))
        try:
            try:
                numbers = list(map(INDEX, given))  # takes half the time of the loop below
            except AttributeError:
                numbers = [row.index if row is not None else 0 for row in given]
            if list(map(self.running.__getitem__, numbers)) == given:  # the common case: all handles are valid
                return numbers
        except (AttributeError, TypeError, IndexError):
            pass
        return [0 if row is None else self.index(row) for row in given]

    def indices(self, rows: Sequence[Row]) -> list[int]:
        """Returns the numbers of rows, which must be distinct.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: an entry is not a row of this table, or a row is named twice.
        """
        numbers = self._look_up(rows)
        if 0 in numbers:
            self.index(None)  # type: ignore[arg-type]
        if len(set(numbers)) != len(numbers):
            raise InvalidArgument(f"a row is named twice in {numbers}")
        return numbers

    def handles(self, rows: Iterable[int]) -> Rows:
        """Returns the handles of rows in use; no row comes twice."""
        return Rows(filter(None, map(self.running.__getitem__, rows)), self, distinct=True)

    @property
    def everyone(self) -> Rows:
        """The handles of all rows in use, in order of their numbers."""
        if self._everyone[0] != self.version:
            self._everyone = self.version, self.handles(np.flatnonzero(self.used).tolist())
        return self._everyone[1]
