"""Planes as int8 in records, layer by layer: the oracle of `memstate.kernels.pack_int8` and the path without Triton."""

import torch
from torch import Tensor

from memstate.kernels.decode_inputs import FLOATS
from memstate.kernels.reference.pack import check_entries, check_outside, check_range, entries
from memstate.kernels.tables import ScaledMap

if not __name__.startswith("memstate."):
    raise ImportError(
        "import memstate.kernels.reference.pack_int8, not kernels.reference.pack_int8: it would be there twice"
    )

LEVELS = 127  # of int8, on either side of 0
SMALLEST = 2.0**-126  # scale: of smaller ones float32 has fewer digits
LARGEST = float.fromhex("0x1.0204060000000p+121")  # scale: the largest of which LEVELS times are finite


def pack_int8(
    planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor, first: int, count: int
) -> None:
    """Copies a plane into records as int8; see `memstate.kernels.pack_int8.pack_int8`. Syncs: yes, off the CPU."""
    check_arguments(planes, slots, index, places, "out", out, first, count)
    for place, slot in entries(slots, index, places, len(out), capacity_of(planes)):
        for layer in range(first, first + count):
            block = _layer(planes, layer)
            x = (block[slot] if slot else torch.zeros_like(block[0])).float()
            peak = x.abs().amax(planes.axis, keepdim=True)  # NaN where one of them is
            scale = (peak / LEVELS).clamp(SMALLEST, LARGEST).masked_fill(peak == 0, 0.0)
            scale = scale.masked_fill(~peak.isfinite(), torch.nan)
            is_number = scale > 0
            values = (x.where(is_number, 0.0) / scale.where(is_number, 1.0)).round()  # half to even
            _values(planes, out, place, layer).copy_(values.to(torch.int8).view(-1).view(torch.uint8))
            _scales(planes, out, place, layer).copy_(scale.reshape(-1).view(torch.uint8))


def unpack_int8(
    planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor, first: int, count: int
) -> None:
    """Copies int8 of records into a plane; see `memstate.kernels.pack_int8.unpack_int8`. Syncs: yes, off the CPU."""
    check_arguments(planes, slots, index, places, "source", source, first, count)
    for place, slot in entries(slots, index, places, len(source), capacity_of(planes)):
        for layer in range(first, first + count if slot else first):
            block = _layer(planes, layer)[slot]
            values = _values(planes, source, place, layer).to(block.device).view(torch.int8).view(block.shape)
            scale = _scales(planes, source, place, layer).to(block.device).view(torch.float32)
            shape = list(block.shape)
            shape[planes.axis] = 1
            block.copy_(values * scale.view(shape))


def _layer(planes: ScaledMap, layer: int) -> Tensor:
    """One layer of the plane, `slot ...`."""
    each = planes.layers.shape[0] // len(planes.tensors)  # all tensors hold one layer, or one tensor all layers
    return planes.tensors[layer // each][layer % each]


def _values(planes: ScaledMap, held: Tensor, place: int, layer: int) -> Tensor:
    start = planes.values + layer * planes.layer_bytes
    return held[place, start : start + _layer(planes, layer)[0].numel()]


def _scales(planes: ScaledMap, held: Tensor, place: int, layer: int) -> Tensor:
    start, block = planes.scales + layer * planes.layer_bytes, _layer(planes, layer)[0]
    return held[place, start : start + 4 * (block.numel() // block.shape[planes.axis])]


def capacity_of(planes: ScaledMap) -> int:
    """The highest slot there is."""
    return planes.tensors[0].shape[1] - 1


def check_arguments(
    planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, name: str, held: Tensor, first: int,
    count: int,
) -> None:  # fmt: skip
    """Raises: ValueError naming the first argument that does not fit; `name` is that of the records, `held`."""
    if planes.tensors[0].dtype not in FLOATS:
        raise ValueError(f"planes: expected one of {FLOATS}, got {planes.tensors[0].dtype}")
    check_entries(planes.layers.device, slots, index, places, name, held, planes.nbytes)
    check_range("layers", first, count, planes.layers.shape[0])
    check_outside(name, held, planes.tensors)
