"""Tests prompts of several lengths that share a forward, with pads before the shorter ones."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import steps
from memstate.integrations.transformers.running import sharing
from tests.integrations.servers import hooked

NEAR = 1e-4  # allowed difference, as a part of the largest value


def text(length: int) -> list[int]:
    """Returns a prompt with its own beginning; prompts that begin alike would wait for each other."""
    return TEXT[length % 5 :][:length]


def shapes(model: Any, mem: ms.StateManager, lengths: list[int], **settings: Any) -> list[tuple[int, ...]]:
    """Serves prompts, checks that each answer is that of the prompt alone, and returns the shapes of the forwards."""
    seen: list[tuple[int, ...]] = []
    prompts = [mst.Prompt(text(length), length, most=NEW) for length in lengths]
    with hooked(model, lambda _, __, given: seen.append((*given["input_ids"].shape,))):
        answers = {one.id: one.tokens for one in mst.serve(model, mem, prompts, **settings)}
    assert answers == {length: alone(model, text(length), {}) for length in lengths}
    mem.audit().raise_if_leaking()
    return seen


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_share_a_forward_leave_the_states_that_each_leaves_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, states = tiny(family), []
    if not mst.layout(model).takes_pads:
        pytest.skip("this model reads pads")
    for pads in (99, 0):
        monkeypatch.setattr(steps, "PADS", pads)
        mem = managed(model)
        assert shapes(model, mem, [5, 13, 9], chunk=64)[:2] == ([(3, 12), (3, 1)] if pads else [(1, 12), (1, 8)])
        matches = [mem.match([*text(length), 1]) for length in (5, 9, 13)]
        (*rows,) = mem.admit([ms.Request(n, tokens=[*text(length), 1]) for n, length in enumerate((5, 9, 13))])
        step = mem.plan(rows)
        states.append(
            ([one.length for one in matches], {name: mem.planes.gather(name, step.read) for name in mem.planes})
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
