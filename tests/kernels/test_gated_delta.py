"""Tests of the gated delta step alone, with a gate per head or per key channel (KDA), and of RWKV-7.

Tests of all decode steps: test_decode_steps.py.
"""

from collections.abc import Container
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import (
    MIXED,
    Case,
    Memory,
    Pairs,
    Row,
    check_step,
    fill_rows,
    same_bits,
)
from tests.support.recurrences import (
    Array,
    float64,
    gated_delta,
    gated_delta_bound,
    gates,
    kda,
    kda_bound,
    low_rank,
    low_rank_bound,
)

GATES = ("a_log", "dt_bias", "sigmoid", "normalize")
per_key = pytest.mark.parametrize("per_key", [False, True], ids=["gdn", "kda"])
value_key = pytest.mark.parametrize("value_key", [False, True], ids=["key value", "value key"])


def build(
    backend: Backend, generator: torch.Generator, rows: list[Row] = MIXED, tokens: int = 3,
    state: torch.dtype = torch.float32, inputs: torch.dtype = torch.float32,
    dims: tuple[int, int, int, int] | None = None, scale: float | None = None, per_key: bool = False,
    value_key: bool = False, gates: bool | Container[str] = False, low_rank: bool = False,
) -> Case:  # fmt: skip
    """Returns a step with random states in the slots that rows read, random real tokens, and rubbish elsewhere.

    dims: heads, key heads, key, value; by default the sizes of a model on a GPU, and small sizes in the interpreter.
    per_key: whether each key channel of a head has a decay, instead of one decay per head.
    value_key: whether a slot stores `head value key`.
    gates: which of `GATES` the op computes from a model's projections; True for all.
    low_rank: whether the rule is the generalized delta rule, with `a` and `b` instead of beta.
    """
    device = backend.device
    heads, key_heads, key, value = dims or ((32, 16, 128, 128) if device.type == "cuda" else (2, 1, 16, 16))
    memory = Memory((heads, key, value), state, device, generator, value_key, axis=-2)
    shapes = {"q": ((key_heads, key), inputs), "k": ((key_heads, key), inputs), "v": ((heads, value), inputs)}
    shapes |= {"decay": ((heads, key) if per_key else (heads,), torch.float32)}
    shapes |= dict.fromkeys("ab", ((key_heads, key), inputs)) if low_rank else {"beta": ((heads,), torch.float32)}

    inside = {name for name in GATES if gates is True or (gates and name in gates)}

    def in_range(name: str, x: Tensor) -> Tensor:
        if name in ("q", "k", "a", "b"):
            return 3 * x if "normalize" in inside else torch.nn.functional.normalize(x, dim=-1)
        if name == "decay":
            return 4 * x if "a_log" in inside else -2 * x.abs()
        return x.sigmoid() if name == "beta" and "sigmoid" not in inside else x

    made = fill_rows(memory, rows, tokens, shapes, generator, in_range)
    shared: dict[str, Any] = (
        {"scale": scale} | ({"beta": None} if low_rank else {}) | dict.fromkeys(inside & {"sigmoid", "normalize"}, True)
    )
    for name, shape in (("a_log", (heads,)), ("dt_bias", shapes["decay"][0])):
        if name in inside:
            shared[name] = torch.randn(shape, generator=generator).to(device)
    return Case("gated_delta_step", rows, made, shared, memory, like="v")


def stated(case: Case, i: int, real: int, old: Array, out: Tensor) -> Pairs:
    """Yields outputs and the new state with exact values and bounds, head by head."""
    exactly, bounds = (kda, kda_bound) if case.inputs["decay"].dim() == 4 else (gated_delta, gated_delta_bound)
    q, k, v, decay, *rest = (float64(tensor[i, :real]) for tensor in case.inputs.values())
    scale = q.shape[-1] ** -0.5 if case.shared["scale"] is None else case.shared["scale"]
    if "a" in case.inputs:
        for h in range(v.shape[1]):
            kh = h // (v.shape[1] // q.shape[1])
            rates = decay[:, h] if decay.ndim == 3 else decay[:, h, None]
            given = q[:, kh], k[:, kh], v[:, h], rates, rest[0][:, kh], rest[1][:, kh], old[h], scale
            computed = out[i, :real, h], case.memory.state[case.rows[i].write, h]
            yield from zip(computed, low_rank(*given), low_rank_bound(*given), strict=True)
        return
    (beta,) = rest
    weights = {name: case.shared.get(name) for name in ("a_log", "dt_bias")}
    switches = [case.shared.get(name, False) for name in ("sigmoid", "normalize")]
    for h in range(v.shape[1]):
        kh = h // (v.shape[1] // q.shape[1])
        rate, bias = (None if weight is None else float64(weight)[h] for weight in weights.values())
        given = gates(
            q[:, kh], k[:, kh], decay[:, h], beta[:, h], rate, np.zeros(1) if bias is None else bias, *switches
        )
        computed = (out[i, :real, h], case.memory.state[case.rows[i].write, h])
        exact = exactly(*(x.value for x in given[:2]), v[:, h], *(x.value for x in given[2:]), old[h], scale)
        yield from zip(computed, exact, bounds(*given[:2], v[:, h], *given[2:], old[h], scale), strict=True)


def run(case: Case, backend: Backend) -> Tensor:
    return check_step(case, backend, stated)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_G2_equal_channels_are_one_gate(backend: Backend, generator: torch.Generator, state: torch.dtype) -> None:
    """If all channels of a head have equal gates, the results are those of one gate per head."""
    one_gate = build(backend, generator, state=state)
    per_channel = one_gate.twin()
    key = one_gate.inputs["q"].shape[-1]
    per_channel.inputs = one_gate.inputs | {"decay": one_gate.inputs["decay"][..., None].repeat(1, 1, 1, key)}
    assert same_bits(per_channel.step(backend), one_gate.step(backend))
    assert same_bits(per_channel.memory.whole, one_gate.memory.whole)


# -- orders of the state, and arguments that do not fit ------------------------------------------------------------


def test_a_scale_is_any_number_that_float32_holds(backend: Backend, generator: torch.Generator) -> None:
    outs = [build(backend, generator.manual_seed(3), scale=scale).step(backend) for scale in (0.25, Fraction(1, 4))]
    assert same_bits(outs[0], outs[1])


# -- gates that the op computes from a model's projections: decay, beta, lengths of q and k ---------------------------


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
