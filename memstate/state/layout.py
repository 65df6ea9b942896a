"""Describes the planes of a slot, and computes byte offsets of its blocks. Knows no memory and no device.

    layer_major   one arena per plane   layer slot [block .. pad]         a plane of one layer is one dense tensor
    slot_major    one arena             slot layer plane [block .. pad]   a slot, and each of its layers, is one run

In slot_major, planes with the same number of layers lie together as `layer plane`, one such group behind the other.

A block is one plane of one layer of one slot, padded to `alignment`, so that lanes can always move 16 bytes at a time.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm, prod
from types import EllipsisType
from typing import Literal, NamedTuple, get_args

import torch

from memstate.checks import is_whole, items, require_name, whole
from memstate.errors import InvalidArgument
from memstate.sheet import Sheet, SheetSection, Shown, Table, bar, of_bytes, section, sheet
from memstate.sizes import INT64_MAX, format_bytes
from memstate.state.sharding import Owned, Part

Order = Literal["layer_major", "slot_major"]
MOVE_BYTES = 16  # bytes that one lane of a kernel moves at a time
NEVER = 2**31  # more tokens than any request has
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of states that decode steps take without scales
NUMBERS = (torch.int16, torch.int8)  # dtypes of states of whole numbers, which have scales: see `scales_in`


@dataclass(frozen=True, repr=False)
class Plane:
    """One named tensor of the state.

    Args:
        name: name of the plane, such as "conv" or "ssm".
        shape: elements per slot and layer; () is one element, a zero makes the plane empty.
        dtype: dtype of the elements.
        rewritten_each_step: whether a step computes every element anew. If not, the plane is copied before a step that
            reads one slot and writes another.
        parts: the parts that tensor parallelism cuts along `axis`, in the order of memory. Without parts, every rank
            holds the whole plane.
        axis: the axis that is cut.
        order: name of the order of the axes, such as "value_key", which the shape may not show. A state that was stored
            in one order does not match a layout with another order.
        layers: number of layers of the model that hold this plane (default: that of the layout). 1 for data that a
            request has once, such as its last tokens.
        fill: initial value of every element, in the null slot and in slots that are made fresh. None if nothing fills
            the plane, because every element is written before it is read.
        grid: number of tokens. The state can be kept and found again only at multiples of this number, because the
            plane is incomplete at other lengths. None if the plane is always incomplete.

    Raises:
        InvalidArgument: a name, size, dtype, fill or order is invalid, or the parts do not add up to the axis.

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
        """Refuses parts that do not add up to one axis of the shape."""
        parts, axis, who = self.parts, self.axis, f"plane {self.name}"
        names = [part.name for part in parts]
        if len(set(names)) != len(names):
            raise InvalidArgument(f"{who}: parts {names}, expected each name once")
        axes = len(self.shape) if parts else 1  # without parts, `axis` must be 0
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
        """The 64 bits that fill memory again and again, as a signed number; 0 for zeros, None without a fill."""
        if not self.fill:
            return self.fill if self.fill is None else 0
        element = torch.full((1,), self.fill, dtype=self.dtype, device="cpu").view(torch.uint8)
        return int.from_bytes(bytes(element.tolist()) * (8 // self.dtype.itemsize), sys.byteorder, signed=True)

    def shard(self, ranks: int) -> "Plane":
        """Returns the plane of one of `ranks` ranks; `owned` says which elements the rank holds.

        Each rank holds an equal share of the units of a part. With more ranks than units, several ranks hold the same
        unit.

        Args:
            ranks: number of ranks.

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
        """Returns the slice of each part along `axis`, by the name of the part; empty for a plane without parts."""
        ends = accumulate(part.length for part in self.parts)
        return {part.name: slice(end - part.length, end) for part, end in zip(self.parts, ends, strict=True)}

    def owned(self, ranks: int, rank: int) -> list[Owned]:
        """Returns the slices along `axis` of this plane that a rank holds, and their places in `shard(ranks)`.

        With more ranks than units, neighbouring ranks hold the same unit. Heads and groups are cut the same way, so
        heads stay with their group. For a plane without parts, there is one entry: the plane's name and the whole axis.

        Args:
            ranks: number of ranks.
            rank: number of the rank, from 0.

        Raises:
            InvalidArgument: there is no such rank, or the ranks do not divide the units of a part.
        """
        local = self.shard(ranks).slices()
        if not is_whole(rank) or not 0 <= rank < ranks:
            raise InvalidArgument(f"plane {self.name}: rank {rank!r}, expected 0 to {ranks - 1}")
        held, uncut, rank, ranks = list[Owned](), self.slices(), int(rank), int(ranks)
        for part in self.parts:
            first, mine = uncut[part.name].start + rank * part.units // ranks * part.size, local[part.name]
            held.append(Owned(part.name, slice(first, first + mine.stop - mine.start), mine))
        return held or [Owned(self.name, slice(None), slice(None))]

    def scales(self, axis: int) -> "Plane":
        """Returns the plane of the scales of this plane of whole numbers: one of fp32 for all elements along `axis`.

        Ranks cut it like this plane, so `axis` lies behind the one that they cut.
        """
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        return replace(self, name=f"{self.name}_scale", shape=shape, dtype=torch.float32, order="")

    def index(self, along: slice) -> tuple[EllipsisType | slice, ...]:
        """Returns the index of a slice along `axis`, for a tensor whose last axes are those of this plane."""
        if not self.shape:
            return (...,)
        return (..., along, *[slice(None)] * (len(self.shape) - self.axis - 1))

    def __repr__(self) -> str:
        sizes, dtype = ",".join(map(str, self.shape)), _dtype(self.dtype)
        parts = " | ".join(f"{part.name} {part.units}*{part.size}" for part in self.parts)
        fill = f"filled with {self.fill}" if self.fill else "never made fresh" if self.fill is None else ""
        layers = f"{self.layers} layers" if self.layers else ""
        grid = "" if self.grid == 1 else f"whole every {self.grid} tokens" if self.grid else "never whole"
        told = "".join(f"{part}, " for part in (self.order, parts, layers, fill, grid) if part)
        return f"Plane({self.name}[{sizes}] {dtype}, {told}{format_bytes(self.nbytes)} per layer)"


class PlaneStrides(NamedTuple):
    """Where the blocks of a plane lie, in bytes.

    A block starts at arena[offset + layer * layer_stride + slot * slot_stride].
    """

    arena: int
    offset: int
    layer_stride: int
    slot_stride: int


class PlaneRow(NamedTuple):
    """A plane as a row of a table: the bytes of one block, and the `PlaneStrides` of its blocks.

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
    """Bytes that are contiguous in every slot: `nbytes` from arena[offset + slot * slot_stride] on."""

    arena: int
    offset: int
    slot_stride: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class StateLayout(Shown):
    """The planes of a state, its layers and their physical order.

    Args:
        planes: one or more, each name once.
        layers: number of layers that hold state. A plane without `layers` of its own exists once in each of them.
        order: "layer_major" or "slot_major".
        alignment: every block starts and ends at a multiple of this many bytes from the start of its arena; a multiple
            of 16.
        rows: planes with one entry per row, `layer row ...`, for data that belongs to a request and not to a slot, such
            as its inputs since the last complete state. An entry has its initial values when a request starts, is
            copied by a fork, and is never published.

    Raises:
        InvalidArgument: a value is invalid.

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
        self._require_scales()
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

    def _require_scales(self) -> None:
        """Refuses scales that do not lie and move like the numbers that they belong to."""
        named = {plane.name: plane for plane in self.planes}
        for numbers, scales in ((named[one], named[other]) for one, other in scales_in(self.planes).items()):
            first = numbers.axis + bool(numbers.parts)
            if scales not in map(numbers.scales, range(first, len(numbers.shape))):
                raise InvalidArgument(
                    f"{scales!r} has the scales of {numbers!r}: expected its shape without an axis behind {first - 1}, "
                    "float32, and the same parts, layers, fill and grid; or another name"
                )

    def layers_of(self, plane: Plane) -> int:
        """Returns the number of layers of a plane."""
        return plane.layers or self.layers

    @property
    def grid(self) -> int:
        """The least number of tokens at whose multiples all planes can be kept; `NEVER` if a plane never can."""
        return min(NEVER, lcm(*(plane.grid or NEVER for plane in self.planes)))

    def block_bytes(self, plane: Plane) -> int:
        """Returns the bytes of a plane per slot and layer, padding included."""
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
        """Returns the bytes of each arena for `slots` slots and the null slot. Raises: InvalidArgument."""
        slots = whole("slots", slots, least=0)
        if self.order == "slot_major":
            return ((slots + 1) * self.bytes_per_slot,)
        return tuple(self.layers_of(plane) * (slots + 1) * self.block_bytes(plane) for plane in self.planes)

    def placements(self, slots: int) -> tuple[PlaneStrides, ...]:
        """Returns where each plane lies in arenas of `slots` slots and the null slot. Raises: InvalidArgument."""
        slots = whole("slots", slots, least=0)
        blocks = [self.block_bytes(plane) for plane in self.planes]
        if self.order == "layer_major":
            return tuple(PlaneStrides(i, 0, (slots + 1) * block, block) for i, block in enumerate(blocks))
        places, start = dict[str, PlaneStrides](), 0
        for layers in dict.fromkeys(map(self.layers_of, self.planes)):
            alike = [plane for plane in self.planes if self.layers_of(plane) == layers]
            ends = [*accumulate(map(self.block_bytes, alike))]
            for plane, end in zip(alike, ends, strict=True):
                offset = start + end - self.block_bytes(plane)
                places[plane.name] = PlaneStrides(0, offset, ends[-1], self.bytes_per_slot)
            start += layers * ends[-1]
        return tuple(places[plane.name] for plane in self.planes)

    def table(self, slots: int = 1) -> Table[PlaneRow]:
        """Returns where each plane lies in a slot; only layer_stride depends on `slots`. Raises: InvalidArgument."""
        rows = [
            PlaneRow(plane.name, plane.shape, plane.dtype, plane.nbytes, self.block_bytes(plane) - plane.nbytes, *place)
            for plane, place in zip(self.planes, self.placements(slots), strict=True)
        ]
        return Table(rows, f"bytes of a block, and where blocks lie with slots={slots}", {"dtype": _dtype})

    def shard(self, ranks: int) -> "StateLayout":
        """Returns the layout of one of `ranks` tensor-parallel ranks; `Plane.owned` says what each rank holds.

        Args:
            ranks: number of ranks.

        Raises:
            InvalidArgument: the units of a part and the ranks do not divide each other.
        """
        rows = None if self.rows is None else self.rows.shard(ranks)
        return replace(self, planes=tuple(plane.shard(ranks) for plane in self.planes), rows=rows)

    def runs(self, slots: int) -> tuple[Run, ...]:
        """Returns the runs of bytes of a slot, as few as possible; no run cuts a block. Raises: InvalidArgument."""
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
        unfolded = self.plane_section()._replace(title="")
        return sheet(repr(self), [bar("one layer of one slot", [*planes, padding])], [unfolded])

    def plane_section(self) -> SheetSection:
        """Returns a table of the planes, for the sheets of layouts and of planes."""
        rows = [
            (row.name, f"{list(row.shape)} {_dtype(row.dtype)}", f"{row.payload:,}", f"{row.padding:,}")
            for layout in (self, self.rows)
            if layout is not None
            for row in layout.table()
        ]
        return section("planes", ("plane", "shape", "bytes of a layer of a slot", "padding"), rows)


def scales_in(planes: Sequence[Plane]) -> dict[str, str]:
    """Returns plane of whole numbers -> plane of its scales. The two are one state, so nothing moves one alone."""
    names = {plane.name for plane in planes}
    return {one.name: scale for one in planes if one.dtype in NUMBERS and (scale := f"{one.name}_scale") in names}


def _dtype(dtype: torch.dtype) -> str:
    """Returns the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def _fill(plane: str, fill: float | None, dtype: torch.dtype) -> float | None:
    """Returns the fill as the dtype holds it. Raises: InvalidArgument if the dtype cannot hold it."""
    try:
        if fill is None or fill == 0:  # every dtype holds 0
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
    """Returns the sizes as ints. Raises: InvalidArgument with the plane's name."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (None,)
    if not all(is_whole(size) and size >= 0 for size in sizes):
        raise InvalidArgument(f"plane {plane}: shape {shape!r}, expected sizes of 0 or more")
    return tuple(int(size) for size in sizes)
