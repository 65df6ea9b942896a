"""Scatters a contiguous batch to slots of one plane, all layers in one launch. Knows no register and no other plane.

An item of work is (due entry, tile of a block). A fixed number of programs take the items in turn, as in
`memstate.kernels.copy`. So one due entry keeps the whole device busy, and a call with nothing due ends after it has
read its entries.
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import cut, key_sizes, tiles_of
from memstate.kernels.configs import ScatterConfig
from memstate.kernels.kept import unspecialised
from memstate.kernels.move_checks import check_scatter
from memstate.kernels.tables import ACCESS_BYTES
from memstate.kernels.tuned import launch_of
from memstate.kernels.warps import limit, roomy


@unspecialised()  # UNIT says how pointers are aligned
def _scatter_slots(
    plane_ptr, slots_ptr, batch_ptr, entries, layers, tiles, last, layer_units, slot_units, block_units,
    UNIT: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = LANES // UNIT
    ALIGNMENT: tl.constexpr = UNIT * plane_ptr.dtype.element_ty.primitive_bitwidth // 8
    lane = tl.arange(0, LANES)
    item = tl.program_id(0)
    for start in range(0, entries, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        slots = tl.load(slots_ptr + index, mask=index < entries, other=0)
        due = (slots > 0) & (slots <= last)
        pair = (slots.to(tl.int64) << 32) | index
        rank = tl.cumsum(due.to(tl.int32), 0) - 1
        items = tl.sum(due.to(tl.int32), 0) * layers * tiles
        while item < items:
            chosen = tl.sum(tl.where(due & (rank == item // tiles // layers), pair, 0), 0)
            layer = (item // tiles % layers).to(tl.int64)
            first = (item % tiles).to(tl.int64) * UNITS
            slot = chosen >> 32
            entry = chosen & 0x7FFFFFFF

            target = tl.multiple_of(plane_ptr + (layer * layer_units + slot * slot_units + first) * UNIT, ALIGNMENT)
            source = tl.multiple_of(batch_ptr + ((layer * entries + entry) * block_units + first) * UNIT, ALIGNMENT)
            inside = lane < tl.minimum(block_units - first, UNITS).to(tl.int32) * UNIT  # the bound never cuts a unit
            tl.store(target + lane, tl.load(source + lane, mask=inside, other=0), mask=inside)
            item += tl.num_programs(0)
        item -= items


def scatter_slots(plane: Tensor, slots: Tensor, batch: Tensor, trusted: bool = False) -> None:
    """Launches the op; see `memstate.kernels.reference.scatter.scatter_slots`."""
    if not trusted:
        check_scatter(plane, slots, batch)
    if batch.numel() == 0:
        return
    words = cut(plane, batch.data_ptr())
    layers, entries = batch.shape[:2]
    unit, _ = static = key_sizes(words)
    programs, config = launch_of(ScatterConfig, plane.device, *static)
    tiles = tiles_of(words, config.lanes)
    _scatter_slots[(min(entries * layers * tiles, programs),)](
        triton.reinterpret(plane, words.word), slots, triton.reinterpret(batch, words.word),
        entries, layers, tiles, plane.shape[1] - 1, words.layer_units, words.slot_units, words.block_units,
        UNIT=words.unit_words, ENTRIES=config.entries, LANES=config.lanes, num_warps=config.warps,
        **limit(roomy(config.warps, unit < ACCESS_BYTES)),
    )  # fmt: skip
