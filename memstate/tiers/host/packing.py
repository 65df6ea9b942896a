"""Maps the bytes of slots to the bodies of records, and moves them. Knows no key and no pool.

    header   not touched by this module
    body     a slot of the same layout in slot-major order: layer by layer, plane by plane, each padded to 16 bytes

A record has the same bytes in staging on the device, in host memory and in storage. Padding is never written, so it
stays zero in memory that was zero at first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from memstate.checks import is_count
from memstate.errors import InvalidArgument
from memstate.kernels.tables import TILE_BYTES, RecordMap, RecordPiece, ScaledMap
from memstate.sizes import format_bytes
from memstate.state.layout import FLOATS, MOVE_BYTES, Plane, StateLayout, scales_in
from memstate.state.memory import AddressTable, tiles_of
from memstate.state.planes import Planes
from memstate.state.regions import Region

ROW = 32  # bytes of one entry of a tile table: four int64


def table_bytes(layout: StateLayout) -> int:
    """Returns the bytes of the table of tiles (runs of bytes) by which planes are copied to records without int8."""
    return ROW * sum(layout.layers_of(plane) * len(tiles_of(plane.nbytes)) for plane in layout.planes)


class RecordTable(AddressTable):
    """The table of the tiles (runs of bytes) by which planes are copied to and from the body of a record.

    Args:
        regions: The regions of memory that hold the planes.
        layout: Layout of the body.
        device: The device for the table.
    """

    def __init__(self, regions: Sequence[Region], layout: StateLayout, device: torch.device) -> None:
        self._blocks = tuple(region.blocks for region in regions)
        self._pieces = _pieces(regions, layout)
        super().__init__(4, device)
        self.map = RecordMap(self.table, self._blocks, self._pieces, layout.bytes_per_slot, self.unit)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Returns for each tile: address in slot 0, bytes between slots, length, and offset in the body."""
        places = [(block.data_ptr(), block.stride(0), block.stride(1)) for block in self._blocks]
        return [
            (places[block][0] + layer * places[block][1] + start, places[block][2], length, offset)
            for block, layer, start, length, offset in self._pieces
        ]


class ScaledTable(AddressTable):
    """The table of a plane that records hold as int8.

    Args:
        regions: The regions of memory that hold the plane.
        axis: The axis along which all values share one scale.
        layout: Layout of the body.
        device: The device for the table.
    """

    def __init__(self, regions: Sequence[Region], axis: int, layout: StateLayout, device: torch.device) -> None:
        self._tensors = tuple(region.tensor for region in regions)
        rows = {row.name: row for row in layout.table()}
        values, scales = (rows[name] for name in (regions[0].plane.name, scales_of(regions[0].plane.name)))
        super().__init__(2, device)
        self.map = ScaledMap(
            self.table, self._tensors, axis, values.offset, scales.offset, values.layer_stride, layout.bytes_per_slot,
            self.unit,
        )  # fmt: skip

    def rows(self) -> list[tuple[int, int]]:
        """Returns for each layer: address in slot 0, and bytes between slots."""
        return [
            (layer.data_ptr(), layer.stride(0) * layer.element_size()) for tensor in self._tensors for layer in tensor
        ]


class Packing:
    """Moves slots to and from records.

    If `int8` names the plane `ssm`, the body has a plane `ssm` of int8 and a plane `ssm.scale` of float32. All values
    along the axis share a scale. The axis is 2 for `head key value` (the gated delta rule: qwen3_next, qwen3_5,
    kimi_linear), and 1 for `head dim state` (Mamba-2: nemotron_h, falcon_h1, granite_hybrid, bamba, codestral_mamba).
    `memstate.kernels.pack_int8.pack_int8` says how exact this is.

    Args:
        planes: The planes of the slots.
        int8: Names of planes of float32, bfloat16 or float16 that records hold as int8. The value of a name is the axis
            along which values share a scale.

    Attributes:
        layout: Layout of the body of a record, as one slot.
        nbytes: Bytes of a body.
        memory: The planes of the slots.

    Raises:
        Asleep: The planes' memory is released.
        InvalidArgument: `int8` names an unknown plane or axis, another dtype, or a plane without elements.

    Example:
        >>> from memstate.kernels.dispatch import Backend
        >>> from memstate.state.layout import Plane, StateLayout
        >>> layout = StateLayout((Plane("ssm", (2, 8, 8), torch.float32),), layers=4)
        >>> planes = Planes(layout, 2, Backend("reference"))
        >>> Packing(planes), Packing(planes, int8={"ssm": 2})
        (Packing(ssm x 4 layers, 2.00 KiB a record), Packing(ssm, ssm.scale x 4 layers, 768 B a record))
    """

    def __init__(self, planes: Planes, int8: Mapping[str, int] | None = None) -> None:
        planes.require_awake("packing")
        self.memory, self.backend, self.device = planes, planes.backend, planes.device
        int8 = dict(int8 or {})
        self.layout = in_records(planes.layout, int8)
        self.nbytes = self.layout.bytes_per_slot
        exact = [region for region in self.memory.regions if region.plane.name not in int8]
        self._table = RecordTable(exact, self.layout, self.device)
        self._scaled = [ScaledTable(self.memory.of(name), int8[name], self.layout, self.device) for name in int8]
        for table in (self._table, *self._scaled):
            self.memory.follow(table)

    def pack(self, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor) -> None:
        """Copies slots into the bodies of records; see `memstate.kernels.pack.pack_slots`.

        This takes one launch, and one more for each plane of int8.

        Args:
            slots: int32 `register`: the slot of each register. None: `index` has slot ids.
            index: Registers or slots, int32 `n`.
            places: Numbers of the records, int32 `n`.
            out: The bodies of all records, uint8 `record byte`; written.

        Raises:
            Asleep: The planes' memory is released.
            ValueError: The tensors do not fit; nothing moved.

        Syncs: no.
        """
        self.memory.require_awake("pack")
        if self._table.map.pieces or not self._scaled:
            self.backend.pack_slots(self._table.map, slots, index, places, out)
        for table in self._scaled:
            self.backend.pack_int8(table.map, slots, index, places, out)

    def unpack(self, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor) -> None:
        """Copies the bodies of records into slots; see `memstate.kernels.pack.unpack_slots`.

        This takes as many launches as `pack`.

        Args:
            slots: int32 `register`: the slot of each register. None: `index` has slot ids.
            index: Registers or slots, int32 `n`; their planes are written.
            places: Numbers of the records, int32 `n`.
            source: The bodies of all records, uint8 `record byte`.

        Raises:
            Asleep: The planes' memory is released.
            ValueError: The tensors do not fit; nothing moved.

        Syncs: no.
        """
        self.memory.require_awake("unpack")
        if self._table.map.pieces or not self._scaled:
            self.backend.unpack_slots(self._table.map, slots, index, places, source)
        for table in self._scaled:
            self.backend.unpack_int8(table.map, slots, index, places, source)

    def __repr__(self) -> str:
        planes = ", ".join(plane.name for plane in self.layout.planes)
        return f"Packing({planes} x {self.layout.layers} layers, {format_bytes(self.nbytes)} a record)"


def scales_of(plane: str) -> str:
    """Returns the name of the plane that has, in records, the scales of an int8 plane."""
    return f"{plane}.scale"


def in_records(layout: StateLayout, int8: Mapping[str, int]) -> StateLayout:
    """Returns the layout of the body of a record for slots of `layout`: the planes named in `int8` are int8 there.

    Raises:
        InvalidArgument: A plane cannot be held as int8.
    """
    planes: list[Plane] = []
    if missing := sorted(int8.keys() - {plane.name for plane in layout.planes}):
        raise InvalidArgument(f"int8: no planes {missing} in {[plane.name for plane in layout.planes]}")
    pairs = scales_in(layout.planes)
    if whole := sorted(int8.keys() & {*pairs, *pairs.values()}):
        raise InvalidArgument(f"int8: {whole}: states of whole numbers and their scales stay as they are in records")
    for plane in layout.planes:
        if plane.name not in int8:
            planes.append(plane)
            continue
        axis, shape = int8[plane.name], plane.shape
        if plane.dtype not in FLOATS or not plane.elements or not (is_count(axis) and axis < len(shape)):
            raise InvalidArgument(
                f"int8: axis {axis!r} of {plane}: expected elements of float32, bfloat16 or float16, and one of its "
                f"{len(shape)} axes, from 0"
            )
        if not isfinite(plane.fill or 0):
            raise InvalidArgument(f"int8: {plane}: a scale of {plane.fill} says nothing; keep this plane exact")
        shared = (*shape[:axis], 1, *shape[axis + 1 :])  # the 1 tells the fingerprint the axis
        parts = plane.parts if axis != plane.axis else ()
        scale = Plane(
            scales_of(plane.name), shared, torch.float32, parts=parts, axis=plane.axis if parts else 0,
            layers=plane.layers,
        )  # fmt: skip
        planes += [replace(plane, dtype=torch.int8, fill=0), scale]
    return replace(layout, planes=tuple(planes), order="slot_major", alignment=MOVE_BYTES)


def _pieces(regions: Sequence[Region], layout: StateLayout) -> tuple[RecordPiece, ...]:
    """Cuts regions into tiles of at most TILE_BYTES, and returns them in the order of the body: by layer, by plane."""
    rows = {row.name: row for row in layout.table()}
    pieces = []
    for number, region in enumerate(regions):
        row = rows[region.plane.name]
        for layer in range(len(region.blocks)):
            offset = row.offset + (region.first + layer) * row.layer_stride
            for start in tiles_of(row.payload):
                pieces.append(RecordPiece(number, layer, start, min(TILE_BYTES, row.payload - start), offset + start))
    return tuple(sorted(pieces, key=lambda piece: piece.offset))
