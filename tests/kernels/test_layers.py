"""Computes one token of a layer from its projections with two launches, and checks that nothing is copied.

The results have the bits of contiguous inputs. Tests of each operation against float64: test_conv.py,
test_gated_delta.py, test_selective.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memstate.kernels.dispatch import Backend
from tests.support.decode_case import Memory, Row, same_bits
from tests.support.watch import real_launches

HEADS, GROUPS, TAPS = 4, 2, 4
ROWS = [Row(1, 1, tokens=1), Row(2, 3, 4, 1), Row(0, 5, 0, 1), Row(0, 0, 0, 1)]


class Made(TorchDispatchMode):
    """Collects the names of the operations that torch runs, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operation, and runs it."""
        if not func.is_view:
            self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def operations() -> Iterator[list[str]]:
    """Yields a list. It gets the torch operations of the block that make, copy or compute a tensor."""
    with Made() as made:
        yield made.ops


class Layer:
    """A layer with its projection, a convolution of the first channels, planes of windows and states, and rows."""

    def __init__(
        self, backend: Backend, generator: torch.Generator, dtype: torch.dtype, sizes: list[int], states: Memory
    ) -> None:
        self.backend, self.generator, self.sizes, self.states = backend, generator, sizes, states
        self.channels = sum(sizes[:3])
        self.projection = self.random(len(ROWS), 1, sum(sizes)).to(dtype)
        self.projection[-1] = torch.nan  # the last row is padding
        self.windows = Memory((TAPS - 1, self.channels), dtype, backend.device, generator)
        for memory in (self.windows, self.states):
            for slot in (1, 2):
                memory.fill(slot, self.random(*memory.state.shape[1:]))
        self.weight, self.bias = self.random(self.channels, TAPS).to(dtype), self.random(self.channels).to(dtype)
        columns = ([getattr(row, name) for row in ROWS] for name in Row._fields)
        self.where = [torch.tensor(column, dtype=torch.int32, device=backend.device) for column in columns]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.backend.device)

    def step(self, part: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
        """Returns the outputs of convolution and recurrence. part: turns a slice of the projection into an input."""
        inputs, *rest = self.projection.split([self.channels, *self.sizes[3:]], -1)
        mixed = self.backend.conv_step(part(inputs), self.weight, self.bias, self.windows.state, *self.where)
        return [mixed, self.recurrence(*map(part, (*mixed.split(self.sizes[:3], -1), *rest)))]

    def recurrence(self, *parts: Tensor) -> Tensor:
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
        self.gates: dict[str, Any] = {"a_log": self.random(HEADS), "dt_bias": self.random(HEADS).to(dtype)}

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (GROUPS, self.KEY)) for x in (q, k))
        v, where = v.unflatten(-1, (HEADS, self.VALUE)), (self.states.state, *self.where)
        return self.backend.gated_delta_step(q, k, v, a, b, *where, sigmoid=True, normalize=True, **self.gates)


class Mamba2(Layer):
    """Mamba-2: `x | B | C | z | dt`, and four numbers that the layer does not use."""

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


MAKERS = {"gdn": DeltaNet, "gdn, value key": partial(DeltaNet, value_key=True), "mamba2": Mamba2}


@pytest.mark.sample
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_D9_D13_a_layer_makes_two_outputs_from_its_projections_and_copies_nothing(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, make: Callable[..., Layer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    layer = make(backend, generator, dtype)
    memories = layer.windows, layer.states
    outputs = layer.step()
    kept = [memory.whole.clone() for memory in memories]
    for memory in memories:
        memory.check_changed_only({1, 3, 4, 5})
        memory.whole.copy_(memory.before)
    assert all(map(same_bits, outputs, layer.step(torch.Tensor.contiguous)))
    assert all(same_bits(memory.whole, was) for memory, was in zip(memories, kept, strict=True))
    assert all(out[:-1].isfinite().all() and not out[-1].any() for out in outputs)
    if backend.name != "reference":  # the reference makes tensors of its own
        with real_launches(monkeypatch) as launched:
            layer.step()
        if backend.name == "interpreter":  # which makes tensors of its own, too
            monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *_, **__: None)
        with operations() as made:
            layer.step()
        assert made in (["new_empty"] * 2, ["empty"] * 2) and len(launched) == 2
