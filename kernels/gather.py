"""Gathers slots of one plane into a contiguous batch, all layers in one launch. Knows no register and no other plane.

One program moves one tile of one layer of one entry, so that even a single entry keeps the whole device busy.
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import cut, key_sizes, tiles_of
from memstate.kernels.configs import GatherConfig
from memstate.kernels.kept import unspecialised
from memstate.kernels.move_checks import check_gather
from memstate.kernels.tables import ACCESS_BYTES
from memstate.kernels.tuned import config_of
from memstate.kernels.warps import limit, roomy


@unspecialised()  # UNIT says how pointers are aligned
def _gather_slots(
    plane_ptr, slots_ptr, out_ptr, batch, layers, tiles, last, layer_units, slot_units, block_units, pattern,
    UNIT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = LANES // UNIT
    ALIGNMENT: tl.constexpr = UNIT * plane_ptr.dtype.element_ty.primitive_bitwidth // 8
    item = tl.program_id(0)
    first = (item % tiles).to(tl.int64) * UNITS
    layer = (item // tiles % layers).to(tl.int64)
    row = item // tiles // layers
    slot = tl.load(slots_ptr + row)
    known = (slot > 0) & (slot <= last)
    slot = tl.where(known, slot, 0).to(tl.int64)

    source = tl.multiple_of(plane_ptr + (layer * layer_units + slot * slot_units + first) * UNIT, ALIGNMENT)
    target = tl.multiple_of(out_ptr + ((layer * batch + row) * block_units + first) * UNIT, ALIGNMENT)
    lane = tl.arange(0, LANES)
    inside = lane < tl.minimum(block_units - first, UNITS).to(tl.int32) * UNIT  # the bound never cuts a unit
    # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
    words = tl.load(source + lane, mask=tl.where(known, inside, False), other=0)
    if pattern is not None:
        width: tl.constexpr = plane_ptr.dtype.element_ty.primitive_bitwidth
        shift = (lane % (64 // width) * width).to(tl.int64)
        words = tl.where(known, words, (pattern.to(tl.int64) >> shift).to(words.dtype))
    tl.store(target + lane, words, mask=inside)


def gather_slots(plane: Tensor, slots: Tensor, out: Tensor, pattern: int = 0) -> None:
    """Launches the op; see `memstate.kernels.reference.gather.gather_slots`."""
    check_gather(plane, slots, out)
    if out.numel() == 0:
        return
    words = cut(plane, out.data_ptr())
    layers, batch = out.shape[:2]
    unit, _ = static = key_sizes(words)
    config = config_of(GatherConfig, plane.device, *static)
    tiles = tiles_of(words, config.lanes)
    _gather_slots[(tiles * layers * batch,)](
        triton.reinterpret(plane, words.word), slots, triton.reinterpret(out, words.word),
        batch, layers, tiles, plane.shape[1] - 1, words.layer_units, words.slot_units, words.block_units,
        pattern or None, UNIT=words.unit_words, LANES=config.lanes, num_warps=config.warps,
        **limit(roomy(config.warps, unit < ACCESS_BYTES)),
    )  # fmt: skip
