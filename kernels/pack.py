"""Moves slots to and from records, all planes and layers in one persistent launch. Knows no plane by name and no key.

A record holds a slot as one run of bytes, in device or host memory. Its body has the planes of each layer in turn:

    body    layer 0 [conv .. pad | ssm .. pad]  layer 1 [conv .. pad | ssm .. pad]  ...

The kernel does not move padding. An item of work is (entry, tile); programs take items in turn, as in
`memstate.kernels.copy`. Lanes that move bytes to or from the host wait for its bus. A few programs keep the bus busy;
more would only take multiprocessors from the model.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.configs import PackConfig
from memstate.kernels.copy import WORDS, key_sizes
from memstate.kernels.kept import unspecialised
from memstate.kernels.move_checks import check_pack
from memstate.kernels.slots import known_slot
from memstate.kernels.tables import ACCESS_BYTES, RECORD_ALIGNMENT, RecordMap
from memstate.kernels.tuned import launch_of
from memstate.kernels.warps import limit, roomy

HOST_PROGRAMS = 32  # programs that fill the PCIe 5 link to host memory; more would slow the model
ALIGNMENT = tl.constexpr(RECORD_ALIGNMENT)


@triton.jit
def due_entries(
    slots_ptr, index_ptr, places_ptr, start, n, registers, capacity, held, PACK: tl.constexpr, ENTRIES: tl.constexpr
):
    """Returns, for the entries from `start` on, (whether each is due, its `place << 32 | slot`); slot 0 is no slot."""
    index = start + tl.arange(0, ENTRIES)
    place = tl.load(places_ptr + index, mask=index < n, other=-1)
    slot = tl.load(index_ptr + index, mask=index < n, other=0)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + slot, mask=(slot > 0) & (slot < registers), other=0)
    slot = known_slot(slot, capacity)
    due = (place >= 0) & (place < held)
    if not PACK:
        due = due & (slot != 0)
    return due, (place.to(tl.int64) << 32) | slot


@triton.jit
def _move_tile(tiles, tile, records_ptr, place, slot, record_units, PACK: tl.constexpr, UNIT: tl.constexpr,
               WORD: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    """Moves one tile between slot and record; the null slot gives zeros."""
    PER_UNIT: tl.constexpr = UNIT * 8 // WORD.primitive_bitwidth
    start = tl.load(tiles + 4 * tile)
    stride = tl.load(tiles + 4 * tile + 1)
    length = tl.load(tiles + 4 * tile + 2)
    offset = tl.load(tiles + 4 * tile + 3)
    words = (length // UNIT * PER_UNIT).to(tl.int32)  # so the compiler sees that no mask below cuts a unit
    body = records_ptr + (place * record_units * ALIGNMENT + offset)
    in_slot = tl.multiple_of((start + slot * stride).to(tl.pointer_type(WORD)), UNIT)
    in_record = tl.multiple_of(body.to(tl.pointer_type(WORD)), UNIT)
    for at in range(0, words, LANES):
        index = at + tl.arange(0, LANES)
        if PACK:
            # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
            bits = tl.load(in_slot + index, mask=tl.where(slot != 0, index < words, False), other=0)
            tl.store(in_record + index, bits, mask=index < words)
        else:
            tl.store(in_slot + index, tl.load(in_record + index, mask=index < words), mask=index < words)


@unspecialised("tiles")
def _move_records(
    tiles, slots_ptr, index_ptr, places_ptr, records_ptr, n, first, count, registers, capacity, held, record_units,
    PACK: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    for start in range(0, n, ENTRIES):
        due, pair = due_entries(slots_ptr, index_ptr, places_ptr, start, n, registers, capacity, held, PACK, ENTRIES)
        rank = tl.cumsum(due.to(tl.int32), 0) - 1
        items = tl.sum(due.to(tl.int32), 0) * count
        while item < items:
            chosen = tl.sum(tl.where(due & (rank == item // count), pair, 0), 0)
            place, slot = chosen >> 32, chosen & 0x7FFFFFFF
            _move_tile(tiles, first + item % count, records_ptr, place, slot, record_units, PACK, UNIT, WORD, LANES)
            item += tl.num_programs(0)
        item -= items


def programs_of(tuned: int, planes: torch.device, held: torch.device) -> int:
    """Returns the programs of a launch: `tuned`, but at most `HOST_PROGRAMS` if only the records are in host memory."""
    return min(tuned, HOST_PROGRAMS) if held.type == "cpu" != planes.type else tuned


def _launch(records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, held: Tensor, pack: bool) -> None:
    device, (unit, count) = records.tiles.device, key_sizes(records)
    if not (count and index.numel() and held.numel()):
        return
    tuned, config = launch_of(PackConfig, device, unit, count)
    _move_records[(programs_of(tuned, device, held.device),)](
        records.tiles, slots, index, places, held, index.numel(), 0, count,
        0 if slots is None else slots.numel(), records.capacity, len(held),
        held.stride(0) // RECORD_ALIGNMENT if len(held) > 1 else 0,
        PACK=pack, UNIT=unit, WORD=WORDS[unit], ENTRIES=config.entries, LANES=config.lanes,
        num_warps=config.warps, **limit(roomy(config.warps, unit < ACCESS_BYTES)),
    )  # fmt: skip


def pack_slots(records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, out: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.pack.pack_slots`."""
    check_pack(records, slots, index, places, "out", out)
    _launch(records, slots, index, places, out, pack=True)


def unpack_slots(records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, source: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.pack.unpack_slots`."""
    check_pack(records, slots, index, places, "source", source)
    _launch(records, slots, index, places, source, pack=False)
