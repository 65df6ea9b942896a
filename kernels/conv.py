"""Computes the causal convolution step on read, write and snapshot slots. Knows no register, strategy or other layer.

One program takes a block of channels of one row through all tokens. It loads the window of inputs once, and stores it
once, so it may write the slot that it read. A lane has LANE neighbouring channels with all their taps. If memory has
the order `channel tap`, a lane moves whole pieces of LANE elements, and sorts them itself.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from memstate.kernels import slots
from memstate.kernels.blocks import stride_unit, taps_are_fastest
from memstate.kernels.configs import ConvConfig
from memstate.kernels.decode_checks import check_conv
from memstate.kernels.kept import launch_step, launched_again, unspecialised
from memstate.kernels.pieces import apart, together
from memstate.kernels.remembered import Checked
from memstate.kernels.tables import ConvTail, Cursor, StepMarks
from memstate.kernels.trees import behind, either, next_node, walk_length
from memstate.kernels.tuned import config_of
from memstate.kernels.warps import limit, roomy, warp_threads

TAPS_WITHOUT_LIMIT = 4  # launches of other taps would spill without `roomy`
OPTIONS = {"enable_fp_fusion": False}  # rounding must not depend on the Triton version


@triton.jit
def load_channel_tap(ptr, at, end, present, TAPS: tl.constexpr, LANE: tl.constexpr):
    """Returns a tile `lane LANE` per tap, from memory with the order `channel tap`; zeros unless `present`.

    `at` has the offset of each lane's first piece; `end` is the offset behind the last channel.
    """
    loaded = ()
    for piece in tl.static_range(TAPS):
        inside = tl.where(present, at + piece * LANE < end, False)
        loaded += apart(tl.load(ptr + at + piece * LANE, mask=inside, other=0.0), LANE)
    tiles = ()
    for tap in tl.static_range(TAPS):
        columns = ()
        for column in tl.static_range(LANE):
            columns += (loaded[column * TAPS + tap],)
        tiles += (together(columns, LANE),)
    return tiles


@triton.jit
def _pieces(tiles, TAPS: tl.constexpr, LANE: tl.constexpr):
    """Returns the pieces of these tiles: the inverse of `load_channel_tap`."""
    columns = ()
    for tap in tl.static_range(TAPS):
        columns += apart(tiles[tap], LANE)
    pieces = ()
    for piece in tl.static_range(TAPS):
        piece_columns = ()
        for at in tl.static_range(LANE):
            piece_columns += (columns[(piece * LANE + at) % TAPS * LANE + (piece * LANE + at) // TAPS],)
        pieces += (together(piece_columns, LANE),)
    return pieces


@triton.jit
def parts_of(window, stored: tl.constexpr, TAP_FASTEST: tl.constexpr, TAPS: tl.constexpr, LANE: tl.constexpr):
    """Returns a window as a slot stores it: a tile per tap or, if TAP_FASTEST, pieces in the order `channel tap`."""
    parts = ()
    for tap in tl.static_range(TAPS):
        parts += (window[tap].to(stored),)
    if TAP_FASTEST:
        parts = _pieces(parts, TAPS, LANE)
    return parts


@triton.jit
def _store(
    ptr, parts, wanted, channel, piece_at, CHANNELS: tl.constexpr, TAP_FASTEST: tl.constexpr, TAPS: tl.constexpr,
    LANE: tl.constexpr,
):  # fmt: skip
    """Stores the result of `parts_of` to the slot at `ptr` if `wanted`."""
    for part in tl.static_range(TAPS):
        at = piece_at + part * LANE if TAP_FASTEST else channel + part * CHANNELS
        fits = at < CHANNELS * TAPS if TAP_FASTEST else channel < CHANNELS
        # `where` instead of `&`: the interpreter of Triton 3.9 takes no `&` of a block and a scalar as a mask
        tl.store(ptr + at, parts[part], mask=tl.where(wanted, fits, False))


@unspecialised("weight_ptr", "bias_ptr", "state_ptr")
def _conv_step(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, read_ptr, write_ptr, snapshot_ptr, tokens_ptr,
    mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr, tail_x_ptr,
    cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, parents_ptr,
    max_tokens, last, stride_units, x_distance, out_distance, tail_x_apart, tail_rows, ring, nodes,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAP_FASTEST: tl.constexpr, UNIT: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, LANE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    if AHEAD:
        # The next launch may begin as soon as all programs are here: by then all launches before this one have ended.
        gdc_wait()
        gdc_launch_dependents()
    OLD: tl.constexpr = TAPS - 1
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * (BLOCK // LANE) + tl.arange(0, BLOCK // LANE)[:, None]
    element = tl.arange(0, LANE)[None, :]
    channel = lane * LANE + element
    inside = channel < CHANNELS
    bias = tl.zeros([BLOCK // LANE, LANE], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)

    real, read, write, snapshot, count = slots.row_slots(
        read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last
    )

    if mark_count_ptr is not None:
        mark = slots.first_mark(mark_count_ptr, mark_entry_ptr, row)
        offset = slots.mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    # The compiler must see that the stride is a multiple of UNIT: otherwise accesses to the state become narrow.
    slot_stride = stride_units.to(tl.int64) * UNIT
    stored: tl.constexpr = state_ptr.dtype.element_ty
    # The narrowest type that holds inputs and window exactly, because a wide type needs more hardware registers.
    held: tl.constexpr = stored if x_ptr.dtype == state_ptr.dtype else tl.float32
    piece_at = lane * (LANE * OLD) + element
    live_ptr = state_ptr + write * slot_stride
    copy_ptr = state_ptr + snapshot * slot_stride
    if cursor_row_ptr is not None:
        memory, place, pending, store = slots.row_tail(
            cursor_row_ptr, cursor_label_ptr, cursor_pending_ptr, cursor_store_ptr, row, tail_rows, ring, count
        )
        pending = tl.where(real, pending, 0)
        kept_ptr = tail_x_ptr + memory * tail_x_apart
        # Skip old pending tokens: they would leave the window again before the window is stored or used.
        used = tl.where((store >= 0) & (store < pending), store, pending)
        entry = tl.maximum(used - OLD, 0)
        place = (place + entry) % ring
        read = tl.where(used < OLD, read, 0)
    old_ptr = state_ptr + read * slot_stride
    window = ()
    if TAP_FASTEST:
        old = load_channel_tap(old_ptr, piece_at, CHANNELS * OLD, read > 0, OLD, LANE)
        for tap in tl.static_range(OLD):
            window += (old[tap].to(held),)
    else:
        present = tl.where(read > 0, inside, False)
        for tap in tl.static_range(OLD):
            window += (tl.load(old_ptr + tap * CHANNELS + channel, mask=present, other=0.0).to(held),)

    if cursor_row_ptr is not None:
        for at in range(entry, pending + 1):
            if at == store:
                new = parts_of(window, stored, TAP_FASTEST, OLD, LANE)
                _store(live_ptr, new, real, channel, piece_at, CHANNELS, TAP_FASTEST, OLD, LANE)
                _store(copy_ptr, new, snapshot > 0, channel, piece_at, CHANNELS, TAP_FASTEST, OLD, LANE)
            if at < pending:
                x = tl.load(slots.token_start(kept_ptr, place, CHANNELS, CHANNELS) + channel, mask=inside, other=0.0)
                window = window[1:]
                window += (x.to(stored).to(held),)
                place = slots.next_place(place, ring)

    visits = count
    if parents_ptr is not None:
        tree = parents_ptr + row * nodes
        visits = walk_length(tree, count, nodes)
        start, first_place, last_node, target = window, place, -1, 0
    for t in range(visits):
        of_token = inside
        if parents_ptr is not None:
            t = next_node(tree, last_node, target, nodes)
            of_token = tl.where(t == target, inside, False)
        token = row * max_tokens + t
        x = tl.load(slots.token_start(x_ptr, token, x_distance, CHANNELS) + channel, mask=inside, other=0.0)
        window += (x.to(held),)
        # Load the weights again for each token: held across tokens, they would fill most hardware registers and spill.
        weights = load_channel_tap(weight_ptr, lane * (LANE * TAPS) + element, CHANNELS * TAPS, True, TAPS, LANE)
        y = bias
        for tap in tl.static_range(TAPS):
            y = tl.fma(weights[tap].to(tl.float32), window[tap].to(tl.float32), y)
        if SILU:
            y = y / (1 + tl.exp(-y))
        out_at = slots.token_start(out_ptr, token, out_distance, CHANNELS) + channel
        tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=of_token)
        window = window[1:]
        if cursor_row_ptr is not None:
            if parents_ptr is not None:
                place = (first_place + t) % ring
            wanted = tl.where((memory > 0) & (pending + t >= store), of_token, False)
            tl.store(slots.token_start(kept_ptr, place, CHANNELS, CHANNELS) + channel, x, mask=wanted)
            window = window[: OLD - 1]
            window += (x.to(stored).to(held),)
            place = slots.next_place(place, ring)
        if parents_ptr is not None:
            last_node, target, back = behind(tree, t, target, count, nodes)
            window = either(start, window, back, OLD)
        if mark_count_ptr is not None:
            while offset <= t + 1:
                kept = slots.known_slot(tl.load(mark_slot_ptr + mark), last)
                new = parts_of(window, stored, TAP_FASTEST, OLD, LANE)
                marked = (offset == t + 1) & (kept > 0)
                at_ptr = state_ptr + kept * slot_stride
                _store(at_ptr, new, marked, channel, piece_at, CHANNELS, TAP_FASTEST, OLD, LANE)
                mark += 1
                offset = slots.mark_offset(mark, mark_count_ptr, mark_entry_ptr, mark_offset_ptr, row)

    for t in range(count, max_tokens):
        out_at = slots.token_start(out_ptr, row * max_tokens + t, out_distance, CHANNELS) + channel
        tl.store(out_at, 0.0, mask=inside)

    if cursor_row_ptr is not None:
        real = real & (store > pending)
        snapshot = tl.where(store > pending, snapshot, 0)
    new = parts_of(window, stored, TAP_FASTEST, OLD, LANE)
    _store(live_ptr, new, real, channel, piece_at, CHANNELS, TAP_FASTEST, OLD, LANE)
    _store(copy_ptr, new, snapshot > 0, channel, piece_at, CHANNELS, TAP_FASTEST, OLD, LANE)


def key_sizes(state: Tensor) -> tuple[Any, ...]:
    """Returns the sizes that make the key of a launch on windows `slot tap-1 channel`, of any strides."""
    return state.shape[1] + 1, taps_are_fastest(state), state.element_size()


def tiling(
    state: Tensor, sizes: tuple[Any, ...], config: ConvConfig, threads: int
) -> tuple[tuple[int], tuple[int, int]]:
    """Returns the programs of a row, and the channels of a program and of a lane's access; see `ConvConfig.blocks`."""
    block, lane = config.blocks(state.shape[2], sizes[0], sizes[2], threads)
    return (triton.cdiv(state.shape[2], block),), (block, lane)


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor,
    tokens: Tensor, activation: str | None = "silu", out: Tensor | None = None, marks: StepMarks | None = None,
    tail: ConvTail | None = None, cursor: Cursor | None = None, parents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.conv.conv_step`."""
    given = tuple(locals().values())  # all arguments, in order
    return launched(check_conv(*given), given)


def launched(checked: Checked[tuple[int, int]], given: tuple[Any, ...], form: str = "") -> Tensor:
    """Launches a step that has passed its check.

    Args:
        checked: result of the check.
        given: all arguments of `conv_step`, in order.
        form: "ahead" if the next launch may begin before this one ends.
    """
    x, weight, bias, state, read, write, snapshot, tokens, activation, out, marks, tail, cursor, parents = given
    result: Tensor = x.new_empty(x.shape) if out is None else out
    batch, max_tokens, channels = x.shape
    if batch == 0:
        return result
    tensors = (
        x, weight, bias, state, result, read, write, snapshot, tokens, *(marks or slots.NO_MARKS),
        *slots.tail_tensors(ConvTail, tail, cursor, parents),
    )  # fmt: skip
    if launched_again(checked, tensors, form):
        return result
    unit = stride_unit(state)
    taps, tap_fastest, _ = static = key_sizes(state)
    config = config_of(ConvConfig, state.device, *static)
    grid, (block, lane) = tiling(state, static, config, warp_threads())
    numbers = (
        max_tokens, state.shape[0] - 1, state.stride(0) // unit, *checked.found,
        *slots.tail_numbers(ConvTail, tail, parents),
    )  # fmt: skip
    constants = {
        "CHANNELS": channels, "TAPS": taps, "TAP_FASTEST": tap_fastest, "UNIT": unit, "SILU": activation == "silu",
        "BLOCK": block, "LANE": lane, "AHEAD": form == "ahead",
    }  # fmt: skip
    needed = marks is not None or parents is not None or taps != TAPS_WITHOUT_LIMIT
    options = {"num_warps": config.warps, **OPTIONS, **limit(roomy(config.warps, needed))}
    launch_step(checked, _conv_step, (*grid, batch), tensors, numbers, constants, options, form)
    return result
