"""Copies whole slots over all planes and layers, or makes them fresh, in one launch. Knows no plane by name.

To make a slot *fresh* is to fill it with the initial pattern of each plane, which is mostly zeros. An item of work is
one tile of one due entry. A fixed number of programs take the items in turn. So one due slot keeps the whole device
busy, and a call with nothing due ends after it has read its entries. The kernel itself finds the due entries, a few
hundred entries at a time:

    entries   0 5 0 3 0 ...      due   rank 0 -> entry 1, rank 1 -> entry 3      item = rank * tiles + tile

A program keeps the number of its next item from one chunk of entries to the next. So all programs get equally many
items, wherever the due entries are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.checks import check_columns
from memstate.kernels.configs import CopyConfig
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.tables import ROW_CODE, ZERO_SOURCE, PlaneMap, RecordMap, Section
from memstate.kernels.tuned import launch_of
from memstate.kernels.warps import ALONE

COPY = tl.constexpr(0)  # first_ptr: destination slots, second_ptr: source slots
ZERO = tl.constexpr(1)  # first_ptr: slots, second_ptr: not read
DATA = tl.constexpr(2)  # first_ptr: command packet, second_ptr: slots of the registers
ROWS = tl.constexpr(3)  # first_ptr: command packet; only its entries that name rows count; second_ptr: not read
DATA_SECTION = tl.constexpr(int(Section.DATA))
ZEROS = tl.constexpr(ZERO_SOURCE)
OF_ROW = tl.constexpr(ROW_CODE)

WORDS = {16: tl.int32, 8: tl.int32, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # bytes of a unit -> type of a word


@triton.jit
def _known(slot, capacity):
    """Returns slot ids as int32, 0 for ids outside 1..capacity."""
    return tl.where((slot > 0) & (slot <= capacity), slot, 0).to(tl.int32)


@triton.jit
def _held(slots_ptr, register, capacity):
    """Returns the slots in registers; 0 for registers 0 and below."""
    return _known(tl.load(slots_ptr + register, mask=register > 0, other=0), capacity)


@triton.jit
def _move_tile(
    tiles, fills, tile, to, of, UNIT: tl.constexpr, WORD: tl.constexpr, LANES: tl.constexpr, FILLED: tl.constexpr
):  # fmt: skip
    """Copies one tile of slot `of` to slot `to`, or fills it with the initial pattern if `of` is 0."""
    PER_UNIT: tl.constexpr = UNIT * 8 // WORD.primitive_bitwidth
    start = tl.load(tiles + 3 * tile)
    stride = tl.load(tiles + 3 * tile + 1)
    length = tl.load(tiles + 3 * tile + 2)
    length = tl.where(of != 0, tl.abs(length), tl.maximum(length, 0))
    words = (length // UNIT * PER_UNIT).to(tl.int32)  # so the compiler sees that no mask below cuts a unit
    target = tl.multiple_of((start + to.to(tl.int64) * stride).to(tl.pointer_type(WORD)), UNIT)
    source = tl.multiple_of((start + of.to(tl.int64) * stride).to(tl.pointer_type(WORD)), UNIT)
    if FILLED:  # a fill repeats 64 bits; LANES words are a multiple of 64 bits
        width: tl.constexpr = WORD.primitive_bitwidth
        shift = (tl.arange(0, LANES) % (64 // width) * width).to(tl.int64)
        fresh = (tl.load(fills + tile) >> shift).to(WORD)
    for at in range(0, words, LANES):
        index = at + tl.arange(0, LANES)
        # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
        bits = tl.load(source + index, mask=tl.where(of != 0, index < words, False), other=0)
        if FILLED:
            bits = tl.where(of != 0, bits, fresh)
        tl.store(target + index, bits, mask=index < words)


@triton.jit(
    do_not_specialize=["n", "tile_count", "capacity"], do_not_specialize_on_alignment=["first_ptr", "second_ptr"]
)
def _move(
    tiles, fills, first_ptr, second_ptr, n, tile_count, capacity,
    MODE: tl.constexpr, UNIT: tl.constexpr, WORD: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    targets = first_ptr
    sources = second_ptr
    if MODE >= DATA:
        n = tl.load(first_ptr + DATA_SECTION)
        targets = first_ptr + tl.load(first_ptr + 8 + DATA_SECTION)
        sources = targets + (n + 3) // 4 * 4
    item = tl.program_id(0)
    for start in range(0, n, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        to = tl.load(targets + index, mask=index < n, other=0)
        if MODE == COPY:
            to = _known(to, capacity)
            of = _known(tl.load(sources + index, mask=index < n, other=0), capacity)
            due = (to != 0) & (of != 0) & (to != of)
        elif MODE == ZERO:
            to = _known(to, capacity)
            of = to * 0
            due = to != 0
        elif MODE == ROWS:
            to = _known(-to + OF_ROW, capacity)
            of = _known(-tl.load(sources + index, mask=index < n, other=0) + OF_ROW, capacity)
            due = (to != 0) & (to != of)
        else:
            to = _held(second_ptr, to, capacity)
            register = tl.load(sources + index, mask=index < n, other=0)
            of = _held(second_ptr, register, capacity)
            due = (to != 0) & ((register == ZEROS) | (of != 0)) & (to != of)

        rank = tl.cumsum(due.to(tl.int32), 0) - 1
        count = tl.sum(due.to(tl.int32), 0)
        pair = (to.to(tl.int64) << 32) | of.to(tl.int64)
        while item < count * tile_count:
            chosen = tl.sum(tl.where(due & (rank == item // tile_count), pair, 0), 0)
            to_slot, of_slot = (chosen >> 32).to(tl.int32), chosen.to(tl.int32)
            _move_tile(tiles, fills, item % tile_count, to_slot, of_slot, UNIT, WORD, LANES, FILLED)
            item += tl.num_programs(0)
        item -= count * tile_count


KEPT = KeptLaunch(_move, {})
FILLED = KeptLaunch(_move, ALONE)  # without `ALONE`, the kernel would spill


def key_sizes(moved: PlaneMap | RecordMap) -> tuple[int, int]:
    """Returns the sizes that make the key of a launch: bytes of a unit, and tiles of a slot."""
    return moved.unit, moved.tiles.shape[0]


def _launch(planes: PlaneMap, mode: int, first: Tensor, second: Tensor, n: int) -> None:
    device, (unit, tiles) = planes.tiles.device, key_sizes(planes)
    programs, config = launch_of(CopyConfig, device, unit, tiles)
    filled = planes.fills is not None
    fills = planes.fills if filled else planes.tiles
    args = planes.tiles, fills, first, second, n, tiles, planes.blocks[0].shape[1] - 1
    sizes = {
        "MODE": mode, "UNIT": unit, "WORD": WORDS[unit], "ENTRIES": config.entries, "LANES": config.lanes,
        "FILLED": filled,
    }  # fmt: skip
    # Packets and registers belong to the library: their dtypes and alignment are the same in all launches.
    alike = mode >= DATA.value and first.dtype == second.dtype == torch.int32
    (FILLED if filled else KEPT).launch(args, sizes, config.warps, device, alike, programs)


def copy_slots(planes: PlaneMap, dst: Tensor, src: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.copy.copy_slots`."""
    check_columns(planes.tiles.device, None, dst=dst, src=src)
    _launch(planes, COPY.value, dst, src, dst.numel())


def zero_slots(planes: PlaneMap, ids: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.copy.zero_slots`."""
    check_columns(planes.tiles.device, None, ids=ids)
    _launch(planes, ZERO.value, ids, ids, ids.numel())


def run_data(planes: PlaneMap, slots: Tensor, packet: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.copy.run_data`."""
    _launch(planes, DATA.value, packet, slots, 0)


def run_rows(planes: PlaneMap, packet: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.copy.run_rows`."""
    _launch(planes, ROWS.value, packet, packet, 0)
