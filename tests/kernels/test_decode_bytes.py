"""Bytes that a decode step of one token moves, counted from the addresses of its loads and stores."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.kernels.conv import conv_step
from memstate.kernels.gated_delta import blocks as delta_blocks
from memstate.kernels.gated_delta import gated_delta_step
from memstate.kernels.selective import blocks as selective_blocks
from memstate.kernels.selective import selective_step
from tests.support.addresses import LOAD, STORE, Log

try:  # it replaces parts of Triton, and tries at once whether they are what it takes them for
    from tests.proof.interleaver import interleaved, misfit, stock
except ImportError as error:
    pytest.skip(f"accesses cannot be recorded here: {error}", allow_module_level=True)
if reason := misfit():
    pytest.skip(f"accesses cannot be recorded here: {reason}", allow_module_level=True)

SLOTS = 5
READ, WRITE, SNAPSHOT = [1, 0, 2], [1, 0, 3], [0, 0, 4]  # in place, padding, moving with a snapshot
HEADS, KEY_HEADS, KEY, VALUE = 4, 2, 16, 48
GROUPS, DIM, STATE = 2, 24, 16


@contextmanager
def accesses() -> Iterator[Log]:
    with interleaved(stock) as log:
        yield log


def times(log: Log, kind: str, tensor: Tensor) -> list[int]:
    """How often each byte of a tensor was loaded or stored. Lanes of one access that want the same byte are one."""
    start, counts = tensor.data_ptr(), np.zeros(tensor.nbytes, np.int64)
    for access in (access for launch in log.launches for access in launch.accesses):
        at = np.unique(access.bytes()) - start
        if access.kind == kind:
            np.add.at(counts, at[(at >= 0) & (at < len(counts))], 1)
    return counts.tolist()


def slots_of(log: Log, kind: str, state: Tensor) -> list[set[int]]:
    """Of each slot, how often its bytes were loaded or stored."""
    counts = np.array(times(log, kind, state)).reshape(state.shape[0], -1)
    return [set(slot.tolist()) for slot in counts]


def columns() -> dict[str, Tensor]:
    named = {"read": READ, "write": WRITE, "snapshot": SNAPSHOT, "tokens": [1, 1, 1]}
    return {name: torch.tensor(column, dtype=torch.int32) for name, column in named.items()}


def of_rows(log: Log, kind: str, tensor: Tensor) -> list[set[int]]:
    """Of each row, how often its bytes were loaded or stored."""
    counts = np.array(times(log, kind, tensor)).reshape(tensor.shape[0], -1)
    return [set(row.tolist()) for row in counts]


def expect_state(log: Log, state: Tensor) -> None:
    """Slots 1 and 2 are read once, 1, 3 and the snapshot 4 are written once; nothing else is touched."""
    assert slots_of(log, LOAD, state) == [{0}, {1}, {1}, {0}, {0}]
    assert slots_of(log, STORE, state) == [{0}, {1}, {0}, {1}, {1}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["key value", "value key"])
def test_D25_a_delta_step_moves_each_byte_of_a_state_once(dtype: torch.dtype, transposed: bool) -> None:
    """Queries and keys are loaded for each tile of values and each head that shares them: once from memory."""
    rows = len(READ)
    q, k = torch.randn(2, rows, 1, KEY_HEADS, KEY).to(torch.bfloat16)
    v = torch.randn(rows, 1, HEADS, VALUE).to(torch.bfloat16)
    decay, beta = -torch.rand(rows, 1, HEADS), torch.rand(rows, 1, HEADS)
    plane = torch.randn(SLOTS, HEADS, *((VALUE, KEY) if transposed else (KEY, VALUE))).to(dtype)
    out = torch.empty_like(v)
    state = plane.mT if transposed else plane
    with accesses() as log:
        gated_delta_step(q, k, v, decay, beta, state, **columns(), out=out)
    expect_state(log, plane)
    tiles = -(-VALUE // delta_blocks(KEY, VALUE, plane.element_size(), 16 // plane.element_size())[1])
    shared = tiles * HEADS // KEY_HEADS
    for tensor, often in ((q, shared), (k, shared), (v, 1), (decay, tiles), (beta, tiles)):
        assert of_rows(log, LOAD, tensor) == [{often}, {0}, {often}]
    assert of_rows(log, STORE, out) == [{1}, {1}, {1}] and of_rows(log, LOAD, out) == [{0}] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_D25_a_mamba_step_moves_each_byte_of_a_state_once(dtype: torch.dtype) -> None:
    rows = len(READ)
    x, z = torch.randn(2, rows, 1, HEADS, DIM).to(torch.bfloat16)
    b, c = torch.randn(2, rows, 1, GROUPS, STATE).to(torch.bfloat16)
    dt, a = torch.rand(rows, 1, HEADS), -torch.rand(HEADS)
    state, out = torch.randn(SLOTS, HEADS, DIM, STATE).to(dtype), torch.empty_like(x)
    with accesses() as log:
        selective_step(x, dt, a, b, c, state, **columns(), z=z, out=out)
    expect_state(log, state)
    tiles = -(-DIM // selective_blocks(DIM, STATE, True)[0])
    shared = tiles * HEADS // GROUPS
    for tensor, often in ((x, 1), (z, 1), (b, shared), (c, shared), (dt, tiles)):
        assert of_rows(log, LOAD, tensor) == [{often}, {0}, {often}]
    assert of_rows(log, STORE, out) == [{1}, {1}, {1}] and of_rows(log, LOAD, out) == [{0}] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("taps_fastest", [False, True], ids=["tap channel", "channel tap"])
def test_D25_a_convolution_moves_each_byte_of_a_window_once(dtype: torch.dtype, taps_fastest: bool) -> None:
    rows, taps, channels = len(READ), 4, 80
    x, weight = torch.randn(rows, 1, channels).to(torch.bfloat16), torch.randn(channels, taps).to(torch.bfloat16)
    plane = torch.randn(SLOTS, *((channels, taps - 1) if taps_fastest else (taps - 1, channels))).to(dtype)
    out = torch.empty_like(x)
    with accesses() as log:
        conv_step(x, weight, None, plane.mT if taps_fastest else plane, **columns(), out=out)
    expect_state(log, plane)
    assert of_rows(log, LOAD, x) == [{1}, {0}, {1}] and of_rows(log, LOAD, weight) == [{2}] * channels
    assert of_rows(log, STORE, out) == [{1}, {1}, {1}] and of_rows(log, LOAD, out) == [{0}] * 3
