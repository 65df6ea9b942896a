"""Scattering what was accepted of a window: every byte of poisoned memory accounted for, on every kind of plane."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.state.layout import Order
from tests.kernels.test_gather import KINDS, LAYERS, ORDERS, SLOTS, Poisoned, dense, ids, stored, strided
from tests.support.decode_case import far_apart

STEP = 3
OPS = ("gather_slots", "scatter_slots", "scatter_accepted", "scatter_inputs")
Kind = tuple[torch.dtype, tuple[int, ...]]


class Row(NamedTuple):
    """One entry of a speculative step: where its state and its snapshot go, and after how many tokens."""

    write: int
    accepted: int
    snapshot: int = 0
    crossed: int = 0


# All accepted, with a snapshot; none accepted, and yet a snapshot; padding; nothing crossed; snapshot alone.
MIXED = [Row(2, STEP, 5, 1), Row(1, 0, 4, 2), Row(0, 2, 0, 1), Row(3, 1, 6, 0)]
NOTHING_DUE = [
    Row(0, 1), Row(-1, 2, -3, 1), Row(1, 0, 2, 0), Row(3, -1, 4, -2), Row(1, STEP + 1, 2, STEP + 1),
    Row(SLOTS, 1, SLOTS, 1), Row(2**31 - 1, 2, 3, 2**31 - 1), Row(4, -(2**31), -(2**31), 3),
]  # fmt: skip
CHANNELS = 8
both_orders = pytest.mark.parametrize("transposed", [False, True], ids=["tap channel", "channel tap"])
WINDOWS = [
    (torch.bfloat16, 3, CHANNELS),  # 48 bytes
    (torch.float32, 3, 4),
    (torch.float16, 3, 5),
    (torch.float32, 1, 4),
    (torch.bfloat16, 4, 1),
    (torch.int8, 3, 5),
    (torch.bool, 2, 16),
    (torch.complex64, 3, 2),
    (torch.complex128, 2, 3),
    (torch.bfloat16, 3, 3000),  # several tiles
    (torch.int8, 3, 3001),
]


def columns(backend: Backend, rows: list[Row], dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    return {name: ids(backend, [getattr(row, name) for row in rows], dtype) for name in Row._fields}


def puts(rows: list[Row], count: int) -> list[tuple[int, int, int]]:
    """(entry, slot, tokens) of everything that a step stores in a plane of `count` slots."""
    both = [pair for i, row in enumerate(rows) for pair in ((i, *row[:2]), (i, *row[2:]))]
    return [(entry, slot, tokens) for entry, slot, tokens in both if 0 < slot < count and 1 <= tokens <= STEP]


def run_accepted(
    backend: Backend, generator: torch.Generator, plane: Poisoned, rows: list[Row], dtype: torch.dtype = torch.int32
) -> None:
    """Scatters the states of a speculative step, and checks every byte."""
    layers, count, *inner = plane.tensor.shape
    window = dense(backend, generator, plane.tensor.dtype, (layers, len(rows), STEP, *inner))
    backend.scatter_accepted(plane.tensor, window.tensor, **columns(backend, rows, dtype))
    for (entry, slot, tokens), layer in product(puts(rows, count), range(layers)):
        plane.expected[plane.block(layer, slot)] = window.expected[window.block(layer, entry, tokens - 1)]
    plane.check()
    window.check()
    assert backend.counts.launches == {"scatter_accepted": 1}


def run_inputs(
    backend: Backend, generator: torch.Generator, plane: Poisoned, rows: list[Row], transposed: bool, offset: int = 0
) -> None:
    """Scatters the windows of a speculative step to a plane as it lies in memory, and checks every byte."""
    view = plane.tensor.transpose(2, 3) if transposed else plane.tensor
    layers, count, taps, channels = view.shape
    inputs = dense(backend, generator, view.dtype, (layers, len(rows), taps + STEP, channels), offset)
    backend.scatter_inputs(view, inputs.tensor, **columns(backend, rows))
    for (entry, slot, tokens), layer in product(puts(rows, count), range(layers)):
        fed = inputs.expected[inputs.block(layer, entry)].view(taps + STEP, channels, -1)
        window = fed[tokens : tokens + taps]
        plane.expected[plane.block(layer, slot)] = (window.transpose(0, 1) if transposed else window).flatten()
    plane.check()
    inputs.check()
    assert backend.counts.launches == {"scatter_inputs": 1}


# -- the states of a speculative step ----------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_B41_accepted_and_crossed_states_are_kept(
    backend: Backend, generator: torch.Generator, kind: Kind, order: Order
) -> None:
    run_accepted(backend, generator, stored(backend, generator, kind, order), MIXED)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ORDERS)
def test_B41_nothing_due_changes_nothing(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, order: Order
) -> None:
    plane = stored(backend, generator, (torch.bfloat16, (3, 5)), order)
    run_accepted(backend, generator, plane, NOTHING_DUE, dtype)


@pytest.mark.parametrize(
    "rows",
    [
        [Row(1, 2, 3, 2)],
        [Row(1, 1)],
        [Row(0, 3, 2, 3)],
        [Row(4, 0, 5, 3)],
        [Row(1, 2**32 + 1, 2, 2**40 + 1), Row(2**32 + 3, 1, -(2**32) + 4, 1), Row(5, 2, 3, 1)],
    ],
)
def test_B41_one_row_and_rows_of_64_bits(backend: Backend, generator: torch.Generator, rows: list[Row]) -> None:
    """Counts and slots are not cut."""
    run_accepted(backend, generator, stored(backend, generator, (torch.float32, (4,)), "slot_major"), rows, torch.int64)


@pytest.mark.parametrize("batch", [17, 300])
def test_B41_many_rows(backend: Backend, generator: torch.Generator, batch: int) -> None:
    """Random rows, of which most of a large batch are padding; writes and snapshots share a block of entries."""
    slots = torch.randperm(40, generator=generator).tolist() + [0] * (2 * batch)
    chosen = torch.randperm(2 * batch, generator=generator).tolist()
    due = dict(zip(chosen, slots, strict=False))
    counts = torch.randint(0, STEP + 2, (batch, 2), generator=generator).tolist()
    rows = [Row(due[i], counts[i][0], due[batch + i], counts[i][1]) for i in range(batch)]
    rows[-1] = Row(40, STEP, 41, STEP - 1)  # the last entries of all
    plane = strided(backend, generator, torch.float32, (1, 42, 4), (168, 4, 1))
    run_accepted(backend, generator, plane, rows)


@pytest.mark.parametrize(("dtype", "steps", "size"), [(torch.float32, 2**29 + 1, 4), (torch.int8, 2**30 + 1, 3)])
def test_B38_steps_beyond_2_31_elements(
    backend: Backend, generator: torch.Generator, dtype: torch.dtype, steps: int, size: int
) -> None:
    window = far_apart(steps, torch.zeros(size, dtype=dtype, device=backend.device), size).view(1, 1, steps, size)
    state = torch.randint(8, 99, (2, size), generator=generator).to(window)
    window[0, 0, -1], window[0, 0, 0] = state[0], state[1]
    plane = torch.full((1, 3, size), 7, dtype=dtype, device=backend.device)
    backend.scatter_accepted(plane, window, **columns(backend, [Row(1, steps, 2, 1)]))
    assert torch.equal(plane[0, 1:], state) and bool((plane[0, 0] == 7).all())


# -- the windows of a speculative step ---------------------------------------------------------------


@both_orders
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.sample
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_B41_windows_are_slices_of_the_inputs(
    backend: Backend, generator: torch.Generator, window: tuple[torch.dtype, int, int], order: Order, transposed: bool
) -> None:
    dtype, taps, channels = window
    shape = (channels, taps) if transposed else (taps, channels)
    run_inputs(backend, generator, stored(backend, generator, (dtype, shape), order), MIXED, transposed)


@both_orders
@pytest.mark.parametrize("offset", [1, 8])
def test_B37_inputs_and_planes_at_any_address(
    backend: Backend, generator: torch.Generator, transposed: bool, offset: int
) -> None:
    shape = (CHANNELS, 3) if transposed else (3, CHANNELS)
    strides = (64 * SLOTS, 56 if offset == 8 else 57, shape[1], 1)
    plane = strided(backend, generator, torch.int8, (LAYERS, SLOTS, *shape), strides, offset - 1)
    run_inputs(backend, generator, plane, MIXED if offset == 1 else NOTHING_DUE, transposed, offset)


@both_orders
def test_B38_windows_beyond_2_31_elements(backend: Backend, generator: torch.Generator, transposed: bool) -> None:
    plane = far_apart(3, torch.zeros((1, 4, 2) if transposed else (1, 2, 4), device=backend.device), 2**30 + 4)
    plane = plane.transpose(0, 1).transpose(2, 3) if transposed else plane.transpose(0, 1)
    plane[:] = 7
    inputs = torch.randn(1, 1, 5, 4, generator=generator).to(backend.device)
    backend.scatter_inputs(plane, inputs, **columns(backend, [Row(2, 3)]))
    assert torch.equal(plane[0, 2], inputs[0, 0, 3:]) and bool((plane[:, :2] == 7).all())


# -- at the door, all four -----------------------------------------------------------------------------


def arguments(backend: Backend, op: str, plane: Tensor, batch: int = 2, step: int = STEP) -> dict[str, Tensor]:
    """What an operation takes beside a plane `layer slot tap channel`: nothing of it is due."""
    layers, _, *inner = plane.shape
    given = columns(backend, [Row(0, 1)] * batch)
    if op in ("gather_slots", "scatter_slots"):
        name = "out" if op == "gather_slots" else "batch"
        return {"plane": plane, "slots": given["write"], name: plane.new_ones(layers, batch, *inner)}
    if op == "scatter_accepted":
        return {"plane": plane, "window": plane.new_ones(layers, batch, step, *inner), **given}
    return {"plane": plane, "inputs": plane.new_ones(layers, batch, inner[0] + step, inner[1]), **given}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("shape", "batch"), [((2, 6, 3, 0), 2), ((2, 6, 0, 4), 2), ((0, 6, 3, 4), 2), ((2, 6, 3, 4), 0)]
)
def test_B39_nothing_to_move_launches_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], batch: int, op: str
) -> None:
    monkeypatch.setattr("memstate.kernels.scatter._scatter", None)
    monkeypatch.setattr("memstate.kernels.gather._gather_slots", None)
    plane = torch.zeros(shape, device=backend.device)
    getattr(backend, op)(**arguments(backend, op, plane, batch))
    assert not plane.any()
