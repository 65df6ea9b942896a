"""Moves slots to and from records, tile by tile, in plain torch.

Tests compare `memstate.kernels.pack` with this reference, which replaces the kernels where Triton is missing.
"""

from collections.abc import Iterator

from torch import Tensor

from memstate.kernels.move_checks import check_pack
from memstate.kernels.tables import RecordMap


def pack_slots(records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor) -> None:
    """Copies slots into records, bit for bit: `out[places[b]]` gets entry b.

    An entry without a slot, or with an id outside 1..capacity, gives zeros. An entry whose place is outside 0..record-1
    is skipped. Two entries may have the same slot, but not the same place: the order of entries is not defined.

    Args:
        records: where the bytes of a slot lie in memory, and in a record.
        slots: int32 `register`; entry b is the slot in register index[b]. Registers that are 0, negative or unknown
            have no slot. If `slots` is None, index[b] is the slot itself, or the page.
        index: register of each entry, or its slot or page, int32 or int64 `batch`.
        places: number of the record of each entry, int32 or int64 `batch`.
        out: uint8 `record byte`, bodies of records: `records.nbytes` contiguous bytes each. The stride is any multiple
            of 16. On the device of the planes, or in pinned host memory. Changed, except bytes of padding.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; `out` shares bytes with another tensor; or
            records of `out` share bytes.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_pack(records, slots, index, places, "out", out)
    for place, slot, offset, block in _moves(records, slots, index, places, out):
        target = out[place, offset : offset + block.shape[1]]
        target.copy_(block[slot]) if slot else target.zero_()


def unpack_slots(records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor) -> None:
    """Copies records into slots, bit for bit: entry b gets `source[places[b]]`.

    Entries without a slot or without a place are skipped. Two entries may have the same place, but not the same slot.

    Args:
        records: where the bytes of a slot lie in memory, and in a record. The planes are changed.
        slots: slot of each register, int32 `register`; None if `index` has slots or pages.
        index: register of each entry, or its slot or page, int32 or int64 `batch`.
        places: number of the record of each entry, int32 or int64 `batch`.
        source: bodies of records, like `out` of `pack_slots`.

    Raises:
        ValueError: as in `pack_slots`.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_pack(records, slots, index, places, "source", source)
    for place, slot, offset, block in _moves(records, slots, index, places, source):
        if slot:
            block[slot].copy_(source[place, offset : offset + block.shape[1]])


def entries(slots: Tensor | None, index: Tensor, places: Tensor, held: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Yields (place, slot or 0) of each entry that has a place among `held` records. Syncs: yes."""
    held_slots = None if slots is None else slots.tolist()
    for at, place in zip(index.tolist(), places.tolist(), strict=True):
        slot = at if held_slots is None else held_slots[at] if 0 < at < len(held_slots) else 0
        if 0 <= place < held:
            yield place, slot if 0 < slot <= capacity else 0


def _moves(
    records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, held: Tensor
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yields (place, slot, offset in the body, bytes `slot byte`) of every tile of every entry with a place."""
    for place, slot in entries(slots, index, places, len(held), records.capacity) if records.pieces else ():
        for block, layer, start, length, offset in records.pieces:
            yield place, slot, offset, records.blocks[block][layer, :, start : start + length]
