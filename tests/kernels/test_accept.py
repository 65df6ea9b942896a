"""Accept on random register files: kernel and reference agree bit for bit, and both follow the rules as told here."""

import random

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import tracking
from memstate.kernels.tables import Accepted, Count, Registers, Rules, StepRecord, Strategy
from tests.kernels import test_plan_kernel as plans
from tests.kernels.test_plan_kernel import (
    BATCHES,
    NO_LIMIT,
    POISON,
    VARIANTS,
    batch_packet,
    copy_of,
    same,
    stale_marks,
    stale_record,
)


def stale_outcome(batch: int, like: Tensor) -> Accepted:
    return Accepted(*(torch.full((batch,), POISON, dtype=torch.int32, device=like.device) for _ in Accepted._fields))


class Case:
    """A planned window on a random file, and what was accepted of it: nothing where the row was reused since."""

    def __init__(self, backend: Backend, seed: int, variant: str, batch: int) -> None:
        rng = random.Random(seed)
        strategy, lanes, in_place = VARIANTS[variant]
        self.file = plans.RandomFile(rng, backend, batch, lanes)
        self.table = self.file.file.table
        self.rules = Rules(strategy, lanes, self.file.every, in_place)
        self.limit = rng.choice((NO_LIMIT, NO_LIMIT, 0, 2))
        rows, tokens = plans.random_batch(rng, self.file, batch)
        self.record = stale_record(batch, self.table.cells)
        before = copy_of(self.table)
        packet = batch_packet((rows, tokens), self.limit, self.table.cells)
        marks = stale_marks(1, self.table.cells)
        tracking.plan(self.table, packet, self.record, marks, self.rules._replace(strategy=Strategy.WINDOW))
        assert same(before, self.table)  # a window changes nothing until it is accepted
        self.accepted = [rng.choice((0, n, n, max(0, n - 1), n + 1)) for n in self.record.tokens.tolist()]

    def run(self, backend: Backend, table: Registers) -> tuple[StepRecord, Accepted]:
        record = StepRecord(*(column.clone() for column in self.record))
        outcome = stale_outcome(len(self.accepted), table.cells)
        backend.accept(table, batch_packet((self.accepted,), self.limit, table.cells), record, outcome, self.rules)
        return record, outcome


@pytest.mark.sample(24)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_G2_kernel_and_reference_accept_alike(backend: Backend, variant: str, batch: int) -> None:
    case = Case(backend, 7 * batch + len(variant), variant, batch)
    here, there = copy_of(case.table), copy_of(case.table)
    got, expected = case.run(backend, here), case.run(Backend("reference", backend.device), there)
    assert same(here, there)
    for left, right in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(30))
def test_B33_accept_follows_the_rules(variant: str, seed: int) -> None:
    """Row by row: labels, lanes and slots are what the rules say, told from the state before."""
    case = Case(Backend("reference"), seed, variant, 24)
    before, after = copy_of(case.table), case.table
    record, outcome = case.run(Backend("reference"), after)
    free, every = case.file.free(), case.rules.every
    left = min(int(before.counters[Count.FREE]) - int(before.counters[Count.RESERVE]), case.limit)  # optional claims
    lowest = sorted(slot for slot in range(1, before.capacity + 1) if int(before.bitmap[slot // 32]) >> (slot % 32) & 1)
    for i, row in enumerate(record.rows.tolist()):
        n = min(case.accepted[i], int(case.record.tokens[i]))
        got = {name: int(column[i]) for name, column in (record._asdict() | outcome._asdict()).items()}
        if n <= 0 or not row:
            assert [got[k] for k in ("write", "snapshot", "accepted", "crossed")] == [0] * 4
            continue
        slots, labels = ([int(v) for v in column[3 * row : 3 * row + 3]] for column in (before.slots, before.labels))
        source, tracked = (int(column[row]) for column in (before.source, before.tracked))
        length = int(before.labels[source]) if source else labels[0]
        end = length + n
        reach = end - (case.rules.strategy == Strategy.REDIRECT)
        inside = [m for m in range(length + 1, reach + 1) if m % every == 0]
        mark = inside[-1] if inside and case.rules.lanes else 0
        lanes = list(range(1, 1 + case.rules.lanes))
        write, snapshot, new = slots[0], 0, tracked
        turns = case.rules.strategy == Strategy.REDIRECT and not mark and not source
        turns = turns and length % every == 0 and length > tracked
        lane = None
        if mark or turns:
            idle = [k for k in lanes if slots[k] and labels[k] == 0 and case.rules.strategy != Strategy.REDIRECT]
            empty = [k for k in lanes if not slots[k]]
            if idle:
                lane = idle[0]
            elif empty and left > 0:
                lane, left = empty[0], left - 1
                slots[lane] = lowest.pop(0)
            elif not empty:
                lane = min(lanes, key=lambda k: labels[k])
            elif case.rules.in_place and len(empty) < len(lanes):
                lane = next(k for k in lanes if slots[k])
        if lane and turns:
            slots[0], slots[lane] = slots[lane], slots[0]
            labels[lane], new, write = length, length, slots[0]
        elif lane:
            snapshot, labels[lane] = slots[lane], mark
            new = mark if case.rules.strategy == Strategy.REDIRECT else tracked
        labels[0] = end
        assert [int(v) for v in after.slots[3 * row : 3 * row + 3]] == slots
        assert [int(v) for v in after.labels[3 * row : 3 * row + 3]] == labels
        assert (int(after.tracked[row]), int(after.source[row])) == (new, 0)
        assert got["read"] == int(before.slots[source or 3 * row])
        assert (got["write"], got["snapshot"]) == (write, snapshot)
        assert (got["accepted"], got["crossed"]) == (n, mark - length if snapshot else 0)
    assert sorted(free) == lowest and int(after.counters[Count.FREE]) == len(lowest)


@pytest.mark.parametrize("rows", [[0], [0, -1, 0]])
def test_B14_padding_alone_changes_nothing(backend: Backend, rows: list[int]) -> None:
    case = Case(backend, 3, "redirect", 4)
    record, outcome = stale_record(len(rows), case.table.cells), stale_outcome(len(rows), case.table.cells)
    like, nothing = case.table.cells, [0] * len(rows)
    packet, rules = batch_packet((rows, nothing), NO_LIMIT, like), Rules(Strategy.WINDOW, 0, 4, False)
    backend.plan(case.table, packet, record, stale_marks(1, like), rules)
    before = copy_of(case.table)
    packet = batch_packet(([3] * len(rows),), NO_LIMIT, like)
    backend.accept(case.table, packet, record, outcome, Rules(Strategy.REDIRECT, 1, 4, False))
    assert same(before, case.table)
    for column in (*record, *outcome):
        assert not column.any()
