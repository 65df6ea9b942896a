"""Counts the bytes that decode steps move, from the addresses of their loads and stores."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.kernels.configs import SelectiveConfig
from memstate.kernels.conv import conv_step
from memstate.kernels.gated_delta import blocks as delta_blocks
from memstate.kernels.gated_delta import gated_delta_step
from memstate.kernels.mamba3 import mamba3_step
from memstate.kernels.selective import selective_step
from memstate.kernels.tables import ConvTail, Cursor, DeltaTail, Mamba3State, SelectiveTail
from tests.support.addresses import LOAD, STORE, Log
from tests.support.recorded import recorded

SLOTS = 5
# Three rows: one works in place; one is padding; one writes another slot and a snapshot.
READ, WRITE, SNAPSHOT = [1, 0, 2], [1, 0, 3], [0, 0, 4]
HEADS, KEY_HEADS, KEY, VALUE = 4, 2, 16, 48
GROUPS, DIM, STATE = 2, 24, 16


def often(log: Log, kind: str, tensor: Tensor) -> list[set[int]]:
    """Returns for each row of a tensor the set of the numbers of accesses to its bytes. {2}: each byte had two.
    kind: whether to count loads or stores.
    """
    start, counts = tensor.data_ptr(), np.zeros(tensor.nbytes, np.int64)
    for access in (access for launch in log.launches for access in launch.accesses if access.kind == kind):
        at = np.unique(access.bytes()) - start
        np.add.at(counts, at[(at >= 0) & (at < len(counts))], 1)
    return [set(row.tolist()) for row in counts.reshape(tensor.shape[0], -1)]


def columns(tokens: int = 1) -> dict[str, Tensor]:
    named = {"read": READ, "write": WRITE, "snapshot": SNAPSHOT, "tokens": [tokens] * 3}
    return {name: torch.tensor(column, dtype=torch.int32) for name, column in named.items()}


def check(log: Log, state: Tensor, out: Tensor, *loaded: tuple[Tensor, int]) -> None:
    """Checks that slots 1 and 2 are read once, slots 1, 3 and 4 and all output written once, and nothing else.

    loaded: pairs of an input and how often each byte of its real rows is loaded.
    """
    assert often(log, LOAD, state) == [{0}, {1}, {1}, {0}, {0}]
    assert often(log, STORE, state) == [{0}, {1}, {0}, {1}, {1}]
    assert often(log, STORE, out) == [{1}, {1}, {1}] and often(log, LOAD, out) == [{0}] * 3
    for tensor, times in loaded:
        assert often(log, LOAD, tensor) == [{times}, {0}, {times}]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["key value", "value key"])
def test_D25_a_delta_step_moves_each_byte_of_a_state_once(dtype: torch.dtype, transposed: bool) -> None:
    """A program computes one tile (a block of values of a head), and loads the queries and keys for it anew."""
    rows = len(READ)
    q, k = torch.randn(2, rows, 1, KEY_HEADS, KEY).to(torch.bfloat16)
    v = torch.randn(rows, 1, HEADS, VALUE).to(torch.bfloat16)
    decay, beta = -torch.rand(rows, 1, HEADS), torch.rand(rows, 1, HEADS)
    plane = torch.randn(SLOTS, HEADS, *((VALUE, KEY) if transposed else (KEY, VALUE))).to(dtype)
    out = torch.empty_like(v)
    state = plane.mT if transposed else plane
    with recorded() as log:
        gated_delta_step(q, k, v, decay, beta, state, **columns(), out=out)
    tiles = -(-VALUE // delta_blocks(KEY, VALUE, plane.element_size(), 16 // plane.element_size())[1])
    shared = tiles * HEADS // KEY_HEADS
    check(log, plane, out, (q, shared), (k, shared), (v, 1), (decay, tiles), (beta, tiles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_D25_a_mamba_step_moves_each_byte_of_a_state_once(dtype: torch.dtype) -> None:
    rows = len(READ)
    x, z = torch.randn(2, rows, 1, HEADS, DIM).to(torch.bfloat16)
    b, c = torch.randn(2, rows, 1, GROUPS, STATE).to(torch.bfloat16)
    dt, a = torch.rand(rows, 1, HEADS), -torch.rand(HEADS)
    state, out = torch.randn(SLOTS, HEADS, DIM, STATE).to(dtype), torch.empty_like(x)
    with recorded() as log:
        selective_step(x, dt, a, b, c, state, **columns(), z=z, out=out)
    tiles = -(-DIM // SelectiveConfig().blocks(DIM, STATE, True)[0])
    shared = tiles * HEADS // GROUPS
    check(log, state, out, (x, 1), (z, 1), (b, shared), (c, shared), (dt, tiles))


def test_D25_a_step_of_mamba3_moves_each_byte_of_a_state_once() -> None:
    """The state has four planes."""
    rows, dim, angles = len(READ), 16, 4
    x, z = torch.randn(2, rows, 1, HEADS, dim).to(torch.bfloat16)
    b, c = torch.randn(2, rows, 1, GROUPS, STATE).to(torch.bfloat16)
    dt, decay, trap = torch.rand(3, rows, 1, HEADS)
    rotation, (b_bias, c_bias), d = torch.randn(rows, 1, angles), torch.randn(2, HEADS, STATE), torch.randn(HEADS)
    shapes = (HEADS, angles), (HEADS, dim, STATE), (HEADS, STATE), (HEADS, dim)
    state, out = Mamba3State(*(torch.randn(SLOTS, *shape) for shape in shapes)), torch.empty_like(x)
    with recorded() as log:
        mamba3_step(x, b, c, dt, -decay, trap, rotation, b_bias, c_bias, d, state, **columns(), z=z, out=out)
    shared = HEADS // GROUPS
    for plane in state:
        check(log, plane, out, (x, 1), (z, 1), (b, shared), (c, shared), (dt, 1), (rotation, HEADS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("taps_fastest", [False, True], ids=["tap channel", "channel tap"])
def test_D25_a_convolution_moves_each_byte_of_a_window_once(dtype: torch.dtype, taps_fastest: bool) -> None:
    rows, taps, channels = len(READ), 4, 80
    x, weight = torch.randn(rows, 1, channels).to(torch.bfloat16), torch.randn(channels, taps).to(torch.bfloat16)
    plane = torch.randn(SLOTS, *((channels, taps - 1) if taps_fastest else (taps - 1, channels))).to(dtype)
    out = torch.empty_like(x)
    with recorded() as log:
        conv_step(x, weight, None, plane.mT if taps_fastest else plane, **columns(), out=out)
    check(log, plane, out, (x, 1))
    assert often(log, LOAD, weight) == [{2}] * channels


T, RING, PENDING = 4, 7, 2  # tokens of a step, places of a ring, pending tokens


def ring(*token: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, RING, *token).to(dtype)


def with_tail() -> dict[str, Any]:
    """Returns columns of a step of 4 tokens.

    Row 0 has 2 pending tokens, which begin at place 4 of the ring; row 2 has no tail.
    """
    told = [2, 1, 0], [4, 0, 0], [PENDING, 2, 2], [PENDING, 2, 2]
    return columns(T) | {"cursor": Cursor(*(torch.tensor(column, dtype=torch.int32) for column in told))}


def check_tail(log: Log, state: Tensor, out: Tensor, *rings: tuple[Tensor, int]) -> None:
    """Checks one read and one write of each state.

    rings: pairs of a ring and how often each byte of a pending token in it is loaded.
    """
    check(log, state, out)
    for ring, times in rings:
        assert often(log, LOAD, ring[:2]) == often(log, STORE, ring[:2]) == [{0}, {0}]
        assert often(log, LOAD, ring[2]) == [{0}] * 4 + [{times}] * PENDING + [{0}]
        assert often(log, STORE, ring[2]) == [{1}] * 3 + [{0}] * 3 + [{1}]


@pytest.mark.sample
@pytest.mark.parametrize("transposed", [False, True], ids=["key value", "value key"])
@pytest.mark.parametrize("low_rank", [False, True], ids=["gates", "rwkv7"])
def test_D25_a_tail_moves_each_byte_of_a_delta_state_once(transposed: bool, low_rank: bool) -> None:
    q, k, a, b = torch.randn(4, 3, T, KEY_HEADS, KEY).to(torch.bfloat16)
    v = torch.randn(3, T, HEADS, VALUE).to(torch.bfloat16)
    decay = -torch.rand(3, T, HEADS, *([KEY] if low_rank else []))
    plane = torch.randn(SLOTS, HEADS, *((VALUE, KEY) if transposed else (KEY, VALUE)))
    low = [ring(KEY_HEADS, KEY, dtype=k.dtype) for _ in range(3)]
    tail = DeltaTail(low[0], ring(HEADS, VALUE, dtype=v.dtype), ring(*decay.shape[2:]), ring(HEADS))
    given: dict[str, Any] = {"beta": torch.rand(3, T, HEADS)}
    if low_rank:
        tail, given = tail._replace(beta=None, a=low[1], b=low[2]), {"beta": None, "a": a, "b": b}
    state, out = plane.mT if transposed else plane, torch.empty_like(v)
    with recorded() as log:
        gated_delta_step(q, k, v, decay, **given, state=state, **with_tail(), tail=tail, out=out)
    tiles = -(-VALUE // delta_blocks(KEY, VALUE, 4, 4)[1])
    shared = tiles * HEADS // KEY_HEADS
    times = {"k": shared, "v": 1, "gate": tiles, "beta": tiles, "a": shared, "b": shared}
    check_tail(log, plane, out, *((x, times[name]) for name, x in tail._asdict().items() if x is not None))


@pytest.mark.parametrize("tied", [True, False], ids=["mamba2", "mamba1"])
def test_D25_a_tail_moves_each_byte_of_a_mamba_state_once(tied: bool) -> None:
    x, (b, c) = torch.randn(3, T, HEADS, DIM).to(torch.bfloat16), torch.randn(2, 3, T, GROUPS, STATE)
    own = [HEADS] if tied else [HEADS, DIM]
    dt, a = torch.rand(3, T, *own), -torch.rand(*own, *([] if tied else [STATE]))
    state, out = torch.randn(SLOTS, HEADS, DIM, STATE), torch.empty_like(x)
    tail = SelectiveTail(ring(HEADS, DIM, dtype=x.dtype), ring(GROUPS, STATE), ring(*own))
    with recorded() as log:
        selective_step(x, dt, a, b, c, state, **with_tail(), tail=tail, out=out)
    tiles = -(-DIM // SelectiveConfig().blocks(DIM, STATE, tied)[0])
    check_tail(log, state, out, (tail.x, 1), (tail.b, tiles * HEADS // GROUPS), (tail.dt, tiles if tied else 1))


def test_D25_a_tail_moves_each_byte_of_a_window_once() -> None:
    """If the pending inputs fill the window, the step does not read the window."""
    taps, channels = 4, 80
    for fewer in (taps, PENDING + 1):
        x, weight = torch.randn(3, T, channels).to(torch.bfloat16), torch.randn(channels, fewer).to(torch.bfloat16)
        state, out, tail = torch.randn(SLOTS, fewer - 1, channels), torch.empty_like(x), ring(channels, dtype=x.dtype)
        with recorded() as log:
            conv_step(x, weight, None, state, **with_tail(), tail=ConvTail(tail), out=out)
        if fewer == taps:
            check_tail(log, state, out, (tail, 1))
        else:
            assert often(log, LOAD, state) == [{0}, {0}, {1}, {0}, {0}]
            assert often(log, STORE, state) == [{0}, {1}, {0}, {1}, {1}]
