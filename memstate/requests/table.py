"""The request table: rows, their generations and their progress. Sized by rows, never by slots; knows no slot id and no
plane.
"""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from memstate.checks import sequence
from memstate.errors import InvalidArgument, OutOfRows, StaleHandle
from memstate.requests.snapshots import Snapshot, risen
from memstate.slots.registers import Longs
from memstate.tokens import Tokens

_TABLES = count(1)


def first_generation() -> int:
    """Where the generations of a table start: elsewhere for each, so that another manager's handles are stale here."""
    return next(_TABLES) * 1_000_003 % 2**30


@dataclass(frozen=True)
class Session:
    """A handle to a conversation whose states stay between its turns, void once it is closed."""

    id: Hashable
    serial: int


@dataclass(frozen=True)
class Request:
    """What a request needs to be admitted.

    id: any name, shown by audits. length: tokens that KV pages are taken for at once (default: all of `tokens`).
    resume: a snapshot to continue from.
    want: one more length, besides the multiples of `every`, at which a snapshot is due (0 = none).
    A snapshot says what length it stands for, not of which tokens: whoever gives `resume` and `tokens` vouches for it.
    tokens: the whole prompt, for the prefix cache or a session to find what is computed already; in one dimension, any
    sequence of whole numbers. salt: equal tokens under different salts never match; None, str, bytes, int or a tuple of
    these, of exactly these types. session: the conversation that this is the next turn of. fetch: the prefetch that was
    begun for it; several ranks start from what they agreed on.
    """

    id: Hashable
    length: int | None = None
    resume: Snapshot | None = None
    snapshot_at: int = 0
    tokens: Tokens | None = field(default=None, repr=False, compare=False)
    salt: Hashable = None
    session: Session | None = None
    fetch: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Row:
    """A handle to a row of the request table, void once the row has been released."""

    index: int
    generation: int


class Rows(tuple[Row, ...]):
    """The rows of one admission, in order."""

    table: "RequestTable"

    @classmethod
    def of(cls, rows: Iterable[Row], table: "RequestTable") -> "Rows":
        """Handles together with the table that knows whether they still run."""
        self = cls(rows)
        self.table = table
        return self

    @property
    def any_alive(self) -> bool:
        """Whether one of them is neither finished nor released."""
        return any(self.table.alive(row) for row in self)


class RequestTable:
    """Rows 1..rows, lowest first; row 0 is the null row and stands for padding."""

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise InvalidArgument(f"{rows} rows: at least 1 is needed")
        self.rows = rows
        self.generation = np.full(rows + 1, first_generation(), np.int32)
        self.reset()

    def reset(self) -> None:
        """Frees every row; handles given out before become stale."""
        self.generation = risen(self.generation)
        self._free = list(range(1, self.rows + 1))
        self.used = np.zeros(self.rows + 1, bool)
        self.finished = np.zeros(self.rows + 1, bool)
        self.unsettled = np.zeros(self.rows + 1, np.int32)  # planned steps whose results are not known
        self.confirmed = np.zeros(self.rows + 1, np.int64)  # length up to which the row is known to be real
        self.ids: list[Hashable] = [None] * (self.rows + 1)

    @property
    def free(self) -> int:
        """Rows that nobody uses."""
        return len(self._free)

    def claim(self, ids: Sequence[Hashable]) -> Longs:
        """Uses the lowest free rows for requests. Raises: OutOfRows (nothing changed)."""
        if len(ids) > self.free:
            raise OutOfRows(len(ids), self.free, self.rows)
        rows = [heapq.heappop(self._free) for _ in ids]
        self.used[rows] = True
        self.finished[rows] = False
        self.unsettled[rows] = 0
        self.confirmed[rows] = 0
        for row, name in zip(rows, ids, strict=True):
            self.ids[row] = name
        return np.asarray(rows, np.int64)

    def release(self, rows: Longs) -> None:
        """Frees rows and makes every handle to them stale."""
        self.used[rows] = False
        self.generation[rows] = risen(self.generation[rows])
        for row in rows.tolist():
            self.ids[row] = None
            heapq.heappush(self._free, row)

    def handle(self, row: int) -> Row:
        """The handle to a row in use."""
        return Row(row, int(self.generation[row]))

    def alive(self, row: Row) -> bool:
        """Whether the handle's request still runs."""
        return bool(
            self.generation[row.index] == row.generation and self.used[row.index] and not self.finished[row.index]
        )

    def index(self, row: Row) -> int:
        """The number of a handle's row. Raises: StaleHandle, InvalidArgument."""
        if not isinstance(row, Row):
            raise InvalidArgument(f"{row!r} is no row: use the handles that admit() returned")
        if type(row.index) is not int or not 0 < row.index <= self.rows:
            raise InvalidArgument(f"{row!r}: this table has rows 1..{self.rows}; it is another manager's")
        if self.generation[row.index] != row.generation or not self.used[row.index]:
            raise StaleHandle(f"row {row.index}", row.generation, int(self.generation[row.index]))
        return row.index

    def indices(self, rows: Sequence[Row]) -> Longs:
        """The numbers of distinct rows. Raises: StaleHandle, InvalidArgument."""
        numbers = [self.index(row) for row in sequence("rows", rows, "[row]")]
        if len(set(numbers)) != len(numbers):
            raise InvalidArgument(f"a row is named twice in {numbers}")
        return np.asarray(numbers, np.int64)
