"""The bytes of all slots, and the operations that move them. Knows no free slot and no owner."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import TILE_BYTES, PlaneMap
from memstate.layout import MOVE_BYTES, Placement, Plane, StateLayout, format_bytes


@dataclass
class Traffic:
    """Bytes that operations moved, padding included, as far as the host knows; `uncounted`: calls that did not say."""

    copied: int = 0
    zeroed: int = 0
    uncounted: int = 0


class Storage:
    """The planes of `slots` slots and of the null slot.

    allocate: gives uint8 arenas of the byte counts asked for, where memory comes from elsewhere; one call per arena,
    in the order of `layout.arena_bytes`. Contents start undefined except in the null slot, which is zero.
    Raises: InvalidArgument; LayoutMismatch for arenas that do not fit.
    """

    def __init__(
        self, layout: StateLayout, slots: int, backend: Backend, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        if slots < 1:
            raise InvalidArgument(f"slots {slots}: at least 1 slot is needed")
        self.layout, self.slots, self.backend = layout, slots, backend
        self.traffic = Traffic()
        sizes = layout.arena_bytes(slots)
        self.arenas = tuple(allocate(size) if allocate else _empty(size, backend.device) for size in sizes)
        for arena, size in zip(self.arenas, sizes, strict=True):
            _require_fit(arena, size, backend.device)
        placed = list(zip(layout.planes, layout.placements(slots), strict=True))
        self.planes: dict[str, Tensor] = {plane.name: self._view(plane, place) for plane, place in placed}
        blocks = tuple(self._blocks(layout.block_bytes(plane), place) for plane, place in placed)
        self.plane_map = PlaneMap(self._tiles(), blocks)
        self.device = self.plane_map.tiles.device  # with its index, which the backend's may lack
        self.scrub_null()

    def _view(self, plane: Plane, place: Placement) -> Tensor:
        size = plane.dtype.itemsize  # 1, 2, 4, 8 or 16: divides every stride and offset
        inner = [prod(plane.shape[axis + 1 :]) for axis in range(len(plane.shape))]
        strides = (place.layer_stride // size, place.slot_stride // size, *inner)
        typed = self.arenas[place.arena].view(plane.dtype)
        start = typed.storage_offset() + place.offset // size
        return typed.as_strided((self.layout.layers, self.slots + 1, *plane.shape), strides, start)

    def _blocks(self, nbytes: int, place: Placement) -> Tensor:
        arena = self.arenas[place.arena]
        shape, strides = (self.layout.layers, self.slots + 1, nbytes), (place.layer_stride, place.slot_stride, 1)
        return arena.as_strided(shape, strides, arena.storage_offset() + place.offset)

    def _tiles(self) -> Tensor:
        tiles = [
            (self.arenas[run.arena].data_ptr() + run.offset + at, run.slot_stride, min(TILE_BYTES, run.nbytes - at))
            for run in self.layout.runs(self.slots)
            for at in range(0, run.nbytes, TILE_BYTES)
        ]
        return torch.tensor(tiles, dtype=torch.int64).reshape(-1, 3).to(self.backend.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the states, null slot and padding included."""
        return sum(arena.nbytes for arena in self.arenas)

    @property
    def table_nbytes(self) -> int:
        """Bytes of the tile table: 24 a tile, the same for any number of slots."""
        return self.plane_map.tiles.nbytes

    def copy(self, dst: Tensor, src: Tensor, *, checked: bool = False, due: int | None = None) -> None:
        """Copies slots src[i] to dst[i] in one launch; see `memstate.kernels.copy.copy_slots`.

        dst, src: int32 or int64 `n` on the storage's device. due: entries that are not skipped, where the caller knows.
        checked: refuse overlapping sets and unknown ids first.
        Syncs: only if checked. Raises: InvalidArgument, nothing moved then.
        """
        self._require_ids("dst", dst)
        self._require_ids("src", src)
        if dst.numel() != src.numel():
            raise InvalidArgument(f"copy: {dst.numel()} destinations for {src.numel()} sources")
        if checked:
            self.backend.counts.syncs += 2
            check_disjoint(dst.tolist(), src.tolist(), self.slots)
        if dst.numel():
            self.backend.copy_slots(self.plane_map, dst, src)
            self._count(copied=due)

    def zero(self, ids: Tensor, *, due: int | None = None) -> None:
        """Zeroes slots over all planes and layers in one launch; ids outside 1..slots are skipped.

        ids: int32 or int64 `n` on the storage's device. due: entries that are not skipped, where the caller knows.
        Syncs: no. Raises: InvalidArgument, nothing moved then.
        """
        self._require_ids("ids", ids)
        if ids.numel():
            self.backend.zero_slots(self.plane_map, ids)
            self._count(zeroed=due)

    def run_data(self, slots: Tensor, packet: Tensor, *, copied: int | None = None, zeroed: int | None = None) -> None:
        """Carries out the data section of a command packet in one launch; see `memstate.kernels.copy.run_data`.

        slots: int32 `register`. packet: int32. copied, zeroed: slots that will be, where the caller knows. Syncs: no.
        """
        self.backend.run_data(self.plane_map, slots, packet)
        self._count(copied=copied, zeroed=zeroed)

    def scrub_null(self) -> None:
        """Zeroes slot 0, where foreign kernels may leave rubbish; one small device operation per plane. Syncs: no."""
        for block in self.plane_map.blocks:
            block[:, 0].zero_()

    def _count(self, copied: int | None = None, zeroed: int | None = None) -> None:
        self.traffic.uncounted += copied is None and zeroed is None
        self.traffic.copied += (copied or 0) * self.layout.bytes_per_slot
        self.traffic.zeroed += (zeroed or 0) * self.layout.bytes_per_slot

    def _require_ids(self, name: str, ids: Tensor) -> None:
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
            raise InvalidArgument(
                f"{name}: {ids.dtype} {tuple(ids.shape)} with strides {ids.stride()},"
                " expected a contiguous vector of int32 or int64 slot ids"
            )
        if ids.device != self.device:
            raise InvalidArgument(f"{name}: ids on {ids.device}, the storage is on {self.device}: move them first")

    def __repr__(self) -> str:
        return f"Storage({self.slots} slots + null, {format_bytes(self.nbytes)}, {self.layout.order}, {self.device})"


def check_disjoint(dst: Sequence[int], src: Sequence[int], slots: int) -> None:
    """Refuses copies whose result would depend on their order; entries that a copy skips do not count.

    dst, src: slot ids, entry by entry. slots: the highest id there is. Raises: InvalidArgument naming the ids.
    """
    unknown = sorted({slot for slot in (*dst, *src) if slot > slots})
    if unknown:
        raise InvalidArgument(f"copy: ids {unknown} name no slot, the highest is {slots}")
    due = [(to, of) for to, of in zip(dst, src, strict=True) if to > 0 and of > 0 and to != of]
    twice = sorted(slot for slot, times in Counter(to for to, _ in due).items() if times > 1)
    if twice:
        raise InvalidArgument(f"copy: slots {twice} are destinations more than once: chance would pick the last writer")
    both = sorted({to for to, _ in due} & {of for _, of in due})
    if both:
        raise InvalidArgument(f"copy: slots {both} are source and destination at once: copy in two calls")


def _empty(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _require_fit(arena: Tensor, nbytes: int, device: torch.device) -> None:
    fits = arena.dtype == torch.uint8 and arena.shape == (nbytes,) and arena.is_contiguous()
    if not fits or arena.device.type != device.type:
        raise LayoutMismatch(
            f"arena {arena.dtype} {tuple(arena.shape)} with strides {arena.stride()} on {arena.device},"
            f" expected {nbytes} contiguous bytes of uint8 on {device}"
        )
    if arena.data_ptr() % MOVE_BYTES or arena.storage_offset() % MOVE_BYTES:
        raise LayoutMismatch(f"arena at address {arena.data_ptr():#x}: expected a multiple of {MOVE_BYTES} bytes")
