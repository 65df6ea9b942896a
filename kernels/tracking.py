"""Plan: the tracking rules for a whole batch in one launch. Knows no plane.

The rules are in ARCHITECTURE.md. All that changes from step to step is in the packet or in the columns, so a captured
launch can be replayed:

    packet   [ header: counts, limit, offsets | rows | tokens | sections of the ownership launch ]
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.bitmap import (
    BIG,
    CLAIMED,
    FREE,
    bump,
    chunk_words,
    sized,
    take_lowest,
)
from memstate.kernels.catalog import CompileCase
from memstate.kernels.checks import check_plan
from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, Count, Registers, Rules, Section, StepRecord, Strategy
from memstate.kernels.warps import all_loaded, warps_for

RESERVE = tl.constexpr(int(Count.RESERVE))
DEGRADED = tl.constexpr(int(Count.DEGRADED))
NONE = tl.constexpr(int(Strategy.NONE))
PING_PONG = tl.constexpr(int(Strategy.PING_PONG))
LAZY = tl.constexpr(int(Strategy.LAZY))
REDIRECT = tl.constexpr(int(Strategy.REDIRECT))
WINDOW = tl.constexpr(int(Strategy.WINDOW))
BATCH = tl.constexpr(int(Section.BATCH))
HEADER = tl.constexpr(HEADER_INTS)
LIMIT = tl.constexpr(LIMIT_CELL)


@triton.jit
def known_row(row, table_rows):
    """Row numbers, 0 for those that are padding or beyond the table."""
    return tl.where((row > 0) & (row < table_rows), row, 0)


@triton.jit
def batch_columns(packet_ptr, batch):
    """Both columns of a packet's batch, which begin behind its header, and the limit of optional claims."""
    first = packet_ptr + HEADER
    return first, first + (batch + 3) // 4 * 4, tl.load(packet_ptr + LIMIT)


@triton.jit
def claim_needed(need, bitmap_ptr, counters_ptr, words, limit, CHUNK: tl.constexpr):
    """One free slot for each lane in need, in batch order up to the budget; 0 for the rest, which are counted.

    Holds the barrier between all that its caller has loaded and all that its caller stores.
    """
    wanted = need.to(tl.int32)
    total = tl.sum(wanted, 0)
    budget = tl.load(counters_ptr + FREE) - tl.load(counters_ptr + RESERVE)
    all_loaded()  # or a late warp finds rows labelled and slots spent, and claims for others
    granted = tl.maximum(tl.minimum(tl.minimum(budget, limit), total), 0)
    rank = tl.where(need, tl.cumsum(wanted, 0) - wanted, BIG)
    slot, _, taken = take_lowest(bitmap_ptr, words, 0, granted, rank, CHUNK)
    bump(counters_ptr, FREE, -taken)
    bump(counters_ptr, CLAIMED, taken)
    bump(counters_ptr, DEGRADED, total - taken)
    return slot


@triton.jit
def take_lane(
    due, real, live, label, slot_a, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, words, limit,
    LANES: tl.constexpr, IN_PLACE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The slot of the lane that takes the snapshot of each row that is due, 0 for none.

    The lane's register is filled and labelled.
    """
    lane_a = live + 1
    lane_b = live + 2
    label_a = tl.load(labels_ptr + lane_a, mask=real, other=0)
    if LANES == 2:
        slot_b = tl.load(slots_ptr + lane_b, mask=real, other=0)
        label_b = tl.load(labels_ptr + lane_b, mask=real, other=0)
    else:
        slot_b = slot_a
        label_b = label_a
    idle_a = (slot_a > 0) & (label_a == 0)
    idle_b = (slot_b > 0) & (label_b == 0)
    empty = (slot_a == 0) | (slot_b == 0)
    claimed = claim_needed(due & empty & ((idle_a | idle_b) == 0), bitmap_ptr, counters_ptr, words, limit, CHUNK)
    full = (empty == 0) & ((idle_a | idle_b) == 0)
    first = tl.where(idle_a | idle_b, idle_a, tl.where(full, label_a <= label_b, slot_a == 0))
    if IN_PLACE:  # the claim was refused and one lane is held: overwrite that one
        alone = empty & ((slot_a > 0) | (slot_b > 0)) & (claimed == 0) & ((idle_a | idle_b) == 0)
        first = tl.where(alone, slot_a > 0, first)
    held = tl.where(first, slot_a, slot_b)
    chosen = tl.where(held > 0, held, claimed)
    take = due & (chosen > 0)
    lane = tl.where(first, lane_a, lane_b)
    tl.store(slots_ptr + lane, chosen, mask=take)
    tl.store(labels_ptr + lane, label, mask=take)
    return tl.where(take, chosen, 0)


@triton.jit(do_not_specialize=["batch", "table_rows", "words", "every"])
def _plan(
    packet_ptr, slots_ptr, labels_ptr, tracked_ptr, snapshot_at_ptr, source_ptr, bitmap_ptr, counters_ptr,
    out_rows_ptr, out_tokens_ptr, out_read_ptr, out_write_ptr, out_snapshot_ptr,
    batch, table_rows, words, every,
    STRATEGY: tl.constexpr, LANES: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, BLOCK)
    inside = index < batch
    rows_ptr, tokens_ptr, limit = batch_columns(packet_ptr, batch)
    row = known_row(tl.load(rows_ptr + index, mask=inside, other=0), table_rows)
    tokens = tl.load(tokens_ptr + index, mask=inside, other=0)
    live = row * 3
    lane_a = live + 1
    live_slot = tl.load(slots_ptr + live, mask=row > 0, other=0)
    source = tl.load(source_ptr + row, mask=row > 0, other=0)
    snapshot_at = tl.load(snapshot_at_ptr + row, mask=row > 0, other=0)
    slot_a = tl.load(slots_ptr + lane_a, mask=row > 0, other=0)
    real = (live_slot > 0) & (tokens > 0)  # padding, a row without a state, nothing to do: a null row
    origin = tl.where(source > 0, source, live)
    length = tl.load(labels_ptr + origin, mask=row > 0, other=0)
    read = tl.load(slots_ptr + origin, mask=row > 0, other=0)
    after = length + tokens
    write = live_slot
    snapshot = row * 0

    if STRATEGY == REDIRECT:
        tracked = tl.load(tracked_ptr + row, mask=row > 0, other=0)
        due = real & ((length % every == 0) | (length == snapshot_at)) & (length > tracked) & (source == 0)
        claimed = claim_needed(due & (slot_a == 0), bitmap_ptr, counters_ptr, words, limit, CHUNK)
        fresh = tl.where(slot_a > 0, slot_a, claimed)  # rotate: the superseded snapshot's slot is written next
        turn = due & (fresh > 0)
        tl.store(slots_ptr + lane_a, live_slot, mask=turn)
        tl.store(labels_ptr + lane_a, length, mask=turn)
        tl.store(slots_ptr + live, fresh, mask=turn)
        tl.store(tracked_ptr + row, length, mask=turn)
        write = tl.where(turn, fresh, live_slot)

    if (STRATEGY == PING_PONG) | (STRATEGY == LAZY):
        due = real & ((after % every == 0) | (after == snapshot_at))
        snapshot = take_lane(
            due, row > 0, live, after, slot_a, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, words, limit,
            LANES, IN_PLACE, CHUNK,
        )  # fmt: skip

    if STRATEGY == NONE:
        all_loaded()  # or a late warp takes the new label for the old one
    if STRATEGY != WINDOW:
        tl.store(labels_ptr + live, after, mask=real)
        tl.store(source_ptr + row, 0, mask=real & (source > 0))
    tl.store(out_rows_ptr + index, tl.where(real, row, 0), mask=inside)
    tl.store(out_tokens_ptr + index, tl.where(real, tokens, 0), mask=inside)
    tl.store(out_read_ptr + index, tl.where(real, read, 0), mask=inside)
    tl.store(out_write_ptr + index, tl.where(real, write, 0), mask=inside)
    tl.store(out_snapshot_ptr + index, tl.where(real, snapshot, 0), mask=inside)
    tl.store(packet_ptr + index, 0, mask=index < BATCH)  # the changes are made; the batch stays


def shape(batch: int) -> tuple[int, int]:
    """Lanes of the one program and its warps: two rows a thread up to 1024."""
    block = max(32, triton.next_power_of_2(batch))
    return block, warps_for(block)


def plan(registers: Registers, packet: Tensor, record: StepRecord, rules: Rules) -> None:
    """Launches the op; see `memstate.kernels.reference.tracking.plan`."""
    check_plan(registers, packet, record)
    batch = record.rows.numel()
    block, warps = shape(batch)
    words = registers.bitmap.numel()
    _plan[(1,)](
        packet, registers.slots, registers.labels, registers.tracked, registers.snapshot_at, registers.source,
        registers.bitmap, registers.counters, *record, batch, registers.source.numel(), words, rules.every,
        STRATEGY=int(rules.strategy), LANES=rules.lanes, IN_PLACE=rules.in_place,
        BLOCK=block, CHUNK=chunk_words(words, warps), num_warps=warps,
    )  # fmt: skip


SIZES = {"none": (32, 256), "ping-pong": (32, 256), "lazy": (32, 256, 512), "redirect": (32, 256), "window": (32, 256)}


def compile_cases() -> list[CompileCase]:
    """Every strategy from the smallest batch on; none moves plane bytes."""
    columns = (
        "slots_ptr", "labels_ptr", "tracked_ptr", "snapshot_at_ptr", "source_ptr", "bitmap_ptr", "counters_ptr",
    )  # fmt: skip
    outputs = tuple(f"out_{name}_ptr" for name in StepRecord._fields)
    pointers = ("packet_ptr", *columns, *outputs)
    scalars = {"batch": "i32", "table_rows": "i32", "words": "i32", "every": "i32"}
    variants = {
        "none": (0, 0, False), "ping-pong": (1, 2, False), "lazy": (2, 2, True), "redirect": (3, 1, False),
        "window": (4, 0, False),
    }  # fmt: skip
    return [
        CompileCase(
            sized(f"plan[{name}]", block), _plan, dict.fromkeys(pointers, "*i32") | scalars,
            {
                "STRATEGY": code, "LANES": lanes, "IN_PLACE": in_place,
                "BLOCK": block, "CHUNK": chunk_words(256, warps_for(block)),
            },
            pointers, warps_for(block), (),
        )
        for name, (code, lanes, in_place) in variants.items()
        for block in SIZES[name]
    ]  # fmt: skip
