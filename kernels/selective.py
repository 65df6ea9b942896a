"""Computes the selective state update of Mamba on read, write and snapshot slots. Knows no register, strategy or layer.

One program takes one tile of one head's state, a block of `dim` by all of `state`, through all tokens of its row. The
tile stays in fp32 hardware registers after its load, so the program may write the slot that it read. Up to 512 states
fit one warp, so a sum over states waits for no other warp. After the token of a mark, the program stores the tile to
the slot of the mark.

A slot stores `dim state` or, with one decay per head, `state dim`; the strides of the state say which. Lanes move 16
bytes along the fastest axis. Which of the two layouts a slot has also decides in which order the elements of a sum are
added.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels import slots
from memstate.kernels.blocks import is_transposed, stride_unit
from memstate.kernels.configs import SECTOR_BYTES, SelectiveConfig, state_shares
from memstate.kernels.decode_checks import check_selective
from memstate.kernels.gates import softplus as softplus_of
from memstate.kernels.kept import launch_step, launched_again, unspecialised
from memstate.kernels.pieces import dot, drawn_for, rounded, store_row, store_tile, tile_of, vector
from memstate.kernels.tables import Cursor, SelectiveTail, StepMarks
from memstate.kernels.trees import behind, either, next_node, walk_length
from memstate.kernels.tuned import config_of
from memstate.kernels.warps import limit, roomy, warp_threads

OPTIONS = {"enable_fp_fusion": False}  # rounding must not depend on the Triton version


@triton.jit
def _own(ptr, head, dim, in_dim, DIM: tl.constexpr, TIED: tl.constexpr):
    """Returns dt, d or dt_bias of a head in fp32: one value if TIED, otherwise one for each channel."""
    own = tl.load(ptr + head) if TIED else tl.load(ptr + (head * DIM + dim), mask=in_dim, other=0.0)
    return own.to(tl.float32)


@triton.jit
def _advanced(s, x, b, dt, a, PIECES: tl.constexpr, TIED: tl.constexpr):
    """Returns the state after one more token; `a` is one number if TIED, otherwise a tensor for each piece."""
    inward = (dt * x)[None, :]
    if TIED:
        decay = tl.exp(dt * a)
    advanced = ()
    for piece in tl.static_range(PIECES):
        if not TIED:
            decay = tl.exp(dt[None, :] * a[piece])
        advanced += (tl.fma(s[piece], decay, inward * b[piece][:, None]),)
    return advanced


@unspecialised("state_ptr")
def _selective_step(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, dt_bias_ptr, state_ptr, out_ptr,
    read_ptr, write_ptr, snapshot_ptr, tokens_ptr, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    tail_x_ptr, tail_b_ptr, tail_dt_ptr,
    cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, parents_ptr, scales_ptr, lengths_ptr,
    max_tokens, last, stride_units, x_distance, dt_distance, b_distance, c_distance, z_distance,
    tail_x_apart, tail_b_apart, tail_dt_apart, tail_rows, ring, nodes, scales_apart, seed, layer, first_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TIED: tl.constexpr,
    SOFTPLUS: tl.constexpr, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr, EACH: tl.constexpr,
    STATE_FASTEST: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    LANES: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2)
    dim = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_dim = dim < DIM
    if DIM % BLOCK_D == 0:
        in_dim = tl.full([BLOCK_D], True, tl.int1)
    channel = head * DIM + dim
    # The pieces of a tile say which states a lane has. With dims fastest, a lane has PIECES neighbouring states, one of
    # each piece; with states fastest, it has RUN neighbouring states of each piece.
    PIECES: tl.constexpr = BLOCK_N // (LANES * RUN)
    ROWS: tl.constexpr = LANES * RUN
    index = tl.arange(0, ROWS) * (1 if STATE_FASTEST else PIECES)
    PIECE_STEP: tl.constexpr = ROWS if STATE_FASTEST else 1  # states from one piece to the next
    STATE_STRIDE: tl.constexpr = 1 if STATE_FASTEST else DIM
    DIM_STRIDE: tl.constexpr = STATE if STATE_FASTEST else 1

    real, read, write, snapshot, count = slots.row_slots(
        read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last
    )

    if mark_count_ptr is not None:
        mark = slots.first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = slots.mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    # The compiler must see that the stride is a multiple of UNIT: otherwise accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    tile = head * (DIM * STATE) + index[:, None] * STATE_STRIDE + dim[None, :] * DIM_STRIDE
    scales_at, chance, length = None, None, 0
    if scales_ptr is not None:
        scales_at = scales_ptr + channel
    plane = (state_ptr + tile, slot_stride, scales_at, scales_apart, index, in_dim)
    s = tile_of(plane, read, STATE, PIECE_STEP, STATE_STRIDE, STATE_FASTEST, 1, PIECES)
    if seed is not None:
        chance = (seed, layer, (first_head * DIM + channel) * (STATE // 16))
        length = tl.load(lengths_ptr + row)
    at_store = None if EACH else chance  # a state that is rounded after each token is stored as it is
    stored: tl.constexpr = state_ptr.dtype.element_ty

    if TIED:
        a = tl.load(a_ptr + head).to(tl.float32)
    else:
        a = ()
        for piece in tl.static_range(PIECES):
            a_at = a_ptr + (tile + piece * (PIECE_STEP * STATE_STRIDE))
            if STATE * a_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
                a_at = tl.multiple_of(a_at, [16, 1])  # `check_address` requires that `a` is aligned
            mask = (index + piece * PIECE_STEP < STATE)[:, None] & in_dim[None, :]
            a += (tl.load(a_at, mask=mask, other=0.0).to(tl.float32),)
    if dt_bias_ptr is not None:
        dt_bias = _own(dt_bias_ptr, head, dim, in_dim, DIM, TIED)
    if d_ptr is not None:
        d = _own(d_ptr, head, dim, in_dim, DIM, TIED)

    # Pointers advance from token to token, because the loop would otherwise compute 64-bit products.
    first = (row * max_tokens).to(tl.int64)
    x_at = x_ptr + first * x_distance
    b_at = b_ptr + first * b_distance
    c_at = c_ptr + first * c_distance
    dt_at = dt_ptr + first * dt_distance
    if z_ptr is not None:
        z_at = z_ptr + first * z_distance
    group = head // (HEADS // GROUPS)
    if cursor_row_ptr is not None:
        memory, place, pending, store = slots.row_tail(
            cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, row, tail_rows, ring, count
        )
        pending = tl.where(real, pending, 0)
        OWN: tl.constexpr = HEADS if TIED else HEADS * DIM
        kept_x = tail_x_ptr + memory * tail_x_apart
        kept_b = tail_b_ptr + memory * tail_b_apart
        kept_dt = tail_dt_ptr + memory * tail_dt_apart
        for entry in range(pending + 1):
            if entry == store:
                store_tile(plane, (write, snapshot), s, None, STATE, PIECE_STEP, STATE_STRIDE, 1, PIECES)
            if entry < pending:
                x_place = slots.token_start(kept_x + place * (HEADS * DIM), head, DIM, DIM)
                x = tl.load(x_place + dim, mask=in_dim, other=0.0).to(tl.float32)
                b_place = slots.token_start(kept_b + place * (GROUPS * STATE), group, STATE, STATE)
                b = vector(b_place, STATE, STATE_FASTEST, LANES, RUN, PIECES, JOINED=True)
                dt = _own(kept_dt + place * OWN, head, dim, in_dim, DIM, TIED)
                s = _advanced(s, x, b, dt, a, PIECES, TIED)
                drawn = drawn_for(s, chance, length + entry + 1, True, STATE_FASTEST, ROWS, 1, PIECES)
                s = rounded(s, stored, PIECES, drawn)
                place = slots.next_place(place, ring)

    visits, depth = count, 0
    if cursor_row_ptr is not None:
        depth = pending
    if parents_ptr is not None:
        tree = parents_ptr + row.to(tl.int64) * nodes
        visits = walk_length(tree, count, nodes)
        start, first_place, last_node, target = s, place, -1, 0
    for t in range(visits):
        if parents_ptr is not None:
            t = next_node(tree, last_node, target, nodes)
            x_at = x_ptr + (first + t) * x_distance
            b_at = b_ptr + (first + t) * b_distance
            c_at = c_ptr + (first + t) * c_distance
            dt_at = dt_ptr + (first + t) * dt_distance
            if z_ptr is not None:
                z_at = z_ptr + (first + t) * z_distance
        x = tl.load(slots.token_start(x_at, head, DIM, DIM) + dim, mask=in_dim, other=0.0).to(tl.float32)
        b_of_group = slots.token_start(b_at, group, STATE, STATE)
        c_of_group = slots.token_start(c_at, group, STATE, STATE)
        b = vector(b_of_group, STATE, STATE_FASTEST, LANES, RUN, PIECES, JOINED=True)
        c = vector(c_of_group, STATE, STATE_FASTEST, LANES, RUN, PIECES, JOINED=True)
        dt = _own(dt_at, head, dim, in_dim, DIM, TIED)
        c_at += c_distance
        dt_at += dt_distance
        if dt_bias_ptr is not None:
            dt = dt + dt_bias
        if SOFTPLUS:
            dt = softplus_of(dt)
        if DT_MIN is not None:
            dt = tl.where(dt < DT_MIN, DT_MIN, dt)
        if DT_MAX is not None:
            dt = tl.where(dt > DT_MAX, DT_MAX, dt)

        s = _advanced(s, x, b, dt, a, PIECES, TIED)
        y = dot(c, s, PIECES)
        if d_ptr is not None:
            y = tl.fma(x, d, y)
        if z_ptr is not None:
            z = tl.load(slots.token_start(z_at, head, DIM, DIM) + dim, mask=in_dim, other=0.0).to(tl.float32)
            z_at += z_distance
            y = y * (z / (1 + tl.exp(-z)))
        token = (row * max_tokens + t).to(tl.int64)
        y = y.to(out_ptr.dtype.element_ty)
        of_token = in_dim
        if parents_ptr is not None:
            of_token = tl.where(t == target, in_dim, False)
        store_row(out_ptr, token * (HEADS * DIM), channel, y, of_token, DIM, STATE_FASTEST, ROWS, UNIT)
        if cursor_row_ptr is not None:
            keeps = (memory > 0) & (pending + t >= store)
            if parents_ptr is not None:
                place = (first_place + t) % ring
                keeps = keeps & (t == target)
            if keeps:
                slots.copy_token(kept_x + place * (HEADS * DIM) + head * DIM, x_at + head * DIM, dim, DIM)
                if tl.program_id(0) == 0 and head % (HEADS // GROUPS) == 0:
                    kept_at = kept_b + place * (GROUPS * STATE) + group * STATE
                    slots.copy_token(kept_at, b_at + group * STATE, tl.arange(0, BLOCK_N), STATE)
                if not TIED:
                    tl.store(kept_dt + place * OWN + channel, dt, mask=in_dim)
                elif tl.program_id(0) == 0:
                    tl.store(kept_dt + place * OWN + head, dt)
            place = slots.next_place(place, ring)
        if EACH:
            depth += 1
            drawn = drawn_for(s, chance, length + depth, True, STATE_FASTEST, ROWS, 1, PIECES)
            s = rounded(s, stored, PIECES, drawn)
        x_at += x_distance
        b_at += b_distance
        if parents_ptr is not None:
            last_node, target, back = behind(tree, t, target, count, nodes)
            s = either(start, s, back, PIECES)
            depth = tl.where(back, pending, depth)
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = slots.known_slot(tl.load(mark_slot_ptr + mark), last)
                marked = tl.where(offset == t + 1, kept, 0)
                of_mark = drawn_for(s, at_store, length + offset, True, STATE_FASTEST, ROWS, 1, PIECES)
                store_tile(plane, (marked,), s, of_mark, STATE, PIECE_STEP, STATE_STRIDE, 1, PIECES)
                mark += 1
                offset = slots.mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        tl.store(out_ptr + (row * max_tokens + t).to(tl.int64) * (HEADS * DIM) + channel, 0.0, mask=in_dim)

    if cursor_row_ptr is not None:
        write = tl.where(store > pending, write, 0)
        snapshot = tl.where(store > pending, snapshot, 0)
    drawn = drawn_for(s, at_store, length + count, count > 0, STATE_FASTEST, ROWS, 1, PIECES)
    store_tile(plane, (write, snapshot), s, drawn, STATE, PIECE_STEP, STATE_STRIDE, 1, PIECES)


def _options(warps: int, tied: bool, itemsize: int, dim_fastest: bool, marked: bool) -> dict[str, int]:
    """Returns launch options: `roomy` ones if the launch would spill (marks, 16-bit states, or dims fastest)."""
    return roomy(warps, marked or dim_fastest or (tied and itemsize == 2))


def key_sizes(state: Tensor, tied: bool) -> tuple[Any, ...]:
    """Returns the sizes that make the key of a launch on states `slot head dim state`, of any strides.

    Args:
        state: the states.
        tied: whether a head has only one `a`.
    """
    return *state.shape[2:], tied, state.element_size()


def tiling(state: Tensor, sizes: tuple[Any, ...], config: SelectiveConfig) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """Returns the programs of a row, `tile head`; then whether dims are fastest, the sizes of a tile, and its warps."""
    (dim, states, tied, itemsize), dim_fastest = sizes, is_transposed(state)
    block_d, block_n, warps = config.blocks(dim, states, tied, SECTOR_BYTES // itemsize if dim_fastest else 1)
    return (triton.cdiv(dim, block_d), state.shape[1]), (dim_fastest, block_d, block_n, warps)


def _finite(limit: float | None) -> float | None:
    """Returns a limit, None if it is infinite and so no limit."""
    return float(limit) if limit is not None and math.isfinite(limit) else None


def selective_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, d: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    softplus: bool = False, out: Tensor | None = None, marks: StepMarks | None = None,
    tail: SelectiveTail | None = None, cursor: Cursor | None = None, parents: Tensor | None = None,
    scales: Tensor | None = None, lengths: Tensor | None = None, seed: int | None = None, layer: int = 0,
    first_head: int = 0, dt_min: float | None = None, dt_max: float | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.selective.selective_step`."""
    checked = check_selective(*locals().values())  # all arguments, in order
    out = x.new_empty(x.shape) if out is None else out
    batch, max_tokens, heads, dim = x.shape
    if batch == 0:
        return out
    tensors = (
        x, dt, a, b, c, d, z, dt_bias, state, out, read, write, snapshot, tokens, *(marks or slots.NO_MARKS),
        *slots.tail_tensors(SelectiveTail, tail, cursor, parents), scales, lengths,
    )  # fmt: skip
    if launched_again(checked, tensors):
        return out
    groups, states = b.shape[2:]
    unit = math.gcd(stride_unit(state), heads * dim * states)
    *_, tied, itemsize = static = key_sizes(state, dt.dim() == 3)
    config = config_of(SelectiveConfig, state.device, *static)
    grid, (dim_fastest, block_d, block_n, warps) = tiling(state, static, config)
    size = 4 if scales is not None and dim_fastest else itemsize
    lanes, run = state_shares(dim_fastest, size, math.gcd(unit, states), block_d, block_n, warps, warp_threads())
    numbers = (
        max_tokens, state.shape[0] - 1, state.stride(0) // unit, *checked.found,
        *slots.tail_numbers(SelectiveTail, tail, parents), None if scales is None else scales.stride(0), seed, layer,
        first_head,
    )  # fmt: skip
    constants = {
        "HEADS": heads, "GROUPS": groups, "DIM": dim, "STATE": states, "TIED": tied, "SOFTPLUS": softplus,
        "DT_MIN": _finite(dt_min), "DT_MAX": _finite(dt_max),
        "EACH": tail is not None or (scales is not None and max_tokens > 1),
        "STATE_FASTEST": not dim_fastest, "UNIT": unit, "BLOCK_D": block_d, "BLOCK_N": block_n, "LANES": lanes,
        "RUN": run,
    }  # fmt: skip
    options = OPTIONS | limit(_options(warps, tied, itemsize, dim_fastest, marks is not None)) | {"num_warps": warps}
    launch_step(checked, _selective_step, (*grid, batch), tensors, numbers, constants, options)
    return out
