"""Gates of the gated delta rule that the op computes from what a model projects: decay, beta, lengths of q and k."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.kernels.test_gated_delta import GATES, build, per_key, run, value_key
from tests.support.decode_case import Memory, Row, check_misfit, same_bits
from tests.support.recurrences import (
    Rounded,
    causal_conv,
    causal_conv_bound,
    float64,
    gated_delta,
    gated_delta_bound,
    gates,
)
from tests.support.slices import operations


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
@pytest.mark.parametrize("dims", [(2, 1, 72, 20), (1, 1, 300, 3)], ids=str)
def test_D7_gates_of_odd_sizes(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int], per_key: bool, value_key: bool
) -> None:
    """Lanes without a key add nothing to a length, and several warps find the same one."""
    rows = [Row(1, 2, 3, tokens=2), Row(0, 4, tokens=1)]
    state, inputs = (torch.float16, torch.bfloat16) if per_key else (torch.bfloat16, torch.float16)
    run(build(backend, generator, rows, 2, state, inputs, dims, None, per_key, value_key, gates=True), backend)


@per_key
@pytest.mark.parametrize("steps", [(-60, -9), (19, 21), (20, 300)], ids=str)
def test_D8_steps_of_every_size_keep_their_precision(
    backend: Backend, generator: torch.Generator, per_key: bool, steps: tuple[float, float]
) -> None:
    """Where exp(x) is lost beside 1 and where it would overflow. Rates up to e^18 make small steps count."""
    case = build(backend, generator, [Row(1, 2), Row(3, 4)], per_key=per_key, gates=("a_log",))
    decay, (low, high) = case.inputs["decay"], steps
    decay.copy_(low + (high - low) * torch.rand(decay.shape, generator=generator))
    case.shared["a_log"] += 18 if high < 0 else -3
    run(case, backend)


def test_D8_vectors_of_length_zero_and_of_great_length(backend: Backend, generator: torch.Generator) -> None:
    """Zeros stay zeros, short vectors stay short, and lengths of 1e15 are still divided by."""
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


@per_key
def test_D16_gates_that_do_not_fit_are_named(backend: Backend, generator: torch.Generator, per_key: bool) -> None:
    case = build(backend, generator, [Row(1, 1), Row(2, 2)], per_key=per_key, gates=True)
    a_log, dt_bias = case.shared["a_log"], case.shared["dt_bias"]
    misfits: list[tuple[str, Any]] = [
        ("a_log", a_log[:1]), ("a_log", a_log.long()), ("a_log", a_log.repeat(2)[::2]), ("dt_bias", dt_bias[:1]),
        ("dt_bias", dt_bias.double()), ("sigmoid", 1), ("normalize", None),
        ("dt_bias", torch.zeros(2, 16) if not per_key else torch.zeros(2)),
    ]  # fmt: skip
    if per_key:
        misfits += [("dt_bias", dt_bias.new_empty(33)[1:].view(2, 16))]
    for name, value in misfits:
        check_misfit(case, backend, name, value)
    del case.shared["a_log"]
    with pytest.raises(ValueError, match=r"^dt_bias: expected None without a_log"):
        case.step(backend)


def test_D15_more_tokens_than_a_kernel_counts_are_named(backend: Backend, generator: torch.Generator) -> None:
    """By their number alone: a view of one token, whose distances are not looked at."""
    case = build(backend, generator, [Row(1, 1)], dims=(1, 1, 8, 8))
    many = {name: x[:1, :1].expand(2**15, 2**16, *x.shape[2:]) for name, x in case.inputs.items()}
    with pytest.raises(ValueError, match=r"^v: expected fewer than 2\*\*31 tokens in a batch, got 32768 x 65536"):
        getattr(backend, case.op)(**(case.arguments() | many))


# -- a layer from its projections ----------------------------------------------------------------------------------

HEADS, KEY_HEADS, KEY, VALUE, TAPS = 4, 2, 16, 8, 4
KEYS, VALUES = KEY_HEADS * KEY, HEADS * VALUE
CHANNELS = 2 * KEYS + VALUES
ROWS = [Row(1, 1, tokens=1), Row(2, 3, 4, 1), Row(0, 5, 0, 1), Row(0, 0, 0, 1)]


class Layer:
    """A Gated DeltaNet layer of Qwen3-Next at one token: projections `q | k | v | z` and `b | a`, weights, planes."""

    def __init__(self, backend: Backend, generator: torch.Generator, dtype: torch.dtype, value_key: bool) -> None:
        self.backend, device = backend, backend.device

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        self.qkvz, self.ba = (random(len(ROWS), 1, n).to(dtype) for n in (CHANNELS + VALUES, 2 * HEADS))
        self.qkvz[-1] = self.ba[-1] = torch.nan  # padding
        self.windows = Memory((TAPS - 1, CHANNELS), dtype, device, generator)
        self.states = Memory((HEADS, KEY, VALUE), dtype, device, generator, value_key)
        for memory in (self.windows, self.states):
            for slot in (1, 2):
                memory.fill(slot, random(*memory.state.shape[1:]))
        self.weight, self.bias = random(CHANNELS, TAPS).to(dtype), random(CHANNELS).to(dtype)
        self.a_log, self.dt_bias = random(HEADS), random(HEADS).to(dtype)
        columns = ([getattr(row, name) for row in ROWS] for name in Row._fields)
        self.where = [torch.tensor(column, dtype=torch.int32, device=device) for column in columns]

    def step(self) -> tuple[Tensor, Tensor]:
        """The mixed `q | k | v`, and what the queries read."""
        mixed = self.backend.conv_step(
            self.qkvz[..., :CHANNELS], self.weight, self.bias, self.windows.state, *self.where
        )  # fmt: skip
        q, k, v = mixed.split([KEYS, KEYS, VALUES], -1)
        b, a = self.ba.split(HEADS, -1)
        out = self.backend.gated_delta_step(
            q.unflatten(-1, (KEY_HEADS, KEY)), k.unflatten(-1, (KEY_HEADS, KEY)), v.unflatten(-1, (HEADS, VALUE)), a, b,
            self.states.state, *self.where, a_log=self.a_log, dt_bias=self.dt_bias, sigmoid=True, normalize=True,
        )  # fmt: skip
        return mixed, out


@value_key
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_D9_a_gated_delta_layer_makes_two_outputs_from_its_projections_and_copies_nothing(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, value_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution and a recurrence are two launches and two tensors. Each is within its bound of float64."""
    layer = Layer(backend, generator, dtype, value_key)
    windows, states = float64(layer.windows.state), float64(layer.states.state)
    mixed, out = layer.step()
    x, (b, a) = float64(layer.qkvz)[..., :CHANNELS], (float64(part) for part in layer.ba.split(HEADS, -1))
    q, k, v = (float64(part) for part in mixed.split([KEYS, KEYS, VALUES], -1))
    weight, bias, a_log, dt_bias = (
        float64(each) for each in (layer.weight, layer.bias, layer.a_log, layer.dt_bias)
    )  # fmt: skip

    def close(got: Tensor, exact: object, bound: Rounded) -> None:
        assert bool((np.abs(float64(got) - exact) <= bound.stored(got.dtype, backend.name).error).all())

    for i, row in enumerate(ROWS[:-1]):
        window = windows[row.read] if row.read else np.zeros(windows.shape[1:])
        close(
            mixed[i], causal_conv(x[i], weight, bias, window, True)[0],
            causal_conv_bound(x[i], weight, bias, window, True),
        )  # fmt: skip
        for h in range(HEADS):
            keys = slice(h // (HEADS // KEY_HEADS) * KEY, (h // (HEADS // KEY_HEADS) + 1) * KEY)
            values = v[i][:, h * VALUE : (h + 1) * VALUE]
            old = states[row.read, h] if row.read else np.zeros((KEY, VALUE))
            given = gates(q[i][:, keys], k[i][:, keys], a[i][:, h], b[i][:, h], a_log[h], dt_bias[h], True, True)
            exact = gated_delta(*(g.value for g in given[:2]), values, *(g.value for g in given[2:]), old, KEY**-0.5)
            bounds = gated_delta_bound(*given[:2], values, *given[2:], old, KEY**-0.5)
            for got, *stated in zip((out[i, :, h], layer.states.state[row.write, h]), exact, bounds, strict=True):
                close(got, *stated)
        assert same_bits(layer.windows.state[row.write, -1], layer.qkvz[i, 0, :CHANNELS])
    assert not mixed[-1].any() and not out[-1].any()
    layer.windows.check_changed_only({1, 3, 4, 5})
    layer.states.check_changed_only({1, 3, 4, 5})
    if backend.name != "reference":  # which works on one row at a time in fp32
        launches: list[object] = []
        if backend.name == "interpreter":
            monkeypatch.setattr(
                "triton.runtime.interpreter.GridExecutor.__call__", lambda *_, **__: launches.append(None)
            )  # fmt: skip
        with operations() as made:
            layer.step()
        assert made in (["new_empty"] * 2, ["empty"] * 2) and (backend.name != "interpreter" or len(launches) == 2)
