"""Repeats plan and settle on the host's mirror, by the same rules as the kernels, so that its counts stay exact.

It uses the lengths that the host knows. Whole batches are numpy; Python runs once for each row at a boundary only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memstate.errors import InvalidArgument
from memstate.kernels.rules import Claim, Columns, accept_snapshot, needs_claim, plan_snapshot, superseded
from memstate.kernels.tables import REGISTERS_PER_ROW, Rules
from memstate.requests.tracking.base import Tracking
from memstate.slots.packet import FEW
from memstate.slots.registers import Longs, RegisterFile


class Mirror:
    """Keeps the mirror of a register file in step with plan and settle of one strategy.

    Args:
        file: the register file.
        tracking: the strategy.
        overlap: the next step is planned before the last one is settled.

    Attributes:
        lanes: lane registers of a row.
        rules: the strategy's settings for the kernels.
        snapshots: taken since the start.
        degraded: optional claims refused since the start.
    """

    def __init__(self, file: RegisterFile, tracking: Tracking, overlap: bool) -> None:
        self.file, self.tracking = file, tracking
        self.lanes = tracking.lanes(overlap)
        self.rules = Rules(int(tracking.strategy), self.lanes, int(tracking.every), tracking.in_place)
        self._columns = Columns(file.held, file.labels, file.tracked, file.snapshot_at, file.source)
        self.snapshots = 0  # taken since the start
        self.degraded = 0  # optional claims refused since the start

    def plan(self, rows: Longs, length: Longs, after: Longs, limit: int) -> None:
        """Plans distinct rows that hold a state.

        Args:
            rows: `row`.
            length: tokens before the step, `row`.
            after: tokens after the step, `row`.
            limit: number of optional claims.
        """
        if at := self._at_boundary(self._due(rows, length, after)):
            claim = self._claims(len(rows), limit)
            for i in at:
                lane = plan_snapshot(self._columns, self.rules, int(rows[i]), int(length[i]), int(after[i]), claim)
                self.snapshots += lane > 0
        self._advance(rows, after)

    def accept(self, rows: Longs, accepted: Longs, limit: int) -> Longs:
        """Moves distinct rows on by the accepted tokens of their windows; returns their lengths after that, `row`."""
        length = self.lengths(rows)
        after = length + accepted
        if at := self._at_boundary(self._crossed(rows, length, after)):
            claim = self._claims(len(rows), limit)
            for i in at:
                lane, _ = accept_snapshot(self._columns, self.rules, int(rows[i]), int(length[i]), int(after[i]), claim)
                self.snapshots += lane > 0
        self._advance(rows, after)
        return after

    def _at_boundary(self, rows: NDArray[np.bool_]) -> list[int]:
        """Returns the indices of rows that take a snapshot; none where the strategy takes none."""
        at: list[int] = np.flatnonzero(rows).tolist() if self.lanes else []
        return at

    def _advance(self, rows: Longs, after: Longs) -> None:
        self.file.labels[rows * REGISTERS_PER_ROW] = after
        self.file.source[rows] = 0

    def _claims(self, rows: int, limit: int) -> Claim:
        """Returns a function that takes one optional slot after the other, as far as the budget of a plan goes."""
        allocator = self.file.allocator
        allocator.confirm(allocator.reserve + rows)
        budget = max(0, min(allocator.free - allocator.reserve, limit))

        def claim() -> int:
            nonlocal budget
            if budget < 1:
                self.degraded += 1
                return 0
            budget -= 1
            allocator.free -= 1
            return 1

        return claim

    def _due(self, rows: Longs, length: Longs, after: Longs) -> NDArray[np.bool_]:
        """Returns which rows are at a boundary: a multiple of `every`, or the row's `snapshot_at`."""
        at = length if self.tracking.reads_old_slot else after
        due: NDArray[np.bool_] = at % self.tracking.every == 0
        extra = self.file.snapshot_at[rows]
        if extra.any():
            due |= at == extra
        return due

    def _crossed(self, rows: Longs, length: Longs, after: Longs) -> NDArray[np.bool_]:
        """Returns which rows a window takes from, to or across a boundary."""
        every, snapshot_at = self.tracking.every, self.file.snapshot_at[rows]
        crossed: NDArray[np.bool_] = (
            (length // every != after // every)
            | (length % every == 0)
            | ((length <= snapshot_at) & (snapshot_at <= after))
        )
        return crossed

    def claims(self, rows: Longs, length: Longs, tokens: Longs, window: bool) -> int:
        """Returns the optional claims that the next plan of these rows would make if slots were free.

        With `window` it is the most that the accept of a window would make.
        """
        at = self._at_boundary((self._crossed if window else self._due)(rows, length, length + tokens))
        return sum(needs_claim(self._columns, self.rules, int(rows[i]), int(length[i]), window) for i in at)

    def require_within_boundary(self, rows: Longs, length: Longs, after: Longs) -> None:
        """Requires that no step crosses a boundary, because its snapshot would be lost.

        Raises:
            InvalidArgument: a row's step crosses one.
        """
        file, every = self.file, self.tracking.every
        if not self.lanes:
            return
        crossed = length % every + (after - length) > every
        extra = file.snapshot_at[rows]
        if extra.any():
            crossed |= (length < extra) & (extra < after)
        for i in np.flatnonzero(crossed)[:1] if crossed.any() else ():
            raise InvalidArgument(
                f"row {rows[i]}: a chunk from {length[i]} to {after[i]} crosses a boundary "
                f"(every={every}, snapshot_at={extra[i]}): end it at next_boundary(row)"
            )

    def own_lengths(self, rows: Longs) -> Longs:
        """Returns the tokens folded into the states of rows that read their own register."""
        return self.file.labels[rows * REGISTERS_PER_ROW].astype(np.int64)

    def lengths(self, rows: Longs) -> Longs:
        """Returns the tokens folded into the states of rows."""
        return self.file.labels[self.file.origins(rows)].astype(np.int64)

    def superseding(self, rows: Longs) -> bool:
        """Returns whether a settle of these rows could release a lane. One lane alone supersedes nothing."""
        return bool(self._both(rows).any())

    def _both(self, rows: Longs) -> NDArray[np.bool_]:
        lane = rows * REGISTERS_PER_ROW + 1
        both: NDArray[np.bool_] = self.file.held[lane] & self.file.held[lane + 1]
        return both

    def settle(self, rows: Longs, known: NDArray[np.integer]) -> None:
        """Settles rows whose lengths up to `known` are real."""
        if self.tracking.releases_at_settle:
            for i in np.flatnonzero(self._both(rows)):
                self.file.allocator.free += len(superseded(self._columns, int(rows[i]), int(known[i])))

    def answer(self, row: int, known: int, ended: bool) -> int | None:
        """Returns the register with the most tokens in 1..known: a lane, or live too if the row has ended."""
        first = REGISTERS_PER_ROW * row
        candidates: Sequence[int] = range(first if ended else first + 1, first + 1 + self.lanes)
        valid = [r for r in candidates if self.file.held[r] and 1 <= self.file.labels[r] <= known]
        return max(valid, key=lambda r: int(self.file.labels[r]), default=None)

    def answers(self, rows: Longs, known: Longs, ended: bool) -> Longs:
        """Returns the `answer` of each row, 0 for none: `row`."""
        if len(rows) <= FEW:
            bounds = zip(rows.tolist(), known.tolist(), strict=True)
            return np.array([self.answer(row, bound, ended) or 0 for row, bound in bounds], np.int64)
        registers = rows[:, None] * REGISTERS_PER_ROW + np.arange(0 if ended else 1, 1 + self.lanes)
        if not registers.size:
            return np.zeros(len(rows), np.int64)
        labels = self.file.labels[registers]
        labels = np.where(self.file.held[registers] & (labels <= known[:, None]), labels, 0)
        at = np.arange(len(rows)), labels.argmax(1)
        return np.where(labels[at] > 0, registers[at], 0)
