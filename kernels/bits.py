"""Moves states between slots in fewer bits and a batch of fp32, one layer in a launch. Knows no rule of a state.

One program moves BLOCKS blocks of 32 elements of one row. A block is a row of its tensors, so that its scale is a
maximum over an axis. Powers of two are made of the bits of their exponents, and every product is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import WORDS
from memstate.kernels.catalog import CompileCase
from memstate.kernels.move_checks import check_bits
from memstate.kernels.slots import known_slot
from memstate.kernels.tables import ACCESS_BYTES, BITS, BITS_BLOCK
from memstate.kernels.tables import RESIDUAL as STEPS
from memstate.kernels.warps import limit, roomy, warp_threads

WIDEST = 128  # registers of a thread that stores: without a limit some spill at 64, as others do at 96
WARPS = 4  # a block for each thread: 32 elements, whose residual is 16 bytes
WIDE, BLOCK, RESIDUAL = (tl.constexpr(number) for number in (ACCESS_BYTES, BITS_BLOCK, STEPS))
E4M3 = tl.constexpr(BITS[torch.float8_e4m3fn][0])  # TOP of these
INFINITY = tl.constexpr(0x7F800000)  # bits of an infinite fp32; those of NaN are above
SIZES = ["last", "blocks", "value_units", "scale_units", "residual_units", "seed", "first"]
POINTERS = ["values_ptr", "scales_ptr", "residual_ptr", "slots_ptr", "batch_ptr", "numbers_ptr"]


@triton.jit
def _power(exponent):
    """2**(exponent - 127) for exponents from 1 to 254; 0 for 0, infinity for 255."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _slot(ptr, slot, units):
    """Where a slot begins, `units` times 16 bytes from the next."""
    PER: tl.constexpr = WIDE // (ptr.dtype.element_ty.primitive_bitwidth // 8)
    return tl.multiple_of(ptr + slot * units.to(tl.int64) * PER, WIDE)


@triton.jit
def _of_e4m3(code):
    """fp32 of the code of an e4m3."""
    power = tl.maximum((code >> 3) & 15, 1)
    digits = tl.where((code & 0x78) == 0, code & 7, (code & 7) + 8).to(tl.float32)
    digits = tl.where((code & 0x7F) == 0x7F, float("nan"), digits)
    return digits * (((power + 117) << 23) | (code << 24 & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def _chances(number, seed, first, BLOCKS: tl.constexpr):
    """Multiples of 2**-24 from 0 to below 1, `block 32`, of which each group of 4 has its own counter."""
    GROUPS: tl.constexpr = BLOCK // 4
    at = (first + tl.arange(0, BLOCKS)[:, None]) * GROUPS + tl.arange(0, GROUPS)[None, :]
    number = tl.zeros_like(at) + number
    counter = (at.to(tl.int32), (at >> 32).to(tl.int32), number.to(tl.int32), (number >> 32).to(tl.int32))
    a, b, c, d = tl.philox(seed, counter[0], counter[1], counter[2], counter[3])
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCKS, BLOCK)
    return (words >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _rounded(size, numbers_ptr, row, seed, first, BLOCKS: tl.constexpr):
    """Whole numbers near sizes: the nearest ones, or above where the chance is below the rest."""
    low = tl.floor(size)
    rest = size - low
    whole = low.to(tl.int32)
    if numbers_ptr is None:
        above = (rest > 0.5) | ((rest == 0.5) & ((whole & 1) == 1))
    else:
        above = _chances(tl.load(numbers_ptr + row).to(tl.int64), seed, first, BLOCKS) < rest
    return whole + above.to(tl.int32)


@triton.jit(do_not_specialize=POINTERS + SIZES)
def _move_bits(
    values_ptr, scales_ptr, residual_ptr, slots_ptr, batch_ptr, numbers_ptr, last, blocks, value_units, scale_units,
    residual_units, seed, first, LOAD: tl.constexpr, TOP: tl.constexpr, ROOM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = known_slot(tl.load(slots_ptr + row), last)
    start = tl.program_id(0) * BLOCKS
    block = start + tl.arange(0, BLOCKS)
    there = block < blocks
    known = tl.where(slot > 0, there, False)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    batch = tl.multiple_of(batch_ptr + row * blocks * BLOCK, WIDE) + at
    values = _slot(values_ptr, slot, value_units) + at
    scales = _slot(scales_ptr, slot, scale_units) + block
    if residual_ptr is not None:
        pair = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        residual = _slot(residual_ptr, slot, residual_units) + pair
    if LOAD:
        scale = tl.load(scales, mask=known, other=0).to(tl.int32)
        held = tl.load(values, mask=known[:, None], other=0).to(tl.int32)
        x = _of_e4m3(held) if TOP == E4M3 else held.to(tl.float32)
        if residual_ptr is not None:
            pairs = tl.load(residual, mask=known[:, None], other=0).to(tl.int8, bitcast=True).to(tl.int32)
            rest = tl.join((pairs << 28) >> 28, pairs >> 4).reshape(BLOCKS, BLOCK)
            x = x + rest.to(tl.float32) * (1 / RESIDUAL)
        tl.store(batch, x * _power(scale)[:, None], mask=there[:, None])
    else:
        x = tl.load(batch, mask=known[:, None], other=0.0)
        peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        finite = peak < INFINITY
        scale = tl.maximum(((peak + ROOM) >> 23) - TOP, 1)
        size = tl.where(finite[:, None], tl.abs(x) * _power(254 - scale)[:, None], 0.0)  # in steps
        if TOP == E4M3:
            power = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121)  # below 2**-6 steps become no smaller
            size = size * _power(257 - power)
        elif residual_ptr is not None:
            size = size * RESIDUAL
        held = _rounded(size, numbers_ptr, row, seed, first.to(tl.int64) + start, BLOCKS)
        if TOP == E4M3:
            held += 8 * (power - 121)
            held = tl.where(x < 0, held | 0x80, held)
        else:
            held = tl.where(x < 0, -held, held)
        if residual_ptr is not None:
            low, high = tl.split((held & 15).reshape(BLOCKS, BLOCK // 2, 2))
            tl.store(residual, (low | (high << 4)).to(tl.uint8), mask=known[:, None])
            held = (held + RESIDUAL // 2) >> 4
        tl.store(values, held.to(values_ptr.dtype.element_ty), mask=known[:, None])
        tl.store(scales, tl.where(finite, scale, 255).to(tl.uint8), mask=known)


def _launch(
    values: Tensor, scales: Tensor, slots: Tensor, batch: Tensor, residual: Tensor | None, load: bool,
    numbers: Tensor | None = None, seed: int = 0, first: int = 0,
) -> None:  # fmt: skip
    if slots.numel():
        planes = values, scales, values if residual is None else residual
        units = [plane.stride(0) * plane.element_size() // ACCESS_BYTES for plane in planes]
        (top, room), blocks, tile = BITS[values.dtype], scales[0].numel(), WARPS * warp_threads()
        _move_bits[(triton.cdiv(blocks, tile), slots.numel())](
            triton.reinterpret(values, WORDS[values.element_size()]), scales, residual, slots, batch, numbers,
            len(values) - 1, blocks, *units, seed, first, LOAD=load, TOP=top, ROOM=room, BLOCKS=tile, num_warps=WARPS,
            **limit(roomy(WARPS, not load, most=WIDEST)),
        )  # fmt: skip


def load_bits(values: Tensor, scales: Tensor, slots: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Launches the op; see `memstate.kernels.reference.bits.load_bits`."""
    check_bits(values, scales, slots, "out", out, residual)
    _launch(values, scales, slots, out, residual, True)


def store_bits(
    values: Tensor, scales: Tensor, slots: Tensor, batch: Tensor, residual: Tensor | None = None,
    numbers: Tensor | None = None, seed: int = 0, first: int = 0,
) -> None:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.bits.store_bits`."""
    check_bits(values, scales, slots, "batch", batch, residual, numbers, seed=seed, first=first)
    _launch(values, scales, slots, batch, residual, False, numbers, seed, first)


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: every kind of values; rounding by chance, and to the nearest as rare cases.

    Scales are one byte a block: they move one a lane.
    """
    cases = []
    for dtype, residual in [*((dtype, False) for dtype in BITS), (torch.int8, True)]:
        kind, (top, room) = str(dtype).removeprefix("torch.") + "_residual" * residual, BITS[dtype]
        types = dict.fromkeys(SIZES, "i32") | {"values_ptr": f"*i{8 * dtype.itemsize}", "batch_ptr": "*fp32"}
        types |= {"scales_ptr": "*u8", "residual_ptr": "*u8", "slots_ptr": "*i32", "numbers_ptr": "*i32"}
        shape = {"TOP": top, "ROOM": room, "BLOCKS": 32 * WARPS} | ({} if residual else {"residual_ptr": None})
        moved, nearest = ("values_ptr", "batch_ptr", *["residual_ptr"] * residual), {"numbers_ptr": None}
        cases += [
            CompileCase(
                f"{name}_{kind}{how}", _move_bits, types, shape | {"LOAD": load} | given, (), WARPS, moved,
                roomy(WARPS, not load, most=WIDEST), bool(how), {"BLOCKS": 64 * WARPS},
            )
            for name, how, load, given in (
                ("load_bits", "", True, nearest), ("store_bits", "", False, {}),
                ("store_bits", ", nearest", False, nearest),
            )
        ]  # fmt: skip
    return cases
