"""Computes the gated delta rule step on read, write and snapshot slots. Knows no register, strategy or other layer.

One program takes one tile of one head's state, `key` by a block of `value`, through all tokens of its row. The tile
stays in fp32 hardware registers after its load, so the program may write the slot that it read. Up to 128 keys fit one
warp, so a sum over keys waits for no other warp. After the token of a mark, the program stores the tile to the slot of
the mark.

A slot stores `key value` or `value key`; the strides of the state say which. Lanes move 16 bytes along the fastest
axis, or 8 bytes of int8. Which of the two layouts a slot has also decides in which order the elements of a sum are
added. How many values a tile has does not: a file may choose them by the rows of the launch.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from memstate.kernels import slots
from memstate.kernels.blocks import is_transposed, stride_unit
from memstate.kernels.configs import DeltaConfig, shares
from memstate.kernels.decode_checks import check_gated_delta
from memstate.kernels.gates import EPSILON, sigmoid, softplus
from memstate.kernels.kept import launch_step, launched_again, unspecialised
from memstate.kernels.pieces import dot, drawn_for, joined, lane_part, rounded, store_row, store_tile, tile_of, vector
from memstate.kernels.remembered import Checked
from memstate.kernels.tables import ACCESS_BYTES, Cursor, DeltaTail, StepMarks
from memstate.kernels.trees import behind, next_node, walk_length
from memstate.kernels.tuned import config_of
from memstate.kernels.warps import THREAD_REGISTERS, limit, roomy, warp_threads

OPTIONS = {"enable_fp_fusion": False}  # rounding must not depend on the Triton version
WIDE = 168  # hardware registers of a thread for fp32 states in one warp: these need 140, and would spill at 128
DEFAULT = DeltaConfig()


@triton.jit
def _below(at, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns which elements of a block are below SIZE: all, without a comparison, if SIZE is a multiple of BLOCK."""
    return tl.full(at.shape, True, tl.int1) if SIZE % BLOCK == 0 else at < SIZE


@triton.jit
def _values(
    ptr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, KEY_FASTEST: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Returns a vector over the values of one head: `1 value` with keys fastest, else a copy per lane, `lane value`.

    With keys fastest, the values that a lane uses are not neighbours, so it loads up to 16 values at a time. If it
    loaded more at a time, the compiler would load each value once, and exchange the values through shared memory.
    """
    FEW: tl.constexpr = min(16, BLOCK_V) if KEY_FASTEST else BLOCK_V
    parts = ()
    for part in tl.static_range(BLOCK_V // FEW):
        at = (tl.program_id(0) * BLOCK_V + part * FEW + tl.arange(0, FEW))[None, :]
        if not KEY_FASTEST:
            at = at + tl.zeros([LANES, 1], tl.int32)
        parts += (tl.load(ptr + at, mask=_below(at, VALUE, BLOCK_V), other=0.0).to(tl.float32),)
    block = joined(parts, BLOCK_V // FEW)
    return block.reshape(1, BLOCK_V) if KEY_FASTEST else block


@triton.jit
def _inverse_norm(keys, like, COUNT: tl.constexpr):
    """Returns 1 / sqrt(x^2 + EPSILON) of a vector x over keys, for each value: summed as `dot` does, in its order.

    A sum over lanes alone would have a layout of the compiler's choice, and so its order. `like`, a tensor `lane value`
    of the state, gives its layout: zeros that are made of it are added.
    """
    squares = keys[0] * keys[0]
    for key in tl.static_range(1, COUNT):
        squares = tl.fma(keys[key], keys[key], squares)
    zeros = tl.max(tl.minimum(tl.abs(like), 0.0), 1, keep_dims=True)  # also of NaN
    return tl.rsqrt(tl.sum(squares[:, None] + zeros, 0) + EPSILON)


@triton.jit
def _gate(decay, rate, bias, GATED: tl.constexpr, BIASED: tl.constexpr):
    """Returns the gate of a log decay or, if GATED, of a projection from which the log decay is computed."""
    if BIASED:
        decay = decay + bias
    if GATED:
        decay = -rate * softplus(decay)
    return tl.exp(decay)


@triton.jit
def _decayed(s, gates, COUNT: tl.constexpr, PER_KEY: tl.constexpr):
    decayed = ()
    for key in tl.static_range(COUNT):
        decayed += (s[key] * (gates[key][:, None] if PER_KEY else gates[0]),)
    return decayed


@triton.jit
def _added(s, keys, delta, COUNT: tl.constexpr):
    added = ()
    for key in tl.static_range(COUNT):
        added += (tl.fma(keys[key][:, None], delta, s[key]),)
    return added


@triton.jit
def _advanced(s, k, v, gates, beta, COUNT: tl.constexpr, PER_KEY: tl.constexpr, NORMALIZE: tl.constexpr):
    """Returns the state after one more token of the gated delta rule."""
    s = _decayed(s, gates, COUNT, PER_KEY)
    seen = dot(k, s, COUNT)[None, :]
    if NORMALIZE:
        k_norm = _inverse_norm(k, s[0], COUNT)[None, :]
        seen = seen * k_norm
    delta = beta * (v - seen)
    if NORMALIZE:
        delta = delta * k_norm
    return _added(s, k, delta, COUNT)


@triton.jit
def _advanced_low_rank(s, k, v, gates, a, b, COUNT: tl.constexpr, PER_KEY: tl.constexpr):
    """Returns the state after one more token of the generalized delta rule."""
    seen = dot(a, s, COUNT)[None, :]
    return _added(_added(_decayed(s, gates, COUNT, PER_KEY), b, seen, COUNT), k, v, COUNT)


@triton.jit
def _with_pending(
    s, place, chance, length, k_ptr, v_ptr, gate_ptr, beta_ptr, a_ptr, b_ptr, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, PER_KEY: tl.constexpr,
    KEY_FASTEST: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr, NORMALIZE: tl.constexpr,
    stored: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Returns the state after one more pending token, which is read from the rings of the tail.

    The pointers point to the elements of the head in place 0 of the rings.
    """
    COUNT: tl.constexpr = PIECES * RUN
    k = vector(k_ptr + place * (KEY_HEADS * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
    v = _values(slots.token_start(v_ptr, place, HEADS * VALUE, VALUE), VALUE, BLOCK_V, KEY_FASTEST, LANES)
    gate_at = gate_ptr + place * (HEADS * KEY if PER_KEY else HEADS)
    gates = vector(gate_at, KEY, KEY_FASTEST, LANES, RUN, PIECES, APART) if PER_KEY else (tl.load(gate_at),)
    if a_ptr is None:
        s = _advanced(s, k, v, gates, tl.load(beta_ptr + place * HEADS), COUNT, PER_KEY, NORMALIZE)
    else:
        a = vector(a_ptr + place * (KEY_HEADS * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
        b = vector(b_ptr + place * (KEY_HEADS * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
        s = _advanced_low_rank(s, k, v, gates, a, b, COUNT, PER_KEY)
    return rounded(s, stored, COUNT, drawn_for(s, chance, length, True, KEY_FASTEST, LANES, RUN, PIECES, APART))


@unspecialised("state_ptr")
def _gated_delta_step(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr,
    read_ptr, write_ptr, snapshot_ptr, tokens_ptr, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    a_ptr, b_ptr, tail_k_ptr, tail_v_ptr, tail_gate_ptr, tail_beta_ptr, tail_a_ptr, tail_b_ptr,
    cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, parents_ptr,
    scales_ptr, lengths_ptr, max_tokens, last, scale, stride_units,
    q_apart, k_apart, v_apart, decay_apart, beta_apart, a_apart, b_apart,
    tail_k_apart, tail_v_apart, tail_gate_apart, tail_beta_apart, tail_a_apart, tail_b_apart, tail_rows, ring, nodes,
    scales_apart, seed, layer, first_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PER_KEY: tl.constexpr,
    KEY_FASTEST: tl.constexpr, UNIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    LANES: tl.constexpr, RUN: tl.constexpr, APART: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
    EACH: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = _below(value, VALUE, BLOCK_V)
    # The pieces of a tile say which keys a lane has. With values fastest, a lane has PIECES neighbouring keys, one of
    # each piece; with keys fastest, it has RUN neighbouring keys of each piece.
    PIECES: tl.constexpr = BLOCK_K // (LANES * RUN)
    index = lane_part(tl.arange(0, LANES * RUN), LANES, APART) * (1 if KEY_FASTEST else PIECES)
    PIECE_STEP: tl.constexpr = LANES * RUN if KEY_FASTEST else 1  # keys from one piece to the next
    KEY_STRIDE: tl.constexpr = 1 if KEY_FASTEST else VALUE
    VALUE_STRIDE: tl.constexpr = KEY if KEY_FASTEST else 1

    real, read, write, snapshot, count = slots.row_slots(
        read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last
    )

    if mark_count_ptr is not None:
        mark = slots.first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = slots.mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    # The compiler must see that the stride is a multiple of UNIT: otherwise accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    tile = head * (KEY * VALUE) + index[:, None] * KEY_STRIDE
    at = state_ptr + (tile + value[None, :] * VALUE_STRIDE)
    if KEY_FASTEST:
        # Values are added to the pointer, before all else: so a lane has one address, plus constants. In a sum of 32
        # bits, which might overflow, each of its addresses would take hardware registers of its own.
        at = state_ptr + tl.arange(0, BLOCK_V)[None, :] * KEY + (tile + tl.program_id(0) * (BLOCK_V * KEY))
    scales_at, chance, length, pending = None, None, 0, 0
    if scales_ptr is not None:
        scales_at = scales_ptr + head * VALUE + value
    plane = (at, slot_stride, scales_at, scales_apart, index, in_value)
    s = tile_of(plane, read, KEY, PIECE_STEP, KEY_STRIDE, KEY_FASTEST, RUN, PIECES, BEHIND)
    if BEHIND:
        # So far this program has read what the launch before does not write: columns of the step, and the state.
        gdc_wait()
    rate = 0.0
    if a_log_ptr is not None:
        rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if seed is not None:
        chance = (seed, layer, ((first_head + head) * VALUE + value) * (KEY // 16))
        length = tl.load(lengths_ptr + row)
    once = None if EACH else chance  # a state that is rounded after each token is stored as it is

    COUNT: tl.constexpr = PIECES * RUN
    stored: tl.constexpr = state_ptr.dtype.element_ty
    if cursor_row_ptr is not None:
        memory, place, pending, store = slots.row_tail(
            cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, row, tail_rows, ring, count
        )
        pending = tl.where(real, pending, 0)
        ring_k = tail_k_ptr + (memory * tail_k_apart + key_head * KEY)
        ring_v = tail_v_ptr + (memory * tail_v_apart + head * VALUE)
        ring_gate = tail_gate_ptr + (memory * tail_gate_apart + head * (KEY if PER_KEY else 1))
        ring_beta, ring_a, ring_b = None, None, None
        if a_ptr is None:
            ring_beta = tail_beta_ptr + (memory * tail_beta_apart + head)
        else:
            ring_a = tail_a_ptr + (memory * tail_a_apart + key_head * KEY)
            ring_b = tail_b_ptr + (memory * tail_b_apart + key_head * KEY)
        if parents_ptr is None:
            for entry in range(pending + 1):
                if entry == store:
                    store_tile(plane, (write, snapshot), s, None, KEY, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
                if entry < pending:
                    s = _with_pending(
                        s, place, chance, length + entry + 1, ring_k, ring_v, ring_gate, ring_beta, ring_a, ring_b,
                        HEADS, KEY_HEADS, KEY, VALUE, BLOCK_V, PER_KEY, KEY_FASTEST, LANES, RUN, PIECES, NORMALIZE,
                        stored, APART,
                    )  # fmt: skip
                    place = slots.next_place(place, ring)

    visits, depth = count, pending
    if parents_ptr is not None:
        # The walk of the tree adds the pending tokens, and adds them again each time it goes back. One loop runs
        # the pending tokens and the tree, because two loops would need too many hardware registers. So the walk makes
        # one visit even if the step has no tokens.
        tree = parents_ptr + row * nodes
        visits = tl.maximum(walk_length(tree, count, nodes), 1)
        first_place, last_node, target, start = place, -1, 0, 0
    for t in range(visits):
        if parents_ptr is not None:
            for entry in range(start, pending + 1):
                if (entry == store) & (target == 0):
                    store_tile(plane, (write, snapshot), s, None, KEY, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
                if entry < pending:
                    s = _with_pending(
                        s, (first_place + entry) % ring, chance, length + entry + 1, ring_k, ring_v, ring_gate,
                        ring_beta, ring_a, ring_b,
                        HEADS, KEY_HEADS, KEY, VALUE, BLOCK_V, PER_KEY, KEY_FASTEST, LANES, RUN, PIECES, NORMALIZE,
                        stored, APART,
                    )  # fmt: skip
            start = pending + 1
            t = next_node(tree, last_node, target, nodes)
        token = (tl.program_id(2) * max_tokens + t).to(tl.int64)
        k_at = k_ptr + (token * k_apart + key_head * KEY)
        k = vector(k_at, KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
        q = vector(q_ptr + (token * q_apart + key_head * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
        v_at = slots.token_start(v_ptr + head * VALUE, token, v_apart, VALUE)
        v = _values(v_at, VALUE, BLOCK_V, KEY_FASTEST, LANES)
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + token * beta_apart + head).to(tl.float32)
            if SIGMOID:
                beta = sigmoid(beta)

        if PER_KEY:
            decay_at = decay_ptr + (token * decay_apart + head * KEY)
            decay = vector(decay_at, KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
            if dt_bias_ptr is not None:
                dt_bias = vector(dt_bias_ptr + head * KEY, KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
        else:
            decay = (tl.load(decay_ptr + token * decay_apart + head).to(tl.float32),)
            if dt_bias_ptr is not None:
                dt_bias = (tl.load(dt_bias_ptr + head).to(tl.float32),)
        gates = ()
        for key in tl.static_range(COUNT if PER_KEY else 1):
            bias = dt_bias[key] if dt_bias_ptr is not None else 0.0
            gates += (_gate(decay[key], rate, bias, a_log_ptr is not None, dt_bias_ptr is not None),)
        if a_ptr is not None:
            a_at = a_ptr + (token * a_apart + key_head * KEY)
            b_at = b_ptr + (token * b_apart + key_head * KEY)
            a = vector(a_at, KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
            b = vector(b_at, KEY, KEY_FASTEST, LANES, RUN, PIECES, APART)
            s = _advanced_low_rank(s, k, v, gates, a, b, COUNT, PER_KEY)
        else:
            s = _advanced(s, k, v, gates, beta, COUNT, PER_KEY, NORMALIZE)
        o = dot(q, s, PIECES * RUN)
        if NORMALIZE:
            o = o * _inverse_norm(q, s[0], COUNT)
        o = (o * scale).to(out_ptr.dtype.element_ty)
        of_token = in_value
        if parents_ptr is not None:
            of_token = tl.where((t == target) & (t < count), in_value, False)
        store_row(out_ptr, (token * HEADS + head) * VALUE, value, o, of_token, VALUE, KEY_FASTEST, LANES, UNIT)
        if cursor_row_ptr is not None:
            keeps = (memory > 0) & (pending + t >= store)
            if parents_ptr is not None:
                place = (first_place + pending + t) % ring
                keeps = keeps & (t == target) & (t < count)
            if keeps:
                slots.copy_token(ring_v + place * (HEADS * VALUE), v_at, value, VALUE)
                if tl.program_id(0) == 0:
                    channel = tl.arange(0, BLOCK_K)
                    if head % (HEADS // KEY_HEADS) == 0:
                        slots.copy_token(ring_k + place * (KEY_HEADS * KEY), k_at, channel, KEY)
                        if a_ptr is not None:
                            slots.copy_token(ring_a + place * (KEY_HEADS * KEY), a_at, channel, KEY)
                            slots.copy_token(ring_b + place * (KEY_HEADS * KEY), b_at, channel, KEY)
                    if a_ptr is None:
                        tl.store(ring_beta + place * HEADS, beta)
                    gate_at = ring_gate + place * (HEADS * KEY if PER_KEY else HEADS)
                    if PER_KEY:
                        in_key = channel < KEY
                        gate = tl.load(decay_at + channel, mask=in_key, other=0.0).to(tl.float32)
                        of_key = 0.0
                        if dt_bias_ptr is not None:
                            of_key = tl.load(dt_bias_ptr + head * KEY + channel, mask=in_key, other=0.0).to(tl.float32)
                        gate = _gate(gate, rate, of_key, a_log_ptr is not None, dt_bias_ptr is not None)
                        tl.store(gate_at + channel, gate, mask=in_key)
                    else:
                        tl.store(gate_at, gates[0])  # type: ignore[misc]  # bound above unless PER_KEY
            place = slots.next_place(place, ring)
        if EACH:
            depth += 1
            drawn = drawn_for(s, chance, length + depth, True, KEY_FASTEST, LANES, RUN, PIECES, APART)
            s = rounded(s, stored, COUNT, drawn)
        if parents_ptr is not None:
            last_node, target, back = behind(tree, t, target, count, nodes)
            if back:
                # Load the state in front of the tree again: hardware registers have no room to keep it. The state
                # is in the slot that this program has just stored, or else in the read slot. In both slots, the
                # pending tokens are missing.
                tl.debug_barrier()
                start, depth = tl.maximum(store, 0), pending
                before = tl.where(store >= 0, write, read)
                s = tile_of(plane, before, KEY, PIECE_STEP, KEY_STRIDE, KEY_FASTEST, RUN, PIECES)
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = tl.where(offset == t + 1, slots.known_slot(tl.load(mark_slot_ptr + mark), last), 0)
                # What to store depends on `kept`: otherwise the compiler would round the state of every token.
                kept_s = (tl.where(kept > 0, s[0], 0.0),)
                kept_s += s[1:]
                at_mark = drawn_for(kept_s, once, length + offset, True, KEY_FASTEST, LANES, RUN, PIECES, APART)
                store_tile(plane, (kept,), kept_s, at_mark, KEY, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
                mark += 1
                offset = slots.mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        out_at = ((row * max_tokens + t) * HEADS + head) * VALUE + value
        tl.store(out_ptr + out_at, 0.0, mask=in_value)

    if cursor_row_ptr is not None:
        write, snapshot = tl.where(store > pending, write, 0), tl.where(store > pending, snapshot, 0)
    at_end = drawn_for(s, once, length + count, count > 0, KEY_FASTEST, LANES, RUN, PIECES, APART)
    store_tile(plane, (write, snapshot), s, at_end, KEY, PIECE_STEP, KEY_STRIDE, RUN, PIECES)


def blocks(
    key: int, value: int, itemsize: int, unit: int, config: DeltaConfig = DEFAULT, converted: bool = False
) -> tuple[int, int, int]:  # fmt: skip
    """Returns the keys and values of one tile (powers of two), and the warps that hold it.

    If lanes cannot move 16 bytes at a time, an element counts as 8 bytes, because a lane then holds more addresses. An
    element of 1 byte counts as 2: a lane has room for 128 elements in fp32.

    Args:
        key: keys of a head.
        value: values of a head.
        itemsize: bytes of an element of the state.
        unit: elements; every slot begins at a multiple of it.
        config: the launch configuration.
        converted: whether each element takes a conversion of its own, as fp16 does with keys fastest. An element then
            counts twice.
    """
    return config.blocks(key, value, max(2, itemsize) * (1 + converted) if unit * itemsize == ACCESS_BYTES else 8)


def _most(unit: int, itemsize: int, warps: int) -> int:
    """Returns the limit of hardware registers per thread: WIDE for fp32 states that one warp accesses by 16 bytes.

    Other launches need more registers. With narrow accesses a lane has more addresses, with several warps per tile it
    has more inputs, and with 2-byte states it has more elements of the state.
    """
    return WIDE if unit * itemsize == ACCESS_BYTES and (itemsize, warps) == (4, 1) else THREAD_REGISTERS


def key_sizes(state: Tensor) -> tuple[Any, ...]:
    """Returns the sizes that make the key of a launch on states `slot head key value`, of any strides."""
    return *state.shape[2:], state.element_size(), is_transposed(state), state.dtype == torch.float16


def tiling(state: Tensor, sizes: tuple[Any, ...], config: DeltaConfig) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """Returns the programs of a row, `tile head`, and the unit, the keys and values of a tile, and its warps."""
    heads, (keys, values, itemsize, key_fastest, fp16) = state.shape[1], sizes
    unit = math.gcd(stride_unit(state), heads * keys * values)
    block_k, block_v, warps = blocks(keys, values, itemsize, unit, config, key_fastest and fp16)
    return (triton.cdiv(values, block_v), heads), (unit, block_k, block_v, warps)


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, scale: float | None = None, out: Tensor | None = None,
    marks: StepMarks | None = None, a_log: Tensor | None = None, dt_bias: Tensor | None = None, sigmoid: bool = False,
    normalize: bool = False, a: Tensor | None = None, b: Tensor | None = None, tail: DeltaTail | None = None,
    cursor: Cursor | None = None, parents: Tensor | None = None, scales: Tensor | None = None,
    lengths: Tensor | None = None, seed: int | None = None, layer: int = 0, first_head: int = 0,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.gated_delta.gated_delta_step`."""
    given = tuple(locals().values())  # all arguments, in order
    return launched(check_gated_delta(*given), given)


def launched(checked: Checked[tuple[int | None, ...]], given: tuple[Any, ...], form: str = "") -> Tensor:
    """Launches a step that has passed its check.

    Args:
        checked: result of the check.
        given: all arguments of `gated_delta_step`, in order.
        form: "behind" if this launch may begin before the one in front of it ends, which writes neither the state nor
            the columns of the step.
    """
    q, k, v, decay, beta, state, read, write, snapshot, tokens, scale, out, marks, a_log, dt_bias, *others = given
    sigmoid, normalize, a, b, tail, cursor, parents, scales, lengths, seed, layer, first_head = others
    result: Tensor = v.new_empty(v.shape) if out is None else out
    batch, max_tokens, heads = v.shape[:3]
    if batch == 0:
        return result
    parents = parents if max_tokens else None
    tensors = (
        q, k, v, decay, beta, a_log, dt_bias, state, result, read, write, snapshot, tokens,
        *(marks or slots.NO_MARKS), a, b, *slots.tail_tensors(DeltaTail, tail, cursor, parents), scales, lengths,
    )  # fmt: skip
    if launched_again(checked, tensors, form):
        return result
    keys, values, itemsize, key_fastest, _ = static = key_sizes(state)
    config = config_of(DeltaConfig, state.device, *static, rows=batch)
    grid, (unit, block_k, block_v, warps) = tiling(state, static, config)
    lanes, run = shares(key_fastest, itemsize, block_k, block_v, warps, warp_threads())
    warps = min(warps, max(1, lanes * block_v // warp_threads()))  # two warps with the same elements would race
    numbers = (
        max_tokens, state.shape[0] - 1, keys**-0.5 if scale is None else float(scale), state.stride(0) // unit,
        *checked.found, *slots.tail_numbers(DeltaTail, tail, parents), None if scales is None else scales.stride(0),
        seed, layer, first_head,
    )  # fmt: skip
    constants = {
        "HEADS": heads, "KEY_HEADS": q.shape[2], "KEY": keys, "VALUE": values, "PER_KEY": decay.dim() == 4,
        "KEY_FASTEST": key_fastest, "UNIT": unit, "BLOCK_K": block_k, "BLOCK_V": block_v, "LANES": lanes, "RUN": run,
        "APART": 1 if key_fastest else min(warps, lanes), "SIGMOID": sigmoid, "NORMALIZE": normalize,
        "EACH": tail is not None or (scales is not None and max_tokens > 1), "BEHIND": form == "behind",
    }  # fmt: skip
    options = {"num_warps": warps, **OPTIONS, **limit(roomy(warps, most=_most(unit, itemsize, warps)))}
    options |= {"launch_pdl": True} if form == "behind" else {}
    launch_step(checked, _gated_delta_step, (*grid, batch), tensors, numbers, constants, options, form)
    return result
