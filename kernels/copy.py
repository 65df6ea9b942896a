"""Copies whole slots over all planes and layers, or makes them fresh, in one launch. Knows no plane by name.

A unit of work is (due entry, tile of a slot), dealt round robin to a fixed number of programs: a single due slot
occupies the whole device, and a call with nothing due ends after reading its entries. Which entries are due is found
out in the kernel, a few hundred entries at a time:

    entries   0 5 0 3 0 ...      due   rank 0 -> entry 1, rank 1 -> entry 3      item = rank * tiles + tile

A program keeps the number of its next item across chunks of entries, so the deal stays even however the due ones are
spread.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.catalog import CompileCase
from memstate.kernels.checks import check_columns
from memstate.kernels.kept import Kept
from memstate.kernels.tables import ACCESS_BYTES, ROW_CODE, ZERO_SOURCE, PlaneMap, Section
from memstate.kernels.tuned import CopyConfig, copy_launch
from memstate.kernels.warps import ALONE

COPY = tl.constexpr(0)  # first_ptr: destination slots, second_ptr: source slots
ZERO = tl.constexpr(1)  # first_ptr: slots, second_ptr: not read
DATA = tl.constexpr(2)  # first_ptr: command packet, second_ptr: slots of the registers
ROWS = tl.constexpr(3)  # first_ptr: command packet, whose entries of rows count here; second_ptr: not read
DATA_SECTION = tl.constexpr(int(Section.DATA))
ZEROS = tl.constexpr(ZERO_SOURCE)
OF_ROW = tl.constexpr(ROW_CODE)

DEFAULT = CopyConfig()
WORDS = {16: tl.int32, 8: tl.int32, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # bytes of a unit -> elements of pointers


@triton.jit
def _known(slot, capacity):
    """Slot ids of any width, 0 for those that name no slot."""
    return tl.where((slot > 0) & (slot <= capacity), slot, 0).to(tl.int32)


@triton.jit
def _held(slots_ptr, register, capacity):
    """Slots in registers; register 0 and below hold none."""
    return _known(tl.load(slots_ptr + register, mask=register > 0, other=0), capacity)


@triton.jit
def _move_tile(
    tiles, fills, tile, to, of, UNIT: tl.constexpr, WORD: tl.constexpr, LANES: tl.constexpr, FILLED: tl.constexpr
):  # fmt: skip
    """Moves one tile from slot `of` to slot `to`, a unit per lane; slot 0 as a source stands for a fresh one."""
    PER_UNIT: tl.constexpr = UNIT * 8 // WORD.primitive_bitwidth
    start = tl.load(tiles + 3 * tile)
    stride = tl.load(tiles + 3 * tile + 1)
    length = tl.load(tiles + 3 * tile + 2)
    length = tl.where(of != 0, tl.abs(length), tl.maximum(length, 0))
    words = (length // UNIT * PER_UNIT).to(tl.int32)  # visibly whole units, so that the masks below never cut one
    target = tl.multiple_of((start + to.to(tl.int64) * stride).to(tl.pointer_type(WORD)), UNIT)
    source = tl.multiple_of((start + of.to(tl.int64) * stride).to(tl.pointer_type(WORD)), UNIT)
    if FILLED:  # the word of each lane, of 64 bits that repeat; LANES are whole repetitions
        width: tl.constexpr = WORD.primitive_bitwidth
        shift = (tl.arange(0, LANES) % (64 // width) * width).to(tl.int64)
        fresh = (tl.load(fills + tile) >> shift).to(WORD)
    for at in range(0, words, LANES):
        index = at + tl.arange(0, LANES)
        # `where`, because `&` of a block and a scalar is no mask in the interpreter of Triton 3.9
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


KEPT = Kept(_move, {})
FILLED = Kept(_move, ALONE)  # otherwise it would spill


def _launch(planes: PlaneMap, mode: int, first: Tensor, second: Tensor, n: int) -> None:
    device, tiles = planes.tiles.device, planes.tiles.shape[0]
    programs, config = copy_launch(device, planes.unit, tiles)
    filled = planes.fills is not None
    args = (
        planes.tiles,
        planes.fills if filled else planes.tiles,
        first,
        second,
        n,
        tiles,
        planes.blocks[0].shape[1] - 1,
    )
    sizes = {
        "MODE": mode, "UNIT": planes.unit, "WORD": WORDS[planes.unit], "ENTRIES": config.entries, "LANES": config.lanes,
        "FILLED": filled,
    }  # fmt: skip
    alike = mode >= DATA.value and first.dtype == second.dtype == torch.int32  # packets and registers, of the library
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


def compile_cases(unit: int = 0, config: CopyConfig = DEFAULT) -> list[CompileCase]:
    """The launches to compile ahead; plane bytes move through the addresses in the tile table.

    Args:
        unit: bytes a lane; fewer than 16 are for memory that an engine has laid out, and narrow on purpose. 0 for all,
            the narrow ones as rare cases.
        config: a launch configuration other than the default.
    """
    pointers = {"tiles": "*i64", "fills": "*i64", "first_ptr": "*i32", "second_ptr": "*i32"}
    signature = pointers | dict.fromkeys(("n", "tile_count", "capacity"), "i32")
    return [
        CompileCase(
            f"{name}{', fills' if filled else ''}{narrow}", _move, signature,
            {
                "MODE": mode.value, "UNIT": size, "WORD": WORDS[size], "ENTRIES": config.entries, "LANES": config.lanes,
                "FILLED": filled,
            },
            ("tiles", "fills"), config.warps, () if narrow else ("tiles",), ALONE if filled else {},
            rare=bool(narrow) or filled,
        )
        for filled in (False, True)
        for size, narrow in units(unit)
        for name, mode in (("copy_slots", COPY), ("zero_slots", ZERO), ("run_data", DATA), ("run_rows", ROWS))
        if not (filled and mode == COPY)
    ]  # fmt: skip


def units(unit: int) -> list[tuple[int, str]]:
    """Bytes a lane to compile for, and what is added to the name of a case: nothing for the one that was asked for."""
    return [(unit, "")] if unit else [(size, "" if size == ACCESS_BYTES else f", {size} bytes") for size in WORDS]
