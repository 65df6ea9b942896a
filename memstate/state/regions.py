"""Finds the bytes of planes: in memstate's own arenas, or in tensors of an engine. Moves no slot.

region   layers of one plane in one tensor: all layers, or one if an engine allocates by layer
block    one layer of one slot of a region; bytes between two blocks do not belong to memstate
span     bytes that are contiguous in every slot: a block, or several that touch
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstate import lasting
from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.state.layout import MOVE_BYTES, Plane, StateLayout


class Region(NamedTuple):
    """Layers of a plane in one tensor.

    Args:
        plane: the plane whose layers these are.
        first: number of the plane's first layer in this tensor.
        tensor: `layer slot ...`.
        blocks: bytes of the tensor, uint8 `layer slot byte`; with padding in memstate's own arenas.
    """

    plane: Plane
    first: int
    tensor: Tensor
    blocks: Tensor

    def __repr__(self) -> str:
        return _where(self.plane, self.first, self.first + len(self.tensor) - 1)


@dataclass(frozen=True)
class BufferInfo:
    """The blocks of one plane and layer in memory: the block of slot s lies at address + s * slot_stride.

    Args:
        plane: name of the plane.
        layer: number of the layer.
        address: address of the block of slot 0.
        slot_stride: bytes from one slot to the next.
        nbytes: bytes of a block, without padding.
        slots: the highest slot.
    """

    plane: str
    layer: int
    address: int
    slot_stride: int
    nbytes: int
    slots: int


def allocated(
    layout: StateLayout, slots: int, device: torch.device, allocate: Callable[[int], Tensor] | None
) -> tuple[Tensor, ...]:
    """Returns arenas for `slots` slots and the null slot. Raises: LayoutMismatch for an arena that does not fit."""
    arenas = []
    for nbytes in layout.arena_bytes(slots):
        arena = allocate(nbytes) if allocate else lasting.empty(nbytes, torch.uint8, device)
        fits = arena.dtype == torch.uint8 and arena.shape == (nbytes,) and arena.is_contiguous()
        if not fits or arena.device.type != device.type:
            raise LayoutMismatch(
                f"arena {arena.dtype} {tuple(arena.shape)} with strides {arena.stride()} on {arena.device},"
                f" expected {nbytes} contiguous bytes of uint8 on {device}"
            )
        if arena.data_ptr() % MOVE_BYTES or arena.storage_offset() % MOVE_BYTES:
            raise LayoutMismatch(f"arena at address {arena.data_ptr():#x}: expected a multiple of {MOVE_BYTES} bytes")
        arenas.append(arena)
    return tuple(arenas)


def carve(layout: StateLayout, slots: int, arenas: Sequence[Tensor]) -> tuple[Region, ...]:
    """Returns the planes in uint8 arenas of `layout.arena_bytes(slots)` bytes, as the layout places them."""
    regions = []
    for plane, place in zip(layout.planes, layout.placements(slots), strict=True):
        arena, size = arenas[place.arena], plane.dtype.itemsize  # the size, 1 to 16, divides strides and offsets
        start = arena.storage_offset() + place.offset
        outer = (layout.layers_of(plane), slots + 1)
        inner = [prod(plane.shape[axis + 1 :]) for axis in range(len(plane.shape))]
        strides = (place.layer_stride // size, place.slot_stride // size, *inner)
        tensor = lasting.view(arena, plane.dtype, start, (*outer, *plane.shape), strides)
        steps = (place.layer_stride, place.slot_stride, 1)
        blocks = lasting.view(arena, torch.uint8, start, (*outer, layout.block_bytes(plane)), steps)
        regions.append(Region(plane, 0, tensor, blocks))
    return tuple(regions)


def adopt(
    layout: StateLayout, tensors: Mapping[str, Tensor | Sequence[Tensor]], device: torch.device, slots: int | None
) -> tuple[Region, ...]:
    """Returns the planes in an engine's tensors, which must fit as `Planes.from_tensors` says.

    Args:
        layout: names, shapes, dtypes and layers.
        tensors: plane name -> `layer slot ...`, or a sequence of `slot ...`, one per layer.
        device: device on which the tensors must be.
        slots: the expected number of slots; None accepts any.

    Raises:
        LayoutMismatch: names the plane, the layer and the numbers.
        InvalidArgument: a tensor requires grad.
    """
    if not isinstance(tensors, Mapping):
        raise LayoutMismatch(f"tensors of type {type(tensors).__name__}: expected a mapping, plane name -> tensor(s)")
    names = [plane.name for plane in layout.planes]
    if set(tensors) != set(names):
        raise LayoutMismatch(f"tensors of planes {sorted(tensors)}: the layout has {sorted(names)}")
    regions: list[Region] = []
    for plane in layout.planes:
        given = tensors[plane.name]
        stacked, count = isinstance(given, Tensor), layout.layers_of(plane)
        if not stacked and not (isinstance(given, Sequence) and all(isinstance(one, Tensor) for one in given)):
            raise LayoutMismatch(
                f"plane {plane.name}: {type(given).__name__}, expected a tensor `layer slot ...` or one per layer"
            )
        if not stacked and len(given) != count:
            raise LayoutMismatch(f"plane {plane.name}: tensors of {len(given)} layers, the layout has {count}")
        for layer, one in enumerate([given] if isinstance(given, Tensor) else given):
            layers = count if stacked else 1
            tensor = one if stacked else one.unsqueeze(0)
            where = _where(plane, layer, layer + layers - 1)
            require_no_grad(where, tensor)
            _require_fit(where, plane, layers, tensor, device)
            if tensor.is_inference():  # it could not be changed outside inference mode
                start = tensor.storage_offset() * tensor.element_size()
                tensor = lasting.view(tensor, tensor.dtype, start, tensor.shape, tensor.stride())
            regions.append(Region(plane, layer, tensor, _as_bytes(tensor, plane.nbytes)))
    first = regions[0]
    for region in regions:
        if region.tensor.shape[1] != first.tensor.shape[1] or region.tensor.device != first.tensor.device:
            raise LayoutMismatch(
                f"{region}: {region.tensor.shape[1]} slots with the null slot on {region.tensor.device},"
                f" {first} has {first.tensor.shape[1]} on {first.tensor.device}"
            )
    if slots is not None and first.tensor.shape[1] != slots + 1:
        raise LayoutMismatch(
            f"{first}: {first.tensor.shape[1]} entries along the slot axis, expected {slots + 1}: the null slot and"
            f" {slots} slots"
        )
    require_apart(buffer_infos(regions))
    return tuple(regions)


def buffer_infos(regions: Sequence[Region]) -> list[BufferInfo]:
    """Returns where every plane and layer lies, without padding and without planes that have no bytes."""
    return [
        BufferInfo(plane.name, first + layer, held[layer].data_ptr(), held.stride(1), plane.nbytes, held.shape[1] - 1)
        for plane, first, _, held in regions
        if plane.nbytes
        for layer in range(len(held))
    ]


def _as_bytes(tensor: Tensor, nbytes: int) -> Tensor:
    """Returns a view of a tensor `layer slot ...` as uint8 `layer slot byte`."""
    size = tensor.element_size()
    shape, strides = (*tensor.shape[:2], nbytes), (tensor.stride(0) * size, tensor.stride(1) * size, 1)
    return lasting.view(tensor, torch.uint8, tensor.storage_offset() * size, shape, strides)


def _where(plane: Plane, first: int, last: int) -> str:
    return f"plane {plane.name}, layer {first}" if first == last else f"plane {plane.name}, layers {first} to {last}"


def _require_fit(where: str, plane: Plane, layers: int, tensor: Tensor, device: torch.device) -> None:
    shape = (layers, *tensor.shape[1:2], *plane.shape)
    if tensor.shape != shape or tensor.dtype != plane.dtype:
        raise LayoutMismatch(
            f"{where}: {tensor.dtype} {tuple(tensor.shape)}, expected {plane.dtype}"
            f" `layer slot ...` = ({layers}, slots, {', '.join(map(str, plane.shape))})"
        )
    if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
        raise LayoutMismatch(f"{where}: on {tensor.device}, expected {device}")
    if tensor.shape[1] < 2:
        raise LayoutMismatch(f"{where}: {tensor.shape[1]} slots, expected the null slot and at least one more")
    if not tensor[0, 0].is_contiguous():
        raise LayoutMismatch(
            f"{where}: {tuple(tensor.shape)} with strides {tensor.stride()}, expected contiguous layers of slots"
        )


def require_no_grad(what: str, tensor: Tensor) -> None:
    """Refuses a tensor that requires grad. Raises: InvalidArgument, with `what` as the name of the tensor."""
    if tensor.requires_grad:
        raise InvalidArgument(
            f"{what}: the tensor requires grad, and autograd cannot follow states that are overwritten: use .detach()"
        )


def require_apart(infos: Sequence[BufferInfo]) -> None:
    """Raises: LayoutMismatch if two blocks share a byte; exact for any strides."""
    for info in infos:
        if info.slot_stride < info.nbytes:
            raise LayoutMismatch(
                f"plane {info.plane}, layer {info.layer}: slots of {info.nbytes} bytes, {info.slot_stride} bytes apart"
            )
    ordered = sorted(infos, key=lambda info: info.address)
    for number, info in enumerate(ordered):
        end = info.address + info.slots * info.slot_stride + info.nbytes
        for other in ordered[number + 1 :]:
            if other.address >= end:
                break
            if _overlap(info, other):
                raise LayoutMismatch(
                    f"plane {info.plane}, layer {info.layer} and plane {other.plane}, layer {other.layer} share bytes:"
                    f" {info.nbytes} from {info.address:#x} every {info.slot_stride},"
                    f" {other.nbytes} from {other.address:#x} every {other.slot_stride}"
                )


def _overlap(low: BufferInfo, high: BufferInfo) -> bool:
    """Returns whether a block of `low` shares a byte with one of `high`, which does not start below `low`."""
    ahead, slots = high.address - low.address, low.slots + 1
    if low.slot_stride == high.slot_stride:
        turns, rest = divmod(ahead, low.slot_stride)  # slot 0 of `high` lies `rest` bytes behind slot `turns` of `low`
        before = low.slot_stride - rest  # bytes from slot 0 of `high` to the next slot of `low`
        return (turns < slots and rest < low.nbytes) or (turns + 1 < slots and before < high.nbytes)
    # For each block of `low`: its start, counted from slot 0 of `high`, and the last slot of `high` before its end.
    starts = np.arange(slots, dtype=np.int64) * low.slot_stride - ahead
    last = np.minimum((starts + low.nbytes - 1) // high.slot_stride, slots - 1)
    return bool(((last >= 0) & (last * high.slot_stride + high.nbytes > starts)).any())
