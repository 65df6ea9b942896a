"""Moving slots to and from records tile by tile: the oracle of `memstate.kernels.pack` and the path without Triton."""

from collections.abc import Iterator

import torch
from torch import Tensor

from memstate.kernels.checks import INT32, blocks_of, check_apart, check_columns, check_memory, check_tensors
from memstate.kernels.tables import RecordMap

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.reference.pack, not kernels.reference.pack: it would be there twice")

RECORD_ALIGNMENT = 16  # bytes of which addresses of records and their distance are multiples


def pack_slots(
    records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor, first: int, count: int
) -> None:
    """Copies slots into records; see `memstate.kernels.pack.pack_slots`. Syncs: yes, off the CPU."""
    check_arguments(records, slots, index, places, "out", out, first, count)
    for place, slot, offset, block in _moves(records, slots, index, places, out, first, count):
        target = out[place, offset : offset + block.shape[1]]
        target.copy_(block[slot]) if slot else target.zero_()


def unpack_slots(
    records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor, first: int, count: int
) -> None:
    """Copies records into slots; see `memstate.kernels.pack.unpack_slots`. Syncs: yes, off the CPU."""
    check_arguments(records, slots, index, places, "source", source, first, count)
    for place, slot, offset, block in _moves(records, slots, index, places, source, first, count):
        if slot:
            block[slot].copy_(source[place, offset : offset + block.shape[1]])


def entries(slots: Tensor | None, index: Tensor, places: Tensor, held: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Place and slot of each entry that has a place among `held` records; slot 0 where it has none. Syncs: yes."""
    found = None if slots is None else slots.tolist()
    for at, place in zip(index.tolist(), places.tolist(), strict=True):
        slot = at if found is None else found[at] if 0 < at < len(found) else 0
        if 0 <= place < held:
            yield place, slot if 0 < slot <= capacity else 0


def _moves(
    records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, held: Tensor, first: int, count: int
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Place, slot, offset in the body, and the bytes `slot byte` of every tile of every entry with a place."""
    pieces = records.pieces[first : first + count]
    for place, slot in entries(slots, index, places, len(held), capacity_of(records)) if pieces else ():
        for block, layer, start, length, offset in pieces:
            yield place, slot, offset, records.blocks[block][layer, :, start : start + length]


def capacity_of(records: RecordMap) -> int:
    """The highest slot there is; 0 where no plane has bytes."""
    return records.blocks[0].shape[1] - 1 if records.blocks else 0


def check_arguments(
    records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, name: str, held: Tensor, first: int,
    count: int,
) -> None:  # fmt: skip
    """Raises: ValueError naming the first argument that does not fit; `name` is that of the records, `held`."""
    check_entries(records.tiles.device, slots, index, places, name, held, records.nbytes)
    check_range("tiles", first, count, records.tiles.shape[0])
    check_outside(name, held, records.blocks)


def check_range(what: str, first: int, count: int, total: int) -> None:
    """Raises: ValueError unless first .. first+count-1 are among `total`."""
    if not 0 <= first <= first + count <= total:
        raise ValueError(f"{what} {first} to {first + count - 1}: expected from 0 to {total - 1}")


def check_entries(
    device: torch.device, slots: Tensor | None, index: Tensor, places: Tensor, name: str, held: Tensor, nbytes: int
) -> None:
    """Raises: ValueError unless the columns are on a device, and `held` are records of `nbytes` bytes, on that device
    or in pinned memory of the host, with nothing of the columns in them.
    """
    columns = {"slots": slots, "index": index, "places": places}
    check_tensors(columns | {name: held}, "slots")
    if slots is not None:
        check_columns(device, None, INT32, slots=slots)
    check_columns(device, None, index=index, places=places)
    if held.dtype is not torch.uint8 or held.dim() != 2 or held.shape[1] != nbytes:
        raise ValueError(f"{name}: expected uint8 `record byte` = (records, {nbytes}), got {held.dtype} {_shape(held)}")
    if held.device.type == "cpu" != device.type:
        if held.numel() and not held.is_pinned():
            raise ValueError(f"{name}: host memory that {device} cannot reach: allocate it with pin_memory=True")
    else:
        check_memory(name, held, device)
    stride = held.stride(0) if len(held) > 1 else 0  # that of a single record means nothing
    if held.numel() and ((held.stride(1) != 1 and nbytes > 1) or (held.data_ptr() | stride) % RECORD_ALIGNMENT):
        raise ValueError(
            f"{name}: expected records of contiguous bytes, at multiples of {RECORD_ALIGNMENT}, got address "
            f"{held.data_ptr():#x} and strides {held.stride()}"
        )
    if name == "out" and held.numel() and len(held) > 1 and stride < nbytes:
        raise ValueError(f"out: records of {nbytes} bytes lie {stride} bytes apart: what one stores another has")
    check_apart(name, blocks_of(held, 1), columns)


def check_outside(name: str, held: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Raises: ValueError where records share bytes with planes `layer slot ...`."""
    if not held.numel() or (planes and planes[0].device != held.device):
        return
    start, nbytes, step = held.data_ptr(), held.shape[1], held.stride(0)
    end = start + (len(held) - 1) * step + nbytes
    for plane in planes:
        blocks = blocks_of(plane, 2)
        if blocks.start < end and start < blocks.end():
            for place in range(len(held)):
                if blocks.meets(start + place * step, start + place * step + nbytes):
                    raise ValueError(f"{name}: record {place} shares bytes with a plane: give it memory of its own")


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))
