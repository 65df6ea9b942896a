"""Tests of the step of Mamba-3 alone. Tests of all decode steps: test_decode_steps.py."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Mamba3State
from tests.support.decode_case import MIXED, Case, Memory, Pairs, Row, check_step, fill_rows
from tests.support.recurrences import Array, Mamba3, float64, mamba3, mamba3_bound
from tests.support.sampling import PROOF

Dims = tuple[int, int, int, int, int]  # heads, groups, dim, state, angle
TURN = 2 * np.pi


def planes(flat: Tensor, dims: Dims) -> Mamba3State:
    """Splits states `.. 1 element` into their four planes. Angles are fp32, whatever dtype the other planes have."""
    heads, _, dim, states, angles = dims
    wide = 4 // flat.element_size()
    angle, *rest = flat[..., 0, :].split([wide * heads * angles, heads * dim * states, heads * states, heads * dim], -1)
    shapes = (heads, dim, states), (heads, states), (heads, dim)
    matrices = (part.unflatten(-1, shape) for part, shape in zip(rest, shapes, strict=True))
    return Mamba3State(angle.view(torch.float32).unflatten(-1, (heads, angles)), *matrices)


def build(
    backend: Backend, generator: torch.Generator, rows: list[Row] = MIXED, tokens: int = 3,
    state: torch.dtype = torch.float32, inputs: torch.dtype = torch.float32, dims: Dims | None = None,
    gate: bool = True,
) -> Case:  # fmt: skip
    """Returns a step with random states in the slots that rows read, random real tokens, and rubbish elsewhere.

    dims: sizes of the step; by default those of a model on a GPU, and small sizes in the interpreter. gate: whether
    the step has the gate z.
    """
    dims = dims or ((32, 1, 64, 128, 32) if backend.device.type == "cuda" else (2, 1, 8, 16, 4))
    heads, groups, dim, states, angles = dims
    size = heads * (4 // state.itemsize * angles + dim * states + states + dim)
    memory = Memory((1, size), state, backend.device, generator)
    own = dict.fromkeys(("dt", "decay"), ((heads,), torch.float32)) | {"trap": ((heads,), inputs)}
    wide = {"x": (heads, dim), "b": (groups, states), "c": (groups, states), "rotation": (angles,), "z": (heads, dim)}
    shapes = own | {name: (shape, inputs) for name, shape in wide.items() if gate or name != "z"}

    def in_range(name: str, x: Tensor) -> Tensor:
        return x.abs() if name == "dt" else -x.abs() if name == "decay" else x

    made = fill_rows(memory, rows, tokens, shapes, generator, in_range)
    weights = {"b_bias": (heads, states), "c_bias": (heads, states), "d": (heads,)}
    shared: dict[str, Any] = {
        name: torch.randn(shape, generator=generator).to(backend.device) for name, shape in weights.items()
    }
    return Case("mamba3_step", rows, made, shared, memory, like="x", planes=partial(planes, dims=dims))


def stated(case: Case, i: int, real: int, old: Array, out: Tensor) -> Pairs:
    """Yields outputs and new state with exact values and bounds, head by head. Angles may differ by whole turns."""
    assert case.planes is not None
    given = {name: float64(tensor[i, :real]) for name, tensor in case.inputs.items()}
    given |= {name: float64(weight) for name, weight in case.shared.items()}
    before = case.planes(torch.from_numpy(old).to(case.memory.state))
    kept: Mamba3State = case.planes(case.memory.state)
    ratio = given["x"].shape[1] // given["b"].shape[1]
    for h in range(given["x"].shape[1]):
        head = Mamba3(
            *(given[name][:, h] for name in ("x",)), *(given[name][:, h // ratio] for name in ("b", "c")),
            *(given[name][:, h] for name in ("dt", "decay", "trap")), given["rotation"],
            *(given[name][h] for name in ("b_bias", "c_bias", "d")), given["z"][:, h] if "z" in given else None,
            *(float64(plane[h]) for plane in before),
        )  # fmt: skip
        (y, last), (y_bounds, last_bounds) = mamba3(head), mamba3_bound(head)
        yield from ((out[i, t, h], y[t], y_bounds[t]) for t in range(real))
        for plane, exact, bound in zip(kept, last, last_bounds, strict=True):
            got = plane[case.rows[i].write, h]
            turns = TURN * np.round((float64(got) - exact) / TURN) if plane is kept.angle else 0
            yield got, exact + turns, bound


def run(case: Case, backend: Backend) -> Tensor:
    return check_step(case, backend, stated)


def test_D31_an_angle_loses_no_digits_to_turns(backend: Backend, generator: torch.Generator) -> None:
    """Tokens turn by about two radians each. After 1000, a plain sum in fp32 would be wrong by a thousandth or more."""
    tokens = 1000 if PROOF else 400
    case = build(backend, generator, [Row(0, 1, tokens=tokens)], tokens, dims=(1, 1, 4, 8, 4))
    turn = case.inputs["rotation"].abs_().add_(0.5)
    case.step(backend)
    exact = (np.pi * np.tanh(float64(turn[0])) * float64(case.inputs["dt"][0])).sum(0)
    assert case.planes is not None and exact.min() > tokens
    angles = float64(case.planes(case.memory.state).angle[1, 0])
    apart = angles - exact
    assert (np.abs(angles) < 3.1416).all() and (np.abs(apart - TURN * np.round(apart / TURN)) < 1e-4).all()
