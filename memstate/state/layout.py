"""What one slot consists of and where its bytes lie, as arithmetic on byte offsets. Knows no memory and no device.

    layer_major   one arena per plane   layer slot [block .. pad]         a plane of one layer is one dense tensor
    slot_major    one arena in all      slot layer plane [block .. pad]   a slot, and each of its layers, is one run

In slot_major, planes with another number of layers follow those before them, `layer plane` again.

A block is one plane of one layer of one slot, padded to `alignment`, so that 16 bytes can move at a time everywhere.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm, prod
from types import EllipsisType
from typing import Literal, NamedTuple, get_args

import torch

from memstate.checks import is_whole, items, require_name, whole
from memstate.errors import InvalidArgument
from memstate.sheet import Section, Sheet, Shown, bar, of_bytes, section, sheet
from memstate.sizes import INT64_MAX, format_bytes
from memstate.state.sharding import Owned, Part

Order = Literal["layer_major", "slot_major"]
MOVE_BYTES = 16  # what one lane of a kernel moves
NEVER = 2**31  # tokens that no request has


@dataclass(frozen=True, repr=False)
class Plane:
    """One named tensor of the state.

    Args:
        name: of the plane, such as "conv" or "ssm".
        shape: elements per slot and layer; () is one element, a zero makes the plane empty.
        dtype: of the elements.
        rewritten_each_step: whether a step computes every element anew. A plane that is written in part must be copied
            where a step reads one slot and writes another.
        parts: what tensor parallelism cuts along `axis`, in the order of memory. Without parts every rank holds the
            whole plane.
        axis: the axis that is cut.
        order: which of several orders of the axes this is, such as "value_key": the shape may not say it. A state of
            one order is not found as one of another.
        layers: how many layers of the model hold this plane (default: those of the layout). 1 for what a request has
            once, such as its last tokens.
        fill: what every element of a fresh slot and of the null slot is. None: the plane is never made fresh, because
            every element is written before it is read.
        grid: the state can be kept and found again only at multiples of so many tokens, because the plane is
            incomplete between them. None: never.

    Raises:
        InvalidArgument: a name, size, dtype, fill or order that cannot be meant, or parts that are not the axis.

    Example:
        >>> import torch
        >>> from memstate import Plane
        >>> Plane("ssm", (32, 128, 128), torch.float32).nbytes
        2097152
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rewritten_each_step: bool = True
    parts: tuple[Part, ...] = ()
    axis: int = 0
    order: str = ""
    layers: int | None = None
    fill: float | None = 0
    grid: int | None = 1

    def __post_init__(self) -> None:
        require_name("plane", self.name)
        if not isinstance(self.order, str):
            raise InvalidArgument(f"plane {self.name}: order {self.order!r}, expected a text")
        object.__setattr__(self, "shape", _shape(self.name, self.shape))
        object.__setattr__(self, "parts", items(f"plane {self.name}: parts", self.parts, Part))
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidArgument(f"plane {self.name}: dtype {self.dtype!r}, expected a torch.dtype")
        self._require_fit()
        object.__setattr__(self, "axis", int(self.axis))
        for name in ("layers", "grid"):
            if (count := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(f"plane {self.name}: {name}", count))
        object.__setattr__(self, "fill", _fill(self.name, self.fill, self.dtype))

    def _require_fit(self) -> None:
        """Refuses parts that are not exactly one axis of the shape."""
        parts, axis, who = self.parts, self.axis, f"plane {self.name}"
        names = [part.name for part in parts]
        if len(set(names)) != len(names):
            raise InvalidArgument(f"{who}: parts {names}, expected each name once")
        axes = len(self.shape) if parts else 1  # without parts the axis says nothing
        if not is_whole(axis) or not 0 <= axis < axes:
            why = "nothing to cut there"
            raise InvalidArgument(f"{who}: axis {axis!r} of shape {self.shape} with {len(parts)} parts: {why}")
        total = sum(part.length for part in parts)
        if parts and total != self.shape[axis]:
            sizes = " + ".join(f"{part.name} {part.units} * {part.size}" for part in parts)
            raise InvalidArgument(
                f"{who}: parts {sizes} = {total}, but axis {axis} of shape {self.shape} has {self.shape[axis]} elements"
            )

    @property
    def elements(self) -> int:
        """Elements per slot and layer."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes per slot and layer, without padding."""
        return self.elements * self.dtype.itemsize

    @property
    def pattern(self) -> int | None:
        """The fill as 64 bits that repeat in memory, a signed number; 0 for zeros, None without a fill."""
        if not self.fill:
            return self.fill if self.fill is None else 0
        element = torch.full((1,), self.fill, dtype=self.dtype, device="cpu").view(torch.uint8)
        return int.from_bytes(bytes(element.tolist()) * (8 // self.dtype.itemsize), sys.byteorder, signed=True)

    def shard(self, ranks: int) -> "Plane":
        """The plane that one of `ranks` ranks holds; `owned` says which part.

        Each rank holds an equal share of the units of a part, or one unit that other ranks hold too.

        Args:
            ranks: how many ranks there are.

        Raises:
            InvalidArgument: the units of a part and the ranks do not divide each other.
        """
        ranks = whole(f"plane {self.name}: ranks", ranks)
        for part in self.parts:
            if part.units % ranks and ranks % part.units:
                raise InvalidArgument(
                    f"plane {self.name}: part {part.name} has {part.units} units of {part.size} for {ranks} ranks:"
                    " one of the two numbers must divide the other"
                )
        if not self.parts:
            return self
        parts = tuple(replace(part, units=max(1, part.units // ranks)) for part in self.parts)
        size = sum(part.length for part in parts)
        return replace(self, parts=parts, shape=(*self.shape[: self.axis], size, *self.shape[self.axis + 1 :]))

    def slices(self) -> dict[str, slice]:
        """Where each part lies along `axis`, by name; nothing for a plane without parts."""
        ends = accumulate(part.length for part in self.parts)
        return {part.name: slice(end - part.length, end) for part, end in zip(self.parts, ends, strict=True)}

    def owned(self, ranks: int, rank: int) -> list[Owned]:
        """Which slices along `axis` of this plane a rank holds, and where in `shard(ranks)` they lie.

        With more ranks than units, neighbours hold the same unit. Heads are cut the same way, so they stay with the
        group they belong to. A plane without parts is one entry with the plane's name and all of it.

        Args:
            ranks: how many ranks there are.
            rank: which one of them.

        Raises:
            InvalidArgument: there is no such rank, or the parts cannot be cut.
        """
        local = self.shard(ranks).slices()
        if not is_whole(rank) or not 0 <= rank < ranks:
            raise InvalidArgument(f"plane {self.name}: rank {rank!r}, expected 0 to {ranks - 1}")
        found, uncut, rank, ranks = list[Owned](), self.slices(), int(rank), int(ranks)
        for part in self.parts:
            first, mine = uncut[part.name].start + rank * part.units // ranks * part.size, local[part.name]
            found.append(Owned(part.name, slice(first, first + mine.stop - mine.start), mine))
        return found or [Owned(self.name, slice(None), slice(None))]

    def index(self, along: slice) -> tuple[EllipsisType | slice, ...]:
        """The index that takes a slice along `axis` out of a tensor that ends in the axes of this plane."""
        if not self.shape:
            return (...,)
        return (..., along, *[slice(None)] * (len(self.shape) - self.axis - 1))

    def __repr__(self) -> str:
        sizes, dtype = ",".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        parts = " | ".join(f"{part.name} {part.units}*{part.size}" for part in self.parts)
        fill = f"filled with {self.fill}" if self.fill else "never made fresh" if self.fill is None else ""
        layers = f"{self.layers} layers" if self.layers else ""
        grid = "" if self.grid == 1 else f"whole every {self.grid} tokens" if self.grid else "never whole"
        told = "".join(f"{part}, " for part in (self.order, parts, layers, fill, grid) if part)
        return f"Plane({self.name}[{sizes}] {dtype}, {told}{format_bytes(self.nbytes)} per layer)"


class Placement(NamedTuple):
    """Where the blocks of one plane start, in bytes: arena[offset + layer * layer_stride + slot * slot_stride]."""

    arena: int
    offset: int
    layer_stride: int
    slot_stride: int


class PlaneRow(NamedTuple):
    """One plane as a line of a table: bytes of one layer of one slot, and the `Placement` of these blocks.

    In slot_major `offset` and `layer_stride` are bytes from the start of a slot.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    payload: int
    padding: int
    arena: int
    offset: int
    layer_stride: int
    slot_stride: int


class Run(NamedTuple):
    """Bytes that lie in one piece in every slot: arena[offset + slot * slot_stride], nbytes long."""

    arena: int
    offset: int
    slot_stride: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class StateLayout(Shown):
    """The planes of a state, its layers and their physical order.

    Args:
        planes: one or more, each name once.
        layers: how many layers hold state. A plane exists once in each of them, unless it has layers of its own.
        order: "layer_major" or "slot_major".
        alignment: every block starts and ends at a multiple of this many bytes from the start of its arena; a multiple
            of 16.
        rows: what each request has once, whatever slots it uses, such as the inputs since the last whole state: planes
            by row, `layer row ...`. It is fresh when a request starts, goes along with a fork, and is never published.

    Raises:
        InvalidArgument: a value that cannot be meant.

    Example:
        >>> import torch
        >>> import memstate as ms
        >>> layout = ms.StateLayout((ms.Plane("ssm", (2, 8, 8), torch.float32),), layers=4)
        >>> layout
        StateLayout(ssm x 4 layers, layer_major, 2.00 KiB per slot with 0 B padding)
        >>> layout.bytes_per_slot
        2048
    """

    planes: tuple[Plane, ...]
    layers: int
    order: Order = "layer_major"
    alignment: int = MOVE_BYTES
    rows: "StateLayout | None" = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", items("planes", self.planes, Plane))
        names = [plane.name for plane in self.planes]
        if not names or len(set(names)) != len(names):
            raise InvalidArgument(f"planes {names}: expected one or more, each name once")
        object.__setattr__(self, "layers", whole("layers", self.layers))
        if self.order not in get_args(Order):
            raise InvalidArgument(f"order {self.order!r}: expected {' or '.join(get_args(Order))}")
        if not is_whole(self.alignment) or self.alignment < MOVE_BYTES or self.alignment % MOVE_BYTES:
            raise InvalidArgument(f"alignment {self.alignment!r} bytes: expected a multiple of {MOVE_BYTES}")
        object.__setattr__(self, "alignment", int(self.alignment))
        if self.rows is not None and (not isinstance(self.rows, StateLayout) or self.rows.rows is not None):
            raise InvalidArgument(f"rows={self.rows!r}: expected a StateLayout without rows of its own, or None")
        if self.bytes_per_slot > INT64_MAX:
            raise InvalidArgument(
                f"planes {names} x {self.layers} layers: {self.bytes_per_slot} bytes per slot, and int64 numbers at "
                f"most {INT64_MAX}: lower shapes or layers"
            )

    def layers_of(self, plane: Plane) -> int:
        """Layers of a plane."""
        return plane.layers or self.layers

    @property
    def grid(self) -> int:
        """Tokens at whose multiples the state can be kept: the least that all planes allow, `NEVER` if one has none."""
        return min(NEVER, lcm(*(plane.grid or NEVER for plane in self.planes)))

    def block_bytes(self, plane: Plane) -> int:
        """Bytes of a plane per slot and layer, padding included."""
        return -(-plane.nbytes // self.alignment) * self.alignment

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a slot over all layers and planes, padding included."""
        return sum(self.layers_of(plane) * self.block_bytes(plane) for plane in self.planes)

    @property
    def payload_bytes_per_slot(self) -> int:
        """Bytes of a slot over all layers and planes, padding left out."""
        return sum(self.layers_of(plane) * plane.nbytes for plane in self.planes)

    def arena_bytes(self, slots: int) -> tuple[int, ...]:
        """Size of each arena in bytes for `slots` slots and the null slot. Raises: InvalidArgument."""
        slots = whole("slots", slots, least=0)
        if self.order == "slot_major":
            return ((slots + 1) * self.bytes_per_slot,)
        return tuple(self.layers_of(plane) * (slots + 1) * self.block_bytes(plane) for plane in self.planes)

    def placements(self, slots: int) -> tuple[Placement, ...]:
        """Where each plane lies in the arenas for `slots` slots and the null slot. Raises: InvalidArgument."""
        slots = whole("slots", slots, least=0)
        blocks = [self.block_bytes(plane) for plane in self.planes]
        if self.order == "layer_major":
            return tuple(Placement(i, 0, (slots + 1) * block, block) for i, block in enumerate(blocks))
        found, start = dict[str, Placement](), 0
        for layers in dict.fromkeys(map(self.layers_of, self.planes)):
            alike = [plane for plane in self.planes if self.layers_of(plane) == layers]
            ends = [*accumulate(map(self.block_bytes, alike))]
            for plane, end in zip(alike, ends, strict=True):
                offset = start + end - self.block_bytes(plane)
                found[plane.name] = Placement(0, offset, ends[-1], self.bytes_per_slot)
            start += layers * ends[-1]
        return tuple(found[plane.name] for plane in self.planes)

    def table(self, slots: int = 1) -> list[PlaneRow]:
        """Where a slot has its bytes, a row per plane; `slots` decides layer_stride only. Raises: InvalidArgument."""
        return [
            PlaneRow(plane.name, plane.shape, plane.dtype, plane.nbytes, self.block_bytes(plane) - plane.nbytes, *place)
            for plane, place in zip(self.planes, self.placements(slots), strict=True)
        ]

    def shard(self, ranks: int) -> "StateLayout":
        """The layout that one of `ranks` tensor-parallel ranks holds; `Plane.owned` says which bytes are whose.

        Args:
            ranks: how many ranks there are.

        Raises:
            InvalidArgument: the units of a part and the ranks do not divide each other.
        """
        rows = None if self.rows is None else self.rows.shard(ranks)
        return replace(self, planes=tuple(plane.shard(ranks) for plane in self.planes), rows=rows)

    def runs(self, slots: int) -> tuple[Run, ...]:
        """The longest runs of bytes that make up a slot, with every block once in them. Raises: InvalidArgument."""
        slots = whole("slots", slots, least=0)
        if self.order == "slot_major":
            return (Run(0, 0, self.bytes_per_slot, self.bytes_per_slot),) if self.bytes_per_slot else ()
        return tuple(
            Run(place.arena, layer * place.layer_stride, place.slot_stride, place.slot_stride)
            for plane, place in zip(self.planes, self.placements(slots), strict=True)
            for layer in range(self.layers_of(plane))
            if place.slot_stride
        )

    def __repr__(self) -> str:
        padding = self.bytes_per_slot - self.payload_bytes_per_slot
        rows = f", {format_bytes(self.rows.bytes_per_slot)} per row" if self.rows else ""
        planes = ", ".join(plane.name + f" ({plane.layers} layers)" * bool(plane.layers) for plane in self.planes)
        return (
            f"StateLayout({planes} x {self.layers} layers, {self.order}, {format_bytes(self.bytes_per_slot)} per slot"
            f" with {format_bytes(padding)} padding{rows})"
        )

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        rows = self.table()
        planes = [of_bytes(row.name, row.payload, f"plane {at}") for at, row in enumerate(rows)]
        padding = of_bytes("padding", sum(row.padding for row in rows), "padding")
        return sheet(repr(self), [bar("one layer of one slot", [*planes, padding])], [self.plane_section()])

    def plane_section(self) -> Section:
        """Returns a table of the planes, for the sheets of layouts and of planes."""
        rows = [
            (row.name, f"{list(row.shape)} {str(row.dtype)[6:]}", f"{row.payload:,}", f"{row.padding:,}")
            for layout in (self, self.rows)
            if layout is not None
            for row in layout.table()
        ]
        return section("planes", ("plane", "shape", "bytes of a layer of a slot", "padding"), rows)


def _fill(plane: str, fill: float | None, dtype: torch.dtype) -> float | None:
    """The fill as the dtype has it. Raises: InvalidArgument for one that it cannot hold."""
    try:
        if fill is None or fill == 0:  # of every dtype
            return fill if fill is None else 0
        kept = torch.full((1,), fill, dtype=dtype, device="cpu").item()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(f"plane {plane}: fill {fill!r}, expected a number that {dtype} holds") from error
    if kept != fill:
        raise InvalidArgument(f"plane {plane}: fill {fill!r} is {kept} in {dtype}: expected a number that it holds")
    if dtype.itemsize > 8:
        raise InvalidArgument(f"plane {plane}: fill {fill!r} of {dtype}: only elements of up to 8 bytes can be filled")
    return kept


def _shape(plane: str, shape: Iterable[int]) -> tuple[int, ...]:
    """The sizes as ints. Raises: InvalidArgument with the plane's name."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (None,)
    if not all(is_whole(size) and size >= 0 for size in sizes):
        raise InvalidArgument(f"plane {plane}: shape {shape!r}, expected sizes of 0 or more")
    return tuple(int(size) for size in sizes)
