"""Decides steps of a few rows in plain integers: of a decision in arrays of one entry, nearly all time is numpy's.

It only knows steps at which no snapshot can be due, of rows that read their live slots. For another step it says so and
has changed nothing; then the mirror decides in arrays.
"""

from memstate.checks import INT32_MAX
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.steps import Batch
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.registers import Longs

FEW = 8  # with more rows, arrays are faster
Columns = tuple[list[int], list[int], list[int]]  # rows, tokens, certain tokens
Folds = list[tuple[int, int, int, int]]  # of rows: number, tokens of the state, certain tokens in the tail, `newest`


class Few:
    """Decides what plans of a few rows do with tails, and notes it in the host's copy of a register file.

    Args:
        mirror: does the same for all steps.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror, self._file, self._tail = mirror, mirror.file, mirror.rules.tail
        self._every = mirror.rules.every if mirror.lanes else INT32_MAX + 1
        self._early = int(mirror.tracking.reads_old_slot)
        self._last: tuple[Batch | None, Columns | None] = None, None

    def columns(self, batch: Batch) -> Columns | None:
        """Returns rows, tokens and certain tokens of a batch. None: it has too many rows, or padding."""
        if self._last[0] is not batch:
            knows = 0 < len(batch.numbers) <= FEW and type(batch.real) is slice and batch.distinct
            lists = (batch.rows.tolist(), batch.tokens.tolist(), batch.certain.tolist()) if knows else None
            self._last = batch, lists
        return self._last[1]

    def fold(self, columns: Columns, label: Longs, pending: Longs, defer: int, late: bool = False) -> Folds | None:
        """Decides what a step does with the tails of its rows; see `rules.fold`.

        Args:
            columns: rows, tokens and certain tokens of the step.
            label: tokens of the states that the step reads, `row`.
            pending: real tokens in the tails, `row`.
            defer: if the tail and the step of a row have fewer tokens than this, none is added to the state.
            late: whether the step before, of the same batch, is not accepted: all drafts in it may be real, too.

        Returns:
            None: a snapshot may be due, or a row has more tokens with drafts than its tail keeps.
        """
        every, early, tail, tracked = self._every, self._early, self._tail, self._file.tracked_at
        folds: Folds = []
        for row, n, certain, state, real in zip(*columns, label.tolist(), pending.tolist(), strict=True):
            length, drafted = state + real, n > certain
            reach = length + 2 * n - certain if late else length + n
            if reach // every * every > max(state - early, tracked[row]) or (drafted and n > tail):
                return None
            waits = 0 < n < defer - real
            if drafted or (waits and n <= tail):
                after = state if waits else length
                folds.append((row, after, length - after + certain, n))
            else:
                folds.append((row, length + n, 0, 0))
        return folds

    def note(self, folds: Folds, batch: Batch) -> None:
        """Notes what a step has done with the tails of its rows."""
        file = self._file
        file.longest += batch.most
        self._mirror.forget_newest(batch.rows)
        for row, after, pending, newest in folds:
            file.label_at[row * REGISTERS_PER_ROW], file.pending_at[row] = after, pending
            file.newest_at[row] = newest


def fits(columns: Columns, accepted: list[int]) -> bool:
    """Returns whether numbers can be the accepted ones of a step with these rows, tokens and certain tokens."""
    if len(accepted) != len(columns[0]):
        return False
    for given, _, n, certain in zip(accepted, *columns, strict=True):
        if type(given) is not int or not certain <= given <= n:
            return False
    return True
