"""Accept on random register files: kernel and reference agree bit for bit, and both follow the rules as told here."""

import random

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import tracking
from memstate.kernels.tables import Accepted, Registers, Rules, StepRecord, Strategy
from tests.kernels import test_plan_kernel as plans
from tests.kernels.test_plan_kernel import (
    BATCHES,
    NO_LIMIT,
    POISON,
    VARIANTS,
    assert_follows,
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


@pytest.mark.sample(60)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(30))
def test_B33_accept_follows_the_rules(variant: str, seed: int) -> None:
    """Row by row labels, lanes and slots are what the model makes of the state before."""
    case = Case(Backend("reference"), seed, variant, 24)
    _, lanes, in_place = VARIANTS[variant]
    model = case.file.model(variant.split(" ")[0], lanes, in_place)
    rows, tokens = case.record.rows.tolist(), case.record.tokens.tolist()
    step = model.plan([(model.rows.get(row), [7] * n) for row, n in zip(rows, tokens, strict=True)], case.limit, True)
    accepted = [min(n, most) for n, most in zip(case.accepted, tokens, strict=True)]
    model.accept(step, accepted, [False] * len(rows), case.limit)
    record, outcome = case.run(Backend("reference"), case.table)
    assert_follows(model, case.file)
    labels = {slot: model.label[register] for register, slot in model.slot.items()}
    for i, (entry, n) in enumerate(zip(step.entries, accepted, strict=True)):
        real = bool(entry.row and n)
        found = [int(column[i]) for column in (record.read, record.write, record.snapshot, *outcome)]
        crossed = labels[entry.snapshot] - entry.before if entry.snapshot else 0
        assert found == [entry.read, entry.write * real, entry.snapshot, n * real, crossed]


def test_B14_an_accept_takes_rows_without_a_state_for_padding(backend: Backend) -> None:
    """The first row beyond the table, and a row whose live register is empty."""
    case = Case(backend, 3, "redirect", 8)
    table, entries = case.table, case.record.rows
    at = entries.nonzero().flatten()[:2].tolist()
    empty = next(row for row in range(1, table.source.numel()) if row not in entries.tolist())
    table.slots[3 * empty] = 0
    entries[at[0]], entries[at[1]] = table.source.numel(), empty
    case.accepted = [int(i in at) for i in range(len(entries))]
    before = copy_of(table)
    record, outcome = case.run(backend, table)
    assert same(before, table)
    assert not any(column.any() for column in (record.write, record.snapshot, *outcome))
