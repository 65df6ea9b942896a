"""The selective state update of Mamba over read, write and snapshot slots. Knows no register, no strategy, no layer.

One program advances one tile of one head's state, a block of `dim` by all of `state`, through all tokens of its row.
The tile stays in fp32 registers from its load on, so the program may write the slot that it read. Up to 512 states fit
one warp, and sums over them then never wait for another. A speculative window takes a copy of the tile behind every
token, slots of marks behind theirs.
"""

import math
from itertools import product

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import stride_unit
from memstate.kernels.catalog import CompileCase
from memstate.kernels.decode_checks import check_selective
from memstate.kernels.slots import (
    NO_MARKS,
    absent,
    first_mark,
    known_slot,
    mark_offset,
    mark_types,
    row_slots,
    token_start,
)
from memstate.kernels.tables import ACCESS_BYTES, Marks
from memstate.kernels.tuned import SelectiveConfig, config_of
from memstate.kernels.warps import limit, roomy

LINEAR = tl.constexpr(20.0)  # softplus(x) is x above
OPTIONS = {"enable_fp_fusion": False}  # rounding as written, whatever the Triton version
DEFAULT = SelectiveConfig()

# Everything that may differ between two calls of one model. The alignment of the inputs belongs here too: it may change
# the order in which lanes add up a sum, and the bits of a row would depend on where its batch was allocated. Inputs of
# shapes that the door wants on 16 bytes are said to be there, see `token_start`.
PER_CALL = [
    "x_ptr", "dt_ptr", "a_ptr", "b_ptr", "c_ptr", "d_ptr", "z_ptr", "dt_bias_ptr", "out_ptr",
    "read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr",
    "mark_count_ptr", "mark_entry_ptr", "mark_offset_ptr", "mark_slot_ptr",
    "max_tokens", "last", "stride_units", "window_units",
    "x_distance", "dt_distance", "b_distance", "c_distance", "z_distance",
]  # fmt: skip


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to the last places, also where the sum keeps little of exp(x); x itself above LINEAR.

    Theorem 4 of Goldberg 1991, What every computer scientist should know about floating-point arithmetic.
    """
    e = tl.exp(tl.where(x > LINEAR, 0.0, x))
    u = 1 + e
    kept = u - 1  # log(u) is right for this; log(u) / kept hardly differs from log(1 + e) / e
    nothing = kept == 0
    y = e * (tl.where(nothing, 1.0, tl.log(u)) / tl.where(nothing, 1.0, kept))
    return tl.where(x > LINEAR, x, y)


@triton.jit(do_not_specialize=PER_CALL)
def _selective_step(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, dt_bias_ptr, state_ptr, window_ptr, out_ptr,
    read_ptr, write_ptr, snapshot_ptr, tokens_ptr, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    max_tokens, last, stride_units, window_units, x_distance, dt_distance, b_distance, c_distance, z_distance,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, TIED: tl.constexpr,
    SOFTPLUS: tl.constexpr, UNIT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dim = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    in_dim = dim < DIM
    in_state = n < STATE
    in_tile = in_dim[:, None] & in_state[None, :]
    channel = head * DIM + dim
    tile = channel[:, None] * STATE + n[None, :]

    real, read, write, snapshot, count = row_slots(
        read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last, window_ptr is None
    )

    if mark_count_ptr is not None:
        mark = first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    # A multiple of UNIT that the compiler can see to be one: otherwise the accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    # Masks of a block and a scalar by `where`: `&` of the two is no mask in the interpreter of Triton 3.9.
    tile_ptr = state_ptr + tile
    s = tl.load(tile_ptr + read * slot_stride, mask=tl.where(read > 0, in_tile, False), other=0.0).to(tl.float32)

    # Whose dt, d and dt_bias: the head's, or each channel's own.
    owner = head if TIED else channel
    owned = head < HEADS if TIED else in_dim
    OWNERS: tl.constexpr = HEADS if TIED else HEADS * DIM
    a_at = a_ptr + (head if TIED else tile)
    if not TIED and STATE * a_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
        a_at = tl.multiple_of(a_at, [1, 16])  # it was seen at the door; each row of `a` is whole accesses long
    a = tl.load(a_at, mask=owned if TIED else in_tile, other=0.0).to(tl.float32)
    if dt_bias_ptr is not None:
        dt_bias = tl.load(dt_bias_ptr + owner, mask=owned, other=0.0).to(tl.float32)
    if d_ptr is not None:
        d = tl.load(d_ptr + owner, mask=owned, other=0.0).to(tl.float32)

    for t in range(count):
        token = row * max_tokens + t
        shared = head // (HEADS // GROUPS) * STATE + n
        x_at = token_start(x_ptr, token, x_distance, HEADS * DIM) + channel
        x = tl.load(x_at, mask=in_dim, other=0.0).to(tl.float32)
        b_at = token_start(b_ptr, token, b_distance, GROUPS * STATE) + shared
        b = tl.load(b_at, mask=in_state, other=0.0).to(tl.float32)
        c_at = token_start(c_ptr, token, c_distance, GROUPS * STATE) + shared
        c = tl.load(c_at, mask=in_state, other=0.0).to(tl.float32)
        dt_at = token_start(dt_ptr, token, dt_distance, OWNERS) + owner
        dt = tl.load(dt_at, mask=owned, other=0.0).to(tl.float32)
        if dt_bias_ptr is not None:
            dt = dt + dt_bias
        if SOFTPLUS:
            dt = _softplus(dt)

        s = s * tl.exp((dt if TIED else dt[:, None]) * a)
        s = s + (dt * x)[:, None] * b[None, :]
        y = tl.sum(s * c[None, :], 1)
        if d_ptr is not None:
            y = y + d * x
        if z_ptr is not None:
            z_at = token_start(z_ptr, token, z_distance, HEADS * DIM) + channel
            z = tl.load(z_at, mask=in_dim, other=0.0).to(tl.float32)
            y = y * (z / (1 + tl.exp(-z)))
        tl.store(out_ptr + token * (HEADS * DIM) + channel, y.to(out_ptr.dtype.element_ty), mask=in_dim)
        if window_ptr is not None:
            # Seen to be a multiple of UNIT and of no more, as slots are: wider accesses here would change the layout of
            # the tile, and with it the order of its sums.
            after = window_ptr + token * window_units * UNIT
            tl.store(after + tile, s.to(window_ptr.dtype.element_ty), mask=in_tile)
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = known_slot(tl.load(mark_slot_ptr + mark), last)
                wanted = tl.where((offset == t + 1) & (kept > 0), in_tile, False)
                tl.store(tile_ptr + kept * slot_stride, s.to(state_ptr.dtype.element_ty), mask=wanted)
                mark += 1
                offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        tl.store(out_ptr + (row * max_tokens + t) * (HEADS * DIM) + channel, 0.0, mask=in_dim)

    if window_ptr is None:
        new = s.to(state_ptr.dtype.element_ty)
        tl.store(tile_ptr + write * slot_stride, new, mask=tl.where(real, in_tile, False))
        tl.store(tile_ptr + snapshot * slot_stride, new, mask=tl.where(snapshot > 0, in_tile, False))


def blocks(dim: int, state: int, tied: bool, config: SelectiveConfig = DEFAULT) -> tuple[int, int, int]:
    """Dims and states of one tile (powers of two) and the warps that hold it."""
    return config.blocks(dim, state, tied)


def selective_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, d: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    softplus: bool = False, window: Tensor | None = None, out: Tensor | None = None, marks: Marks | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.selective.selective_step`."""
    distances = check_selective(
        x, dt, a, b, c, state, read, write, snapshot, tokens, d, z, dt_bias, softplus, window, out, marks
    )
    out = x.new_empty(x.shape) if out is None else out
    batch, max_tokens, heads, dim = x.shape
    groups, states = b.shape[2:]
    if batch == 0:
        return out
    unit = math.gcd(stride_unit(state), heads * dim * states)
    tied = dt.dim() == 3
    config = config_of(SelectiveConfig, state.device, dim, states, tied, state.element_size())
    block_d, block_n, warps = blocks(dim, states, tied, config)
    _selective_step[(triton.cdiv(dim, block_d), heads, batch)](
        x, dt, a, b, c, d, z, dt_bias, state, window, out, read, write, snapshot, tokens, *(marks or NO_MARKS),
        max_tokens, state.shape[0] - 1, state.stride(0) // unit, heads * dim * states // unit, *distances,
        HEADS=heads, GROUPS=groups, DIM=dim, STATE=states, TIED=tied, SOFTPLUS=softplus,
        UNIT=unit, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=warps,
        **OPTIONS, **limit(roomy(warps, marks is not None)),
    )  # fmt: skip
    return out


# heads, groups, dim, state; tied; dtypes of the state
MODELS = {
    "mamba2": ((128, 8, 64, 128), True, ("fp32", "bf16", "fp16")),
    "mamba2_256": ((128, 8, 64, 256), True, ("fp32",)),
    "mamba1": ((1, 1, 8192, 16), False, ("fp32", "bf16", "fp16")),
}


# Other tiles: every number of states, and fewer dims than fill one.
OTHERS = {
    **{f"mamba2, {n} states": ((8, 1, 64, n), True, ("fp32", "bf16", "fp16")) for n in (8, 16, 32, 64, 128, 256, 512)},
    **{f"mamba2, {dim} dims": ((8, 1, dim, 16), True, ("fp32",)) for dim in (1, 8, 16, 32)},
    **{f"mamba1, {n} states": ((1, 1, 8192, n), False, ("fp32", "bf16", "fp16")) for n in (4, 8, 16, 32, 64, 128)},
}


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: both kinds, bf16 inputs; storing slots, a window, or slots of marks too."""
    inputs = ("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "z_ptr", "out_ptr")
    signature = (
        dict.fromkeys(inputs, "*bf16")
        | dict.fromkeys(("a_ptr", "d_ptr", "dt_bias_ptr"), "*fp32")
        | dict.fromkeys(("read_ptr", "write_ptr", "snapshot_ptr", "tokens_ptr"), "*i32")
        | dict.fromkeys(("max_tokens", "last", "stride_units", "window_units"), "i32")
        | dict.fromkeys(("x_distance", "dt_distance", "b_distance", "c_distance", "z_distance"), "i32")
    )
    cases = []
    for name, ((heads, groups, dim, state), tied, dtypes) in (MODELS | OTHERS).items():
        block_d, block_n, warps = blocks(dim, state, tied)
        shape = {
            "HEADS": heads, "GROUPS": groups, "DIM": dim, "STATE": state, "TIED": tied, "SOFTPLUS": True,
            "BLOCK_D": block_d, "BLOCK_N": block_n,
        }  # fmt: skip
        for dtype, stores in product(dtypes, ("", "_window", "_marks")):
            planes = ("state_ptr", "window_ptr") if stores == "_window" else ("state_ptr",)
            rare = name in OTHERS or (stores, dtype) == ("_marks", "fp16")
            bulk = () if rare else planes if tied else (*planes, "a_ptr")
            constexprs = shape | {"UNIT": ACCESS_BYTES // (4 if dtype == "fp32" else 2)} | absent(stores)
            cases.append(
                CompileCase(
                    f"selective_step_{name}_{dtype}{stores}", _selective_step,
                    signature | dict.fromkeys(planes, f"*{dtype}") | mark_types(stores), constexprs, planes, warps,
                    bulk, OPTIONS | roomy(warps, stores == "_marks"), rare,
                )
            )  # fmt: skip
    return cases
