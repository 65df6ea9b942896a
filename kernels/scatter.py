"""Scatters a contiguous batch to slots of one plane, all layers in one launch. Knows no register and no other plane.

A source is a row of steps, of which a slot gets one block:

    scatter_slots      batch    layer batch [block]                 the row itself
    scatter_accepted   window   layer batch step [block]            the block of step a - 1
    scatter_inputs     inputs   layer batch tap-1+step [channel]    the tap-1 steps from step a on

A unit of work is (due entry, tile of a block), dealt round robin to a fixed number of programs, as in
`memstate.kernels.copy`: a single due entry occupies the whole device, and a call with nothing due ends after reading
its entries. Snapshots are entries behind those of the writes.
"""

from collections.abc import Mapping
from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.blocks import LANES, WIDTHS, block_bytes, cut, taps_are_fastest, tiles_of
from memstate.kernels.catalog import CompileCase
from memstate.kernels.move_checks import check_accepted, check_inputs, check_scatter
from memstate.kernels.tables import ACCESS_BYTES
from memstate.kernels.tuned import ENTRIES, ScatterConfig, config_of, programs_for
from memstate.kernels.warps import limit, roomy

WARPS = 4
COLUMNS = ["write_ptr", "accepted_ptr", "snapshot_ptr", "crossed_ptr"]
SIZES = [
    "batch", "steps", "row_steps", "ahead", "layers", "tiles", "last",
    "layer_units", "slot_units", "block_units", "step_words",
]  # fmt: skip
POINTERS = ["plane_ptr", "source_ptr", *COLUMNS]  # what is known of their alignment is in UNIT


@triton.jit
def _due(slots_ptr, counts_ptr, row, batch, steps, row_steps, ahead, last):
    """Per row the slot, shifted by 32 bits, and the step of the source from which it gets a block; 0 if none."""
    listed = (row >= 0) & (row < batch)
    slot = tl.load(slots_ptr + row, mask=listed, other=0)
    due = (slot > 0) & (slot <= last)
    step = row
    if counts_ptr is not None:
        count = tl.load(counts_ptr + row, mask=listed, other=0)
        due = due & (count >= 1) & (count <= steps)
        step = row * row_steps + count.to(tl.int32) - ahead
    return tl.where(due, (slot.to(tl.int64) << 32) | step.to(tl.int64), 0)


@triton.jit(do_not_specialize=POINTERS + SIZES)
def _scatter(
    plane_ptr, source_ptr, write_ptr, accepted_ptr, snapshot_ptr, crossed_ptr,
    batch, steps, row_steps, ahead, layers, tiles, last, layer_units, slot_units, block_units, step_words,
    UNIT: tl.constexpr, TAPS: tl.constexpr, ELEMENT: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    UNITS: tl.constexpr = LANES // UNIT
    ALIGNMENT: tl.constexpr = UNIT * plane_ptr.dtype.element_ty.primitive_bitwidth // 8
    lane = tl.arange(0, LANES)
    item = tl.program_id(0)
    entries = batch
    if snapshot_ptr is not None:
        entries = 2 * batch
    for start in range(0, entries, ENTRIES):
        index = start + tl.arange(0, ENTRIES)
        pair = _due(write_ptr, accepted_ptr, index, batch, steps, row_steps, ahead, last)
        if snapshot_ptr is not None:
            pair = pair | _due(snapshot_ptr, crossed_ptr, index - batch, batch, steps, row_steps, ahead, last)
        rank = tl.cumsum((pair != 0).to(tl.int32), 0) - 1
        items = tl.sum((pair != 0).to(tl.int32), 0) * layers * tiles
        while item < items:
            chosen = tl.sum(tl.where(rank == item // tiles // layers, pair, 0), 0)  # what is not due adds 0
            layer = (item // tiles % layers).to(tl.int64)
            tile = (item % tiles).to(tl.int64)
            slot = chosen >> 32
            step = layer * batch * row_steps + (chosen & 0x7FFFFFFF)

            first = tile * UNITS
            target = tl.multiple_of(plane_ptr + (layer * layer_units + slot * slot_units + first) * UNIT, ALIGNMENT)
            inside = lane < tl.minimum(block_units - first, UNITS).to(tl.int32) * UNIT  # never cuts a unit
            if TAPS == 0:
                source = tl.multiple_of(source_ptr + (step * step_words + first * UNIT), ALIGNMENT)
                words = tl.load(source + lane, mask=inside, other=0)
            else:  # stored as `channel tap`: neighbours come from different steps
                word = (tile * LANES).to(tl.int32) + lane  # 32 bits: a window has less than 2^31 words
                element = word // ELEMENT
                place = element % TAPS * step_words.to(tl.int32) + element // TAPS * ELEMENT + word % ELEMENT
                # No mask, but a word that is there: many narrow loads under masks would be as many branches.
                words = tl.load(source_ptr + step * step_words + tl.where(inside, place, 0))
            tl.store(target + lane, words, mask=inside)
            item += tl.num_programs(0)
        item -= items


def scatter_slots(plane: Tensor, slots: Tensor, batch: Tensor, trusted: bool = False) -> None:
    """Launches the op; see `memstate.kernels.reference.scatter.scatter_slots`."""
    if not trusted:
        check_scatter(plane, slots, batch)
    _launch(plane, batch, block_bytes(plane), 1, 1, 0, slots, None, None, None)


def scatter_accepted(
    plane: Tensor, window: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Launches the op; see `memstate.kernels.reference.scatter.scatter_accepted`."""
    check_accepted(plane, window, write, accepted, snapshot, crossed)
    steps = window.shape[2]
    _launch(plane, window, block_bytes(plane), steps, steps, 1, write, accepted, snapshot, crossed)


def scatter_inputs(
    plane: Tensor, inputs: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Launches the op; see `memstate.kernels.reference.scatter.scatter_inputs`."""
    check_inputs(plane, inputs, write, accepted, snapshot, crossed)
    taps, channels = plane.shape[2:]
    length = inputs.shape[2]
    transposed = taps if taps_are_fastest(plane) else 0
    step_bytes = channels * plane.element_size()
    _launch(plane, inputs, step_bytes, length - taps, length, 0, write, accepted, snapshot, crossed, transposed)


def _launch(
    plane: Tensor, source: Tensor, step_bytes: int, steps: int, row_steps: int, ahead: int, write: Tensor,
    accepted: Tensor | None, snapshot: Tensor | None, crossed: Tensor | None, taps: int = 0,
) -> None:  # fmt: skip
    """Launches the one kernel of all scatters.

    Args:
        plane: what is changed.
        source: rows of steps.
        step_bytes: bytes of a step.
        steps: the largest count.
        row_steps: steps of a row of the source.
        ahead: a count less the step where its block starts.
        write: slots.
        accepted: counts for `write`.
        snapshot: more slots.
        crossed: counts for `snapshot`.
        taps: of a transposed block, else 0.
    """
    if plane.numel() == 0 or source.numel() == 0:
        return
    size = plane.element_size()
    if taps:
        words = cut(plane, word_bytes=gcd(4, size, source.data_ptr()))
    else:
        words = cut(plane, source.data_ptr(), step_bytes)
    layers, batch = source.shape[:2]
    unit = words.unit_words * words.word_bytes
    static = (ScatterConfig, plane.device, unit, words.tiles)
    config, programs = config_of(*static), programs_for(*static)
    tiles = tiles_of(words, config.lanes)
    items = (batch if snapshot is None else 2 * batch) * layers * tiles
    _scatter[(min(items, programs),)](
        triton.reinterpret(plane, words.word), triton.reinterpret(source, words.word),
        write, accepted, snapshot, crossed,
        batch, steps, row_steps, ahead, layers, tiles, plane.shape[1] - 1,
        words.layer_units, words.slot_units, words.block_units, step_bytes // words.word_bytes,
        UNIT=words.unit_words, TAPS=taps, ELEMENT=size // words.word_bytes if taps else 1,
        ENTRIES=config.entries, LANES=config.lanes, num_warps=config.warps,
        **limit(roomy(config.warps, unit < ACCESS_BYTES)),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The launches to compile ahead: 16 bytes a lane; where taps are fastest, 3 of them, loads are as they must be.

    Narrower units and other taps are rare cases.
    """
    sizes = {"ENTRIES": ENTRIES, "LANES": LANES}
    both = ("plane_ptr", "source_ptr")

    def case(
        name: str, word: str, constants: Mapping[str, int | None], planes: tuple[str, ...], columns: list[str]
    ) -> CompileCase:
        signature = dict.fromkeys(both, f"*{word}") | dict.fromkeys(columns, "*i32") | dict.fromkeys(SIZES, "i32")
        absent = dict.fromkeys(column for column in COLUMNS if column not in columns)
        rare = "," in name
        narrow = (constants["UNIT"] or 0) * int(word[1:]) < 8 * ACCESS_BYTES
        return CompileCase(
            name, _scatter, signature, {**constants, **absent}, (), WARPS, () if rare else planes,
            roomy(WARPS, narrow), rare,
        )  # fmt: skip

    return [
        *(
            case(f"{name}{narrow}", word, {"UNIT": unit, "TAPS": 0, "ELEMENT": 1} | sizes, both, columns)
            for narrow, word, unit in WIDTHS
            for name, columns in (
                ("scatter_slots", ["write_ptr"]), ("scatter_accepted", COLUMNS), ("scatter_inputs", COLUMNS),
            )
        ),
        *(
            case(
                f"scatter_inputs_transposed_{dtype}", word, {"UNIT": unit, "TAPS": 3, "ELEMENT": 1} | sizes,
                ("plane_ptr",), COLUMNS,
            )
            for dtype, word, unit in (("bf16", "i16", 8), ("fp32", "i32", 4))
        ),
        *(
            case(
                f"scatter_inputs_transposed_{dtype}, {taps} taps, {unit} words of {element}", word,
                {"UNIT": unit, "TAPS": taps, "ELEMENT": element} | sizes, ("plane_ptr",), COLUMNS,
            )
            for dtype, word, most, element in (
                ("bf16", "i16", 8, 1), ("bf16", "i8", 1, 2), ("fp32", "i32", 4, 1), ("fp32", "i16", 1, 2),
                ("fp32", "i8", 1, 4),
            )
            for taps in (1, 2, 3, 4, 7)
            for unit in (8, 4, 2, 1)
            if unit <= most and (taps, unit, element) != (3, most, 1)
        ),
    ]  # fmt: skip
