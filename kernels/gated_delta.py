"""The gated delta rule step over read, write and snapshot slots. Knows no register, no strategy and no other layer.

One program advances one tile of one head's state, `key` by a block of `value`, through all tokens of its row. The tile
stays in fp32 registers from its load on, so the program may write the slot that it read. Up to 128 keys fit one warp,
and sums over keys then never wait for another. Slots of marks take a copy of the tile behind their tokens.

A slot stores `key value` or `value key`, which the strides of the state say. Lanes move 16 bytes along the axis that is
fastest. The order in which they add up a sum differs.
"""

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import is_transposed, stride_unit
from memstate.kernels.catalog import CompileCase
from memstate.kernels.decode_checks import check_gated_delta
from memstate.kernels.gates import EPSILON, sigmoid, softplus
from memstate.kernels.pieces import halves, rounded
from memstate.kernels.slots import (
    NO_MARKS,
    absent,
    copy_token,
    first_mark,
    known_slot,
    mark_offset,
    mark_types,
    next_place,
    row_slots,
    row_tail,
    tail_args,
    tail_types,
    tail_values,
)
from memstate.kernels.tables import ACCESS_BYTES, Cursor, DeltaTail, Marks
from memstate.kernels.trees import behind, next_node, walk_length
from memstate.kernels.tuned import DeltaConfig, config_of, shares
from memstate.kernels.warps import THREAD_REGISTERS, limit, roomy, warp_threads

OPTIONS = {"enable_fp_fusion": False}  # rounding as written, whatever the Triton version
WIDE = 168  # registers of a thread where a warp holds fp32 states: they take 140, and would spill at 128
DEFAULT = DeltaConfig()

# Everything that may differ between two calls of one model. The alignment of the inputs belongs here too: the bits of a
# row would depend on where its batch was allocated. What shapes alone say about it, the kernel says itself.
PER_CALL = [
    "q_ptr", "k_ptr", "v_ptr", "decay_ptr", "beta_ptr", "a_log_ptr", "dt_bias_ptr", "out_ptr",
    "read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr",
    "mark_count_ptr", "mark_entry_ptr", "mark_offset_ptr", "mark_slot_ptr",
    "max_tokens", "last", "stride_units", "scale",
    "q_apart", "k_apart", "v_apart", "decay_apart", "beta_apart", "a_ptr", "b_ptr", "a_apart", "b_apart",
    *tail_args(DeltaTail),
]  # fmt: skip


@triton.jit
def _below(at, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Which of the elements of a block there are. Of whole blocks all, and no lane is asked."""
    return tl.full(at.shape, True, tl.int1) if SIZE % BLOCK == 0 else at < SIZE


@triton.jit
def _run(ptr, at, KEY: tl.constexpr, RUN: tl.constexpr):
    """RUN neighbouring elements of each lane, in fp32: one tensor `lane` for each. Zeros behind the last of KEY.

    They are moved 16 bytes at a time where the shape alone says that every run lies on 16 bytes: see `check_tokens`. So
    few words of 8 bytes are loaded by the lanes that use them, and nothing is exchanged.

    ptr: the first element of the head. at: the first element of each lane's run.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    bits: tl.constexpr = dtype.primitive_bitwidth
    PER_WORD: tl.constexpr = 64 // bits
    WORDS: tl.constexpr = (
        2 if RUN * bits % 128 == 0 and at.shape[0] <= 8 else 1
    )  # 16 words are loaded where they are used
    found = ()
    if KEY * bits % 128 == 0 and RUN * bits % 64 == 0:
        word = tl.multiple_of(ptr, 16).to(tl.pointer_type(tl.int64), bitcast=True)
        for piece in tl.static_range(RUN // (PER_WORD * WORDS)):
            first = at // PER_WORD + piece * WORDS
            if WORDS == 2:
                words_at = tl.multiple_of(first, 2)[:, None] + tl.arange(0, 2)[None, :]
                pair = tl.split(tl.load(word + words_at, mask=words_at < KEY // PER_WORD, other=0))
            else:
                pair = (tl.load(word + first, mask=first < KEY // PER_WORD, other=0),)
            for which in tl.static_range(WORDS):
                for half in tl.static_range(2):
                    part = (pair[which] >> (32 * half)).to(tl.int32)
                    if dtype == tl.bfloat16:
                        found += halves(part)
                    elif bits == 16:
                        found += (part.to(tl.int16).to(dtype, bitcast=True).to(tl.float32),)
                        found += ((part >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32),)
                    else:
                        found += (part.to(dtype, bitcast=True).to(tl.float32),)
    else:
        for part in tl.static_range(RUN):
            found += (tl.load(ptr + at + part, mask=at + part < KEY, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _rows(block, COUNT: tl.constexpr):
    """Tensors `lane value` of a block, a power of two of them: neighbouring rows of a lane, which are in its registers.

    block: `lane*COUNT value`.
    """
    found = (block,)
    if COUNT > 1:
        LANES: tl.constexpr = block.shape[0] // COUNT
        found = (block.reshape(LANES, COUNT, block.shape[1]).trans(0, 2, 1),)
        for level in tl.static_range(3):
            if 1 << level < COUNT:
                even = ()
                odd = ()
                for part in tl.static_range(1 << level):
                    rows = found[part]
                    if 2 << level < COUNT:
                        rows = rows.reshape(LANES, block.shape[1], COUNT >> (level + 1), 2)
                    pair = tl.split(rows)
                    even += (pair[0],)
                    odd += (pair[1],)
                found = even + odd
    return found


@triton.jit
def _joined(rows, COUNT: tl.constexpr):
    """The block `lane*COUNT value` of its rows: what `_rows` has taken apart."""
    for level in tl.static_range(4):
        if 1 << level < COUNT:
            pairs = ()
            for part in tl.static_range(COUNT >> (level + 1)):
                pair = tl.join(rows[part], rows[part + (COUNT >> (level + 1))])
                pairs += (pair.reshape(pair.shape[0], pair.shape[1], 2 << level) if level else pair,)
            rows = pairs
    found = rows[0]
    if COUNT > 1:
        found = found.trans(0, 2, 1).reshape(found.shape[0] * COUNT, found.shape[1])
    return found


@triton.jit
def _keys(
    ptr, KEY: tl.constexpr, KEY_FASTEST: tl.constexpr, LANES: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """One head's elements for each key, as the tile has them: a tensor `lane` for each of a lane's keys."""
    lane = tl.arange(0, LANES)
    if not KEY_FASTEST:
        return _run(ptr, lane * PIECES, KEY, PIECES)
    found = ()
    for piece in tl.static_range(PIECES):
        found += _run(ptr, (piece * LANES + lane) * RUN, KEY, RUN)
    return found


@triton.jit
def _values(
    ptr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, KEY_FASTEST: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """One head's elements for each value, as the tile has them: `1 value`, or `lane value` with every lane's copy.

    With keys fastest a lane's values lie apart. Up to 16 of them are loaded by the lanes that use them; of more the
    compiler would make one load, and exchange it through shared memory.
    """
    FEW: tl.constexpr = min(16, BLOCK_V) if KEY_FASTEST else BLOCK_V
    parts = ()
    for part in tl.static_range(BLOCK_V // FEW):
        at = (tl.program_id(0) * BLOCK_V + part * FEW + tl.arange(0, FEW))[None, :]
        if not KEY_FASTEST:
            at = at + tl.zeros([LANES, 1], tl.int32)
        parts += (tl.load(ptr + at, mask=_below(at, VALUE, BLOCK_V), other=0.0).to(tl.float32),)
    found = _joined(parts, BLOCK_V // FEW)
    return found.reshape(1, BLOCK_V) if KEY_FASTEST else found


@triton.jit
def _dot(keys, rows, COUNT: tl.constexpr):
    """Sums over keys, `value`: those of a lane one after the other, then those of all lanes."""
    found = keys[0][:, None] * rows[0]
    for key in tl.static_range(1, COUNT):
        found = tl.fma(keys[key][:, None], rows[key], found)
    return tl.sum(found, 0)


@triton.jit
def _inverse_norm(keys, COUNT: tl.constexpr):
    """1 / sqrt(x^2 + EPSILON) of a vector x over keys: a number that every lane has."""
    found = keys[0] * keys[0]
    for key in tl.static_range(1, COUNT):
        found = tl.fma(keys[key], keys[key], found)
    return tl.rsqrt(tl.sum(found, 0) + EPSILON)


@triton.jit
def _in_piece(index, piece, in_value, KEY: tl.constexpr, KEY_STEP: tl.constexpr, PIECE_STEP: tl.constexpr):
    """Elements of a piece that the head has."""
    return (index * KEY_STEP + piece * PIECE_STEP < KEY)[:, None] & in_value[None, :]


@triton.jit
def _load(ptr, mask, KEY_FASTEST: tl.constexpr, RUN: tl.constexpr):
    """A piece of the state in fp32: a tensor `lane value` for each of a lane's RUN keys. Zeros outside of the mask.

    Two bf16 elements that are neighbours in a lane become the word again that they were loaded in, which takes nothing,
    and fp32 from there. Element by element it takes half as many instructions more.
    """
    found = ()
    if ptr.dtype.element_ty == tl.bfloat16 and (RUN if KEY_FASTEST else ptr.shape[1]) > 1:
        bits = tl.load(ptr.to(tl.pointer_type(tl.uint16), bitcast=True), mask=mask, other=0).to(tl.uint32)
        if KEY_FASTEST:
            rows = _rows(bits, RUN)
            for row in tl.static_range(0, RUN, 2):
                found += halves(rows[row] | (rows[row + 1] << 16))
        else:
            pair = tl.split(bits.reshape(bits.shape[0], bits.shape[1] // 2, 2))
            both = halves(pair[0] | (pair[1] << 16))
            found += (tl.join(both[0], both[1]).reshape(bits.shape[0], bits.shape[1]),)
    else:
        found += _rows(tl.load(ptr, mask=mask, other=0.0).to(tl.float32), RUN)
    return found


@triton.jit
def _store(
    ptr, rows, wanted, index, in_value, KEY: tl.constexpr, KEY_STEP: tl.constexpr, PIECE_STEP: tl.constexpr,
    KEY_STRIDE: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Stores the tile where it is wanted. ptr: of the first piece."""
    for piece in tl.static_range(PIECES):
        # Masks of a block and a scalar by `where`: `&` of the two is no mask in the interpreter of Triton 3.9.
        mask = tl.where(wanted, _in_piece(index, piece, in_value, KEY, KEY_STEP, PIECE_STEP), False)
        part = ()
        for row in tl.static_range(RUN):
            part += (rows[piece * RUN + row],)
        block = _joined(part, RUN).to(ptr.dtype.element_ty)
        tl.store(ptr + piece * (PIECE_STEP * KEY_STRIDE), block, mask=mask)


@triton.jit
def _gate(decay, rate, bias, GATED: tl.constexpr, BIASED: tl.constexpr):
    """The gate of a log decay, or of what a model projects for it."""
    if BIASED:
        decay = decay + bias
    if GATED:
        decay = -rate * softplus(decay)
    return tl.exp(decay)


@triton.jit
def _decayed(s, gates, COUNT: tl.constexpr, PER_KEY: tl.constexpr):
    found = ()
    for key in tl.static_range(COUNT):
        found += (s[key] * (gates[key][:, None] if PER_KEY else gates[0]),)
    return found


@triton.jit
def _added(s, keys, delta, COUNT: tl.constexpr):
    found = ()
    for key in tl.static_range(COUNT):
        found += (tl.fma(keys[key][:, None], delta, s[key]),)
    return found


@triton.jit
def _advanced(s, k, v, gates, beta, COUNT: tl.constexpr, PER_KEY: tl.constexpr, NORMALIZE: tl.constexpr):
    """The state behind one more token of the gated delta rule."""
    s = _decayed(s, gates, COUNT, PER_KEY)
    seen = _dot(k, s, COUNT)[None, :]
    if NORMALIZE:
        k_norm = _inverse_norm(k, COUNT)
        seen = seen * k_norm
    delta = beta * (v - seen)
    if NORMALIZE:
        delta = delta * k_norm
    return _added(s, k, delta, COUNT)


@triton.jit
def _advanced_low_rank(s, k, v, gates, a, b, COUNT: tl.constexpr, PER_KEY: tl.constexpr):
    """The state behind one more token of the generalized delta rule."""
    seen = _dot(a, s, COUNT)[None, :]
    return _added(_added(_decayed(s, gates, COUNT, PER_KEY), b, seen, COUNT), k, v, COUNT)


@triton.jit
def _tile(
    ptr, wanted, index, in_value, KEY: tl.constexpr, KEY_STEP: tl.constexpr, PIECE_STEP: tl.constexpr,
    KEY_STRIDE: tl.constexpr, KEY_FASTEST: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The tile of a slot, zeros if it is not wanted. ptr: of the first piece."""
    found = ()
    for piece in tl.static_range(PIECES):
        mask = tl.where(wanted, _in_piece(index, piece, in_value, KEY, KEY_STEP, PIECE_STEP), False)
        found += _load(ptr + piece * (PIECE_STEP * KEY_STRIDE), mask, KEY_FASTEST, RUN)
    return found


@triton.jit
def _with_pending(
    s, place, k_ptr, v_ptr, gate_ptr, beta_ptr, a_ptr, b_ptr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, PER_KEY: tl.constexpr, KEY_FASTEST: tl.constexpr,
    LANES: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr, NORMALIZE: tl.constexpr, stored: tl.constexpr,
):  # fmt: skip
    """The state behind one more token of the tail. The pointers are those of place 0, of the head."""
    COUNT: tl.constexpr = PIECES * RUN
    k = _keys(k_ptr + place * (KEY_HEADS * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES)
    v_at = v_ptr + place * (HEADS * VALUE)
    if VALUE * v_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
        v_at = tl.multiple_of(v_at, 16)
    v = _values(v_at, VALUE, BLOCK_V, KEY_FASTEST, LANES)
    gate_at = gate_ptr + place * (HEADS * KEY if PER_KEY else HEADS)
    gates = _keys(gate_at, KEY, KEY_FASTEST, LANES, RUN, PIECES) if PER_KEY else (tl.load(gate_at),)
    if a_ptr is None:
        s = _advanced(s, k, v, gates, tl.load(beta_ptr + place * HEADS), COUNT, PER_KEY, NORMALIZE)
    else:
        a = _keys(a_ptr + place * (KEY_HEADS * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES)
        b = _keys(b_ptr + place * (KEY_HEADS * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES)
        s = _advanced_low_rank(s, k, v, gates, a, b, COUNT, PER_KEY)
    return rounded(s, stored, COUNT) if stored != tl.float32 else s


@triton.jit(do_not_specialize=PER_CALL)
def _gated_delta_step(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr,
    read_ptr, write_ptr, snapshot_ptr, tokens_ptr, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    max_tokens, last, scale, q_apart, k_apart, v_apart, decay_apart, beta_apart, stride_units,
    a_ptr, b_ptr, a_apart, b_apart,
    tail_k_ptr, tail_v_ptr, tail_gate_ptr, tail_beta_ptr, tail_a_ptr, tail_b_ptr, tail_rows, ring,
    tail_k_apart, tail_v_apart, tail_gate_apart, tail_beta_apart, tail_a_apart, tail_b_apart,
    cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, parents_ptr, nodes,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, PER_KEY: tl.constexpr,
    KEY_FASTEST: tl.constexpr, UNIT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    LANES: tl.constexpr, RUN: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = _below(value, VALUE, BLOCK_V)
    # The tile in pieces, so that a lane knows which keys it has. With values fastest it has PIECES neighbouring keys,
    # one of each piece; with keys fastest RUN neighbouring ones of each piece.
    PIECES: tl.constexpr = BLOCK_K // (LANES * RUN)
    index = tl.arange(0, LANES * RUN)
    KEY_STEP: tl.constexpr = 1 if KEY_FASTEST else PIECES  # keys from one row of a piece to the next
    PIECE_STEP: tl.constexpr = LANES * RUN if KEY_FASTEST else 1  # keys from one piece to the next
    KEY_STRIDE: tl.constexpr = 1 if KEY_FASTEST else VALUE
    VALUE_STRIDE: tl.constexpr = KEY if KEY_FASTEST else 1
    WIDTH: tl.constexpr = min(16, UNIT * out_ptr.dtype.element_ty.primitive_bitwidth // 8)  # bytes that a lane stores

    real, read, write, snapshot, count = row_slots(read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last)

    if mark_count_ptr is not None:
        mark = first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    # A multiple of UNIT that the compiler can see to be one: otherwise the accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    tile = head * (KEY * VALUE) + index[:, None] * (KEY_STEP * KEY_STRIDE) + value[None, :] * VALUE_STRIDE
    tile_ptr = state_ptr + tile
    rate = 0.0
    if a_log_ptr is not None:
        rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    old_ptr = tile_ptr + read * slot_stride
    s = _tile(old_ptr, read > 0, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, KEY_FASTEST, RUN, PIECES)

    COUNT: tl.constexpr = PIECES * RUN
    live_ptr = tile_ptr + write * slot_stride
    copy_ptr = tile_ptr + snapshot * slot_stride
    if cursor_row_ptr is not None:
        stored: tl.constexpr = state_ptr.dtype.element_ty
        memory, place, pending, store = row_tail(
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
                    _store(live_ptr, s, real, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
                    _store(
                        copy_ptr, s, snapshot > 0, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES
                    )
                if entry < pending:
                    s = _with_pending(
                        s, place, ring_k, ring_v, ring_gate, ring_beta, ring_a, ring_b,
                        HEADS, KEY_HEADS, KEY, VALUE, BLOCK_V, PER_KEY, KEY_FASTEST, LANES, RUN, PIECES, NORMALIZE,
                        stored,
                    )  # fmt: skip
                    place = next_place(place, ring)

    visits = count
    if parents_ptr is not None:
        # The walk adds the pending tokens, and does so again when it goes back: of two such loops a compiler would keep
        # more than there are registers. So it has a visit also where there is no token.
        tree = parents_ptr + row * nodes
        visits = tl.maximum(walk_length(tree, count, nodes), 1)
        first_place, last_node, target, start = place, -1, 0, 0
    for t in range(visits):
        if parents_ptr is not None:
            for entry in range(start, pending + 1):
                if (entry == store) & (target == 0):
                    _store(live_ptr, s, real, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
                    _store(
                        copy_ptr, s, snapshot > 0, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES
                    )
                if entry < pending:
                    s = _with_pending(
                        s, (first_place + entry) % ring, ring_k, ring_v, ring_gate, ring_beta, ring_a, ring_b,
                        HEADS, KEY_HEADS, KEY, VALUE, BLOCK_V, PER_KEY, KEY_FASTEST, LANES, RUN, PIECES, NORMALIZE,
                        stored,
                    )  # fmt: skip
            start = pending + 1
            t = next_node(tree, last_node, target, nodes)
        token = (tl.program_id(2) * max_tokens + t).to(tl.int64)
        k_at = k_ptr + (token * k_apart + key_head * KEY)
        k = _keys(k_at, KEY, KEY_FASTEST, LANES, RUN, PIECES)
        q = _keys(q_ptr + (token * q_apart + key_head * KEY), KEY, KEY_FASTEST, LANES, RUN, PIECES)
        v_at = v_ptr + (token * v_apart + head * VALUE)
        if VALUE * v_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
            v_at = tl.multiple_of(v_at, 16)  # it was seen at the door
        v = _values(v_at, VALUE, BLOCK_V, KEY_FASTEST, LANES)
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + token * beta_apart + head).to(tl.float32)
            if SIGMOID:
                beta = sigmoid(beta)

        if PER_KEY:
            decay_at = decay_ptr + (token * decay_apart + head * KEY)
            decay = _keys(decay_at, KEY, KEY_FASTEST, LANES, RUN, PIECES)
            if dt_bias_ptr is not None:
                dt_bias = _keys(dt_bias_ptr + head * KEY, KEY, KEY_FASTEST, LANES, RUN, PIECES)
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
            a = _keys(a_at, KEY, KEY_FASTEST, LANES, RUN, PIECES)
            b = _keys(b_at, KEY, KEY_FASTEST, LANES, RUN, PIECES)
            s = _advanced_low_rank(s, k, v, gates, a, b, COUNT, PER_KEY)
        else:
            s = _advanced(s, k, v, gates, beta, COUNT, PER_KEY, NORMALIZE)
        o = _dot(q, s, PIECES * RUN)
        if NORMALIZE:
            o = o * _inverse_norm(q, PIECES * RUN)
        o = (o * scale).to(out_ptr.dtype.element_ty)
        out_at = out_ptr + (token * HEADS + head) * VALUE
        of_token = in_value
        if parents_ptr is not None:
            of_token = tl.where((t == target) & (t < count), in_value, False)
        if KEY_FASTEST or VALUE * out_ptr.dtype.element_ty.primitive_bitwidth % 128 != 0:
            tl.store(out_at + value, o, mask=of_token)
        else:
            # By the lanes of key 0, as pieces lie: nothing is exchanged.
            out_at = tl.multiple_of(out_at, WIDTH)
            first = (tl.arange(0, LANES) == 0)[:, None] & of_token[None, :]
            whole = tl.broadcast_to(o[None, :], (LANES, BLOCK_V))
            tl.store(out_at + value[None, :] + tl.zeros([LANES, 1], tl.int32), whole, mask=first)
        if cursor_row_ptr is not None:
            keeps = (memory > 0) & (pending + t >= store)
            if parents_ptr is not None:
                place = (first_place + pending + t) % ring
                keeps = keeps & (t == target) & (t < count)
            if keeps:
                copy_token(ring_v + place * (HEADS * VALUE), v_at, value, VALUE)
                if tl.program_id(0) == 0:
                    channel = tl.arange(0, BLOCK_K)
                    if head % (HEADS // KEY_HEADS) == 0:
                        copy_token(ring_k + place * (KEY_HEADS * KEY), k_at, channel, KEY)
                        if a_ptr is not None:
                            copy_token(ring_a + place * (KEY_HEADS * KEY), a_at, channel, KEY)
                            copy_token(ring_b + place * (KEY_HEADS * KEY), b_at, channel, KEY)
                    if a_ptr is None:
                        tl.store(ring_beta + place * HEADS, beta)
                    gate_at = ring_gate + place * (HEADS * KEY if PER_KEY else HEADS)
                    if PER_KEY:
                        in_key = channel < KEY
                        found = tl.load(decay_at + channel, mask=in_key, other=0.0).to(tl.float32)
                        of_key = 0.0
                        if dt_bias_ptr is not None:
                            of_key = tl.load(dt_bias_ptr + head * KEY + channel, mask=in_key, other=0.0).to(tl.float32)
                        found = _gate(found, rate, of_key, a_log_ptr is not None, dt_bias_ptr is not None)
                        tl.store(gate_at + channel, found, mask=in_key)
                    else:
                        tl.store(gate_at, gates[0])  # type: ignore[misc]  # there is one
            if stored != tl.float32:
                s = rounded(s, stored, COUNT)
            place = next_place(place, ring)
        if parents_ptr is not None:
            last_node, target, back = behind(tree, t, target, count, nodes)
            if back:
                # The state in front of the tree, again: registers have no room for it. It is in the slot that this
                # program has just stored, or else was read, but for pending tokens.
                tl.debug_barrier()
                start = tl.maximum(store, 0)
                start_ptr = tile_ptr + tl.where(store >= 0, write, read) * slot_stride
                s = _tile(
                    start_ptr, (store >= 0) | (read > 0), index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE,
                    KEY_FASTEST, RUN, PIECES,
                )  # fmt: skip
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = known_slot(tl.load(mark_slot_ptr + mark), last)
                wanted = (offset == t + 1) & (kept > 0)
                at_ptr = tile_ptr + kept * slot_stride
                _store(at_ptr, s, wanted, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
                mark += 1
                offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        out_at = ((row * max_tokens + t) * HEADS + head) * VALUE + value
        tl.store(out_ptr + out_at, 0.0, mask=in_value)

    if cursor_row_ptr is not None:
        real = real & (store > pending)
        snapshot = tl.where(store > pending, snapshot, 0)
    _store(live_ptr, s, real, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES)
    _store(copy_ptr, s, snapshot > 0, index, in_value, KEY, KEY_STEP, PIECE_STEP, KEY_STRIDE, RUN, PIECES)


def blocks(
    key: int, value: int, itemsize: int, unit: int, config: DeltaConfig = DEFAULT, converted: bool = False
) -> tuple[int, int, int]:  # fmt: skip
    """Keys and values of one tile (powers of two) and the warps that hold it.

    Elements that cannot be moved 16 bytes at a time count as 8 bytes: a lane has room for the addresses of fewer.

    Args:
        key: keys of a head.
        value: values of a head.
        itemsize: bytes of an element of the state.
        unit: elements that every slot begins at a multiple of.
        config: the configuration.
        converted: whether an element is converted by an instruction of its own where keys are fastest, as fp16 is. It
            counts twice then.
    """
    return config.blocks(key, value, itemsize * (1 + converted) if unit * itemsize == ACCESS_BYTES else 8)


def _most(unit: int, itemsize: int, warps: int) -> int:
    """Registers of a thread. Narrow accesses need more addresses at a time, keys of several warps more inputs.

    Of 2 bytes an element a lane holds twice as many.
    """
    return WIDE if unit * itemsize == ACCESS_BYTES and (itemsize, warps) == (4, 1) else THREAD_REGISTERS


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, scale: float | None = None, out: Tensor | None = None,
    marks: Marks | None = None, a_log: Tensor | None = None, dt_bias: Tensor | None = None, sigmoid: bool = False,
    normalize: bool = False, a: Tensor | None = None, b: Tensor | None = None, tail: DeltaTail | None = None,
    cursor: Cursor | None = None, parents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.gated_delta.gated_delta_step`."""
    *apart, a_apart, b_apart = check_gated_delta(
        q, k, v, decay, beta, state, read, write, snapshot, tokens, scale, out, marks, a_log, dt_bias, sigmoid,
        normalize, a, b, tail, cursor, parents,
    )  # fmt: skip
    batch, max_tokens, heads, values = v.shape
    out = v.new_empty(v.shape) if out is None else out
    key_heads, keys = q.shape[2:]
    if batch == 0:
        return out
    unit = math.gcd(stride_unit(state), heads * keys * values)
    key_fastest = is_transposed(state)
    config = config_of(DeltaConfig, state.device, keys, values, state.element_size())
    converted = key_fastest and state.dtype == torch.float16
    block_k, block_v, warps = blocks(keys, values, state.element_size(), unit, config, converted)
    lanes, run = shares(key_fastest, state.element_size(), block_k, block_v, warps, warp_threads())
    _gated_delta_step[(triton.cdiv(values, block_v), heads, batch)](
        q, k, v, decay, beta, a_log, dt_bias, state, out, read, write, snapshot, tokens, *(marks or NO_MARKS),
        max_tokens, state.shape[0] - 1, keys**-0.5 if scale is None else float(scale), *apart, state.stride(0) // unit,
        a, b, a_apart, b_apart, *tail_values(DeltaTail, tail, cursor, parents if max_tokens else None),
        HEADS=heads, KEY_HEADS=key_heads, KEY=keys, VALUE=values, PER_KEY=decay.dim() == 4, KEY_FASTEST=key_fastest,
        UNIT=unit, BLOCK_K=block_k, BLOCK_V=block_v, LANES=lanes, RUN=run, SIGMOID=sigmoid,
        NORMALIZE=normalize, num_warps=warps,
        **OPTIONS, **limit(roomy(warps, most=_most(unit, state.element_size(), warps))),
    )  # fmt: skip
    return out


def _tiles(itemsize: int) -> list[tuple[int, int]]:
    """Keys and values of heads whose tiles differ: every number of keys with a whole block of values, and fewer."""
    whole = blocks(128, 128, itemsize, ACCESS_BYTES // itemsize)[1]
    fewer = [2**power for power in range(whole.bit_length() - 1)]
    return [(128, 128), *((2**power, whole) for power in range(4, 10)), *((128, values) for values in fewer)]


GATES: dict[str, dict[str, Any]] = {  # those inside the kernel: none, or all that a layer of a model has
    "": {"a_log_ptr": None, "dt_bias_ptr": None, "SIGMOID": False, "NORMALIZE": False},
    "_gates": {"SIGMOID": True, "NORMALIZE": True},
}  # fmt: skip

TAIL = {"k": "*bf16", "v": "*bf16", "gate": "*fp32"}
LOW_RANK = ("a_ptr", "b_ptr", "a_apart", "b_apart")
COMMON = {  # order of the state and what is stored -> compiled for every change, of either width of the state
    "": ("", "_marks", "_value_key", "_value_key_marks", "_tail", "_tree"),
    "_kda": ("",),
    "_gates": ("", "_value_key", "_tail", "_value_key_tail", "_tree", "_value_key_tree"),
    "_kda_gates": ("_value_key", "_tail", "_tree"),
    "_rwkv7": ("", "_value_key_marks", "_tail"),
}  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: 32 heads of 128 x 128, bf16 inputs, every dtype of the state, both orders of it.

    One decay a head with 16 key heads, one a key channel with 32; gates given, or computed from what a model projects;
    RWKV-7 with heads of 64 x 64; storing slots, slots of marks too, with a tail, and with trees. Tiles of other sizes
    are rare cases, and so is a state whose slots lie at any element; none of them has trees.
    """
    delta = dict.fromkeys(LOW_RANK)
    kinds: dict[str, dict[str, Any]] = {
        f"{kind}{name}": heads | gates
        for kind, heads in (
            ("", {"KEY_HEADS": 16, "PER_KEY": False, **delta}), ("_kda", {"KEY_HEADS": 32, "PER_KEY": True, **delta}),
        )
        for name, gates in GATES.items()
    }  # fmt: skip
    kinds["_rwkv7"] = {"KEY_HEADS": 32, "PER_KEY": True, "beta_ptr": None, "beta_apart": None, **GATES[""]}
    return [
        _case(dtype, itemsize, kind, constants, key_fastest, stores, keys, values, unit)
        for (dtype, itemsize), (kind, constants), key_fastest, stores in product(
            (("fp32", 4), ("bf16", 2), ("fp16", 2)), kinds.items(), (False, True), ("", "_marks", "_tail", "_tree")
        )
        for keys, values in (_tiles(itemsize) if kind != "_rwkv7" else [(64, 64), (128, 128)])
        for unit in ((ACCESS_BYTES // itemsize, 1) if values == 128 else (ACCESS_BYTES // itemsize,))
        if stores != "_tree" or _is_common(dtype, itemsize, kind, key_fastest, stores, keys, values, unit)
    ]


def _is_common(
    dtype: str, itemsize: int, kind: str, key_fastest: bool, stores: str, keys: int, values: int, unit: int
) -> bool:  # fmt: skip
    size = 64 if kind == "_rwkv7" else 128
    whole = (keys, values, unit) == (size, size, ACCESS_BYTES // itemsize) and dtype != "fp16"
    return whole and f"{'_value_key' * key_fastest}{stores}" in COMMON[kind]


def _case(
    dtype: str, itemsize: int, kind: str, constants: Mapping[str, Any], key_fastest: bool, stores: str, keys: int,
    values: int, unit: int,
) -> CompileCase:  # fmt: skip
    block_k, block_v, warps = blocks(keys, values, itemsize, unit, converted=key_fastest and dtype == "fp16")
    lanes, run = shares(key_fastest, itemsize, block_k, block_v, warps)
    wide = shares(key_fastest, itemsize, block_k, block_v, warps, 64)
    gated = "_gates" in kind
    rings = TAIL | ({"a": "*bf16", "b": "*bf16"} if kind == "_rwkv7" else {"beta": "*fp32"})
    signature = (
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "dt_bias_ptr", "out_ptr", "a_ptr", "b_ptr"), "*bf16")
        | dict.fromkeys(("decay_ptr", "beta_ptr"), "*bf16" if gated else "*fp32")
        | {"a_log_ptr": "*fp32"}
        | dict.fromkeys(("read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr"), "*i32")
        | {"max_tokens": "i32", "last": "i32", "stride_units": "i32", "scale": "fp32"}
        | dict.fromkeys(("q_apart", "k_apart", "v_apart", "decay_apart", "beta_apart", "a_apart", "b_apart"), "i32")
    )
    shape = {
        "HEADS": 32, "KEY": keys, "VALUE": values, "BLOCK_K": block_k, "BLOCK_V": block_v, "UNIT": unit,
        "KEY_FASTEST": key_fastest, "LANES": lanes, "RUN": run,
    }  # fmt: skip
    planes = ("state_ptr",)
    how = f"{'_value_key' * key_fastest}{stores}"
    common = _is_common(dtype, itemsize, kind, key_fastest, stores, keys, values, unit)
    return CompileCase(
        f"gated_delta_step_{dtype}{kind}{how}"
        + (not common) * f", {keys} x {values}, unit {unit}", _gated_delta_step,
        signature | {"state_ptr": f"*{dtype}"} | mark_types(stores) | tail_types(stores, rings),
        {**shape, **constants, **absent(stores, DeltaTail, *rings)},
        planes, warps, planes if common else (), OPTIONS | roomy(warps, most=_most(unit, itemsize, warps)), not common,
        {"LANES": wide[0], "RUN": wide[1]},
    )  # fmt: skip
