"""Repeats each plan on the host, by the same rules as the kernels, so that the host's counts stay exact.

The *mirror* is the host's copy of labels, of which registers hold a slot, and of the columns of rows.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from memstate import logs
from memstate.kernels.rules import (
    Claim,
    Columns,
    Flags,
    Folded,
    due,
    fold,
    last_boundary,
    needs_claim,
    plan_snapshots,
    superseded,
)
from memstate.kernels.tables import REGISTERS_PER_ROW, Rules
from memstate.requests.steps import Batch
from memstate.requests.tracking.strategies import LazyPingPong, Tracking
from memstate.slots.registers import Longs, RegisterFile

LOG = logs.logger("tracking")
FEW = 8  # up to this number of rows, a loop over integers is faster than numpy
NO_LANES: Longs = np.zeros(0, np.int64)


class Mirror:
    """Makes the changes of each plan in the host's copy of a register file, for one strategy.

    Args:
        file: the register file.
        tracking: the tracking strategy.
        overlap: whether the next step can be planned before the previous step is settled.
        pad: number that a plan stores where there is no slot.
        unit: the length of a kept state is a multiple of this number of tokens.
        tail: largest number of tokens that a step keeps in the tail of a row; 0: rows have no tail.

    Attributes:
        lanes: number of lanes of a row.
        lanes_at_admission: number of lanes that get a slot when a request is admitted.
        doubled: False: no row has two lanes with slots. True: a row may have two, and the next settle looks for it.
        rules: the strategy's settings for the kernels.
        snapshots: number of snapshots taken since the start.
        degraded: number of claims for snapshots that found no slot since the start.
    """

    def __init__(
        self, file: RegisterFile, tracking: Tracking, overlap: bool, pad: int = 0, unit: int = 1, tail: int = 0
    ) -> None:
        self.file, self.tracking, self._unit = file, tracking, unit
        self.lanes, self.lanes_at_admission = tracking.lanes(overlap), tracking.lanes_at_admission(overlap)
        self.doubled = self.lanes_at_admission > 1
        overwrites = isinstance(tracking, LazyPingPong) and tracking.overwrite
        self.rules = Rules(int(tracking.strategy), self.lanes, int(tracking.every), overwrites, pad, tail)
        self._columns = Columns(file.held, file.labels, file.tracked, file.source)
        self._seen = NO_LANES  # rows of the newest step with tails
        self.snapshots = 0
        self.degraded = 0
        self._told = logs.Repeats(LOG, sums=["refused"])

    def reaches(self, length: Longs, after: Longs) -> bool:
        """Returns whether a plan finds a row at a boundary, which 0 is not. False if the strategy takes no snapshots.

        Args:
            length: tokens before the step, `row`.
            after: tokens after the step, `row`.
        """
        at, every = length if self.tracking.reads_old_slot else after, self.rules.every
        if not self.lanes or at.size <= FEW:
            return self.lanes > 0 and 0 in map(every.__rmod__, filter(None, at.tolist()))
        past = at % every
        return not past[past.argmin()] and bool(at[past == 0].any())

    def plan(
        self, batch: Batch, length: Longs, after: Longs, limit: int, due: bool, reading: bool, label: Longs,
        free: int | None = None,
    ) -> int:  # fmt: skip
        """Plans rows that have a live slot, no row twice.

        Args:
            batch: the rows of the step, looked up.
            length: tokens before the step, `row`.
            after: tokens after the step, `row`.
            limit: largest number of claims for snapshots.
            due: whether a row stands at a boundary, see `reaches`.
            reading: whether a row reads another register than its live one.
            label: tokens of the states after the step, `row`.
            free: number of slots that were free when the device planned; None: the number that is free now.

        Returns:
            Number of snapshots that the step takes.
        """
        taken = 0
        if due:
            lanes = plan_snapshots(self._columns, self.rules, batch.rows, length, after, self._claims(limit, free))
            taken = int(np.count_nonzero(lanes))
            self.snapshots += taken
        self.file.labels[batch.live] = label
        self.file.longest += batch.most
        if reading:
            self.file.source[batch.rows] = 0
        return taken

    def fold(self, batch: Batch, label: Longs, defer: int = 0) -> Folded:
        """Decides what a step does with the tails of its rows, as the device does.

        Args:
            batch: the rows of the step, looked up.
            label: tokens of the states that the step reads, `row`.
            defer: if the tail and the step of a row have fewer tokens than this, none is added to the state.
        """
        pending, drafts = self.file.pending[batch.rows], batch.tokens - batch.certain
        return fold(self._columns, self.rules, batch.rows, label, pending, batch.tokens, drafts, defer)

    def plan_late(
        self, batch: Batch, label: Longs, source: NDArray[np.int32], limit: int, free: int, defer: int
    ) -> int:
        """Repeats a plan of rows with tails that the device made when the host did not know the lengths of the rows.

        By now, `pending` has the real tokens that were in the tails at the plan.

        Args:
            batch: the rows of the step, looked up.
            label: tokens of the states that the step reads, `row`.
            source: for each row, the register that it read instead of its live one, 0 for none, `row`.
            limit: largest number of claims for snapshots.
            free: number of slots that were free at the plan.
            defer: if the tail and the step of a row had fewer tokens than this, none was added to the state.

        Returns:
            Number of snapshots that the step takes.
        """
        self.file.source[batch.rows] = source
        folded = self.fold(batch, label, defer)
        taken = self.plan(batch, *folded.due(label), limit, self.lanes > 0, True, folded.after, free)
        self.folded(batch, folded)
        return taken

    def folded(self, batch: Batch, folded: Folded) -> None:
        """Notes the tokens that a planned step leaves in the tails of its rows."""
        self.forget_newest(batch.rows)
        self.file.newest[batch.rows] = folded.newest
        self.file.pending[batch.rows] = folded.pending + np.where(folded.newest > 0, batch.certain, 0)

    def forget_newest(self, rows: Longs) -> None:
        """Empties `newest`, because a step of these rows has made the accepted tokens of the step before pending."""
        self.file.newest[self._seen] = 0
        self._seen = rows

    def _claims(self, limit: int, then: int | None = None) -> Claim:
        """Returns the function by which one plan claims slots for snapshots, within its slot budget.

        Args:
            limit: largest number of claims.
            then: number of slots that were free when the device planned; None: the number that is free now.
        """
        allocator = self.file.allocator

        def claim(need: Flags) -> Flags:
            wanted = np.flatnonzero(need)
            if then is None:
                allocator.confirm(allocator.reserve + wanted.size)
            free = allocator.free if then is None else then
            granted = max(0, min(free - allocator.reserve, limit, wanted.size))
            allocator.free -= granted
            allocator.claimed += granted
            self.degraded += wanted.size - granted
            if granted < wanted.size and LOG.isEnabledFor(logging.INFO):
                room = {"free": free - granted, "reserve": allocator.reserve, "limit": limit}
                self._told.event(logging.INFO, "degraded", refused=int(wanted.size - granted), **room)
            given = np.zeros(need.size, bool)
            given[wanted[:granted]] = True
            self.doubled |= granted > 0
            return given

        return claim

    def claims(self, rows: Longs, length: Longs, after: Longs, most: bool = False) -> int:
        """Returns how many slots the next plan of these rows would claim for snapshots if enough were free.

        Args:
            rows: numbers of the rows.
            length: tokens of their states before the step, `row`.
            after: tokens of their states after the step, `row`.
            most: whether the states may end at any length up to `after`. Then the result is the largest possible
                number.
        """
        if not self.lanes:
            return 0
        if most and not self.tracking.reads_old_slot:
            past = last_boundary(np.maximum(length, self._columns.tracked[rows]), after, self.rules.every)
            at = past.nonzero()[0]
        else:
            at = due(self._columns, self.rules, rows, length if self.tracking.reads_old_slot else after)
        return int(np.count_nonzero(needs_claim(self._columns, self.rules, rows[at])))

    def lengths(self, rows: Longs) -> Longs:
        """Returns the lengths of rows."""
        return self.file.lengths(rows)

    def superseded(self, rows: Longs, known: NDArray[np.integer]) -> Longs:
        """Returns the lanes that a settle of these rows releases.

        Args:
            rows: numbers of the rows; an axis `row`.
            known: confirmed length of each of these rows; an axis `row`.
        """
        if not self.releases:
            return NO_LANES
        held, end = self.file.held, self.file.first_holder
        both = held[1:end:REGISTERS_PER_ROW] & held[2:end:REGISTERS_PER_ROW]  # a row with one snapshot has no older one
        self.doubled = bool(both.any())
        both = both[rows]
        return superseded(self._columns, rows[both], known[both]) if both.any() else NO_LANES

    @property
    def releases(self) -> bool:
        """Whether the next settle can release lanes."""
        return self.tracking.releases_at_settle and self.doubled

    def answer(self, row: int, known: int, ended: bool) -> int:
        """Returns the register with the longest state that can be published: of 1..known tokens that fill whole pages.

        The candidates are the lanes and, if the row has ended, the live register. 0: none has such a state.
        """
        held, label, first = self.file.held_at, self.file.label_at, REGISTERS_PER_ROW * row
        answer, most = 0, 0
        for register in range(first if ended else first + 1, first + 1 + self.lanes):
            if held[register] and most < label[register] <= known and not label[register] % self._unit:
                answer, most = register, label[register]
        return answer
