"""Holds the memory of the states: builds tile tables, releases the memory and brings it back. Moves no slot.

A span is bytes that are contiguous in every slot: a block of a region, or several that touch.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby
from math import gcd
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from memstate import lasting
from memstate.errors import Asleep, InvalidArgument, LayoutMismatch
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import TILE_BYTES, ConvTail, DeltaTail, PlaneMap, RingMap, SelectiveTail
from memstate.state.layout import MOVE_BYTES, StateLayout, scales_in
from memstate.state.regions import Region, buffer_infos

TILE_ROW = 24  # bytes of a tile in the table: three int64
RING_ROW = 32  # bytes of a ring in the table of rings: four int64
PATTERN = 8  # bytes of a tile in the table of patterns, for planes with a fill


class Span(NamedTuple):
    """Bytes that are contiguous in every slot; `start` counts from `blocks`, whose address may change."""

    blocks: Tensor
    start: int
    slot_stride: int
    nbytes: int
    pattern: int | None  # 64 bits that fill a fresh span again and again; None if nothing fills it

    @property
    def address(self) -> int:
        """The current address of the span in slot 0."""
        return self.blocks.data_ptr() + self.start


@lru_cache
def table_bytes(layout: StateLayout) -> int:
    """Returns the bytes of the tile table of planes in memstate's own arenas, for any number of slots."""
    runs, patterns = [run.nbytes for run in layout.runs(1)], {plane.pattern for plane in layout.planes}
    if layout.order == "slot_major" and len(patterns) > 1:  # blocks of different patterns are different spans
        blocks = sorted(
            (place.offset + layer * place.layer_stride, layout.block_bytes(plane), plane.pattern)
            for plane, place in zip(layout.planes, layout.placements(1), strict=True)
            for layer in range(layout.layers_of(plane))
        )
        runs = [sum(nbytes for _, nbytes, _ in alike) for _, alike in groupby(blocks, key=itemgetter(2))]
    return (TILE_ROW + PATTERN * any(patterns)) * sum(len(tiles_of(nbytes)) for nbytes in runs)


def rings_of(name: str, rows: Collection[str]) -> tuple[type[Any], dict[str, str]] | None:
    """Returns (kind of a plane's tail, field -> name of the plane of rows that is its ring); None without a tail.

    Args:
        name: name of the plane.
        rows: names of the planes of rows.
    """
    for kind in (DeltaTail, SelectiveTail, ConvTail):
        rings = {field: ring for field in kind._fields if (ring := f"{name}_{field}") in rows}
        if rings.keys() >= set(kind._fields) - set(kind._field_defaults):
            return kind, rings
    return None


def ring_names(layout: StateLayout) -> set[str]:
    """Returns the names of the planes of rows that are rings of tails."""
    rows = {plane.name for plane in layout.rows.planes} if layout.rows is not None else set[str]()
    tails = [rings for plane in layout.planes if (rings := rings_of(plane.name, rows))]
    return {ring for _, rings in tails for ring in rings.values()}


def ring_table_bytes(layout: StateLayout) -> int:
    """Returns the bytes of the table of rings."""
    names, rows = ring_names(layout), layout.rows
    return RING_ROW * sum(rows.layers_of(plane) for plane in rows.planes if plane.name in names) if rows else 0


def tiles_of(nbytes: int) -> range:
    """Returns where each tile of a span starts."""
    return range(0, nbytes, TILE_BYTES)


class AddressTable(ABC):
    """A table of addresses on the device, which can be filled again in place when the addresses have moved.

    Args:
        columns: number of columns; the first one has addresses.
        device: device of the table.

    Attributes:
        table: int64 `row column`.
        unit: bytes, at most 16; all numbers of the table are multiples of it.
    """

    def __init__(self, columns: int, device: torch.device) -> None:
        rows = self.rows()
        self.unit = gcd(MOVE_BYTES, *chain.from_iterable(rows))
        self.table = lasting.tensor(rows, torch.int64, device).reshape(-1, columns)

    @abstractmethod
    def rows(self) -> Sequence[tuple[int, ...]]:
        """Returns the rows with the current addresses."""

    def require_alignment(self) -> None:
        """Raises: LayoutMismatch if the current addresses are no multiples of `unit`, which launches need."""
        for address, *_ in self.rows():
            if address % self.unit:
                where = f"memory came back at address {address:#x}"
                raise LayoutMismatch(f"{where}, expected a multiple of {self.unit} bytes")

    def fill(self) -> None:
        """Writes the current addresses into the table. Syncs: yes, off the CPU."""
        self.table.copy_(torch.tensor(self.rows(), dtype=torch.int64, device="cpu").reshape(self.table.shape))


class PlaneTable(AddressTable):
    """The tile table of some regions, on `device`."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self.spans = _spans(regions)
        super().__init__(3, device)
        patterns = [span.pattern or 0 for span in self.spans for _ in tiles_of(span.nbytes)]
        self.map = PlaneMap(
            self.table, tuple(region.blocks for region in regions), self.unit,
            tuple(region.plane.pattern for region in regions),
            lasting.tensor(patterns, torch.int64, device) if any(patterns) else None,
        )  # fmt: skip
        self.slot_bytes = sum(region.blocks.shape[0] * region.blocks.shape[2] for region in regions)

    def rows(self) -> list[tuple[int, int, int]]:
        """Returns (address, slot stride, length) of each tile, as in `PlaneMap.tiles`."""
        return [
            (
                span.address + at,
                span.slot_stride,
                min(TILE_BYTES, span.nbytes - at) * (-1 if span.pattern is None else 1),
            )
            for span in self.spans
            for at in tiles_of(span.nbytes)
        ]


class RingTable(AddressTable):
    """The table, on `device`, of the planes of rows that are rings."""

    def __init__(self, regions: Sequence[Region], device: torch.device) -> None:
        self.regions = regions
        super().__init__(4, device)
        blocks = tuple(region.blocks[:, :, : region.plane.nbytes] for region in regions)
        self.map = RingMap(self.table, blocks, tuple(region.plane.shape[0] for region in regions), self.unit)

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Returns (address, row stride, bytes of a place, bytes of all places) of each ring, as in `RingMap.table`."""
        return [
            (info.address, info.slot_stride, info.nbytes // region.plane.shape[0], info.nbytes)
            for region in self.regions
            for info in buffer_infos([region])
        ]


class Memory:
    """The memory of the planes, which can be released and brought back.

    Addresses change only between `sleep` and `wake`. Tensors and tables stay the same objects, so a captured graph of
    copies remains valid.

    Args:
        regions: regions of the planes.
        owned: the arenas that memstate allocated, whose memory it can release.
        backend: backend that launches the operations.
        also: other memory that sleeps and wakes together with this memory, or None.

    Attributes:
        asleep: whether the memory of the states is released; every operation on slots raises Asleep then.
        whole: the tile table of all planes.
    """

    def __init__(
        self, regions: tuple[Region, ...], owned: tuple[Tensor, ...], backend: Backend, also: "Memory | None" = None
    ) -> None:
        self.regions, self.backend, self.asleep = regions, backend, False
        self._owned, self._also = owned, also
        self._kept: list[Tensor] | None = None
        self._sizes: list[int] = []
        self._names = frozenset(region.plane.name for region in regions)
        self._scales = scales_in([region.plane for region in regions])
        self.whole = PlaneTable(regions, backend.device)
        self.plane_map = self.whole.map
        self.device = self.plane_map.tiles.device  # has an index, which `backend.device` may lack
        self._tables = {self._names: self.whole}
        self._followers: WeakSet[AddressTable] = WeakSet()

    def require_awake(self, operation: str) -> None:
        """Raises Asleep between `sleep` and `wake`; the error names the operation."""
        if self.asleep:
            raise Asleep(operation)

    def table_of(self, names: Collection[str] | None) -> PlaneTable:
        """Returns the tile table of these planes, or of all planes if `names` is None.

        A table is made once for each set of names. Raises: InvalidArgument, Asleep.
        """
        self.require_awake("planes")
        key = self._names if names is None else frozenset(names)
        if key not in self._tables:
            if not key or not key <= self._names:
                raise InvalidArgument(f"planes {sorted(key)}: expected one or more of {sorted(self._names)}")
            self._require_both("planes", key)
            chosen = [region for region in self.regions if region.plane.name in key]
            self._tables[key] = PlaneTable(chosen, self.device)
        return self._tables[key]

    def _require_both(self, operation: str, names: Collection[str]) -> None:
        """Refuses a plane of whole numbers without its scales, and scales without their numbers."""
        for both in self._scales.items():
            if len(alone := {*both} & {*names}) == 1:
                raise InvalidArgument(
                    f"{operation} of {sorted(alone)} alone: {' and '.join(both)} are one state; name both in copy(),"
                    " or move all planes with save() and load()"
                )

    def follow(self, table: AddressTable) -> None:
        """Makes `wake` write new addresses to one more table, as long as the table exists."""
        self._followers.add(table)

    def of(self, name: str, operation: str = "planes") -> list[Region]:
        """Returns the regions of a plane. Raises: InvalidArgument; and Asleep, which names the operation."""
        self.require_awake(operation)
        if name not in self._names:
            raise InvalidArgument(f"no plane {name!r}, expected one of {sorted(self._names)}")
        return [region for region in self.regions if region.plane.name == name]

    def sleep(self, *, keep: bool = True) -> None:
        """Releases the memory of the states until `wake`; the tensors stay, and must not be read meanwhile.

        Memory that an engine or `allocate` gave must be released by its giver, after this call. On a GPU, memory that
        memstate releases goes to torch's allocator: `torch.cuda.empty_cache()` returns it to the device.

        Args:
            keep: whether to keep the bytes in host memory. If not, all slots except the null slot are undefined after
                `wake`.

        Raises:
            Asleep: the memory is asleep already.

        Syncs: yes.
        """
        self.require_awake("sleep")
        owned = (*self._owned, *(self._also._owned if self._also is not None else ()))
        if fixed := [arena.nbytes for arena in owned if not arena.untyped_storage().resizable()]:
            raise InvalidArgument(
                f"sleep: arenas of {fixed} bytes cannot be released: numpy shares them since .numpy() was called "
                "on a plane; copy planes to look at them"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # launches of any stream may still use the memory
        self._kept = [block.to("cpu", copy=True) for block in self._layers()] if keep else None
        self._sizes = [region.blocks.untyped_storage().nbytes() for region in self.regions]
        self.asleep = True  # from here on, `wake` repairs an interrupted call
        for arena in self._owned:
            arena.untyped_storage().resize_(0)
        if self._also is not None:
            self._also.sleep(keep=keep)
        self.backend.counts.syncs += 1

    def wake(self) -> None:
        """Brings back the memory that `sleep` released: the same tensors, whose addresses may have moved.

        Memory that an engine or `allocate` gave must be back in its tensors before this call. CUDA graphs that hold
        addresses of planes must be captured again. Graphs of copies and zeros stay valid, because they read addresses
        from tables.

        Raises:
            InvalidArgument: the memory is awake.
            Asleep: memory is missing; the memory stays asleep.
            LayoutMismatch: memory came back with a worse alignment; the memory stays asleep.

        Syncs: yes.
        """
        if not self.asleep:
            raise InvalidArgument("wake: the states are awake already")
        if self._also is not None and self._also.asleep:
            self._also.wake()
        for arena in self._owned:
            arena.untyped_storage().resize_(arena.nbytes)
        for region, size in zip(self.regions, self._sizes, strict=True):
            if (have := region.blocks.untyped_storage().nbytes()) < size:
                why = f"the memory of {region} is {have} of {size} bytes: bring the engine's tensors back first"
                raise Asleep("wake", why)
        tables = [*self._tables.values(), *self._followers]
        for table in tables:
            table.require_alignment()
        for table in tables:
            table.fill()
        for block, kept in zip(self._layers(), self._kept, strict=True) if self._kept is not None else ():
            block.copy_(kept)
        self.asleep, lost, self._kept = False, self._kept is None, None
        if lost:
            self.scrub_null()
        self.backend.counts.syncs += 1

    def scrub_null(self) -> None:
        """Fills slot 0 again, because an engine's kernels may have written it; one small device operation per tensor.

        Raises:
            Asleep: the memory is released.

        Syncs: no.
        """
        self.require_awake("scrub_null")
        for region in (*self.regions, *(self._also.regions if self._also is not None else ())):
            if (fill := region.plane.fill) is None:
                continue
            region.blocks[:, 0].zero_()
            if fill:
                region.tensor[:, 0].fill_(fill)

    def _layers(self) -> Iterator[Tensor]:
        """Returns every layer of every plane, uint8 `slot byte`."""
        return (block for region in self.regions for block in region.blocks)


def _spans(regions: Sequence[Region]) -> list[Span]:
    """Returns the longest possible spans. No span joins blocks of two storages, because storages may move apart."""
    blocks = [
        Span(held, layer * held.stride(0), held.stride(1), held.shape[2], plane.pattern)
        for plane, _, _, held in regions
        if held.shape[2]
        for layer in range(len(held))
    ]
    joined: list[Span] = []
    for span in sorted(blocks, key=_place):
        if joined:
            storage, stride, address = _place(joined[-1])
            alike = span.pattern == joined[-1].pattern
            if alike and _place(span) == (storage, stride, address + joined[-1].nbytes):
                joined[-1] = joined[-1]._replace(nbytes=joined[-1].nbytes + span.nbytes)
                continue
        joined.append(span)
    return joined


def _place(span: Span) -> tuple[int, int, int]:
    return span.blocks.untyped_storage().data_ptr(), span.slot_stride, span.address
