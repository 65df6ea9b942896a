"""The gated delta rule step over read, write and snapshot slots. Knows no register, no strategy and no other layer.

One program advances one tile of one head's state, `key` by a block of `value`, through all tokens of its row. The tile
stays in fp32 registers from its load on, so the program may write the slot that it read. Up to 128 keys fit one warp,
and sums over keys then never wait for another. A speculative window takes a copy of the tile behind every token,
slots of marks behind theirs.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import stride_unit
from memstate.kernels.catalog import CompileCase
from memstate.kernels.decode_checks import check_gated_delta
from memstate.kernels.slots import NO_MARKS, absent, first_mark, known_slot, mark_offset, mark_types, row_slots
from memstate.kernels.tables import ACCESS_BYTES, Marks
from memstate.kernels.tuned import DeltaConfig, config_of
from memstate.kernels.warps import THREAD_REGISTERS, limit, roomy

OPTIONS = {"enable_fp_fusion": False}  # rounding as written, whatever the Triton version
MARKED = 168  # registers of a thread in a launch with marks and wide accesses: what float32 states need
DEFAULT = DeltaConfig()

# Everything that may differ between two calls of one model. The alignment of the inputs belongs here too: it may change
# the order in which lanes add up a sum, and the bits of a row would depend on where its batch was allocated.
PER_CALL = [
    "q_ptr", "k_ptr", "v_ptr", "decay_ptr", "beta_ptr", "out_ptr",
    "read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr",
    "mark_count_ptr", "mark_entry_ptr", "mark_offset_ptr", "mark_slot_ptr",
    "max_tokens", "last", "stride_units", "window_units", "scale",
]  # fmt: skip


@triton.jit(do_not_specialize=PER_CALL)
def _gated_delta_step(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, state_ptr, window_ptr, out_ptr,
    read_ptr, write_ptr, snapshot_ptr, tokens_ptr, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    max_tokens, last, stride_units, window_units, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PER_KEY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = key < KEY
    in_value = value < VALUE
    in_tile = in_key[:, None] & in_value[None, :]

    real, read, write, snapshot, count = row_slots(
        read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last, window_ptr is None
    )

    if mark_count_ptr is not None:
        mark = first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    # A multiple of UNIT that the compiler can see to be one: otherwise the accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    # Masks of a block and a scalar by `where`: `&` of the two is no mask in the interpreter of Triton 3.9.
    tile_ptr = state_ptr + head * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    s = tl.load(tile_ptr + read * slot_stride, mask=tl.where(read > 0, in_tile, False), other=0.0).to(tl.float32)

    for t in range(count):
        token = row * max_tokens + t
        key_at = (token * KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY + key
        value_at = (token * HEADS + head) * VALUE + value
        q = tl.load(q_ptr + key_at, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + key_at, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + value_at, mask=in_value, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * HEADS + head).to(tl.float32)

        if PER_KEY:
            decay = tl.load(decay_ptr + (token * HEADS + head) * KEY + key, mask=in_key, other=0.0).to(tl.float32)
            s = s * tl.exp(decay)[:, None]
        else:
            decay = tl.load(decay_ptr + token * HEADS + head).to(tl.float32)
            s = s * tl.exp(decay)
        delta = beta * (v - tl.sum(k[:, None] * s, 0))
        s = s + k[:, None] * delta[None, :]
        o = tl.sum(q[:, None] * s, 0) * scale
        tl.store(out_ptr + value_at, o.to(out_ptr.dtype.element_ty), mask=in_value)
        if window_ptr is not None:
            # Seen to be a multiple of UNIT and of no more, as slots are: wider accesses here would change the layout of
            # the tile, and with it the order of its sums.
            at_ptr = window_ptr + token * window_units * UNIT
            at_ptr = at_ptr + head * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
            tl.store(at_ptr, s.to(window_ptr.dtype.element_ty), mask=in_tile)
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = known_slot(tl.load(mark_slot_ptr + mark), last)
                wanted = tl.where((offset == t + 1) & (kept > 0), in_tile, False)
                tl.store(tile_ptr + kept * slot_stride, s.to(state_ptr.dtype.element_ty), mask=wanted)
                mark += 1
                offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        value_at = ((row * max_tokens + t) * HEADS + head) * VALUE + value
        tl.store(out_ptr + value_at, 0.0, mask=in_value)

    if window_ptr is None:
        new = s.to(state_ptr.dtype.element_ty)
        tl.store(tile_ptr + write * slot_stride, new, mask=tl.where(real, in_tile, False))
        tl.store(tile_ptr + snapshot * slot_stride, new, mask=tl.where(snapshot > 0, in_tile, False))


def blocks(key: int, value: int, config: DeltaConfig = DEFAULT) -> tuple[int, int, int]:
    """Keys and values of one tile (powers of two) and the warps that hold it."""
    return config.blocks(key, value)


def _most(unit: int, itemsize: int) -> int:
    """Registers of a thread in a launch with marks. Narrow accesses need more addresses at a time."""
    return MARKED if unit * itemsize == ACCESS_BYTES else THREAD_REGISTERS


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, scale: float | None = None, out: Tensor | None = None,
    window: Tensor | None = None, marks: Marks | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.gated_delta.gated_delta_step`."""
    check_gated_delta(q, k, v, decay, beta, state, read, write, snapshot, tokens, scale, out, window, marks)
    out = torch.empty_like(v) if out is None else out
    batch, max_tokens, heads, values = v.shape
    key_heads, keys = q.shape[2:]
    if batch == 0:
        return out
    unit = math.gcd(stride_unit(state), heads * keys * values)
    config = config_of(DeltaConfig, state.device, keys, values, state.element_size())
    block_k, block_v, warps = blocks(keys, values, config)
    _gated_delta_step[(triton.cdiv(values, block_v), heads, batch)](
        q, k, v, decay, beta, state, window, out, read, write, snapshot, tokens, *(marks or NO_MARKS),
        max_tokens, state.shape[0] - 1, state.stride(0) // unit, heads * keys * values // unit,
        keys**-0.5 if scale is None else float(scale),
        HEADS=heads, KEY_HEADS=key_heads, KEY=keys, VALUE=values, PER_KEY=decay.dim() == 4,
        UNIT=unit, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=warps,
        **OPTIONS, **limit(roomy(warps, marks is not None, _most(unit, state.element_size()))),
    )  # fmt: skip
    return out


TILES = [(128, 128), *((keys, 16) for keys in (16, 32, 64, 128, 256, 512)), *((128, 2**power) for power in range(4))]


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: 32 heads of 128 x 128, bf16 inputs, every dtype of the state.

    One decay a head with 16 key heads, one a key channel with 32; storing slots, storing
    a window, and storing slots of marks too. Tiles of other
    sizes are rare cases, and so is a state whose slots lie at any element.
    """
    gates = {"": {"KEY_HEADS": 16, "PER_KEY": False}, "_kda": {"KEY_HEADS": 32, "PER_KEY": True}}
    return [
        _case(dtype, itemsize, gate, constants, stores, keys, values, unit)
        for keys, values in TILES
        for (dtype, itemsize), (gate, constants), stores in product(
            (("fp32", 4), ("bf16", 2), ("fp16", 2)), gates.items(), ("", "_window", "_marks")
        )
        for unit in ((ACCESS_BYTES // itemsize, 1) if values == 128 else (ACCESS_BYTES // itemsize,))
    ]


def _case(
    dtype: str, itemsize: int, gate: str, constants: Mapping[str, Any], stores: str, keys: int, values: int, unit: int
) -> CompileCase:
    block_k, block_v, warps = blocks(keys, values)
    signature = (
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
        | dict.fromkeys(("decay_ptr", "beta_ptr"), "*fp32")
        | dict.fromkeys(("read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr"), "*i32")
        | {"max_tokens": "i32", "last": "i32", "stride_units": "i32", "window_units": "i32", "scale": "fp32"}
    )
    shape = {"HEADS": 32, "KEY": keys, "VALUE": values, "BLOCK_K": block_k, "BLOCK_V": block_v, "UNIT": unit}
    planes = ("state_ptr", "window_ptr") if stores == "_window" else ("state_ptr",)
    rare = (keys, values, unit) != (128, 128, ACCESS_BYTES // itemsize) or (stores, dtype) == ("_marks", "fp16")
    return CompileCase(
        f"gated_delta_step_{dtype}{gate}{stores}" + rare * f", {keys} x {values}, unit {unit}", _gated_delta_step,
        signature | dict.fromkeys(planes, f"*{dtype}") | mark_types(stores),
        {**shape, **constants, **absent(stores)},
        planes, warps, () if rare else planes, OPTIONS | roomy(warps, stores == "_marks", _most(unit, itemsize)), rare,
    )  # fmt: skip
