"""Tests vLLM's recurrent kernels in the decode loop; vLLM's null block is slot 0, as memstate's null slot."""

from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.peers import (
    CONV,
    CUDA,
    DELTA,
    EVERY,
    MAMBA,
    Inputs,
    Loop,
    gates,
    mamba_arguments,
    module,
    on_cpu,
)  # fmt: skip

FLA, MIXERS = "vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.mamba.ops"
SLOTS = pytest.mark.parametrize("in_place", [False, True], ids=["two slots", "in place"])


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets CUDA_VISIBLE_DEVICES to hide all GPUs if there are none. Otherwise vLLM would replace Triton."""
    if not CUDA:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if not module("vllm.triton_utils").HAS_TRITON:
        pytest.skip("this vLLM is built for CPUs and does not use Triton")


def vectors(step: ms.Step, in_place: bool) -> dict[str, Tensor]:
    """Returns the slot arguments: vLLM's kernels read slot indices[i, accepted - 1] and write slot indices[i, 0]."""
    if in_place:
        return {"ssm_state_indices": step.write}
    indices = torch.stack([step.write, step.read], 1)
    return {"ssm_state_indices": indices, "num_accepted_tokens": torch.full_like(step.read, 2)}


@SLOTS
def test_gated_delta_rule(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    kernels = module(f"{FLA}.fused_recurrent")
    on_cpu(monkeypatch, kernels)

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        g, beta = gates(weights, x)
        given = {"initial_state": plane} | vectors(step, in_place)
        return kernels.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], g, beta, **given)[0]

    loop = Loop(backend, generator, DELTA, forward, ms.Redirect(EVERY), in_place=in_place).run()
    assert bool(loop.copied) is in_place
    assert not loop.null_written


@SLOTS
def test_gated_delta_rule_with_gates(backend: Backend, generator: torch.Generator, in_place: bool) -> None:
    kernels = module(f"{FLA}.fused_sigmoid_gating")

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        given: dict[str, Any] = {"initial_state": plane} | vectors(step, in_place)
        return kernels.fused_sigmoid_gating_delta_rule_update(**weights, **x, **given)[0]

    loop = Loop(backend, generator, DELTA, forward, ms.Redirect(EVERY), in_place=in_place).run()
    assert bool(loop.copied) is in_place
    assert not loop.null_written


@SLOTS
def test_selective_state_update(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    kernels = module(f"{MIXERS}.mamba_ssm")
    on_cpu(monkeypatch)
    if not CUDA:
        monkeypatch.setattr(kernels, "get_ssm_device_name", lambda: "CPU")  # vLLM looks up block sizes by this name

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        out = torch.empty_like(x["x"][:, 0])
        read = step.write if in_place else step.read
        kernels.selective_state_update(
            plane, **mamba_arguments(weights, x), dt_softplus=True, out=out,
            state_batch_indices=read, dst_state_batch_indices=step.write,
        )  # fmt: skip
        return out

    loop = Loop(backend, generator, MAMBA, forward, ms.Redirect(EVERY), in_place=in_place).run()
    assert bool(loop.copied) is in_place
    assert not loop.null_written


def test_causal_conv1d_update(backend: Backend, generator: torch.Generator) -> None:
    kernels = module(f"{MIXERS}.causal_conv1d")

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        return kernels.causal_conv1d_update(
            x["x"][:, 0], plane, **weights, activation="silu", conv_state_indices=step.write
        )

    loop = Loop(backend, generator, CONV, forward, ms.Redirect(EVERY), in_place=True).run()
    assert loop.copied > 0
    assert not loop.null_written
