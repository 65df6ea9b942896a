"""Tests mamba_ssm's updates of one token in the decode loop and beside memstate's kernels, without a CUDA build."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.kernels import test_mamba3
from tests.support.decode_case import Row
from tests.support.peers import (
    CUDA,
    EVERY,
    MAMBA,
    RESUMED,
    Inputs,
    Loop,
    inner_module,
    mamba_arguments,
    on_cpu,
)  # fmt: skip
from tests.support.recurrences import float64


@triton.jit
def _cos(x):
    return tl.cos(x)


@triton.jit
def _sin(x):
    return tl.sin(x)


@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


class Exact(ModuleType):
    """Triton's language with fp32 in place of bfloat16, so that products are computed in fp32."""

    def __getattr__(self, name: str) -> Any:
        return tl.float32 if name == "bfloat16" else getattr(tl, name)


def siso_step(patch: pytest.MonkeyPatch) -> Any:
    """Returns `mamba3_siso_step`. On a CPU, it computes sines, tanh and products in fp32."""
    module = inner_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_step")
    if not CUDA:
        kernel = module.mamba3_siso_step_kernel.fn  # the kernel that the autotuner wraps
        exact = {"cos_approx": _cos, "sin_approx": _sin, "tanh_approx": _tanh, "tl": Exact("tl"), "language": tl}
        for name, value in {**exact, "mamba3_siso_step_kernel": kernel}.items():
            patch.setattr(module, name, value, raising=False)
    return module.mamba3_siso_step


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    package = inner_module("mamba_ssm.ops.triton.selective_state_update")
    on_cpu(monkeypatch)
    return package.selective_state_update


@pytest.mark.parametrize("tracking", [ms.Redirect(EVERY), ms.PingPong(EVERY)], ids=["redirect", "ping-pong"])
def test_selective_state_update(
    backend: Backend, generator: torch.Generator, update: Callable[..., Tensor], tracking: ms.Tracking
) -> None:
    """The kernel updates one slot per row, so memstate copies states for snapshots."""

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        at = step.write.long()  # int64, because the kernel multiplies slots by a stride
        return update(plane, **mamba_arguments(weights, x), dt_softplus=True, state_batch_indices=at)

    loop = Loop(backend, generator, MAMBA, forward, tracking, in_place=True, pad=-1).run()
    assert loop.copied > RESUMED
    assert not loop.null_written


def test_mamba3_from_the_same_states(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mamba_ssm and memstate may each differ from the exact recurrence by the bound, so from each other by twice the
    bound.
    """
    rows = [Row(1, 2, tokens=1), Row(0, 3, tokens=1), Row(4, 4, tokens=1)]
    case = test_mamba3.build(backend, generator, rows, 1, dims=(2, 1, 16, 16, 4))
    given, x = case.arguments(), {name: tensor[:, 0] for name, tensor in case.inputs.items()}
    before = case.memory.state[[row.read for row in rows]]
    before[1] = 0  # slot 0 reads as zeros
    turns = x["rotation"][:, None].expand(-1, 2, -1)
    their, kept = siso_step(monkeypatch)(
        x["c"], x["b"], x["x"], x["decay"], x["dt"], x["trap"], given["c_bias"], given["b_bias"], turns, given["d"],
        x["z"], test_mamba3.planes(before, (2, 1, 16, 16, 4)),
    )  # fmt: skip
    out = case.step(backend)
    for i in range(len(rows)):
        theirs = [part[i, h] for h in range(2) for part in (their, *kept)]
        stated = test_mamba3.stated(case, i, 1, float64(before[i]), out)
        for number, (other, (_, exact, bound)) in enumerate(zip(theirs, stated, strict=True)):
            apart = np.abs(float64(other) - exact)
            turned = number % 5 == 1  # angles may differ by whole turns
            assert (np.minimum(apart, np.abs(apart - test_mamba3.TURN) if turned else apart) <= 2 * bound.error).all()
