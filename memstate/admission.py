"""New rows: for requests, for more continuations of a running one, for states that arrive from elsewhere. All of what
is needed, or nothing. Knows no step.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from memstate.arguments import counts, is_count, sequence
from memstate.commands import CommandBuffer
from memstate.errors import InvalidArgument, OutOfRows, OutOfSlots
from memstate.holders import Snapshot
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.page_table import PageTable
from memstate.publisher import Publisher
from memstate.registers import Longs
from memstate.requests import Request, RequestTable, Row, Rows

PER_ROW = REGISTERS_PER_ROW


class Fork(NamedTuple):
    """More continuations of a row.

    rows: the new ones. page_copies: (new page, page whose contents it needs) for the page that the row has filled in
    part; the caller copies the KV.
    """

    rows: Rows
    page_copies: list[tuple[int, int]]


class Admission:
    """Gives requests their rows, slots and pages.

    lanes: that a row holds from its admission on. direct_hits: the first step reads a snapshot instead of a copy of it.
    """

    def __init__(
        self, commands: CommandBuffer, table: RequestTable, pages: PageTable, publisher: Publisher, lanes: int,
        direct_hits: bool,
    ) -> None:  # fmt: skip
        self._commands, self._file, self._table = commands, commands.registers, table
        self._pages, self._publisher = pages, publisher
        self._per_request, self._direct_hits = 1 + lanes, direct_hits

    def admit(self, requests: Sequence[Request]) -> Rows:
        """See `StateManager.admit`."""
        sequence("requests", requests, "admit([request])")
        fresh_pages = [self._pages_needed(request) for request in requests]
        self._publisher.holders.require(request.resume for request in requests if request.resume is not None)
        self._require(len(requests), sum(fresh_pages), self._per_request * len(requests))
        rows = self._take([request.id for request in requests])
        self._pages.start(rows, [request.resume.pages if request.resume else () for request in requests], fresh_pages)
        resume = [request.resume for request in requests]
        source = np.array([snap.register if snap else 0 for snap in resume], np.int64)
        length = np.array([snap.length if snap else 0 for snap in resume], np.int64)
        self._start(rows, source, length, np.array([request.want for request in requests], np.int64))
        return Rows.of((self._table.handle(row) for row in rows.tolist()), self._table)

    def _pages_needed(self, request: Request) -> int:
        if not isinstance(request, Request):
            raise InvalidArgument(f"{request!r} is no Request: admit([Request(id, ...), ...])")
        if not (is_count(request.length) and is_count(request.want)) or request.want % self._pages.page_size:
            raise InvalidArgument(
                f"request {request.id!r}: length={request.length!r} and want={request.want!r} must be whole numbers "
                f"from 0 on, want a multiple of page_size={self._pages.page_size}"
            )
        held = len(request.resume.pages) if isinstance(request.resume, Snapshot) else 0
        return max(0, self._pages.count(request.length) - held)

    def _require(self, rows: int, pages: int, slots: int) -> None:
        """Raises: OutOfRows, OutOfPages, OutOfSlots where there is not that much; nothing changed."""
        if rows > self._table.free:
            raise OutOfRows(rows, self._table.free, self._table.rows)
        self._pages.require_free(pages)
        allocator = self._file.allocator
        allocator.confirm(slots)
        if slots > allocator.free:
            raise OutOfSlots(slots, allocator.free, self._publisher.holders.evictable, allocator.capacity)

    def _take(self, ids: Sequence[Hashable]) -> Longs:
        """Rows with their slots claimed."""
        rows = self._table.take(ids)
        self._commands.claim((rows[:, None] * PER_ROW + np.arange(self._per_request)).reshape(-1))
        return rows

    def _start(self, rows: Longs, source: Longs, length: Longs, want: Longs) -> None:
        """Fills the columns of new rows, and their states: zeros, a copy, or a note to read the source once.

        source: register of the state to continue from, 0 = none. length: tokens it stands for.
        """
        file, live, hit = self._file, rows * PER_ROW, source > 0
        file.want[rows] = want
        file.tracked[rows] = length
        file.source[rows] = source if self._direct_hits else 0
        self._table.confirmed[rows] = length
        for column, values in (
            ("generation", self._table.generation[rows]),
            ("want", want),
            ("tracked", length),
            ("source", file.source[rows]),
        ):
            self._commands.write(file.address(column, rows), values)
        self._commands.zero(live[~hit])
        if self._direct_hits:
            for row, register in zip(rows[hit].tolist(), source[hit].tolist(), strict=True):
                self._publisher.pin(row, register)
        elif hit.any():
            self._commands.copy(live[hit], source[hit])

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """See `StateManager.fork`."""
        index = self._table.index(row)
        sequence("request ids", ids, "fork(row, ['second', 'third'])")
        if self._table.unsettled[index] or self._table.finished[index]:
            raise InvalidArgument(
                f"row {index} is {'finished' if self._table.finished[index] else 'in an unsettled step'}: fork rows "
                "that run and whose last step is settled"
            )
        if not ids:
            return Fork(Rows.of((), self._table), [])
        source = int(self._file.origins(np.array([index]))[0])
        length = int(self._file.labels[source])
        kept = self._pages.count(self._pages.floor(length))
        partial = self._pages.count(length) - kept
        moved = self._direct_hits and not self._file.source[index]
        self._require(len(ids), partial * len(ids), self._per_request * len(ids) + moved)
        snapshot = self._share_live(index, length) if moved else None
        shared = self._pages.of(index)
        rows = self._take(ids)
        self._pages.start(rows, [shared[:kept]] * len(ids), [partial] * len(ids))
        source = snapshot.register if snapshot else source
        n = np.ones(len(ids), np.int64)
        self._start(rows, source * n, length * n, 0 * n)
        if snapshot:
            self._publisher.holders.drop(snapshot)  # for good once every row has made its first step
        copies = [(self._pages.of(new)[kept], shared[kept]) for new in rows.tolist()] if partial else []
        return Fork(Rows.of((self._table.handle(new) for new in rows.tolist()), self._table), copies)

    def _share_live(self, row: int, length: int) -> Snapshot:
        """Moves a row's state to a holder, from which the row itself reads it in its next step."""
        if not self._publisher.holders.free:
            raise InvalidArgument("no holder is free for the state that the rows share: drop a snapshot first")
        snapshot = self._publisher.hold(PER_ROW * row, length)
        self._commands.claim([PER_ROW * row])
        self._file.source[row] = snapshot.register
        self._commands.write(self._file.address("source", np.array([row])), [snapshot.register])
        self._publisher.pin(row, snapshot.register)
        return snapshot

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """See `StateManager.arrived`."""
        numbers = self._table.indices(rows)
        tokens = counts("lengths", lengths, len(numbers))
        live = numbers * PER_ROW
        begun = self._file.labels[live].astype(bool) | self._file.source[numbers].astype(bool)
        busy = self._table.unsettled[numbers].astype(bool) | self._table.finished[numbers]
        if (begun | busy).any() or (tokens < 1).any():
            raise InvalidArgument(
                f"rows {numbers.tolist()} with lengths {tokens.tolist()}: a state arrives in a row that has folded no "
                "token, is in no step and not finished, and stands for at least 1"
            )
        self._pages.require_room(numbers, tokens)
        self._file.labels[live] = self._table.confirmed[numbers] = tokens
        self._commands.write(self._file.address("labels", live), tokens)
        self._commands.submit()  # a later change of owners may not overtake the label
