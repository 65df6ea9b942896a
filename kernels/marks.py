"""Stores the states at marks, for forwards that run kernels of their own. Knows no register and no strategy.

    h        layer piece [block of a slot]    the state before each piece of `chunk` tokens, as chunked kernels store it
    inputs   layer token channel              packed inputs of a convolution; a window is the last inputs before a mark
    write    slot of each entry               the state at the end of the entry's tokens

An item of work is (mark, layer, tile of a block). A fixed number of programs take the items in turn, because only the
device knows the number of marks. One launch serves one plane of states and one plane of windows.
"""

from math import gcd, prod

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import taps_are_fastest
from memstate.kernels.configs import ConvConfig
from memstate.kernels.conv import load_channel_tap, parts_of
from memstate.kernels.kept import unspecialised
from memstate.kernels.move_checks import check_scatter_states
from memstate.kernels.slots import known_slot
from memstate.kernels.tables import ACCESS_BYTES, StepMarks
from memstate.kernels.tuned import programs

WARPS = 4
SIDE = 64  # limit of the rows, and of the columns, of a tile


@triton.jit
def _mark(mark, entry_ptr, offset_ptr, slot_ptr, starts_ptr, batch, last):
    """Returns (entry, offset and slot of a mark, first token of its entry, number of tokens of its entry).

    The slot is 0 unless the offset is between 1 and the number of tokens.
    """
    entry = tl.load(entry_ptr + mark)
    offset = tl.load(offset_ptr + mark)
    known = (entry >= 0) & (entry < batch)
    start = tl.load(starts_ptr + entry, mask=known, other=0)
    tokens = tl.load(starts_ptr + entry + 1, mask=known, other=0) - start
    slot = known_slot(tl.load(slot_ptr + mark), last)
    return entry, offset, tl.where((offset > 0) & (offset <= tokens), slot, 0), start, tokens


@unspecialised("plane_ptr", "h_ptr", "conv_ptr", "inputs_ptr")
def _scatter_states(
    plane_ptr, h_ptr, conv_ptr, inputs_ptr,
    count_ptr, entry_ptr, offset_ptr, slot_ptr, starts_ptr, read_ptr, write_ptr, first_ptr,
    batch, chunk, pieces, packed, layers, last, plane_layer, plane_slot, conv_layer, conv_slot,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, TRANSPOSED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAP_FASTEST: tl.constexpr, CONV_UNIT: tl.constexpr,
    BLOCK: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    marks = tl.load(count_ptr)
    item = tl.program_id(0)
    # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
    if plane_ptr is not None:
        ACROSS: tl.constexpr = (COLS + BLOCK_C - 1) // BLOCK_C
        DOWN: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
        TILES: tl.constexpr = HEADS * DOWN * ACROSS
        items = marks * layers * TILES
        while item < items:
            entry, offset, slot, start, tokens = _mark(
                item // TILES // layers, entry_ptr, offset_ptr, slot_ptr, starts_ptr, batch, last
            )
            layer = (item // TILES % layers).to(tl.int64)
            head = item % TILES // (DOWN * ACROSS)
            row = item // ACROSS % DOWN * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
            col = item % ACROSS * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            inside = (row < ROWS) & (col < COLS)
            # The compiler must see that strides are multiples of UNIT: otherwise accesses become narrow.
            tile_ptr = plane_ptr + layer * (plane_layer.to(tl.int64) * UNIT) + head * (ROWS * COLS) + row * COLS + col
            slot_stride = plane_slot.to(tl.int64) * UNIT
            ended = (slot > 0) & (offset == tokens)
            end = known_slot(tl.load(write_ptr + entry, mask=ended, other=0), last)
            values = tl.load(tile_ptr + end * slot_stride, mask=tl.where(end > 0, inside, False), other=0.0)
            given = end > 0
            if h_ptr is not None:
                at = offset.to(tl.uint32)  # uint32 holds the sum of two numbers below 2^31
                if first_ptr is None:
                    at += start.to(tl.uint32)
                whole = at // chunk.to(tl.uint32)
                piece = whole.to(tl.int64)
                if first_ptr is not None:
                    piece += tl.load(first_ptr + entry, mask=slot > 0, other=0)
                even = whole * chunk.to(tl.uint32) == at
                kept = (slot > 0) & (offset < tokens) & even & (piece >= 0) & (piece < pieces)
                place = col * ROWS + row if TRANSPOSED else row * COLS + col
                h_at = (layer * pieces + tl.where(kept, piece, 0)) * (HEADS * ROWS * COLS) + head * (ROWS * COLS)
                h = tl.load(h_ptr + h_at + place, mask=tl.where(kept, inside, False), other=0.0)
                values = tl.where(kept, h.to(plane_ptr.dtype.element_ty), values)
                given = given | kept
            tl.store(tile_ptr + slot * slot_stride, values, mask=tl.where(given, inside, False))
            item += tl.num_programs(0)
        item -= items
    if conv_ptr is not None:
        PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
        stored: tl.constexpr = conv_ptr.dtype.element_ty
        items = marks * layers * PARTS
        while item < items:
            entry, offset, slot, start, tokens = _mark(
                item // PARTS // layers, entry_ptr, offset_ptr, slot_ptr, starts_ptr, batch, last
            )
            layer = (item // PARTS % layers).to(tl.int64)
            lane = item % PARTS * (BLOCK // LANE) + tl.arange(0, BLOCK // LANE)[:, None]
            element = tl.arange(0, LANE)[None, :]
            channel = lane * LANE + element
            inside = channel < CHANNELS
            piece_at = lane * (LANE * TAPS) + element
            layer_ptr = conv_ptr + layer * (conv_layer.to(tl.int64) * CONV_UNIT)
            slot_stride = conv_slot.to(tl.int64) * CONV_UNIT
            if inputs_ptr is None:
                needed = (slot > 0) & (offset == tokens)
                of = known_slot(tl.load(write_ptr + entry, mask=needed, other=0), last)
                slot = tl.where(of > 0, slot, 0)
            else:
                needed = (slot > 0) & (offset < TAPS)
                of = known_slot(tl.load(read_ptr + entry, mask=needed, other=0), last)
            old = ()
            if TAP_FASTEST:
                old = load_channel_tap(layer_ptr + of * slot_stride, piece_at, CHANNELS * TAPS, of > 0, TAPS, LANE)
            else:
                present = tl.where(of > 0, inside, False)
                for tap in tl.static_range(TAPS):
                    old_ptr = layer_ptr + of * slot_stride + tap * CHANNELS
                    old += (tl.load(old_ptr + channel, mask=present, other=0.0),)
            window = old
            if inputs_ptr is not None:
                window = ()
                for tap in tl.static_range(TAPS):
                    at = offset - TAPS + tap  # number of the token in the entry; negative for a token of the old window
                    token = (start + at).to(tl.int64)
                    known = (slot > 0) & (at >= 0) & (token < packed)
                    input_ptr = inputs_ptr + (layer * packed + tl.where(known, token, 0)) * CHANNELS
                    value = tl.load(input_ptr + channel, mask=tl.where(known, inside, False), other=0.0).to(stored)
                    for before in tl.static_range(TAPS):
                        if before > tap:
                            value = tl.where(offset + tap == before, old[before], value)
                    window += (value,)
            parts = parts_of(window, stored, TAP_FASTEST, TAPS, LANE)
            for part in tl.static_range(TAPS):
                place = piece_at + part * LANE if TAP_FASTEST else channel + part * CHANNELS
                fits = place < CHANNELS * TAPS if TAP_FASTEST else inside
                tl.store(layer_ptr + slot * slot_stride + place, parts[part], mask=tl.where(slot > 0, fits, False))
            item += tl.num_programs(0)


def scatter_states(
    marks: StepMarks, starts: Tensor, read: Tensor, write: Tensor, plane: Tensor | None = None, h: Tensor | None = None,
    first: Tensor | None = None, chunk: int = 64, transposed: bool = False, conv: Tensor | None = None,
    inputs: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.marks.scatter_states`."""
    check_scatter_states(marks, starts, read, write, plane, h, first, chunk, transposed, conv, inputs)
    constants = state_tiles((1, 1, 1), transposed) | window_tiles(1, 1, False, 4)
    plane_strides = conv_strides = (0, 0)
    tiles = layers = slots = 0
    if plane is not None:
        sizes, (layers, slots) = block_of(plane), plane.shape[:2]
        unit, plane_strides = _strides(plane)
        constants |= state_tiles(sizes, transposed) | {"UNIT": unit}
        tiles += sizes[0] * -(-sizes[1] // constants["BLOCK_R"]) * -(-sizes[2] // constants["BLOCK_C"])
    if conv is not None:
        layers, slots, taps, channels = conv.shape
        unit, conv_strides = _strides(conv)
        constants |= window_tiles(channels, taps, taps_are_fastest(conv), conv.element_size()) | {"CONV_UNIT": unit}
        tiles += -(-channels // constants["BLOCK"])
    work = marks.entry.numel() * layers * tiles
    if not work or not write.numel():
        return
    _scatter_states[(min(work, programs(starts.device)),)](
        plane, h, conv, inputs, *marks, starts, read, write, first,
        write.numel(), chunk, 0 if h is None else h.shape[1], 0 if inputs is None else inputs.shape[1],
        layers, slots - 1, *plane_strides, *conv_strides, **constants, num_warps=WARPS,
    )  # fmt: skip


def block_of(plane: Tensor) -> tuple[int, int, int]:
    """Returns the heads, rows and columns of one layer of one slot."""
    *heads, rows, cols = (1, 1, *plane.shape[2:])
    return prod(heads), rows, cols


def _strides(plane: Tensor) -> tuple[int, tuple[int, int]]:
    """Returns (unit, (stride of layers, stride of slots)); the unit is in elements, the strides are in units."""
    layer, slot = (plane.stride(axis) if plane.shape[axis] > 1 else 0 for axis in (0, 1))
    unit = gcd(ACCESS_BYTES // plane.element_size(), layer, slot)
    return unit, (layer // unit, slot // unit)


def state_tiles(sizes: tuple[int, int, int], transposed: bool) -> dict[str, int]:
    """Returns the constants of a launch that depend on the block of the plane of states."""
    heads, rows, cols = sizes
    block_c = min(SIDE, triton.next_power_of_2(cols))
    return {
        "HEADS": heads, "ROWS": rows, "COLS": cols, "TRANSPOSED": transposed, "UNIT": 1,
        "BLOCK_R": min(SIDE, triton.next_power_of_2(rows)), "BLOCK_C": block_c,
    }  # fmt: skip


def window_tiles(channels: int, taps: int, tap_fastest: bool, itemsize: int) -> dict[str, int]:
    """Returns the constants of a launch that depend on the windows of the plane of a convolution."""
    block, lane = ConvConfig().blocks(channels, taps + 1, itemsize, 64)  # warps of 32 threads use the same block
    block = min(WARPS * block, triton.next_power_of_2(channels))
    return {
        "CHANNELS": channels, "TAPS": taps, "TAP_FASTEST": tap_fastest, "CONV_UNIT": 1, "BLOCK": block, "LANE": lane,
    }  # fmt: skip
