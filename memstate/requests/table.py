"""Keeps the request table: rows, their generations and their progress.

It is sized by rows, never by slots, and knows no slot id and no plane.
"""

import heapq
import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from memstate.checks import sequence
from memstate.errors import InvalidArgument, OutOfRows, StaleHandle
from memstate.requests.handles import Row, Rows, first_generation, risen
from memstate.slots.registers import Longs


class RequestTable:
    """Hands out rows 1..rows, lowest first. Row 0 is the null row and stands for padding.

    Args:
        rows: number of rows.
        clock: returns seconds; one look at it for each call that takes rows.

    Attributes:
        generation: of each row, int32 `row`; one more at every end.
        used: whether a request has the row, `row`.
        finished: whether a settled step finished the row, `row`.
        unsettled: planned steps whose results are not known, `row`.
        confirmed: length up to which the row is known to be real, `row`.
        ids: the request of each row.
        admitted: when its request took it, in seconds of the clock, `row`.
        version: counts the changes of which rows run; while it stays, checked handles stay valid.

    Raises:
        InvalidArgument: rows is less than 1.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        if rows < 1:
            raise InvalidArgument(f"{rows} rows: at least 1 is needed")
        self.rows, self.clock = rows, clock
        self.generation = np.full(rows + 1, first_generation(), np.int32)
        self.used = np.zeros(rows + 1, bool)
        self.version = 0
        self.reset()

    def reset(self, how: str = "") -> None:
        """Frees every row; handles given out before become stale.

        Args:
            how: what ended the requests, for the errors of stale handles; "" if nothing is known of requests.
        """
        self.version += 1
        ended = np.flatnonzero(self.used).tolist() if how else ()
        self._ended: dict[int, tuple[int, Hashable, str]] = {  # by row: the last generation, its request, how it ended
            row: (int(self.generation[row]), self.ids[row], how) for row in ended
        }
        self.generation = risen(self.generation)
        self._free = list(range(1, self.rows + 1))
        self.used = np.zeros(self.rows + 1, bool)
        self.finished = np.zeros(self.rows + 1, bool)
        self.unsettled = np.zeros(self.rows + 1, np.int32)  # planned steps whose results are not known
        self.confirmed = np.zeros(self.rows + 1, np.int64)  # length up to which the row is known to be real
        self.ids: list[Hashable] = [None] * (self.rows + 1)
        self.admitted = np.zeros(self.rows + 1)

    def miscounts(self) -> list[str]:
        """Returns what is wrong with the rows that are noted as free."""
        free = np.flatnonzero(~self.used[1:]) + 1
        if sorted(self._free) != free.tolist():
            return [f"rows {sorted(self._free)} are noted as free, and rows {free.tolist()} have no request"]
        return []

    @property
    def free(self) -> int:
        """Rows without a request."""
        return len(self._free)

    def claim(self, ids: Sequence[Hashable]) -> Longs:
        """Takes the lowest free rows for requests.

        Raises:
            OutOfRows: too few are free; nothing changed.
        """
        if len(ids) > len(self._free):
            raise OutOfRows(len(ids), self.free, self.rows)
        now = self.clock()  # first: it is the caller's, and could raise
        self.version += 1
        taken = [heapq.heappop(self._free) for _ in ids]
        rows = np.array(taken, np.int64)
        self.used[rows] = True
        self.finished[rows] = False
        self.unsettled[rows] = 0
        self.confirmed[rows] = 0
        self.admitted[rows] = now
        for row, name in zip(taken, ids, strict=True):
            self.ids[row] = name
        return rows

    def release(self, rows: Longs, how: str = "released") -> None:
        """Frees rows and makes every handle to them stale.

        Args:
            rows: `row`.
            how: what ended them, for the errors of stale handles.
        """
        self.version += 1
        numbers = rows.tolist()
        for row, generation in zip(numbers, self.generation[rows].tolist(), strict=True):
            self._ended[row] = generation, self.ids[row], how
        self.used[rows] = False
        self.generation[rows] = risen(self.generation[rows])
        for row in numbers:
            self.ids[row] = None
            heapq.heappush(self._free, row)

    def finish(self, rows: Longs) -> None:
        """Notes that a settled step finished rows; from now on they are padding in a batch."""
        self.version += 1
        self.finished[rows] = True

    def handle(self, row: int) -> Row:
        """Returns the handle to a row in use."""
        return Row(row, int(self.generation[row]))

    def alive(self, row: Row) -> bool:
        """Returns whether the handle's request still runs."""
        return bool(
            self.generation[row.index] == row.generation and self.used[row.index] and not self.finished[row.index]
        )

    def index(self, row: Row) -> int:
        """Returns the number of a handle's row.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this table.
        """
        if not isinstance(row, Row):
            raise InvalidArgument(f"{row!r} is no row: use the handles that admit() returned")
        if type(row.index) is not int or not 0 < row.index <= self.rows:
            raise InvalidArgument(f"{row!r}: this table has rows 1..{self.rows}; it is another manager's")
        if self.generation[row.index] != row.generation or not self.used[row.index]:
            generation, name, how = self._ended.get(row.index, (0, None, ""))
            why = f"request {name!r} was {how}" if generation == row.generation and how else ""
            raise StaleHandle(f"row {row.index}", row.generation, int(self.generation[row.index]), why)
        return row.index

    def batch(self, rows: Sequence[Row | None]) -> tuple[Longs, bool]:
        """Returns the numbers of rows, 0 for None, and whether no row comes twice.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: an entry is not a row of this table.
        """
        if isinstance(rows, Rows) and rows.table is self:
            numbers = rows.indices
            if ((self.generation[numbers] == rows.generations) & self.used[numbers]).all():
                return numbers, rows.distinct
        given = sequence("rows", rows, "[row]")
        numbers = np.array([0 if row is None else self.index(row) for row in given], np.int64)
        real = numbers[numbers > 0].tolist()
        return numbers, len(set(real)) == len(real)

    def indices(self, rows: Sequence[Row]) -> Longs:
        """Returns the numbers of distinct rows.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: an entry is not a row of this table, or a row is named twice.
        """
        if isinstance(rows, Rows):
            numbers, distinct = self.batch(rows)
        else:
            numbers = np.array([self.index(row) for row in sequence("rows", rows, "[row]")], np.int64)
            distinct = len(set(numbers.tolist())) == len(numbers)
        if not distinct:
            raise InvalidArgument(f"a row is named twice in {numbers.tolist()}")
        return numbers

    def handles(self, rows: Longs) -> Rows:
        """Returns the handles to distinct rows in use."""
        return Rows(rows, self.generation[rows], self, distinct=True)
