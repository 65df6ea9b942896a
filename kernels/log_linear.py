"""The log-linear attention step over level slots and the open chunk of each row. Knows no owner and no other layer.

One program computes a block of values of one head, for all tokens of its row. It adds up the levels' states, each with
its weight, before it asks what the query reads from them: so there is one sum over keys a token, however many levels
there are. At the end of a chunk it adds up the levels that merge, and the chunk, and stores them in a fresh slot.

The inputs of earlier tokens lie in the open chunk, those of the step where they came from. Some programs store the
latter in the open chunk, and none reads them there: the step needs no order among its programs.
"""

from itertools import product

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels import fenwick
from memstate.kernels.catalog import CompileCase
from memstate.kernels.decode_checks import check_log_linear
from memstate.kernels.slots import known_slot, token_start
from memstate.kernels.warps import MOST, limit, roomy

FEWER = 168  # registers of a thread, so that three programs of 4 warps fit a multiprocessor; unasked it takes 230
OPTIONS = {"enable_fp_fusion": False}  # rounding as written, whatever the Triton version
CHUNK = tl.constexpr(fenwick.CHUNK)
INNER = tl.constexpr(fenwick.INNER)
LANES = tl.constexpr(fenwick.MOST_LEVELS + 1)  # one for each level, and one behind the last

# Everything that may differ between two calls of one model, and where its tensors lie: shapes say what is aligned.
POINTERS = [
    "q_ptr", "k_ptr", "v_ptr", "decay_ptr", "scales_ptr", "levels_ptr", "level_decay_ptr", "chunk_k_ptr", "chunk_v_ptr",
    "chunk_decay_ptr", "rows_ptr", "lengths_ptr", "tokens_ptr", "table_ptr", "target_ptr", "out_ptr",
]  # fmt: skip
NUMBERS = [
    "max_tokens", "last", "last_row", "q_apart", "k_apart", "v_apart", "decay_apart", "scales_apart", "levels_apart",
    "level_decay_apart", "chunk_k_apart", "chunk_v_apart", "chunk_decay_apart",
]  # fmt: skip


@triton.jit
def _tokens(chunk_ptr, new_ptr, at, start, WIDTH: tl.constexpr, apart):
    """Where tokens of the open chunk begin: the earlier ones there, from `start` on among the inputs.

    new_ptr: where token 0 of the chunk would begin among the inputs.
    """
    return tl.where(at < start, chunk_ptr + at * WIDTH, new_ptr + at * apart)


@triton.jit
def _rows(at, WIDTH: tl.constexpr):
    """Pointers as a column; on 16 bytes where tokens are whole accesses wide, as `check_tokens` has seen."""
    at = at[:, None]
    if WIDTH * at.dtype.element_ty.primitive_bitwidth % 128 == 0:
        at = tl.multiple_of(at, [1, 16])
    return at


@triton.jit
def _slots(table_ptr, level, wanted, last, LEVELS: tl.constexpr):
    """The slots of levels that are wanted, null for others."""
    held = (level >= 0) & (level < LEVELS) & ((wanted >> tl.maximum(level, 0)) & 1 > 0)
    return known_slot(tl.load(table_ptr + level, mask=held, other=0), last)


@triton.jit
def _mixed(
    levels_ptr, level_decay_ptr, table_ptr, scales_ptr, wanted, since, last, levels_apart, level_decay_apart, tile,
    inside, LEVELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The sum of the wanted levels' tiles, each decayed since its end and times its scale, if there are scales.

    Returns also the log decay since the oldest of them began: a level ends where the next lower one begins.

    wanted: a set bit for each level. since: the log decay since the youngest level ended.
    """
    level = tl.arange(0, LANES)
    slots = _slots(table_ptr, level, wanted, last, LEVELS)
    lower = _slots(table_ptr, level - 1, wanted, last, LEVELS)
    # Sums without a level's own decay: to take it away again would cancel, where a level is long.
    sums = since + tl.cumsum(tl.load(level_decay_ptr + lower * level_decay_apart, mask=lower > 0, other=0.0), 0)
    weights = tl.exp(sums)
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + INNER + level, mask=slots > 0, other=0.0).to(tl.float32)
    found = tl.zeros(inside.shape, tl.float32)
    for this in range(LEVELS):
        slot = tl.sum(tl.where(level == this, slots, 0), 0)
        weight = tl.sum(tl.where(level == this, weights, 0.0), 0)
        at = token_start(levels_ptr, slot, levels_apart, SIZE) + tile
        # Masks of a block and a scalar by `where`: `&` of the two is no mask in the interpreter of Triton 3.9.
        state = tl.load(at, mask=tl.where(slot > 0, inside, False), other=0.0).to(tl.float32)
        found = tl.fma(state, weight, found)
    return found, tl.sum(tl.where(level == LEVELS, sums, 0.0), 0)


@triton.jit(do_not_specialize=[*POINTERS, *NUMBERS, "scale"])
def _log_linear_step(
    q_ptr, k_ptr, v_ptr, decay_ptr, scales_ptr, levels_ptr, level_decay_ptr, chunk_k_ptr, chunk_v_ptr, chunk_decay_ptr,
    rows_ptr, lengths_ptr, tokens_ptr, table_ptr, target_ptr, out_ptr, max_tokens, last, last_row, q_apart, k_apart,
    v_apart, decay_apart, scales_apart, levels_apart, level_decay_apart, chunk_k_apart, chunk_v_apart,
    chunk_decay_apart, scale,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    entry = tl.program_id(2)
    KEYS: tl.constexpr = KEY_HEADS * KEY
    VALUES: tl.constexpr = HEADS * VALUE
    key = tl.arange(0, BLOCK_K)
    in_key = key < KEY
    key_at = head // (HEADS // KEY_HEADS) * KEY + key
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_value = value < VALUE
    value_at = head * VALUE + value
    tile = head * (KEY * VALUE) + key[:, None] * VALUE + value[None, :]
    inside = in_key[:, None] & in_value[None, :]

    row = known_slot(tl.load(rows_ptr + entry), last_row)
    length = tl.load(lengths_ptr + entry)
    chunks = length // CHUNK
    start = (length % CHUNK).to(tl.int32)
    tokens = tl.minimum(tl.maximum(tl.load(tokens_ptr + entry), 0), max_tokens).to(tl.int32)
    count = tl.where(row > 0, tl.minimum(tokens + start, CHUNK) - start, 0)
    first = (entry * max_tokens).to(tl.int64)
    if count > 0:
        at = tl.arange(0, CHUNK)
        chunk_k = token_start(chunk_k_ptr, row, chunk_k_apart, CHUNK * KEYS)
        chunk_v = token_start(chunk_v_ptr, row, chunk_v_apart, CHUNK * VALUES)
        chunk_decay = chunk_decay_ptr + row * chunk_decay_apart + head
        new_k = k_ptr + (first - start) * k_apart
        new_v = v_ptr + (first - start) * v_apart
        new_decay = decay_ptr + (first - start) * decay_apart + head
        k_at = _rows(_tokens(chunk_k, new_k, at, start, KEYS, k_apart), KEYS) + key_at[None, :]
        v_at = _rows(_tokens(chunk_v, new_v, at, start, VALUES, v_apart), VALUES) + value_at[None, :]

        new = (at >= start) & (at < start + count)
        # Programs share decays and keys. One of each group stores them: the first block, and for keys the first head.
        alone = tl.program_id(0) == 0
        keeps = alone & (head % (HEADS // KEY_HEADS) == 0)
        mask = tl.where(keeps, new[:, None] & in_key[None, :], False)
        tl.store(chunk_k + at[:, None] * KEYS + key_at[None, :], tl.load(k_at, mask=mask, other=0.0), mask=mask)
        mask = new[:, None] & in_value[None, :]
        tl.store(chunk_v + at[:, None] * VALUES + value_at[None, :], tl.load(v_at, mask=mask, other=0.0), mask=mask)
        decay_at = _tokens(chunk_decay, new_decay, at, start, HEADS, decay_apart)
        decay = tl.load(decay_at, mask=at < start + count, other=0.0)
        tl.store(chunk_decay + at * HEADS, decay, mask=tl.where(alone, new, False))
        decay = decay.to(tl.float32)
        next_at = _tokens(chunk_decay, new_decay, at + 1, start, HEADS, decay_apart)
        later = tl.load(next_at, mask=at + 1 < start + count, other=0.0).to(tl.float32)

        level_decay = level_decay_ptr + head
        table = table_ptr + entry * LEVELS
        for t in range(count):
            scales = scales_ptr + (first + t) * scales_apart + head * (INNER + LEVELS)
            seen = at <= start + t
            apart = at ^ (start + t)
            level = tl.zeros_like(at)  # the bits that it takes to write how far two tokens are apart in the tree
            for bit in tl.static_range(INNER - 1):
                level += (apart >= 1 << bit).to(tl.int32)
            since = tl.cumsum(tl.where(at < start + t, later, 0.0), 0, reverse=True)  # the log decay behind each token
            past = tl.sum(tl.where(seen, decay, 0.0), 0)
            q = tl.load(token_start(q_ptr, first + t, q_apart, KEYS) + key_at, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(k_at, mask=seen[:, None] & in_key[None, :], other=0.0).to(tl.float32)
            v = tl.load(v_at, mask=seen[:, None] & in_value[None, :], other=0.0).to(tl.float32)
            weight = tl.load(scales + level, mask=seen, other=0.0).to(tl.float32) * tl.exp(since)
            weight *= tl.sum(k * q[None, :], 1)
            mixed, _ = _mixed(
                levels_ptr, level_decay, table, scales, chunks, past, last, levels_apart, level_decay_apart,
                tile, inside, LEVELS, HEADS * KEY * VALUE,
            )  # fmt: skip
            o = scale * (tl.sum(weight[:, None] * v, 0) + tl.sum(q[:, None] * mixed, 0))
            out_at = token_start(out_ptr, first + t, VALUES, VALUES) + value_at
            tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=in_value)

        target = known_slot(tl.load(target_ptr + entry), last)
        if (start + count == CHUNK) & (target > 0):
            ending = (chunks ^ (chunks + 1)) >> 1  # the ones at the end of the number
            merged, whole = _mixed(
                levels_ptr, level_decay, table, None, ending, tl.sum(decay, 0), last, levels_apart, level_decay_apart,
                tile, inside, LEVELS, HEADS * KEY * VALUE,
            )  # fmt: skip
            late = 0.0
            for newer in range(CHUNK):  # the newest token first
                s = CHUNK - 1 - newer
                one_k = _tokens(chunk_k, new_k, s, start, KEYS, k_apart) + key_at
                one_v = _tokens(chunk_v, new_v, s, start, VALUES, v_apart) + value_at
                old_k = tl.load(one_k, mask=in_key, other=0.0).to(tl.float32)
                old_v = tl.load(one_v, mask=in_value, other=0.0).to(tl.float32) * tl.exp(late)
                merged = tl.fma(old_k[:, None], old_v[None, :], merged)
                late += tl.load(_tokens(chunk_decay, new_decay, s, start, HEADS, decay_apart)).to(tl.float32)
            target_at = token_start(levels_ptr, target, levels_apart, HEADS * KEY * VALUE) + tile
            tl.store(target_at, merged.to(levels_ptr.dtype.element_ty), mask=inside)
            tl.store(level_decay + target * level_decay_apart, whole, mask=alone)

    for t in range(count, max_tokens):
        tl.store(out_ptr + (first + t) * VALUES + value_at, 0.0, mask=in_value)


def blocks(key: int, value: int) -> tuple[int, int, int]:
    """Keys and values of one tile (powers of two) and the warps that hold it."""
    block_k = max(16, int(triton.next_power_of_2(key)))
    return block_k, min(32, max(4, int(triton.next_power_of_2(value)))), min(MOST, max(1, block_k // 32))


def log_linear_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, level_scales: Tensor, levels: Tensor, level_decay: Tensor,
    chunk_k: Tensor, chunk_v: Tensor, chunk_decay: Tensor, rows: Tensor, lengths: Tensor, tokens: Tensor,
    table: Tensor, target: Tensor, scale: float = 1.0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.log_linear.log_linear_step`."""
    apart = check_log_linear(
        q, k, v, decay, level_scales, levels, level_decay, chunk_k, chunk_v, chunk_decay, rows, lengths, tokens, table,
        target, scale, out,
    )  # fmt: skip
    batch, max_tokens, heads, value = v.shape
    out = v.new_empty(v.shape) if out is None else out
    if batch == 0:
        return out
    key_heads, key = q.shape[2:]
    block_k, block_v, warps = blocks(key, value)
    _log_linear_step[(triton.cdiv(value, block_v), heads, batch)](
        q, k, v, decay, level_scales, levels, level_decay, chunk_k, chunk_v, chunk_decay, rows, lengths, tokens, table,
        target, out, max_tokens, levels.shape[0] - 1, chunk_k.shape[0] - 1, *apart, float(scale),
        HEADS=heads, KEY_HEADS=key_heads, KEY=key, VALUE=value, LEVELS=table.shape[1], BLOCK_K=block_k,
        BLOCK_V=block_v, num_warps=warps, **OPTIONS, **limit(roomy(warps, most=FEWER)),
    )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: levels for 2^17 tokens, bf16 inputs. Heads of log-linear Mamba-2, and others."""
    models = {"": (64, 1, 128, 64), ", 16 x 16": (4, 4, 16, 16), ", 256 x 128": (8, 8, 256, 128)}
    return [_case(dtype, name, *sizes) for dtype, (name, sizes) in product(("fp32", "bf16"), models.items())]


def _case(dtype: str, name: str, heads: int, key_heads: int, key: int, value: int) -> CompileCase:
    block_k, block_v, warps = blocks(key, value)
    types = dict.fromkeys(POINTERS, "*bf16") | dict.fromkeys(NUMBERS, "i32") | {"levels_ptr": f"*{dtype}"}
    types |= dict.fromkeys(("decay_ptr", "level_decay_ptr", "chunk_decay_ptr"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("rows_ptr", "lengths_ptr", "tokens_ptr", "table_ptr", "target_ptr"), "*i32")
    shape = {
        "HEADS": heads, "KEY_HEADS": key_heads, "KEY": key, "VALUE": value, "LEVELS": 11, "BLOCK_K": block_k,
        "BLOCK_V": block_v,
    }  # fmt: skip
    return CompileCase(
        f"log_linear_step_{dtype}{name}", _log_linear_step, types, shape, (), warps, ("levels_ptr",),
        OPTIONS | roomy(warps, most=FEWER), bool(name),
    )  # fmt: skip
