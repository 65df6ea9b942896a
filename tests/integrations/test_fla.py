"""Tests flash-linear-attention's recurrent kernels in the decode loop, in Triton's interpreter."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.op_case import first_of, starts_of
from tests.support.peers import (
    DELTA,
    DELTA_KEY_FIRST,
    EVERY,
    KEY,
    RESUMED,
    Inputs,
    Loop,
    Op,
    gates,
    module,
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")  # fla warns without a GPU


@pytest.fixture(scope="module")
def fla() -> ModuleType:
    """The module `fla.ops`. The first test imports it, because the import takes seconds."""
    return module("fla.ops")


def fla_gates(weights: Inputs, x: Inputs, gate: str) -> Inputs:
    """Returns queries, keys, values, decays `g` and `beta`, as arguments of fla's functions.

    For KDA, all keys of a head get one decay, so KDA equals the gated delta rule.
    """
    g, beta = gates(weights, x)
    g = g[..., None].expand(*g.shape, KEY).contiguous() if gate == "kda" else g
    return {"q": x["q"], "k": x["k"], "v": x["v"], "g": g, "beta": beta}


@pytest.mark.sample
@pytest.mark.parametrize("gate", ["gated_delta_rule", "kda"])
@pytest.mark.parametrize("tracking", [ms.Redirect(EVERY), ms.PingPong(EVERY)], ids=["redirect", "ping-pong"])
def test_gathered_states(
    backend: Backend, generator: torch.Generator, fla: ModuleType, gate: str, tracking: ms.Tracking
) -> None:
    """fla's public functions take a batch of states and return a new one, so states are gathered and scattered."""

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        states = plane.new_empty(1, len(step.read), *plane.shape[1:])
        backend.gather_slots(plane[None], step.read, states)
        rule = getattr(fla, f"fused_recurrent_{gate}")
        out, states[0] = rule(**fla_gates(weights, x, gate), initial_state=states[0], output_final_state=True)
        for target in (step.write, step.snapshot):
            backend.scatter_slots(plane[None], target, states)
        return out

    loop = Loop(backend, generator, DELTA_KEY_FIRST, forward, tracking).run()
    assert loop.copied == (0 if isinstance(tracking, ms.Redirect) else RESUMED)


@pytest.mark.sample
@pytest.mark.parametrize("op", [DELTA_KEY_FIRST, DELTA], ids=["key value", "value key"])
@pytest.mark.parametrize(
    ("tracking", "in_place"),
    [(ms.Redirect(EVERY), False), (ms.Redirect(EVERY), True), (ms.PingPong(EVERY), True)],
    ids=["redirect", "redirect in place", "ping-pong in place"],
)
def test_slots(
    backend: Backend, generator: torch.Generator, fla: ModuleType, tracking: ms.Tracking, in_place: bool, op: Op
) -> None:
    """fla's kernel reads slot indices[i, accepted - 1] and writes slot indices[i, 0].

    So it can read one slot and write another, as Redirect needs.
    """
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        given: dict[str, Any] = fla_gates(weights, x, "kda") | {"ssm_state_indices": step.write}
        if not in_place:
            given["ssm_state_indices"] = torch.stack([step.write, step.read], 1)
            given["num_accepted_tokens"] = torch.full_like(step.read, 2)
        return fused_recurrent_kda_fwd(**given, initial_state=plane, state_v_first=op is DELTA)[0]

    loop = Loop(backend, generator, op, forward, tracking, in_place=in_place).run()
    assert bool(loop.copied) is in_place
    assert loop.null_written  # the kernel stores the state of padding
    loop.mem.device.scrub_null()
    assert not loop.plane[0].any()


def test_pieces_of_packed_rows_are_counted_as_fla_counts_them(fla: ModuleType) -> None:
    """`scatter_states(first=)` is where the pieces of a row begin in `h` of fla's chunked kernels."""
    from fla.ops.utils import prepare_chunk_offsets

    for lengths in ([300], [63, 64, 65], [1, 1, 200, 1, 128], [100, 600]):
        starts = torch.tensor(starts_of(lengths))
        assert prepare_chunk_offsets(starts, 64).tolist() == first_of(lengths, 64)
