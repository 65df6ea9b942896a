"""Tests of the causal convolution step alone. Tests of all decode steps: test_decode_steps.py."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import MIXED, Case, Memory, Pairs, Row, check_step, fill_rows
from tests.support.recurrences import Array, causal_conv, causal_conv_bound, float64


def build(
    backend: Backend, generator: torch.Generator, rows: list[Row] = MIXED, tokens: int = 3,
    state: torch.dtype = torch.float32, inputs: torch.dtype = torch.float32, taps: int = 4, channels: int | None = None,
    bias: bool = True, activation: str | None = "silu", channel_major: bool = False,
) -> Case:  # fmt: skip
    """Returns a step with random windows in the slots that rows read, random real tokens, and rubbish elsewhere.

    channels: number of channels; by default as many as a model has on a GPU, and a few in the interpreter.
    channel_major: whether slots lie in memory as `channel tap-1`, not `tap-1 channel`.
    """
    device = backend.device
    channels = channels or (8192 if device.type == "cuda" else 24)
    memory = Memory((channels, taps - 1) if channel_major else (taps - 1, channels), state, device, generator)
    memory.state = memory.state.transpose(1, 2) if channel_major else memory.state
    made = fill_rows(memory, rows, tokens, {"x": ((channels,), inputs)}, generator)
    shared: dict[str, Any] = {
        "weight": torch.randn((channels, taps), generator=generator).to(made["x"]),
        "bias": torch.randn((channels,), generator=generator).to(made["x"]) if bias else None,
        "activation": activation,
    }
    return Case("conv_step", rows, made, shared, memory, like="x")


def stated(case: Case, i: int, real: int, old: Array, out: Tensor) -> Pairs:
    """Yields the outputs with their bounds, and the new window, which is exact."""
    weight, bias, silu = case.shared["weight"], case.shared["bias"], case.shared["activation"] == "silu"
    offset = np.zeros(len(weight)) if bias is None else float64(bias)
    arguments = (float64(case.inputs["x"][i, :real]), float64(weight), offset, old, silu)
    exact, new = causal_conv(*arguments)
    yield out[i, :real], exact, causal_conv_bound(*arguments)
    yield case.memory.state[case.rows[i].write], new, None


def run(case: Case, backend: Backend) -> Tensor:
    return check_step(case, backend, stated)


@pytest.mark.parametrize(("bias", "activation"), [(True, None), (False, "silu"), (False, None)])
def test_G2_with_and_without_bias_and_activation(
    backend: Backend, generator: torch.Generator, activation: str | None, bias: bool
) -> None:
    run(build(backend, generator, [Row(1, 2)], bias=bias, activation=activation), backend)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the warning comes from numpy, in the interpreter
def test_G2_silu_of_large_values(backend: Backend, generator: torch.Generator) -> None:
    """For y so negative that exp(-y) overflows to infinity, y sigmoid(y) must be zero."""
    case = build(backend, generator, [Row(1, 2)])
    case.inputs["x"] *= 100
    assert bool(run(case, backend).isfinite().all())
