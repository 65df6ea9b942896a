"""Tests of the selective state update alone. Tests of all decode steps: test_decode_steps.py."""

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
)  # fmt: skip
from tests.support.recurrences import Array, float64, selective, selective_bound

KINDS = {"mamba2": (2, 1, 16, 16), "mamba1": (1, 1, 24, 16)}  # small sizes: heads, groups, dim, state
MODELS = {"mamba2": (32, 8, 64, 128), "mamba1": (1, 1, 8192, 16)}

each_kind = pytest.mark.parametrize("kind", KINDS)


def build(
    backend: Backend, generator: torch.Generator, kind: str = "mamba2", rows: list[Row] = MIXED, tokens: int = 3,
    state: torch.dtype = torch.float32, inputs: torch.dtype = torch.float32,
    dims: tuple[int, int, int, int] | None = None, softplus: bool = True, without: tuple[str, ...] = (),
    steps: tuple[float, float] = (-3, 1), state_dim: bool = False,
) -> Case:  # fmt: skip
    """Returns a step with random states in the slots that rows read, random real tokens, and rubbish elsewhere.

    dims: heads, groups, dim, state; by default the sizes of a model on a GPU, and small sizes in the interpreter.
    without: which of d, z and dt_bias are None. steps: range of dt, before the softplus if there is one. state_dim:
    whether a slot stores `head state dim`.
    """
    device = backend.device
    heads, groups, dim, states = dims or (MODELS if device.type == "cuda" else KINDS)[kind]
    memory = Memory((heads, dim, states), state, device, generator, state_dim)
    own = (heads,) if kind == "mamba2" else (heads, dim)
    shapes = {"x": (heads, dim), "dt": own, "b": (groups, states), "c": (groups, states), "z": (heads, dim)}
    given = {name: (shape, inputs) for name, shape in shapes.items() if name not in without}

    def in_range(name: str, x: Tensor) -> Tensor:
        x = x.uniform_(*steps, generator=generator) if name == "dt" else x
        return x if softplus or name != "dt" else x.abs()

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator)

    made = fill_rows(memory, rows, tokens, given, generator, in_range)
    a = -random(own if kind == "mamba2" else (heads, dim, states)).exp()
    weights = {"a": a, "d": random(own), "dt_bias": random(own).abs()}
    shared: dict[str, Any] = dict.fromkeys(without)
    shared |= {name: weight.to(device) for name, weight in weights.items() if name not in without}
    return Case("selective_step", rows, made, shared | {"softplus": softplus}, memory, like="x")


def heads_of(case: Case, i: int, real: int, old: Array) -> list[dict[str, Any]]:
    """Returns for each head the arguments of the recurrence. If a head has one value, all its channels get it."""
    arguments = case.arguments()
    heads, dim, states = old.shape
    given = {
        name: float64(arguments[name] if name in ("a", "d", "dt_bias") else arguments[name][i, :real])
        for name in ("x", "dt", "a", "b", "c", "d", "z", "dt_bias")
        if arguments[name] is not None
    }
    group, arguments_of = heads // given["b"].shape[1], []
    for h in range(heads):
        dt = given["dt"][:, h]
        head = {
            "x": given["x"][:, h], "dt": np.broadcast_to(dt[:, None] if dt.ndim == 1 else dt, (real, dim)),
            "a": np.broadcast_to(given["a"][h], (dim, states)), "b": given["b"][:, h // group],
            "c": given["c"][:, h // group], "z": given["z"][:, h] if "z" in given else None, "state": old[h],
            "softplus": case.shared["softplus"],
            "limits": (case.shared.get("dt_min", -np.inf), case.shared.get("dt_max", np.inf)),
        }  # fmt: skip
        for name in ("d", "dt_bias"):
            head[name] = np.broadcast_to(given[name][h], (dim,)) if name in given else np.zeros(dim)
        arguments_of.append(head)
    return arguments_of


def exact(head: dict[str, Any]) -> tuple[Array, Array]:
    """Returns outputs `token dim` and states `token+1 dim state`. The recurrence takes a dt that includes the bias."""
    rest = {name: value for name, value in head.items() if name != "dt_bias"}
    return selective(**rest | {"dt": head["dt"] + head["dt_bias"]})


def bounds(head: dict[str, Any]) -> Any:
    """Returns a bound for each output and each state of `exact`."""
    return selective_bound(**{"bias" if name == "dt_bias" else name: value for name, value in head.items()})


def stated(case: Case, i: int, real: int, old: Array, out: Tensor) -> Pairs:
    """Yields outputs and the new state with exact values and bounds, head by head."""
    for h, head in enumerate(heads_of(case, i, real, old)):
        (y, states), (y_bounds, state_bounds) = exact(head), bounds(head)
        yield from ((out[i, t, h], y[t], y_bounds[t]) for t in range(real))
        yield case.memory.state[case.rows[i].write, h], states[-1], state_bounds[-1]


def run(case: Case, backend: Backend) -> Tensor:
    return check_step(case, backend, stated)


@each_kind
@pytest.mark.parametrize(
    ("softplus", "without"),
    [(True, ("d",)), (False, ("z",)), (True, ("dt_bias",)), (False, ()), (True, ("d", "z", "dt_bias"))],
)
def test_G2_with_and_without_what_may_be_left_out(
    backend: Backend, generator: torch.Generator, kind: str, softplus: bool, without: tuple[str, ...]
) -> None:
    run(build(backend, generator, kind, [Row(1, 2)], softplus=softplus, without=without), backend)


@each_kind
@pytest.mark.parametrize("steps", [(-60, -9), (-9, 9), (19, 21), (20, 300)])
def test_G2_softplus_of_steps_of_every_size(
    backend: Backend, generator: torch.Generator, kind: str, steps: tuple[float, float]
) -> None:
    """The ranges of dt: exp(dt) too small to change 1 + exp(dt); around 20, where softplus branches; and exp(dt)
    overflows. One row starts from zeros, so that its state is as small as its step.
    """
    run(build(backend, generator, kind, [Row(0, 1), Row(2, 3)], steps=steps, without=("dt_bias",)), backend)


@each_kind
@pytest.mark.parametrize(("softplus", "limits"), [(True, (0.2, 0.6)), (True, (0.25, np.inf)), (False, (-np.inf, 0.5))])
def test_D41_steps_are_bounded_behind_the_softplus(
    backend: Backend, generator: torch.Generator, kind: str, softplus: bool, limits: tuple[float, float]
) -> None:
    """Both limits bind for some of the steps."""
    case = build(backend, generator, kind, softplus=softplus, steps=(-6, 2) if softplus else (0, 1))
    case.shared.update(zip(("dt_min", "dt_max"), limits, strict=True))
    run(case, backend)


@pytest.mark.parametrize("limits", [(0.5, 0.2), (float("nan"), None), ("0.1", None), (None, torch.ones(()))])
def test_limits_that_are_no_range_are_refused(
    backend: Backend, generator: torch.Generator, limits: tuple[Any, Any]
) -> None:
    case = build(backend, generator)
    case.shared.update(zip(("dt_min", "dt_max"), limits, strict=True))
    with pytest.raises(ValueError, match=r"dt_min .*, dt_max .*: expected numbers, the first at most the second"):
        case.step(backend)
