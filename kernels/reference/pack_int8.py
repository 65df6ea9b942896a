"""Moves planes to and from records as int8, in plain torch.

Tests compare `memstate.kernels.pack_int8` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
from torch import Tensor

from memstate.kernels.move_checks import check_int8
from memstate.kernels.reference.pack import entries
from memstate.kernels.tables import LARGEST_SCALE, LEVELS, SMALLEST_SCALE, ScaledMap


def pack_int8(planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor) -> None:
    """Copies a plane into records as int8: `out[places[b]]` gets entry b.

    scale = max |x| / 127 over the axis;  q = x / scale, rounded half to even;  x' = q * scale. This is symmetric
    quantisation, as in Dettmers et al. 2022, arXiv:2208.07339, sec. 2. Arithmetic is float32.

    The scale is at least 2**-126, the smallest float32 with all digits, and at most the largest float32 whose product
    with 127 is finite. It is 0 if all values are 0. |x - x'| is at most scale / 2 plus two rounding errors:
    2**-16 of the scale for x / scale, and half a unit in the last place of the plane's dtype for x'. If a value is
    infinite or NaN, the scale is NaN, and all values that share the scale come back as NaN, so that no wrong number
    comes back.

    Args:
        planes: where the plane lies in memory, and in a record.
        slots: slot of each register, int32 `register`; None if `index` has slots or pages. Without a slot, an
            entry gives zeros.
        index: register of each entry, or its slot or page, int32 or int64 `batch`.
        places: number of the record of each entry, int32 or int64 `batch`.
        out: bodies of records, as in `pack_slots`. Changed.

    Raises:
        ValueError: as in `pack_slots`.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_int8(planes, slots, index, places, "out", out)
    for place, slot in entries(slots, index, places, len(out), planes.capacity):
        for layer in range(planes.layers.shape[0]):
            block = _layer(planes, layer)
            x = (block[slot] if slot else torch.zeros_like(block[0])).float()
            peak = x.abs().amax(planes.axis, keepdim=True)  # NaN if a value is NaN
            # Divide by a tensor: to divide by a number, a GPU multiplies with its inverse.
            scale = peak / torch.full_like(peak, LEVELS)
            scale = scale.clamp(SMALLEST_SCALE, LARGEST_SCALE).masked_fill(peak == 0, 0.0)
            scale = scale.masked_fill(~peak.isfinite(), torch.nan)
            is_number = scale > 0
            values = (x.where(is_number, 0.0) / scale.where(is_number, 1.0)).round()  # half to even
            _values(planes, out, place, layer).copy_(values.to(torch.int8).view(-1).view(torch.uint8))
            _scales(planes, out, place, layer).copy_(scale.reshape(-1).view(torch.uint8))


def unpack_int8(planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor) -> None:
    """Copies int8 of records into a plane: entry b gets `source[places[b]]`.

    x' = q * scale in float32, rounded to the plane's dtype. Entries without a slot or without a place are skipped.

    Args:
        planes: where the plane lies in memory, and in a record. The plane is changed.
        slots: slot of each register, int32 `register`; None if `index` has slots or pages.
        index: register of each entry, or its slot or page, int32 or int64 `batch`.
        places: number of the record of each entry, int32 or int64 `batch`.
        source: bodies of records, as in `unpack_slots`.

    Raises:
        ValueError: as in `pack_slots`.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_int8(planes, slots, index, places, "source", source)
    for place, slot in entries(slots, index, places, len(source), planes.capacity):
        for layer in range(planes.layers.shape[0] if slot else 0):
            block = _layer(planes, layer)[slot]
            values = _values(planes, source, place, layer).to(block.device).view(torch.int8).view(block.shape)
            scale = _scales(planes, source, place, layer).to(block.device).view(torch.float32)
            shape = list(block.shape)
            shape[planes.axis] = 1
            block.copy_(values * scale.view(shape))


def _layer(planes: ScaledMap, layer: int) -> Tensor:
    """Returns one layer of the plane, `slot ...`."""
    each = planes.layers.shape[0] // len(planes.tensors)  # layers per tensor: all, or one
    return planes.tensors[layer // each][layer % each]


def _values(planes: ScaledMap, held: Tensor, place: int, layer: int) -> Tensor:
    start = planes.values + layer * planes.layer_bytes
    return held[place, start : start + _layer(planes, layer)[0].numel()]


def _scales(planes: ScaledMap, held: Tensor, place: int, layer: int) -> Tensor:
    start, block = planes.scales + layer * planes.layer_bytes, _layer(planes, layer)[0]
    return held[place, start : start + 4 * (block.numel() // block.shape[planes.axis])]
