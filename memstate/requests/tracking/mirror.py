"""Repeats plans on the host's mirror, by the same rules as the kernels, so that its counts stay exact.

It uses the lengths that the host knows.
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
FEW = 8  # rows that cost less as plain integers than as an array
NO_LANES: Longs = np.zeros(0, np.int64)


class Mirror:
    """Keeps the mirror of a register file in step with the plans of one strategy.

    Args:
        file: the register file.
        tracking: the strategy.
        overlap: the next step is planned before the last one is settled.
        pad: what a plan stores where there is no slot.
        unit: tokens of which the length of a kept state is a multiple.
        tail: tokens that a step may keep in the tail of a row; 0: rows have no tail.

    Attributes:
        lanes: lane registers of a row.
        lanes_at_admission: those that are filled when a request is admitted.
        doubled: False: no row holds two lanes. True: one may, and the next settle looks.
        rules: the strategy's settings for the kernels.
        snapshots: taken since the start.
        degraded: optional claims refused since the start.
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
        self.snapshots = 0  # taken since the start
        self.degraded = 0  # optional claims refused since the start
        self._told = logs.Repeats(LOG, sums=["refused"])

    def reaches(self, length: Longs, after: Longs) -> bool:
        """Returns whether a row stands at a boundary in a plan, where the strategy takes snapshots.

        Args:
            length: tokens before the step, `row`.
            after: tokens after the step, `row`.
        """
        at, every = length if self.tracking.reads_old_slot else after, self.rules.every
        if not self.lanes or at.size <= FEW:
            return self.lanes > 0 and 0 in map(every.__rmod__, at.tolist())
        past = at % every
        return not past[past.argmin()]

    def plan(
        self, batch: Batch, length: Longs, after: Longs, limit: int, due: bool, reading: bool, label: Longs
    ) -> int:
        """Plans distinct rows that hold a state.

        Args:
            batch: the rows.
            length: tokens before the step, `row`.
            after: tokens after the step, `row`.
            limit: number of optional claims.
            due: whether a row stands at a boundary, see `reaches`.
            reading: whether some rows read another register than their own.
            label: tokens of the states after the step, `row`.

        Returns:
            Number of snapshots that the step takes.
        """
        taken = 0
        if due:
            lanes = plan_snapshots(self._columns, self.rules, batch.rows, length, after, self._claims(limit))
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
            batch: the rows.
            label: tokens of their states.
            defer: tokens below which no tail is folded.
        """
        drafts = np.zeros_like(batch.tokens) if batch.drafts is None else batch.drafts
        pending = self.file.pending[batch.rows]
        return fold(self._columns, self.rules, batch.rows, label, pending, batch.tokens, drafts, defer)

    def plan_late(
        self, batch: Batch, label: Longs, pending: Longs, source: NDArray[np.int32], limit: int, free: int, defer: int
    ) -> int:
        """Plans rows with tails that the device has planned before, when the host did not know their lengths.

        Args:
            batch: the rows.
            label: tokens of the states that the step reads, `row`.
            pending: real tokens in the tails then, `row`.
            source: what the rows of the file read then.
            limit: number of optional claims.
            free: slots that were free then.
            defer: tokens below which no tail was folded.

        Returns:
            Number of snapshots that the step takes.
        """
        columns, taken = self._columns._replace(source=source), 0
        drafts = np.zeros_like(batch.tokens) if batch.drafts is None else batch.drafts
        folded = fold(columns, self.rules, batch.rows, label, pending, batch.tokens, drafts, defer)
        if self.lanes:
            claim = self._claims(limit, free)
            lanes = plan_snapshots(columns, self.rules, batch.rows, *folded.due(label), claim)
            taken = int(np.count_nonzero(lanes))
            self.snapshots += taken
        self.file.labels[batch.live] = folded.after
        self.folded(batch, folded)
        return taken

    def folded(self, batch: Batch, folded: Folded) -> None:
        """Notes what a planned step leaves in the tails of its rows."""
        self.file.newest[:] = 0  # the plan has counted what was accepted of the step before
        self.file.newest[batch.rows] = folded.newest
        certain = batch.tokens if batch.drafts is None else batch.tokens - batch.drafts
        self.file.pending[batch.rows] = folded.pending + np.where(folded.newest > 0, certain, 0)

    def _claims(self, limit: int, then: int | None = None) -> Claim:
        """Returns what takes the optional slots of one plan, as far as its budget goes.

        Args:
            limit: the most claims.
            then: slots that were free when the device made them; None: those that are free now.
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
        """Returns the optional claims that the next plan of these rows would make if slots were free.

        Args:
            rows: the rows.
            length: tokens of their states before the step, `row`.
            after: tokens of their states after the step, `row`.
            most: the states may end at any length up to `after`; count the most claims.
        """
        if not self.lanes:
            return 0
        if most and not self.tracking.reads_old_slot:
            at = last_boundary(np.maximum(length, self._columns.tracked[rows]), after, self.rules.every) > 0
        else:
            at = due(self._columns, self.rules, rows, length if self.tracking.reads_old_slot else after)
        return int(np.count_nonzero(needs_claim(self._columns, self.rules, rows[at])))

    def lengths(self, rows: Longs) -> Longs:
        """Returns the tokens of rows."""
        return self.file.lengths(rows)

    def superseded(self, rows: Longs, known: NDArray[np.integer]) -> Longs:
        """Returns the lanes that a settle of these rows releases.

        Args:
            rows: `row`.
            known: length up to which each row is real, `row`.
        """
        if not self.releases:
            return NO_LANES
        held, end = self.file.held, self.file.first_holder
        both = held[1:end:REGISTERS_PER_ROW] & held[2:end:REGISTERS_PER_ROW]  # one lane alone supersedes nothing
        self.doubled = bool(both.any())
        both = both[rows]
        return superseded(self._columns, rows[both], known[both]) if both.any() else NO_LANES

    @property
    def releases(self) -> bool:
        """Whether a settle can release lanes."""
        return self.tracking.releases_at_settle and self.doubled

    def answer(self, row: int, known: int, ended: bool) -> int:
        """Returns the register with the most tokens in 1..known that can be kept: whole pages of them.

        It is a lane, or live too if the row has ended; 0: none.
        """
        held, label, first = self.file.held_at, self.file.label_at, REGISTERS_PER_ROW * row
        found, most = 0, 0
        for register in range(first if ended else first + 1, first + 1 + self.lanes):
            if held[register] and most < label[register] <= known and not label[register] % self._unit:
                found, most = register, label[register]
        return found
