"""Moves states between slots in fewer bits and a batch of fp32, one layer in a launch. Knows no rule of a state.

One program moves BLOCKS blocks of 32 elements of one row. A block is a row of its tensors, so that its scale is a
maximum over an axis. Powers of two are made of the bits of their exponents, and every product is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.bit_checks import check_bits, check_draws
from memstate.kernels.catalog import CompileCase
from memstate.kernels.slots import known_slot
from memstate.kernels.tables import ACCESS_BYTES, BITS_BLOCK, BITS_ROOM, BITS_TOP
from memstate.kernels.tables import RESIDUAL as STEPS
from memstate.kernels.warps import warp_threads

WARPS = 4  # a block for each thread: 32 elements, whose residual is 16 bytes
WIDE = tl.constexpr(ACCESS_BYTES)
BLOCK = tl.constexpr(BITS_BLOCK)
RESIDUAL = tl.constexpr(STEPS)
INFINITY = tl.constexpr(0x7F800000)  # bits of an infinite fp32; those of NaN are above
SIZES = ["last", "blocks", "value_units", "scale_units", "residual_units"]
POINTERS = ["values_ptr", "scales_ptr", "residual_ptr", "slots_ptr", "numbers_ptr", "batch_ptr"]


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


@triton.jit(do_not_specialize=POINTERS + SIZES)
def _load_bits(
    values_ptr, scales_ptr, residual_ptr, slots_ptr, batch_ptr, last, blocks, value_units, scale_units, residual_units,
    FLOAT: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = known_slot(tl.load(slots_ptr + row), last)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    there = block < blocks
    known = tl.where(slot > 0, there, False)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    scale = tl.load(_slot(scales_ptr, slot, scale_units) + block, mask=known, other=0).to(tl.int32)
    held = tl.load(_slot(values_ptr, slot, value_units) + at, mask=known[:, None], other=0).to(tl.int32)
    x = _of_e4m3(held) if FLOAT else held.to(tl.float32)
    if residual_ptr is not None:
        pair_at = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        pairs = tl.load(_slot(residual_ptr, slot, residual_units) + pair_at, mask=known[:, None], other=0)
        signed = pairs.to(tl.int8, bitcast=True).to(tl.int32)
        rest = tl.join((signed << 28) >> 28, signed >> 4).reshape(BLOCKS, BLOCK)
        x = x + rest.to(tl.float32) * (1 / RESIDUAL)
    batch = tl.multiple_of(batch_ptr + row * blocks * BLOCK, WIDE) + at
    tl.store(batch, x * _power(scale)[:, None], mask=there[:, None])


@triton.jit
def _chances(number, seed, first, BLOCKS: tl.constexpr):
    """Multiples of 2**-24 from 0 to below 1, `block 32`, of which each group of 4 has its own counter."""
    GROUPS: tl.constexpr = BLOCK // 4
    at = (first.to(tl.int64) + tl.arange(0, BLOCKS)[:, None]) * GROUPS + tl.arange(0, GROUPS)[None, :]
    none = tl.zeros_like(at)
    a, b, c, d = tl.philox(
        seed,
        at.to(tl.int32),
        (at >> 32).to(tl.int32),
        (none + number).to(tl.int32),
        ((none + number) >> 32).to(tl.int32),
    )
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


@triton.jit(do_not_specialize=[*POINTERS, *SIZES, "seed", "first"])
def _store_bits(
    values_ptr, scales_ptr, residual_ptr, slots_ptr, batch_ptr, numbers_ptr, last, blocks, value_units, scale_units,
    residual_units, seed, first, FLOAT: tl.constexpr, TOP: tl.constexpr, ROOM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    slot = known_slot(tl.load(slots_ptr + row), last)
    if slot > 0:
        block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
        there = block < blocks
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        batch = tl.multiple_of(batch_ptr + row * blocks * BLOCK, WIDE) + at
        x = tl.load(batch, mask=there[:, None], other=0.0)
        peak = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        finite = peak < INFINITY
        scale = tl.maximum(((peak + ROOM) >> 23) - TOP, 1)
        size = tl.where(finite[:, None], tl.abs(x) * _power(254 - scale)[:, None], 0.0)  # in steps
        place = first + tl.program_id(0) * BLOCKS
        if FLOAT:
            power = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121)  # below 2**-6 steps become no smaller
            code = _rounded(size * _power(257 - power), numbers_ptr, row, seed, place, BLOCKS) + 8 * (power - 121)
            held = tl.where(x < 0, code | 0x80, code)
        else:
            if residual_ptr is not None:
                size = size * RESIDUAL
            held = _rounded(size, numbers_ptr, row, seed, place, BLOCKS)
            held = tl.where(x < 0, -held, held)
        if residual_ptr is not None:
            low, high = tl.split((held & 15).reshape(BLOCKS, BLOCK // 2, 2))
            pair_at = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            pairs = (low | (high << 4)).to(tl.uint8)
            tl.store(_slot(residual_ptr, slot, residual_units) + pair_at, pairs, mask=there[:, None])
            held = (held + RESIDUAL // 2) >> 4
        held = held.to(values_ptr.dtype.element_ty)
        tl.store(_slot(values_ptr, slot, value_units) + at, held, mask=there[:, None])
        scale = tl.where(finite, scale, 255).to(tl.uint8)
        tl.store(_slot(scales_ptr, slot, scale_units) + block, scale, mask=there)


def load_bits(values: Tensor, scales: Tensor, slots: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Launches the op; see `memstate.kernels.reference.bits.load_bits`."""
    check_bits(values, scales, slots, "out", out, residual)
    if slots.numel():
        planes, blocks, units = _planes(values, scales, residual)
        tile = WARPS * warp_threads()
        _load_bits[(triton.cdiv(blocks, tile), slots.numel())](
            *planes, slots, out, len(values) - 1, blocks, *units,
            FLOAT=values.dtype.is_floating_point, BLOCKS=tile, num_warps=WARPS,
        )  # fmt: skip


def store_bits(
    values: Tensor, scales: Tensor, slots: Tensor, batch: Tensor, residual: Tensor | None = None,
    numbers: Tensor | None = None, seed: int = 0, first: int = 0,
) -> None:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.bits.store_bits`."""
    check_bits(values, scales, slots, "batch", batch, residual, numbers)
    check_draws(seed, first)
    if slots.numel():
        planes, blocks, units = _planes(values, scales, residual)
        kind, tile = values.dtype, WARPS * warp_threads()
        _store_bits[(triton.cdiv(blocks, tile), slots.numel())](
            *planes, slots, batch, numbers, len(values) - 1, blocks, *units, seed, first,
            FLOAT=kind.is_floating_point, TOP=BITS_TOP[kind], ROOM=BITS_ROOM[kind], BLOCKS=tile, num_warps=WARPS,
        )  # fmt: skip


def _planes(values: Tensor, scales: Tensor, residual: Tensor | None) -> tuple[tuple[object, ...], int, tuple[int, ...]]:
    """Planes as a kernel takes them, blocks of a slot, and units of 16 bytes between slots."""
    planes = values, scales, values if residual is None else residual
    units = tuple(plane.stride(0) * plane.element_size() // ACCESS_BYTES for plane in planes)
    integers = triton.reinterpret(values, torch.int8) if values.dtype.is_floating_point else values
    return (integers, scales, residual), scales[0].numel(), units


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: every kind of values; rounding by chance, and to the nearest as rare cases.

    Scales are one byte a block: they move one a lane.
    """
    cases = []
    for kind, (dtype, word) in {
        "int16": (torch.int16, "i16"),
        "int8": (torch.int8, "i8"),
        "e4m3": (torch.float8_e4m3fn, "i8"),
        "int8_residual": (torch.int8, "i8"),
    }.items():
        signature = (
            {"values_ptr": f"*{word}", "scales_ptr": "*u8", "residual_ptr": "*u8", "batch_ptr": "*fp32"}
            | {"slots_ptr": "*i32", "numbers_ptr": "*i32"} | dict.fromkeys((*SIZES, "seed", "first"), "i32")
        )  # fmt: skip
        held = ("values_ptr", "batch_ptr", "residual_ptr")[: 3 if "residual" in kind else 2]
        shape = {"FLOAT": dtype.is_floating_point, "BLOCKS": 32 * WARPS}
        shape |= {} if "residual" in kind else {"residual_ptr": None}
        grid = shape | {"TOP": BITS_TOP[dtype], "ROOM": BITS_ROOM[dtype]}
        cases += [
            CompileCase(
                name, kernel, signature, constants, (), WARPS, held, rare="," in name, of_64={"BLOCKS": 64 * WARPS}
            )
            for name, kernel, constants in (
                (f"load_bits_{kind}", _load_bits, shape), (f"store_bits_{kind}", _store_bits, grid),
                (f"store_bits_{kind}, nearest", _store_bits, grid | {"numbers_ptr": None}),
            )
        ]  # fmt: skip
    return cases
