"""Planes of states in fewer bits: shapes and shares, what is refused, and requests whose states they are."""

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.state.bits import Bits, fewer_bits
from memstate.state.layout import Order, Plane, StateLayout
from memstate.state.sharding import Part

HEADS = Plane("ssm", (32, 128, 128), torch.float32, parts=(Part("head", 32),), order="value_key")
NAMES = {"ssm": "values", "ssm_scales": "scales", "ssm_residual": "residual"}
LAYERS = 2


@pytest.mark.parametrize(
    ("bits", "per_element"), [("int16", 16.25), ("e4m3", 8.25), ("int8", 8.25), ("int8+residual", 12.25)]
)
def test_planes_take_the_bits_that_they_should_and_are_cut_alike(bits: Bits, per_element: float) -> None:
    planes = fewer_bits(HEADS, bits)
    assert sum(plane.nbytes for plane in planes) * 8 == per_element * HEADS.elements
    assert [plane.name for plane in planes] == list(NAMES)[: len(planes)]
    for plane in planes:
        assert plane.parts == HEADS.parts and plane.order == HEADS.order
        assert plane.shard(4).shape == (8, *plane.shape[1:])
    assert fewer_bits(HEADS.shard(4), bits) == tuple(plane.shard(4) for plane in planes)


def test_units_along_the_last_axis_are_cut_between_blocks() -> None:
    plane = Plane("ssm", (16, 256), torch.float32, parts=(Part("k", 2, 64), Part("v", 4, 32)), axis=1)
    values, scales, residual = fewer_bits(plane, "int8+residual")
    assert values.parts == plane.parts
    assert (scales.shape, scales.parts) == ((16, 8), (Part("k", 2, 2), Part("v", 4, 1)))
    assert (residual.shape, residual.parts) == ((16, 128), (Part("k", 2, 32), Part("v", 4, 16)))


@pytest.mark.parametrize(
    ("plane", "bits", "said"),
    [
        (Plane("ssm", (64,), torch.int32), "int8", "torch.int32, expected floats"),
        (HEADS, "int4", "bits 'int4', expected one of int16, e4m3, int8, int8"),
        (Plane("ssm", (8192, 16), torch.float32), "int8", "the last axis has 16 elements, expected a multiple of 32"),
        (Plane("ssm", (), torch.float32), "int8", "the last axis has 1 elements"),
        (Plane("ssm", (64,), torch.float32, fill=1.5), "e4m3", "fill 1.5, but a fresh slot of fewer bits is zeros"),
        (
            Plane("ssm", (2, 96), torch.float32, parts=(Part("head", 2, 48),), axis=1), "e4m3",
            "a unit of part head has 48 elements, expected a multiple of 32, which share a scale",
        ),
    ],
)  # fmt: skip
def test_planes_that_cannot_be_are_refused_by_name(plane: Plane, bits: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^plane ssm\b.*{said}"):
        fewer_bits(plane, bits)


class Model:
    """A gated delta rule whose tokens are a function of their place, on planes in fewer bits."""

    def __init__(self, backend: Backend, bits: Bits, order: Order, generator: torch.Generator) -> None:
        self.ops = backend
        planes = fewer_bits(Plane("ssm", (2, 4, 32), torch.float32), bits)
        layout = StateLayout(planes, LAYERS, order)
        device = {"backend": backend.name, "device": backend.device}
        self.mem = ms.StateManager(layout, slots=12, max_requests=4, tracking=ms.Redirect(every=4), **device)  # type: ignore[arg-type]
        self.q, self.k, self.v = (torch.randn(16, 1, 2, n, generator=generator) for n in (4, 4, 32))
        self.decay, self.beta = (torch.rand(16, 1, 2, generator=generator) * sign for sign in (-0.1, 1))

    def step(self, rows: Any) -> list[list[Tensor]]:
        """One token of each row, and the bytes of each row's state behind it."""
        step, held = self.mem.plan(rows), self.mem.planes
        n = len(step.before)
        at, column = torch.from_numpy(step.before.astype(np.int64)), torch.arange(1, n + 1, dtype=torch.int32)
        inputs = [x[at].to(self.ops.device) for x in (self.q, self.k, self.v, self.decay, self.beta)]
        column, numbers = column.to(self.ops.device), torch.from_numpy(step.after.copy()).to(self.ops.device)
        for layer in range(LAYERS):
            planes = {NAMES[name]: plane[layer] for name, plane in held.items()}
            states = torch.empty(1 + n, 2, 4, 32, device=self.ops.device)
            self.ops.load_bits(**planes, slots=step.read, out=states[1:])
            self.ops.gated_delta_step(*inputs, states, column, column, 0 * column, 0 * column + 1)
            for slots in (step.write, step.snapshot):
                self.ops.store_bits(**planes, slots=slots, batch=states[1:], numbers=numbers, seed=5, first=8 * layer)
        self.mem.settle(step)
        slots = step.write.tolist()
        return [[plane[:, slot].contiguous().view(torch.uint8).cpu() for plane in held.values()] for slot in slots]


@pytest.mark.parametrize(("bits", "order"), list(zip(get_args(Bits), ("layer_major", "slot_major") * 2, strict=True)))
def test_a_request_that_resumes_has_the_bits_of_one_that_ran_through(
    backend: Backend, bits: Bits, order: Order, generator: torch.Generator
) -> None:
    model = Model(backend, bits, order, generator)
    mem = model.mem
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    through = [model.step(rows) for _ in range(7)]
    assert all(map(torch.equal, *through[-1]))
    kept, _ = mem.end(rows, keep="handle", lengths=[4, 4])
    (alone,) = mem.admit([ms.Request("c", resume=kept)])
    for length in (5, 6, 7):
        ((*state,),) = model.step([alone])
        assert all(map(torch.equal, state, through[length - 1][0])) and any(plane.any() for plane in state)
    assert mem.audit().clean
