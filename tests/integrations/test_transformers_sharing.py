"""Tests the forwards of `serve`: prompts share them, with pads, and they keep copies from step to step."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import memstate as ms
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_served import TEXT

pytest.importorskip("transformers")

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import steps
from memstate.integrations.transformers.paged import BatchColumns
from memstate.integrations.transformers.running import sharing
from memstate.integrations.transformers.states import goes_on
from tests.integrations.servers import Judged, hooked

NEAR = 1e-4  # allowed difference, as a part of the largest value


def text(length: int) -> list[int]:
    """Returns a prompt with its own beginning; prompts that begin alike would wait for each other."""
    return TEXT[length % 5 :][:length]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_share_a_forward_leave_the_states_that_each_leaves_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    if not mst.layout(tiny(family)).takes_pads:
        pytest.skip("this model reads pads")
    for pads in (99, 0):
        monkeypatch.setattr(steps, "PADS", pads)
        at, seen = Judged(family, prefix=ms.Prefix(), chunk=64), list[Any]()
        for length in (5, 13, 9):
            at.ask(length, text=text(length))
        with hooked(at.model, lambda _, __, given, seen=seen: seen.append(given["input_ids"].shape)):
            at.results()
        assert seen[:2] == ([(3, 12), (3, 1)] if pads else [(1, 12), (1, 8)])
        matches = [at.mem.match([*text(length), 1]) for length in (5, 9, 13)]
        rows = at.mem.admit([ms.Request(n, tokens=[*text(length), 1]) for n, length in enumerate((5, 9, 13))])
        step = at.mem.plan(rows)
        states.append(
            ([one.length for one in matches], {name: at.mem.planes.gather(name, step.read) for name in at.mem.planes})
        )
    (lengths, shared), (others, single) = states
    assert lengths == others
    for name in shared:
        torch.testing.assert_close(shared[name], single[name], rtol=0, atol=NEAR * float(single[name].abs().max()))


def test_pads_have_a_limit_and_prompts_that_go_on_have_none() -> None:
    def grouped(*chunks: tuple[int, int], pads: int) -> list[list[int]]:
        rows = {cast(Any, _Row(length)): tokens for length, tokens in chunks}
        return [list(group.values()) for group in sharing(rows, pads)]

    assert grouped((0, 3), (0, 100), (0, 90), (0, 3), pads=10) == [[100, 90], [3, 3]]
    assert grouped((0, 3), (0, 100), (0, 90), (0, 3), pads=0) == [[100], [90], [3, 3]]
    assert grouped((0, 8), (4, 8), (0, 7), (4, 7), (9, 8), pads=9) == [[8, 8], [7], [8, 7]]


class _Row(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, length: int) -> None:
        super().__init__(length=length)


def test_a_batch_that_stays_reads_neither_slots_nor_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Judged()
    at.ask(*"ab", most=12)
    at.step()
    mem = at.mem
    before = mem.stats()
    with monkeypatch.context() as patch:
        for owner, name in ((ms.Planes, "gather"), (BatchColumns, "read")):
            patch.setattr(owner, name, None)  # a call would fail
        at.step(8)
    after = mem.stats()
    assert (after.snapshots - before.snapshots, after.copied_bytes) == (4, 0)
    at.ends()


def test_a_step_goes_on_only_with_the_same_requests_in_the_same_order_at_the_same_lengths() -> None:
    layout = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=1)
    mem = ms.StateManager(layout, slots=8, max_requests=2, backend="reference")

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
