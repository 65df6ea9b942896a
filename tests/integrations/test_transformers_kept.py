"""What `serve` keeps of a batch from step to step: copies of states and KV, beside runs that read slots and pages anew.

Slots and pages are written in every step. So a run that keeps nothing must come to the same logits, whatever joins,
ends, is aborted or fails in between. Freed slots and fresh tensors hold poison.
"""

from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import managed

pytest.importorskip("transformers")

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import paged, server
from memstate.integrations.transformers.paged import Columns
from memstate.integrations.transformers.states import goes_on
from tests.integrations.servers import hooked, raising, server_of

CLOSE = 1e-5  # of the largest logit: copies are bit for bit, but tensors with room have other strides
FAMILIES = ("qwen3_next", "lfm3", "inkling_text", "glm5_next", "mamba2")  # all, windows, hybrids, an index, no KV
LAYOUT = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=1)


def played(family: str, seed: int, keep: bool, tracking: Any) -> tuple[list[Any], list[Tensor]]:
    """Events and logits of a random schedule."""
    model, random, logits, events = tiny(family), Random(seed), list[Tensor](), list[Any]()
    mem, choose = managed(model, tracking=tracking), server.choose
    at = mst.Server(model, mem, chunk=6)
    at._batches.states._keep = keep

    def watched(samplers: Any, tokens: Any, found: Tensor) -> Any:
        logits.append(found.clone())
        return choose(samplers, tokens, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "choose", watched)
        for step in range(22):
            if step % 5 == 0:
                length = random.choice([1, 4, 7])
                at.submit(mst.Prompt([random.randint(3, 96) for _ in range(length)], step, most=random.randint(5, 14)))
            if random.random() < 0.08:
                events += at.abort(5 * random.randint(0, step // 5))
            fails = random.random() < 0.06 and at.busy
            with ExitStack() as stack:
                if fails:
                    stack.enter_context(hooked(model, raising(ArithmeticError)))
                    stack.enter_context(pytest.raises(ArithmeticError))
                events += at.step()
    at.close()
    mem.audit().raise_if_leaking()
    return events, logits


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_slots_and_pages_have(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "ROOM", 3)  # full soon: then the pages are read again, and must have every column
    tracking = (ms.Redirect(every=4), ms.PingPong(every=4), ms.LazyPingPong(every=4))[seed]
    (events, logits), (expected, anew) = (played(family, seed, keep, tracking) for keep in (True, False))
    assert events == expected and len(logits) == len(anew) > 10
    for one, other in zip(logits, anew, strict=True):
        assert float((one - other).abs().max()) <= CLOSE * float(other.abs().max())


def test_a_batch_that_stays_reads_neither_slots_nor_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    at = server_of()
    mem = at.mem
    for number in range(2):
        at.submit(mst.Prompt([5, 17, 40 + number], number, most=12))
    at.step()
    before = mem.stats()
    for owner, name in ((ms.Planes, "gather"), (Columns, "read")):
        monkeypatch.setattr(owner, name, None)  # nobody may call it
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
    assert not goes_on(replace(first, after=others.before), others)  # other requests in the same rows
