"""Tests SGLang's recurrent kernels in the decode loop.

For speculation, the kernels have a buffer of states and an index for each row. With a plane as the buffer and
`step.write` or `step.snapshot` as the indices, they read one slot and write another, or write two slots.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.peers import (
    CONV,
    DELTA,
    EVERY,
    HEADS,
    MAMBA,
    RESUMED,
    VALUE,
    Inputs,
    Loop,
    gates,
    mamba_arguments,
    module,
    on_cpu,
)  # fmt: skip

OPS = "sglang.kernels.ops"

pytestmark = pytest.mark.filterwarnings("ignore:Triton is not supported")  # SGLang warns without a GPU


@pytest.fixture
def delta(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    kernels = module(f"{OPS}.attention.fla.fused_recurrent")
    on_cpu(monkeypatch, kernels)
    return kernels


def buffer(plane: Tensor, slots: Tensor) -> dict[str, Any]:
    """Returns arguments with which a kernel stores states in the slots of a plane.

    `cache_steps` is the distance from slot to slot, in states of one layer.
    """
    steps = plane.stride(0) // plane[0].numel()
    return {"intermediate_states_buffer": plane[:, None], "intermediate_state_indices": slots, "cache_steps": steps}


def two_slots(plane: Tensor, step: ms.Step) -> tuple[Tensor, dict[str, Any]]:
    """Returns arguments with which a kernel reads one slot and writes another: the update in place is off."""
    return step.read, buffer(plane, step.write) | {"disable_state_update": True}


def with_snapshot(plane: Tensor, step: ms.Step) -> tuple[Tensor, dict[str, Any]]:
    """Returns arguments with which a kernel updates one slot, and stores the state in the snapshot's slot too."""
    return step.write, buffer(plane, step.snapshot)


def in_place(plane: Tensor, step: ms.Step) -> tuple[Tensor, dict[str, Any]]:
    return step.write, {}


CASES = {
    "two slots": (ms.Redirect(EVERY), two_slots), "with snapshot": (ms.PingPong(EVERY), with_snapshot),
    "in place": (ms.Redirect(EVERY), in_place),
}  # fmt: skip
SLOTS = pytest.mark.parametrize(("tracking", "vectors"), CASES.values(), ids=CASES)


def settings(vectors: object) -> dict[str, Any]:
    return {"in_place": vectors is in_place, "pad": 0 if vectors is with_snapshot else -1}


def require(loop: Loop, vectors: object) -> None:
    """Checks the number of copied states.

    With `two_slots` no state is copied. With `with_snapshot`, states from which requests go on are copied; with
    `in_place`, also one state at each boundary.
    """
    copied = {two_slots: loop.copied == 0, with_snapshot: loop.copied == RESUMED, in_place: loop.copied > RESUMED}
    assert copied[vectors], loop.copied  # type: ignore[index]
    assert loop.null_written is (vectors is with_snapshot)


@SLOTS
def test_gated_delta_rule(
    backend: Backend, generator: torch.Generator, delta: ModuleType, tracking: ms.Tracking, vectors: Any
) -> None:
    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        g, beta = gates(weights, x)
        at, given = vectors(plane, step)
        return delta.fused_recurrent_gated_delta_rule_update(
            x["q"], x["k"], x["v"], g, beta, initial_state_source=plane, initial_state_indices=at, **given
        )

    order: Any = "layer_major"  # a plane with gaps would be copied, and the copy updated
    loop = Loop(backend, generator, DELTA, forward, tracking, order=order, **settings(vectors)).run()
    require(loop, vectors)


@SLOTS
def test_gated_delta_rule_with_gates(
    backend: Backend, generator: torch.Generator, tracking: ms.Tracking, vectors: Any
) -> None:
    kernels = module(f"{OPS}.attention.linear.fused_sigmoid_gating_recurrent")

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        at, given = vectors(plane, step)
        return kernels.fused_sigmoid_gating_delta_rule_update(
            **weights, **x, softplus_beta=1.0, softplus_threshold=20.0,
            initial_state_source=plane, initial_state_indices=at, **given,
        )  # fmt: skip

    loop = Loop(backend, generator, DELTA, forward, tracking, **settings(vectors)).run()
    require(loop, vectors)


def test_gated_delta_rule_on_a_packed_projection(
    backend: Backend, generator: torch.Generator, delta: ModuleType
) -> None:
    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        packed = torch.cat([x[name].flatten(1) for name in "qkv"], 1)
        out = plane.new_empty(len(packed), 1, HEADS, VALUE)
        delta.fused_recurrent_gated_delta_rule_packed_decode(
            packed, x["a"][:, 0], x["b"][:, 0], **weights, scale=0.25, initial_state=plane, out=out,
            ssm_state_indices=step.write,
        )  # fmt: skip
        return out

    loop = Loop(backend, generator, DELTA, forward, ms.Redirect(EVERY), **settings(in_place)).run()
    require(loop, in_place)


@SLOTS
def test_selective_state_update(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, tracking: ms.Tracking, vectors: Any
) -> None:
    """The kernel checks only the first index for padding, so "no snapshot" must be a writable slot: slot 0."""
    kernels, pad = module(f"{OPS}.mamba.triton_ops.mamba_ssm"), settings(vectors)["pad"]
    on_cpu(monkeypatch)

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        at, given = vectors(plane, step)
        out = torch.empty_like(x["x"][:, 0])
        kernels.selective_state_update(
            plane, **mamba_arguments(weights, x), dt_softplus=True, state_batch_indices=at, pad_slot_id=pad, out=out,
            **given,
        )  # fmt: skip
        return out

    loop = Loop(backend, generator, MAMBA, forward, tracking, **settings(vectors)).run()
    require(loop, vectors)


@pytest.mark.parametrize(("tracking", "vectors"), [CASES["with snapshot"], CASES["in place"]])
def test_causal_conv1d_update(
    backend: Backend, generator: torch.Generator, tracking: ms.Tracking, vectors: Any
) -> None:
    """The kernel checks only the first index for padding."""
    kernels, pad = module(f"{OPS}.mamba.causal_conv1d_triton"), settings(vectors)["pad"]

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        given: dict[str, Any] = {"conv_state_indices": step.write, "pad_slot_id": pad}
        if vectors is with_snapshot:
            given |= {"intermediate_conv_window": plane[:, None], "intermediate_state_indices": step.snapshot}
        return kernels.causal_conv1d_update(x["x"][:, 0], plane, **weights, activation="silu", **given)

    loop = Loop(backend, generator, CONV, forward, tracking, **settings(vectors)).run()
    require(loop, vectors)
