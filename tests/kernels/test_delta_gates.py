"""Tests of the gates that the gated delta step computes from a model's projections: decay, beta, lengths of q and k."""

import pytest
import torch

from memstate.kernels.dispatch import Backend
from tests.kernels.test_gated_delta import GATES, build, per_key, run, value_key
from tests.support.decode_case import Row


@per_key
@pytest.mark.parametrize(
    "gates", [("a_log",), ("a_log", "dt_bias"), ("sigmoid",), ("normalize",), GATES], ids=lambda gates: "+".join(gates)
)
def test_D7_each_gate_inside_is_within_the_bound(
    backend: Backend, generator: torch.Generator, per_key: bool, gates: tuple[str, ...]
) -> None:
    run(build(backend, generator, [Row(1, 2), Row(0, 3)], scale=0.7, per_key=per_key, gates=gates), backend)


@per_key
@value_key
@pytest.mark.sample
@pytest.mark.parametrize("dims", [(2, 1, 72, 20), (1, 1, 300, 3)], ids=str)
def test_D7_gates_of_odd_sizes(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int], per_key: bool, value_key: bool
) -> None:
    """Lanes without a key add nothing to the length of a vector. Several warps compute the same length."""
    rows = [Row(1, 2, 3, tokens=2), Row(0, 4, tokens=1)]
    state, inputs = (torch.float16, torch.bfloat16) if per_key else (torch.bfloat16, torch.float16)
    run(build(backend, generator, rows, 2, state, inputs, dims, None, per_key, value_key, gates=True), backend)


@per_key
@pytest.mark.parametrize("steps", [(-60, -9), (19, 21), (20, 300)], ids=str)
def test_D8_steps_of_every_size_keep_their_precision(
    backend: Backend, generator: torch.Generator, per_key: bool, steps: tuple[float, float]
) -> None:
    """For some steps exp(x) is too small to change 1 + exp(x), for others it would overflow.

    Rates up to e^18 make small steps count.
    """
    case = build(backend, generator, [Row(1, 2), Row(3, 4)], per_key=per_key, gates=("a_log",))
    decay, (low, high) = case.inputs["decay"], steps
    decay.copy_(low + (high - low) * torch.rand(decay.shape, generator=generator))
    case.shared["a_log"] += 18 if high < 0 else -3
    run(case, backend)


def test_D8_vectors_of_length_zero_and_of_great_length(backend: Backend, generator: torch.Generator) -> None:
    """Zeros stay zeros, short vectors stay short, and vectors of length 1e15 are normalized."""
    case = build(backend, generator, [Row(1, 2, tokens=3)], gates=("normalize",))
    for name in ("q", "k"):
        scales = torch.tensor([0.0, 1e-4, 1e15], device=backend.device)
        case.inputs[name] *= scales[None, :, None, None]
    run(case, backend)
    assert not case.step(backend)[0, 0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_D7_weights_of_gates_of_any_dtype(backend: Backend, generator: torch.Generator, dtype: torch.dtype) -> None:
    case = build(backend, generator, [Row(1, 2)], per_key=True, gates=True)
    for name in ("a_log", "dt_bias"):
        case.shared[name] = case.shared[name].to(dtype)
    run(case, backend)
