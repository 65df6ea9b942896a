"""One token through a layer, from its projections: two launches, two outputs, no copy, each within its bound."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import Memory, Pairs, Row, same_bits
from tests.support.recurrences import (
    Array,
    causal_conv,
    causal_conv_bound,
    float64,
    gated_delta,
    gated_delta_bound,
    gates,
    selective,
    selective_bound,
)
from tests.support.slices import operations

HEADS, GROUPS, TAPS = 4, 2, 4
ROWS = [Row(1, 1, tokens=1), Row(2, 3, 4, 1), Row(0, 5, 0, 1), Row(0, 0, 0, 1)]


class Layer:
    """A projection whose first channels go through a convolution, the weights of that, planes, and where rows lie."""

    def __init__(
        self, backend: Backend, generator: torch.Generator, dtype: torch.dtype, sizes: list[int], states: Memory
    ) -> None:
        self.backend, self.generator, self.sizes, self.states = backend, generator, sizes, states
        self.channels = sum(sizes[:3])
        self.projection = self.random(len(ROWS), 1, sum(sizes)).to(dtype)
        self.projection[-1] = torch.nan  # padding
        self.windows = Memory((TAPS - 1, self.channels), dtype, backend.device, generator)
        for memory in (self.windows, self.states):
            for slot in (1, 2):
                memory.fill(slot, self.random(*memory.state.shape[1:]))
        self.weight, self.bias = self.random(self.channels, TAPS).to(dtype), self.random(self.channels).to(dtype)
        columns = ([getattr(row, name) for row in ROWS] for name in Row._fields)
        self.where = [torch.tensor(column, dtype=torch.int32, device=backend.device) for column in columns]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.backend.device)

    def step(self) -> tuple[Tensor, Tensor]:
        """What the convolution mixed, and what the recurrence made of it."""
        inputs, *rest = self.projection.split([self.channels, *self.sizes[3:]], -1)
        mixed = self.backend.conv_step(inputs, self.weight, self.bias, self.windows.state, *self.where)
        return mixed, self.recurrence(*mixed.split(self.sizes[:3], -1), *rest)

    def recurrence(self, *parts: Tensor) -> Tensor:
        raise NotImplementedError

    def stated(self, h: int, out: Tensor, new: Tensor, old: Array, *parts: Array) -> Pairs:
        """Output and new state of a head for one token, from what the projection and the convolution say."""
        raise NotImplementedError


class DeltaNet(Layer):
    """Gated DeltaNet as in Qwen3-Next: `q | k | v | z | b | a`."""

    KEY, VALUE = 16, 8

    def __init__(
        self, backend: Backend, generator: torch.Generator, dtype: torch.dtype, value_key: bool = False
    ) -> None:
        keys, values = GROUPS * self.KEY, HEADS * self.VALUE
        states = Memory((HEADS, self.KEY, self.VALUE), dtype, backend.device, generator, value_key)
        super().__init__(backend, generator, dtype, [keys, keys, values, values, HEADS, HEADS], states)
        self.a_log, self.dt_bias = self.random(HEADS), self.random(HEADS).to(dtype)

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (GROUPS, self.KEY)) for x in (q, k))
        return self.backend.gated_delta_step(
            q, k, v.unflatten(-1, (HEADS, self.VALUE)), a, b, self.states.state, *self.where, a_log=self.a_log,
            dt_bias=self.dt_bias, sigmoid=True, normalize=True,
        )  # fmt: skip

    def stated(
        self, h: int, out: Tensor, new: Tensor, old: Array, q: Array, k: Array, v: Array, z: Array, b: Array, a: Array
    ) -> Pairs:
        keys = slice(h * GROUPS // HEADS * self.KEY, (h * GROUPS // HEADS + 1) * self.KEY)
        rate, bias = float64(self.a_log)[h], float64(self.dt_bias)[h]
        given = gates(q[:, keys], k[:, keys], a[:, h], b[:, h], rate, bias, True, True)
        v = v[:, h * self.VALUE : (h + 1) * self.VALUE]
        exact = gated_delta(*(g.value for g in given[:2]), v, *(g.value for g in given[2:]), old, self.KEY**-0.5)
        yield from zip(
            (out, new), exact, gated_delta_bound(*given[:2], v, *given[2:], old, self.KEY**-0.5), strict=True
        )


class Mamba2(Layer):
    """Mamba-2: `x | B | C | z | dt`, and four numbers of nobody."""

    DIM, STATE = 16, 8

    def __init__(self, backend: Backend, generator: torch.Generator, dtype: torch.dtype) -> None:
        inner, group = HEADS * self.DIM, GROUPS * self.STATE
        states = Memory((HEADS, self.DIM, self.STATE), torch.float32, backend.device, generator)
        super().__init__(backend, generator, dtype, [inner, group, group, inner, HEADS, 4], states)
        self.a, self.d, self.dt_bias = -self.random(HEADS).exp(), self.random(HEADS), self.random(HEADS)

    def recurrence(self, x: Tensor, b: Tensor, c: Tensor, z: Tensor, dt: Tensor, _: Tensor) -> Tensor:
        b, c = (y.unflatten(-1, (GROUPS, self.STATE)) for y in (b, c))
        x, z = (y.unflatten(-1, (HEADS, self.DIM)) for y in (x, z))
        return self.backend.selective_step(
            x, dt, self.a, b, c, self.states.state, *self.where, self.d, z, self.dt_bias, True
        )

    def stated(
        self, h: int, out: Tensor, new: Tensor, old: Array, x: Array, b: Array, c: Array, z: Array, dt: Array, _: Array
    ) -> Pairs:
        part, group = slice(h * self.DIM, (h + 1) * self.DIM), h * GROUPS // HEADS * self.STATE
        a, d, bias = (float64(weight)[h] for weight in (self.a, self.d, self.dt_bias))
        head = {
            "x": x[:, part], "z": z[:, part], "b": b[:, group:][:, : self.STATE], "c": c[:, group:][:, : self.STATE],
            "a": np.full(old.shape, a), "d": np.full(self.DIM, d), "softplus": True, "state": old,
        }  # fmt: skip
        step, shift = np.full((1, self.DIM), dt[0, h]), np.full(self.DIM, bias)
        (y,), (_, state) = selective(**head, dt=step + shift)
        (y_bound,), (_, state_bound) = selective_bound(**head, dt=step, bias=shift)
        yield from ((out[0], y, y_bound), (new, state, state_bound))


MAKERS = {"gdn": DeltaNet, "gdn, value key": partial(DeltaNet, value_key=True), "mamba2": Mamba2}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_D9_D13_a_layer_makes_two_outputs_from_its_projections_and_copies_nothing(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, make: Callable[..., Layer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layer = make(backend, generator, dtype)
    windows, states = float64(layer.windows.state), float64(layer.states.state)
    windows[0] = states[0] = 0
    mixed, out = layer.step()
    inputs, *rest = (float64(part) for part in layer.projection.split([layer.channels, *layer.sizes[3:]], -1))
    parts = [*(float64(part) for part in mixed.split(layer.sizes[:3], -1)), *rest]
    weights = float64(layer.weight), float64(layer.bias)
    for i, row in enumerate(ROWS[:-1]):
        given = (inputs[i], *weights, windows[row.read], True)
        pairs = [(mixed[i], causal_conv(*given)[0], causal_conv_bound(*given))]
        for h in range(HEADS):
            new = layer.states.state[row.write, h]
            pairs += layer.stated(h, out[i, :, h], new, states[row.read, h], *(part[i] for part in parts))
        for got, exact, bound in pairs:
            assert bool((np.abs(float64(got) - exact) <= bound.stored(got.dtype, backend.name).error).all())
        assert same_bits(layer.windows.state[row.write, -1], layer.projection[i, 0, : layer.channels])
    assert not mixed[-1].any() and not out[-1].any()
    for memory in (layer.windows, layer.states):
        memory.check_changed_only({1, 3, 4, 5})
    if backend.name != "reference":  # which works on one row at a time in fp32
        launches: list[object] = []
        if backend.name == "interpreter":
            launch = "triton.runtime.interpreter.GridExecutor.__call__"
            monkeypatch.setattr(launch, lambda *_, **__: launches.append(None))
        with operations() as made:
            layer.step()
        assert made in (["new_empty"] * 2, ["empty"] * 2) and (backend.name != "interpreter" or len(launches) == 2)
