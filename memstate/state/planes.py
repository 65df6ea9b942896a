"""Holds the bytes of all slots, and moves them. Knows no free slot and no owner."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from memstate.checks import NotCopied, is_count
from memstate.errors import InvalidArgument
from memstate.kernels.configs import CopyConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import DeltaTail, SelectiveTail, StepMarks, TailRecord
from memstate.kernels.tuned import launch_of
from memstate.sheet import Sheet, Shown, bar, of_bytes, sheet
from memstate.sizes import MOST_SLOTS, MemoryPart, format_bytes, require_memory
from memstate.state.layout import Plane, StateLayout
from memstate.state.memory import Memory, RingTable, ring_names, rings_of
from memstate.state.regions import (
    BufferInfo,
    Region,
    adopt,
    allocated,
    buffer_infos,
    carve,
    require_apart,
    require_no_grad,
)

MOST_TAPS = 8  # a plane without a source holds windows if one of its axes is at most this long

Given = tuple[Any, Tensor | None]  # (a plane, tensor of the forward from which it gets its states)
NOTHING: Given = (None, None)


@dataclass
class Traffic:
    """Bytes that copies and zeroing of slots moved, padding included, as far as the host knows.

    Args:
        copied: bytes copied.
        zeroed: bytes zeroed.
    """

    copied: int = 0
    zeroed: int = 0


class _Naming:
    """A context that puts the operation and its planes in front of the error of a launch."""

    def __init__(self, operation: str, *planes: Plane | None) -> None:
        self.operation, self.planes = operation, planes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            planes = " and ".join(repr(plane) for plane in self.planes if plane is not None)
            raise InvalidArgument(f"{self.operation}{planes and f' of {planes}'}: {error}") from error


class Planes(Memory, NotCopied, Shown, Mapping[str, Any]):
    """The states of all slots: a mapping from plane names to tensors, and the operations that move slots.

    At first, all slots are undefined except the null slot (slot 0), which has zeros, or the fill of the plane.

    Operations run on the current stream of the planes' device, and a CUDA graph can hold them. If this is not the
    stream of the manager, the caller orders the two streams by events.

    Args:
        layout: the planes of a slot.
        slots: number of slots, without the null slot.
        backend: backend that launches the operations.
        allocate: function that returns a uint8 arena of a number of bytes (default: memstate allocates). It is called
            once per arena, in the order of `layout.arena_bytes`.
        rows: number of rows for `layout.rows`; 0 leaves the memory of rows out.

    Attributes:
        rows: the planes of `layout.rows`, with rows in place of slots; row 0 is null. None without memory of rows.

    Raises:
        InvalidArgument: no slots, more slots than the device has memory for, or no backend; nothing was allocated.
        LayoutMismatch: an arena does not fit.

    Example:
        >>> import torch
        >>> import memstate as ms
        >>> layout = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=3)
        >>> planes = ms.Planes(layout, 4, ms.Backend("reference"))
        >>> planes["ssm"].shape  # layer slot ...
        torch.Size([3, 5, 2])
        >>> planes["ssm"][:, 1] = 7.0
        >>> planes.copy(torch.tensor([2]), torch.tensor([1]))
        >>> planes.gather("ssm", torch.tensor([2]))[0].tolist()
        [[7.0, 7.0]]
    """

    def __init__(
        self, layout: StateLayout, slots: int, backend: Backend, allocate: Callable[[int], Tensor] | None = None,
        rows: int = 0,
    ) -> None:  # fmt: skip
        _require_backend(backend)
        if not is_count(slots) or not 1 <= slots <= MOST_SLOTS:
            raise InvalidArgument(f"slots={slots!r}: expected a whole number of slots from 1 to {MOST_SLOTS}")
        if allocate is None:
            needed = MemoryPart("planes", sum(layout.arena_bytes(slots)), "slots, or the sizes of the layout")
            require_memory(f"slots={slots}", [needed], backend.device, InvalidArgument)
        self.arenas = allocated(layout, slots, backend.device, allocate)
        regions = carve(layout, slots, self.arenas)
        if allocate:
            require_apart(buffer_infos(regions))
        # The values are `Any`: one tensor, or one per layer if an engine allocates so. self[name][layer] fits both.
        self._tensors: dict[str, Any] = {region.plane.name: region.tensor for region in regions}
        self._set_up(layout, slots, backend, regions, () if allocate else self.arenas, rows)

    @classmethod
    def from_tensors(
        cls, layout: StateLayout, tensors: Mapping[str, Tensor | Sequence[Tensor]], backend: Backend,
        slots: int | None = None, rows: int = 0,
    ) -> "Planes":  # fmt: skip
        """Returns the planes in memory that an engine has allocated, with any strides between slots and layers.

        Slot 0 is the null slot, so n slots need n + 1 entries. This call fills slot 0 with zeros, or the fill of the
        plane. memstate touches only the bytes of the planes, never the bytes between two blocks.

        Checked: names, layers, shape, dtype, device, the same number of slots everywhere, each layer of each slot
        contiguous, and that no two blocks share a byte (exact, from addresses and strides). Not checked: whether other
        tensors lie in between. Lanes move 16 bytes at a time if all addresses, strides and lengths are multiples of 16,
        otherwise 8, 4, 2 or 1, see `plane_map.unit`.

        Args:
            layout: names, shapes, dtypes and layers; the order and the alignment mean nothing here.
            tensors: plane name -> `layer slot ...`, or a sequence of `slot ...`, one per layer. Slot 0 is changed.
            backend: backend that launches the operations.
            slots: the expected number of slots; None accepts any.
            rows: number of rows, as in `Planes`, which allocates their memory.

        Raises:
            LayoutMismatch: says the plane, the layer and the numbers.
            InvalidArgument: a tensor requires grad.

        Syncs: no.
        """
        _require_backend(backend)
        regions = adopt(layout, tensors, backend.device, slots)
        planes = cls.__new__(cls)
        planes.arenas = ()
        planes._tensors = {name: one if isinstance(one, Tensor) else tuple(one) for name, one in tensors.items()}
        planes._set_up(layout, regions[0].tensor.shape[1] - 1, backend, regions, (), rows)
        return planes

    def _set_up(
        self, layout: StateLayout, slots: int, backend: Backend, regions: tuple[Region, ...],
        owned: tuple[Tensor, ...], rows: int,
    ) -> None:  # fmt: skip
        self.rows = Planes(layout.rows, rows, backend) if layout.rows is not None and rows else None
        super().__init__(regions, owned, backend, self.rows)
        self.layout, self.slots = layout, slots
        self.traffic = Traffic()
        self._rings: RingTable | None = None
        if self.rows is not None:
            names = ring_names(layout)
            if rings := [region for region in self.rows.regions if region.plane.name in names]:
                self._rings = RingTable(rings, self.device)
                self.follow(self._rings)
        self._gathered: dict[str, ref[Tensor]] = {}  # plane name -> the last gathered batch
        if backend.name != "reference":  # a bad tuned file is refused here, not in the first launch
            launch_of(CopyConfig, self.device, self.plane_map.unit, len(self.plane_map.tiles))
        self.scrub_null()

    def __getitem__(self, name: str) -> Any:
        """Returns a plane: a tensor `layer slot ...`, or a tuple of `slot ...` if an engine gave one tensor per layer.

        In both cases planes[name][layer] is one layer.

        Raises:
            Asleep: the memory is released; tensors from earlier calls must not be read either.
        """
        self.require_awake("planes")
        return self._tensors[name]

    def tail(self, name: str, layer: int) -> Any:
        """Returns the rings of a layer of a plane for its decode step: a `ConvTail`, `DeltaTail` or `SelectiveTail`.

        The rings are planes of rows with the names of the plane and of a field of the tuple, such as "ssm_k", as in
        presets with `tail=`.

        Args:
            name: name of the plane.
            layer: layer of the plane.

        Raises:
            InvalidArgument: rows have no tail of this plane, or the plane has no such layer.
            Asleep: the memory is released.
        """
        rows = self.rows if self.rows is not None else {}
        if kind_and_names := rings_of(name, rows):
            kind, names = kind_and_names
            rings = {field: rows[ring] for field, ring in names.items()}
            layers = min(map(len, rings.values()))
            if not 0 <= layer < layers:
                raise InvalidArgument(f"plane {name!r} has layers 0 to {layers - 1}, not {layer}")
            return kind(**{field: plane[layer] for field, plane in rings.items()})
        named = ", or ".join(
            " ".join(f"{name}_{field}" for field in kind._fields) for kind in (DeltaTail, SelectiveTail)
        )
        raise InvalidArgument(
            f"rows have no tail of plane {name!r}, but {sorted(rows)}: a preset with tail= has them, as planes of rows "
            f"{named}, or {name}_x"
        )

    def keep_path(self, record: TailRecord, nodes: Tensor) -> None:
        """Closes the gaps between accepted nodes of trees in the tails, in one launch; see `Backend.keep_path`.

        Args:
            record: record of the step.
            nodes: the accepted nodes of each entry, ascending, int32 or int64 `batch depth`.

        Raises:
            InvalidArgument: the nodes do not fit, or rows have no tails; nothing moved.
            Asleep: the memory is released; nothing moved.

        Syncs: no.
        """
        self.require_awake("keep_path")
        if self._rings is None:
            raise InvalidArgument("keep_path: rows have no tails: a preset with tail= has them, as planes of rows")
        with _Naming("keep_path"):
            self.backend.keep_path(self._rings.map, record, nodes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    __hash__ = object.__hash__  # planes are compared by identity, not by content
    __eq__ = object.__eq__

    @property
    def tailed(self) -> bool:
        """Whether rows have rings that decode steps take as tails."""
        return self._rings is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the states, null slot and padding included."""
        return sum(region.blocks.numel() for region in self.regions)

    def buffer_infos(self) -> list[BufferInfo]:
        """Returns where every plane and layer lies, for readers such as RDMA. Syncs: no. Raises: Asleep."""
        self.require_awake("buffer_infos")
        return buffer_infos(self.regions)

    def copy(
        self, dst: Tensor, src: Tensor, *, planes: Collection[str] | None = None, checked: bool = False,
        due: int | None = None,
    ) -> None:  # fmt: skip
        """Copies slots src[i] to dst[i] in one launch; see `Backend.copy_slots`.

        Args:
            dst: destination slot of each copy, int32 or int64 `n` on the planes' device.
            src: source slot of each copy, int32 or int64 `n` on the planes' device.
            planes: names of the planes to copy (default: all); a plane of whole numbers only with its scales.
            checked: whether to refuse, before the launch, unknown ids, and copies whose result depends on their order.
            due: number of entries that are not skipped, if the caller knows it.

        Raises:
            InvalidArgument: the ids do not fit; nothing moved.
            Asleep: the memory is released; nothing moved.

        Syncs: only if checked.
        """
        self.require_awake("copy")
        table = self.table_of(planes)
        self._require_ids("dst", dst)
        self._require_ids("src", src)
        if dst.numel() != src.numel():
            raise InvalidArgument(f"copy: {dst.numel()} destinations for {src.numel()} sources")
        if checked:
            self.backend.counts.syncs += 2
            check_disjoint(dst.tolist(), src.tolist(), self.slots)
        if dst.numel():
            self.backend.copy_slots(table.map, dst, src)
            self._count(table.slot_bytes, copied=due)

    def zero(self, ids: Tensor, *, due: int | None = None) -> None:
        """Fills slots with zeros, or the fill of each plane, in one launch; ids outside 1..slots are skipped.

        Args:
            ids: slots to fill, int32 or int64 `n` on the planes' device.
            due: number of entries that are not skipped, if the caller knows it.

        Raises:
            InvalidArgument: the ids do not fit; nothing moved.
            Asleep: the memory is released; nothing moved.

        Syncs: no.
        """
        self.require_awake("zero")
        self._require_ids("ids", ids)
        if ids.numel():
            self.backend.zero_slots(self.plane_map, ids)
            self._count(self.whole.slot_bytes, zeroed=due)

    def run_data(self, slots: Tensor, packet: Tensor, *, copied: int | None = None, zeroed: int | None = None) -> None:
        """Carries out the data section of a command packet in one launch, plus one for planes of rows.

        See `Backend.run_data` and `Backend.run_rows`.

        Args:
            slots: int32 `register`, the slot of each register.
            packet: int32, the packet.
            copied: number of slots that will be copied, if the caller knows it.
            zeroed: number of slots that will be filled with zeros or the planes' fills, if the caller knows it.

        Raises:
            Asleep: the memory is released; nothing moved.

        Syncs: no.
        """
        if self.asleep:
            self.require_awake("run_data")
        self.backend.run_data(self.plane_map, slots, packet)
        if self.rows is not None:
            self.backend.run_rows(self.rows.plane_map, packet)
        self._count(self.whole.slot_bytes, copied=copied, zeroed=zeroed)

    def count(self, planes: Collection[str] | None = None, *, copied: int = 0, zeroed: int = 0) -> None:
        """Counts slots that a captured graph copies or zeroes.

        Args:
            planes: names of the planes that the graph copies (default: all).
            copied: number of slots copied.
            zeroed: number of slots zeroed.
        """
        table = self.table_of(planes)
        self._count(table.slot_bytes, copied=copied, zeroed=zeroed)

    def gather(self, name: str, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns slots of a plane side by side, `layer batch ...`; the plane's fill for ids outside 1..slots.

        It takes one launch, or one per layer if an engine gave one tensor per layer.

        Args:
            name: name of the plane.
            slots: slots to copy, in the order of the batch, int32 or int64 `batch`.
            out: tensor for the result, contiguous (default: new memory).

        Raises:
            InvalidArgument: an unknown plane, or one whose numbers and scales are two planes, such as int8 states; ids
                or an `out` that do not fit it, with its name, shape and dtype.
            Asleep: the memory is released.

        Syncs: no.
        """
        self._require_both("gather", [name])
        return self._gather(name, slots, out)

    def _gather(self, name: str, slots: Tensor, out: Tensor | None = None) -> Tensor:
        regions = self.of(name, "gather")
        plane = regions[0].plane
        with _Naming("gather", plane):
            self._require_ids("slots", slots)
            if out is None:
                shape = (self.layout.layers_of(plane), slots.numel(), *plane.shape)
                out = torch.empty(shape, dtype=plane.dtype, device=self.device)
                self._gathered[name] = ref(out)
            elif isinstance(out, Tensor):
                require_no_grad("out", out)
            for region, part in self._beside(regions, "out", out):
                self.backend.gather_slots(region.tensor, slots, part, plane.pattern or 0)
        return out

    def scatter(self, name: str, slots: Tensor, batch: Tensor) -> None:
        """Copies a batch to slots of a plane; entries with an id outside 1..slots are skipped.

        Args:
            name: name of the plane, which is changed.
            slots: slot for each entry of the batch, int32 or int64 `batch`, distinct.
            batch: `layer batch ...`, contiguous. If it is the result of the last `gather` of the
                plane, it is not checked again.

        Raises:
            InvalidArgument, Asleep: as in `gather`.

        Syncs: no. Launches: as in `gather`.
        """
        self._require_both("scatter", [name])
        self._scatter(name, slots, batch)

    def _scatter(self, name: str, slots: Tensor, batch: Tensor) -> None:
        regions = self.of(name, "scatter")
        with _Naming("scatter", regions[0].plane):
            self._require_ids("slots", slots)
            known = self._gathered.get(name)
            trusted = known is not None and known() is batch and slots.shape[0] == batch.shape[1]
            for region, part in self._beside(regions, "batch", batch):
                self.backend.scatter_slots(region.tensor, slots, part, trusted)

    def save(self, slots: Tensor) -> dict[str, Tensor]:
        """Copies slots to host memory, in one call for all planes.

        Args:
            slots: slots to copy, int32 or int64 `batch` on the planes' device.

        Returns:
            Plane name -> `layer batch ...` in host memory, as from `gather`.

        Raises:
            InvalidArgument: the ids do not fit.
            Asleep: the memory is released.

        Syncs: yes, once for each plane.
        """
        gathered = {name: self._gather(name, slots) for name in self}
        self.backend.counts.syncs += len(gathered)
        return {name: batch.cpu() for name, batch in gathered.items()}

    def load(self, saved: Mapping[str, Tensor], slots: Tensor) -> None:
        """Copies the result of `save` to slots, in one call for all planes.

        Args:
            saved: plane name -> batch, as `save` returned it.
            slots: slot for each entry, int32 or int64 `batch`, distinct; an id outside 1..slots skips the entry.

        Raises:
            InvalidArgument: planes are missing or unknown, or a batch or the ids do not fit; nothing moved.
            Asleep: the memory is released; nothing moved.

        Syncs: no.
        """
        if saved.keys() != set(self):
            raise InvalidArgument(f"saved planes {sorted(saved)}: expected {sorted(self)}, as save() returns them")
        self._require_ids("slots", slots)
        for name, region in ((region.plane.name, region) for region in self.regions):
            shape = (self.layout.layers_of(region.plane), slots.numel(), *region.plane.shape)
            if tuple(saved[name].shape) != shape or saved[name].dtype != region.plane.dtype:
                raise InvalidArgument(
                    f"saved plane {name!r} {tuple(saved[name].shape)} {saved[name].dtype}: expected {shape} "
                    f"{region.plane.dtype}"
                )
        for name in self:
            self.backend.counts.uploads += 1
            self._scatter(name, slots, saved[name].to(self.device, non_blocking=True).contiguous())

    def scatter_states(
        self, sources: Mapping[str, Tensor], marks: StepMarks, starts: Tensor, read: Tensor, write: Tensor, *,
        first: Tensor | None = None, chunk: int = 64, transposed: bool = False,
    ) -> None:  # fmt: skip
        """Stores the states at the marks of a step whose forward has kernels of its own; see `Backend.scatter_states`.

        A plane of states and a plane of convolution windows share a launch. So most models take one launch, or one per
        layer if an engine gave one tensor per layer. A plane without a source keeps only states at the end of an
        entry's tokens.

        Args:
            sources: plane name -> output of its forward: the states before pieces, `layer piece ...`, or for windows
                the packed inputs, `layer token channel`.
            marks: marks of the step, `Step.marks`.
            starts: the first packed token of each entry, then the number of all tokens, int32 or int64 `batch+1`.
            read: slot that the step read for each entry, int32 or int64 `batch`, `Step.read`.
            write: slot that the step wrote for each entry, int32 or int64 `batch`, `Step.write`.
            first: the first piece of each entry, then the number of all pieces, int32 or int64 `batch+1`; None if
                pieces begin at multiples of `chunk` of the packed batch.
            chunk: tokens of a piece.
            transposed: whether the last two axes of the sources are swapped, compared with those of the plane.

        Raises:
            InvalidArgument: an unknown plane, or arguments that do not fit the planes of a launch; names the planes.
            Asleep: the memory is released.

        Syncs: no.
        """
        self.require_awake("scatter_states")
        for name in sources:
            self.of(name, "scatter_states")
            self._require_both("scatter_states", [name])
        states: list[tuple[Plane | None, list[Given]]] = []
        windows: list[tuple[Plane | None, list[Given]]] = []
        for plane in self.layout.planes:
            regions, source = self.of(plane.name, "scatter_states"), sources.get(plane.name)
            if source is None:
                parts: list[Given] = [(region.tensor, None) for region in regions]
            else:
                with _Naming("scatter_states", plane):
                    parts = [(region.tensor, part) for region, part in self._beside(regions, plane.name, source)]
            if _holds_windows(plane, source):
                windows.append((plane, [(_with_taps_first(tensor, part), part) for tensor, part in parts]))
            else:
                states.append((plane, parts))
        for (plane_of, one), (conv_of, other) in zip_longest(states, windows, fillvalue=(None, list[Given]())):
            apart = [*((part, NOTHING) for part in one), *((NOTHING, part) for part in other)]
            for (states_of, h), (conv, inputs) in zip(one, other, strict=True) if len(one) == len(other) else apart:
                with _Naming("scatter_states", plane_of, conv_of):
                    self.backend.scatter_states(
                        marks, starts, read, write, states_of, h, first, chunk, transposed, conv, inputs
                    )  # fmt: skip

    def _beside(self, regions: Sequence[Region], what: str, tensor: Tensor) -> list[tuple[Region, Tensor]]:
        """Returns (region, part of a tensor `layer ...` that has the layers of this region) for each region."""
        if not isinstance(tensor, Tensor):
            raise InvalidArgument(f"{what}: {type(tensor).__name__}, expected a tensor `layer ...`")
        layers = self.layout.layers_of(regions[0].plane)
        if tensor.dim() < 1 or tensor.shape[0] != layers:
            raise InvalidArgument(f"{what}: {tuple(tensor.shape)}, expected {layers} layers first")
        if len(regions) == 1:
            return [(regions[0], tensor)]
        return [(region, tensor[region.first : region.first + region.tensor.shape[0]]) for region in regions]

    def _count(self, slot_bytes: int, copied: int | None = None, zeroed: int | None = None) -> None:
        self.traffic.copied += (copied or 0) * slot_bytes
        self.traffic.zeroed += (zeroed or 0) * slot_bytes

    def _require_ids(self, name: str, ids: Tensor) -> None:
        if not isinstance(ids, Tensor):
            raise InvalidArgument(f"{name}={ids!r}: expected a tensor of slot ids on {self.device}")
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
            raise InvalidArgument(
                f"{name}: {ids.dtype} {tuple(ids.shape)} with strides {ids.stride()},"
                " expected a contiguous vector of int32 or int64 slot ids"
            )
        if ids.device != self.device:
            raise InvalidArgument(f"{name}: ids on {ids.device}, the planes are on {self.device}: move them first")

    def __repr__(self) -> str:
        return f"Planes({self.slots} slots + null, {format_bytes(self.nbytes)}, {self.layout.order}, {self.device})"

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        layout, null = self.layout, self.nbytes // (self.slots + 1)
        payload = {plane.name: plane.nbytes * layout.layers_of(plane) * self.slots for plane in layout.planes}
        parts = [of_bytes(name, count, f"plane {at}") for at, (name, count) in enumerate(payload.items())]
        parts.append(of_bytes("padding", self.nbytes - null - sum(payload.values()), "padding"))
        parts.append(of_bytes("null slot", null, "null slot"))
        copied, zeroed = format_bytes(self.traffic.copied), format_bytes(self.traffic.zeroed)
        notes = ["The states sleep: their memory is released."] if self.asleep else []
        notes.append(f"Copied {copied}, zeroed {zeroed} by memstate's own launches.")
        title = f"{self.slots:,} slots of {format_bytes(layout.bytes_per_slot)} and the null slot"
        return sheet(repr(self), [bar(title, parts)], [layout.plane_section()], notes=notes)


def _holds_windows(plane: Plane, source: Tensor | None) -> bool:
    """Returns whether a plane holds windows, by its source or, without a source, by its shape."""
    if len(plane.shape) != 2:
        return False
    return source.dim() == 3 if isinstance(source, Tensor) else min(plane.shape) <= MOST_TAPS


def _with_taps_first(plane: Tensor, inputs: Tensor | None) -> Tensor:
    """Returns windows as `layer slot tap-1 channel`, whatever the order of the plane."""
    first, second = plane.shape[2:]
    exchanged = first > second if inputs is None else second != inputs.shape[2]
    return plane.transpose(2, 3) if exchanged else plane


def _require_backend(backend: Backend) -> None:
    if not isinstance(backend, Backend):
        raise InvalidArgument(f"backend={backend!r}: expected a Backend, such as memstate.Backend('auto', device)")


def check_disjoint(dst: Sequence[int], src: Sequence[int], slots: int) -> None:
    """Refuses copies whose result would depend on their order; skipped entries do not count.

    Args:
        dst: destination slot of each entry.
        src: source slot of each entry.
        slots: the highest id.

    Raises:
        InvalidArgument: names the ids.
    """
    if unknown := sorted({slot for slot in (*dst, *src) if slot > slots}):
        raise InvalidArgument(f"copy: ids {unknown} name no slot, the highest is {slots}")
    due = [(to, of) for to, of in zip(dst, src, strict=True) if to > 0 and of > 0 and to != of]
    if twice := sorted(slot for slot, times in Counter(to for to, _ in due).items() if times > 1):
        raise InvalidArgument(f"copy: slots {twice} are destinations more than once: chance would pick the last writer")
    if both := sorted({to for to, _ in due} & {of for _, of in due}):
        raise InvalidArgument(f"copy: slots {both} are source and destination at once: copy in two calls")
