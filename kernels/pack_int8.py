"""Moves a plane of floats to and from records as int8, all layers in one persistent launch. Knows no other plane.

    body    layer 0 [.. | values int8 | scales float32 | ..]  layer 1 [.. | values | scales | ..]  ...

All values along one axis of the plane share a scale; they are called a *column*. A column has `reduced` values, which
lie `inner` elements apart. An item of work is (entry, layer, block of columns); programs take items in turn, as in
`memstate.kernels.copy`. A column that does not fit into a block is read twice.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.configs import ENTRIES, Int8Config
from memstate.kernels.kept import unspecialised
from memstate.kernels.move_checks import check_int8
from memstate.kernels.pack import due_entries, programs_of
from memstate.kernels.tables import LARGEST_SCALE, LEVELS, RECORD_ALIGNMENT, SMALLEST_SCALE, ScaledMap
from memstate.kernels.tuned import launch_of
from memstate.kernels.warps import limit, roomy

OPTIONS = {"enable_fp_fusion": False}  # rounding must not depend on the Triton version
ALIGNMENT = tl.constexpr(RECORD_ALIGNMENT)
FULL = tl.constexpr(float(LEVELS))
LEAST = tl.constexpr(SMALLEST_SCALE)
MOST = tl.constexpr(LARGEST_SCALE)
ROUND = tl.constexpr(1.5 * 2**23)  # fp32 numbers of this size are whole numbers: adding ROUND rounds half to even
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _quantise(x, scale):
    """Returns values divided by their scale, as int8 from -FULL to FULL; 0 unless the scale is positive."""
    real = scale > 0
    ratio = tl.div_rn(tl.where(real[:, None], x, 0.0), tl.where(real, scale, 1.0)[:, None])
    return ((ratio + ROUND) - ROUND).to(tl.int8)


@triton.jit
def _sizes(x):
    """Returns absolute values; infinity for NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _scale_of(peak):
    """Returns the scale of each column, from its largest absolute value; NaN if that is infinite."""
    scale = tl.div_rn(peak, tl.full(peak.shape, FULL, tl.float32))
    scale = tl.where(peak > 0, tl.minimum(tl.maximum(scale, LEAST), MOST), 0.0)
    return tl.where(peak < float("inf"), scale, float("nan"))


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Returns x in another dtype, rounded half to even.

    For bfloat16 the function rounds bits itself, because Triton's interpreter would truncate them.
    """
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, bits, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _convert(
    in_slot, values, scales, is_slot, column, COLUMNS: tl.constexpr, REDUCED: tl.constexpr, INNER: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Moves a block of columns between a slot and a record; the null slot gives zeros."""
    row = tl.arange(0, BLOCK_R)
    at = (column // INNER * (REDUCED * INNER) + column % INNER)[:, None] + (row * INNER)[None, :]
    in_column = (column < COLUMNS)[:, None]
    if PACK and REDUCED <= BLOCK_R:
        inside = in_column & (row < REDUCED)[None, :]
        x = tl.load(in_slot + at, mask=tl.where(is_slot, inside, False), other=0.0).to(tl.float32)
        scale = _scale_of(tl.max(_sizes(x), 1))
        tl.store(values + at, _quantise(x, scale), mask=inside)
        tl.store(scales + column, scale, mask=column < COLUMNS)
    elif PACK:
        peak = tl.zeros([BLOCK_C], tl.float32)
        for start in range(0, REDUCED, BLOCK_R):
            inside = tl.where(is_slot, in_column & (start + row < REDUCED)[None, :], False)
            x = tl.load(in_slot + start * INNER + at, mask=inside, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.max(_sizes(x), 1))
        scale = _scale_of(peak)
        for start in range(0, REDUCED, BLOCK_R):
            inside = in_column & (start + row < REDUCED)[None, :]
            x = tl.load(in_slot + start * INNER + at, mask=tl.where(is_slot, inside, False), other=0.0).to(tl.float32)
            tl.store(values + start * INNER + at, _quantise(x, scale), mask=inside)
        tl.store(scales + column, scale, mask=column < COLUMNS)
    else:
        scale = tl.load(scales + column, mask=column < COLUMNS, other=0.0)
        for start in range(0, REDUCED, BLOCK_R):
            inside = in_column & (start + row < REDUCED)[None, :]
            x = tl.load(values + start * INNER + at, mask=inside, other=0).to(tl.float32) * scale[:, None]
            tl.store(in_slot + start * INNER + at, _rounded(x, in_slot.dtype.element_ty), mask=inside)


@unspecialised("layers")
def _move_int8(
    layers, slots_ptr, index_ptr, places_ptr, values_ptr, scales_ptr, n, first, count, registers, capacity, held,
    record_units, value_units, scale_units, layer_units,
    PACK: tl.constexpr, COLUMNS: tl.constexpr, REDUCED: tl.constexpr, INNER: tl.constexpr, DTYPE: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    item = tl.program_id(0)
    for start in range(0, n, ENTRIES):
        due, pair = due_entries(slots_ptr, index_ptr, places_ptr, start, n, registers, capacity, held, PACK, ENTRIES)
        rank = tl.cumsum(due.to(tl.int32), 0) - 1
        items = tl.sum(due.to(tl.int32), 0) * (count * PARTS)
        while item < items:
            chosen = tl.sum(tl.where(due & (rank == item // (count * PARTS)), pair, 0), 0)
            place, slot = chosen >> 32, chosen & 0x7FFFFFFF
            layer = first + item // PARTS % count
            address = tl.load(layers + 2 * layer) + slot * tl.load(layers + 2 * layer + 1)
            in_slot = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), UNIT)
            at = place * record_units + layer.to(tl.int64) * layer_units
            values = tl.multiple_of(values_ptr + (at + value_units) * ALIGNMENT, ALIGNMENT)
            scales = tl.multiple_of(scales_ptr + (at + scale_units) * (ALIGNMENT // 4), ALIGNMENT)
            column = item % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)
            _convert(in_slot, values, scales, slot != 0, column, COLUMNS, REDUCED, INNER, BLOCK_C, BLOCK_R, PACK)
            item += tl.num_programs(0)
        item -= items


def _fits(reduced: int, block_r: int) -> bool:
    """Returns whether a column has 64 to 512 values and fits into a block: such launches spill nothing."""
    return 64 <= reduced <= min(block_r, 512)


def key_sizes(plane: Tensor, axis: int) -> tuple[int, int, int]:
    """Returns the sizes that make the key of a launch: values of a column, elements between them, and their bytes."""
    _, _, *shape = plane.shape
    return shape[axis], prod(shape[axis + 1 :]), plane.element_size()


def _launch(planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, held: Tensor, pack: bool) -> None:
    device = planes.layers.device
    if not (index.numel() and held.numel()):
        return
    reduced, inner, _ = static = key_sizes(planes.tensors[0], planes.axis)
    columns = prod(planes.tensors[0].shape[2:]) // reduced
    tuned, config = launch_of(Int8Config, device, *static)
    block_c, block_r = config.blocks(columns, reduced, inner)
    _move_int8[(programs_of(tuned, device, held.device),)](
        planes.layers, slots, index, places,
        triton.reinterpret(held, torch.int8), triton.reinterpret(held, torch.float32), index.numel(), 0,
        planes.layers.shape[0], 0 if slots is None else slots.numel(), planes.capacity, len(held),
        held.stride(0) // RECORD_ALIGNMENT if len(held) > 1 else 0, planes.values // RECORD_ALIGNMENT,
        planes.scales // RECORD_ALIGNMENT, planes.layer_bytes // RECORD_ALIGNMENT,
        PACK=pack, COLUMNS=columns, REDUCED=reduced, INNER=inner, DTYPE=DTYPES[planes.tensors[0].dtype],
        UNIT=planes.unit, BLOCK_C=block_c, BLOCK_R=block_r, ENTRIES=ENTRIES, num_warps=config.warps,
        **OPTIONS, **limit(roomy(config.warps, not _fits(reduced, block_r))),
    )  # fmt: skip


def pack_int8(planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.pack_int8.pack_int8`."""
    check_int8(planes, slots, index, places, "out", out)
    _launch(planes, slots, index, places, out, pack=True)


def unpack_int8(planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.pack_int8.unpack_int8`."""
    check_int8(planes, slots, index, places, "source", source)
    _launch(planes, slots, index, places, source, pack=False)
