"""Tests the copies of states and KV that `serve` keeps of a batch from step to step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms

pytest.importorskip("transformers")

import memstate.integrations.transformers as mst
from memstate.integrations.transformers.paged import BatchColumns
from memstate.integrations.transformers.states import goes_on
from tests.integrations.servers import server_of

LAYOUT = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=1)


def test_a_batch_that_stays_reads_neither_slots_nor_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    at = server_of()
    mem = at.mem
    for number in range(2):
        at.submit(mst.Prompt([5, 17, 40 + number], number, most=12))
    at.step()
    before = mem.stats()
    for owner, name in ((ms.Planes, "gather"), (BatchColumns, "read")):
        monkeypatch.setattr(owner, name, None)  # a call would fail
    for _ in range(8):
        at.step()
    after = mem.stats()
    assert (after.snapshots - before.snapshots, after.copied_bytes) == (4, 0)
    at.close()


def test_a_step_goes_on_only_with_the_same_requests_in_the_same_order_at_the_same_lengths() -> None:
    mem = ms.StateManager(LAYOUT, slots=8, max_requests=2, backend="reference")

    def planned(rows: Any, tokens: int = 1) -> Any:
        step = mem.plan(rows, tokens)
        mem.settle(step)
        return step

    rows = list(mem.admit([ms.Request("a"), ms.Request("b")]))
    first, second, turned = planned(rows), planned(rows), planned(rows[::-1])
    last, fewer, behind = planned(rows), planned(rows[:1]), planned(rows)
    assert goes_on(first, second)
    assert not goes_on(second, turned) and not goes_on(turned, last)
    assert not goes_on(last, fewer) and not goes_on(last, behind) and not goes_on(first, last)
    mem.end(rows)
    others = planned(list(mem.admit([ms.Request("c"), ms.Request("d")])))
    assert np.array_equal(others.numbers, first.numbers)
    assert not goes_on(replace(first, after=others.before), others)  # now other requests have the same rows
