"""Computes the state update of Mamba-3 on read, write and snapshot slots. Knows no register, strategy or layer.

One program takes the whole state of one head through all tokens of its row. If several programs shared a head, one
could read an angle or a key that another program has already overwritten. The state stays in fp32 hardware registers
after its load. A barrier separates the loads from the first store, because several warps hold the same key, value and
angle.
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.decode_checks import check_mamba3
from memstate.kernels.gates import cosine_sine, sigmoid
from memstate.kernels.kept import launch_step, launched_again, unspecialised
from memstate.kernels.slots import NO_MARKS, first_mark, known_slot, mark_offset, row_slots, token_start
from memstate.kernels.tables import Mamba3State, StepMarks
from memstate.kernels.warps import all_loaded, limit, roomy

OPTIONS = {"enable_fp_fusion": False}  # rounding must not depend on the Triton version
WARP_ELEMENTS = 1024  # elements of a head's matrix for each warp: 32 fp32 registers per lane
TURN = tl.constexpr((6.28318548, -1.74845553e-07))  # 2 pi in fp32, and the rest that fp32 rounds away


@triton.jit
def _of(ptr, place, apart):
    """Returns the address of a head in slot `place`, in a plane whose slots are `apart` times 16 bytes apart.

    All elements lie at fixed offsets from this one address, so their addresses need no registers of their own.
    """
    return ptr + place * apart.to(tl.int64) * (128 // ptr.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _load(ptr, slot, apart, at, inside):
    """Returns a head's part of one plane of a slot, in fp32; zeros for the null slot."""
    # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
    return tl.load(_of(ptr, slot, apart) + at, mask=tl.where(slot > 0, inside, False), other=0.0).to(tl.float32)


@triton.jit
def _store(planes, place, apart, at, kept, turning):
    """Stores the state of a head, all planes, to slot `place`."""
    tl.store(_of(planes[0], place, apart[0]) + at[0], kept[0], mask=turning)
    for plane in tl.static_range(1, 4):
        part = kept[plane].to(planes[plane].dtype.element_ty)
        tl.store(_of(planes[plane], place, apart[plane]) + at[plane], part)


@triton.jit
def _pairs(ptr, STATE: tl.constexpr):
    """Returns the even elements and the odd elements of a vector, in fp32."""
    at = 2 * tl.arange(0, STATE // 2)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(ptr + at).to(tl.float32))


@triton.jit
def _turned(ptr, bias, cosine, sine, STATE: tl.constexpr):
    """Returns a vector plus its bias, with each pair of neighbours turned by its angle."""
    even, odd = _pairs(ptr, STATE)
    even += bias[0]
    odd += bias[1]
    return tl.join(even * cosine - odd * sine, even * sine + odd * cosine).reshape(STATE)


@unspecialised("angle_ptr", "ssm_ptr", "k_ptr", "v_ptr")
def _mamba3_step(
    x_ptr, b_ptr, c_ptr, dt_ptr, decay_ptr, trap_ptr, rotation_ptr, z_ptr, b_bias_ptr, c_bias_ptr, d_ptr,
    angle_ptr, ssm_ptr, k_ptr, v_ptr, out_ptr,
    read_ptr, write_ptr, snapshot_ptr, tokens_ptr, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    max_tokens, last, angle_apart, ssm_apart, k_apart, v_apart,
    x_distance, b_distance, c_distance, dt_distance, decay_distance, trap_distance, rotation_distance, z_distance,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    pair = tl.arange(0, STATE // 2)
    index = tl.arange(0, STATE)
    dim = tl.arange(0, DIM)
    turning = pair < ANGLES
    at = (pair, dim[:, None] * STATE + index[None, :], index, dim)

    real, read, write, snapshot, count = row_slots(read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last)
    if mark_count_ptr is not None:
        mark = first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    planes = (angle_ptr + head * ANGLES, ssm_ptr + head * (DIM * STATE), k_ptr + head * STATE, v_ptr + head * DIM)
    apart = (angle_apart, ssm_apart, k_apart, v_apart)
    angle = _load(planes[0], read, angle_apart, pair, turning)
    s = _load(planes[1], read, ssm_apart, at[1], tl.full([DIM, STATE], True, tl.int1))
    k = _load(planes[2], read, k_apart, index, tl.full([STATE], True, tl.int1))
    v = _load(planes[3], read, v_apart, dim, tl.full([DIM], True, tl.int1))
    b_bias = _pairs(b_bias_ptr + head * STATE, STATE)
    c_bias = _pairs(c_bias_ptr + head * STATE, STATE)
    d = tl.load(d_ptr + head).to(tl.float32)
    all_loaded()

    shared = head // (HEADS // GROUPS) * STATE
    for t in range(count):
        token = (row * max_tokens + t).to(tl.int64)
        x = tl.load(token_start(x_ptr, token, x_distance, HEADS * DIM) + head * DIM + dim).to(tl.float32)
        dt = tl.load(dt_ptr + (token * dt_distance + head)).to(tl.float32)
        decay = tl.exp(tl.load(decay_ptr + (token * decay_distance + head)).to(tl.float32))
        now = sigmoid(tl.load(trap_ptr + (token * trap_distance + head)).to(tl.float32))
        rotation_at = token_start(rotation_ptr, token, rotation_distance, ANGLES) + pair
        rotation = tl.load(rotation_at, mask=turning, other=0.0).to(tl.float32)
        # The angle grows by tanh(rotation) * pi * dt. Whole turns are subtracted, so that the angle keeps its digits.
        angle = tl.fma(2 * sigmoid(2 * rotation) - 1, dt * (TURN[0] / 2), angle)
        turns = tl.floor(tl.fma(angle, 1 / TURN[0], 0.5))
        angle = tl.fma(turns, -TURN[1], tl.fma(turns, -TURN[0], angle))
        cosine, sine = cosine_sine(angle)
        key = _turned(token_start(b_ptr, token, b_distance, GROUPS * STATE) + shared, b_bias, cosine, sine, STATE)
        query = _turned(token_start(c_ptr, token, c_distance, GROUPS * STATE) + shared, c_bias, cosine, sine, STATE)

        before = decay * dt * (1 - now)
        s = tl.fma((before * v)[:, None], k[None, :], s * decay)
        s = tl.fma((dt * now * x)[:, None], key[None, :], s)
        k = key
        v = x
        y = tl.fma(x, d, tl.sum(s * query[None, :], 1))
        if z_ptr is not None:
            z = tl.load(token_start(z_ptr, token, z_distance, HEADS * DIM) + head * DIM + dim).to(tl.float32)
            y = y * (z * sigmoid(z))
        tl.store(out_ptr + (token * (HEADS * DIM) + head * DIM + dim), y.to(out_ptr.dtype.element_ty))
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = known_slot(tl.load(mark_slot_ptr + mark), last)
                if (offset == t + 1) & (kept > 0):
                    _store(planes, kept, apart, at, (angle, s, k, v), turning)
                mark += 1
                offset = mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        token = (row * max_tokens + t).to(tl.int64)
        tl.store(out_ptr + (token * (HEADS * DIM) + head * DIM + dim), tl.zeros([DIM], out_ptr.dtype.element_ty))

    if real:
        _store(planes, write, apart, at, (angle, s, k, v), turning)
    if snapshot > 0:
        _store(planes, snapshot, apart, at, (angle, s, k, v), turning)


def warps(dim: int, state: int) -> int:
    """Returns the number of warps of a program."""
    return max(1, dim * state // WARP_ELEMENTS)


def mamba3_step(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor, trap: Tensor, rotation: Tensor, b_bias: Tensor,
    c_bias: Tensor, d: Tensor, state: Mamba3State, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor,
    z: Tensor | None = None, out: Tensor | None = None, marks: StepMarks | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.mamba3.mamba3_step`."""
    checked = check_mamba3(*locals().values())  # all arguments, in order
    out = x.new_empty(x.shape) if out is None else out
    batch, max_tokens, heads, dim = x.shape
    if batch == 0:
        return out
    tensors = (
        x, b, c, dt, decay, trap, rotation, z, b_bias, c_bias, d, *state, out,
        read, write, snapshot, tokens, *(marks or NO_MARKS),
    )  # fmt: skip
    if launched_again(checked, tensors):
        return out
    states, angles, itemsize = b.shape[3], rotation.shape[2], state.ssm.element_size()
    distances, apart = checked.found
    constants = {"HEADS": heads, "GROUPS": b.shape[2], "DIM": dim, "STATE": states, "ANGLES": angles}
    options = OPTIONS | limit(roomy(warps(dim, states), marks is not None or itemsize == 2))
    launch_step(
        checked, _mamba3_step, (heads, batch), tensors, (max_tokens, len(state.ssm) - 1, *apart, *distances),
        constants, options | {"num_warps": warps(dim, states)},
    )  # fmt: skip
    return out
