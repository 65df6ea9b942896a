"""Plans a whole batch by the rules of tracking, in one launch. Knows no plane.

The rules are in ARCHITECTURE.md. Everything that changes from step to step is in the packet or in the columns, so a
captured launch can be replayed:

    packet   [ header: counts, limit, offsets | rows | tokens | entries, offsets, registers of marks | other sections ]
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.bitmap import BIG, CLAIMED, FREE, chunk_words, take_lowest
from memstate.kernels.checks import check_plan
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.levels import bitmap_words
from memstate.kernels.rules import DRAFTS
from memstate.kernels.tables import (
    DEFER_CELL,
    HEADER_INTS,
    LIMIT_CELL,
    Count,
    Registers,
    Rules,
    Section,
    StepMarks,
    StepRecord,
    Strategy,
    TailRecord,
)
from memstate.kernels.warps import all_loaded, block_for, warps_for

RESERVE = tl.constexpr(int(Count.RESERVE))
DEGRADED = tl.constexpr(int(Count.DEGRADED))
NONE = tl.constexpr(int(Strategy.NONE))
PING_PONG = tl.constexpr(int(Strategy.PING_PONG))
LAZY = tl.constexpr(int(Strategy.LAZY))
REDIRECT = tl.constexpr(int(Strategy.REDIRECT))
BATCH = tl.constexpr(int(Section.BATCH))
MARKS = tl.constexpr(int(Section.MARKS))
HEADER = tl.constexpr(HEADER_INTS)
LIMIT = tl.constexpr(LIMIT_CELL)
DEFER = tl.constexpr(DEFER_CELL)
DRAFT = tl.constexpr(DRAFTS)


@triton.jit
def known_row(row, table_rows):
    """Returns row numbers; 0 for padding and for rows beyond the table."""
    return tl.where((row > 0) & (row < table_rows), row, 0)


@triton.jit
def batch_columns(packet_ptr, batch, table_rows):
    """Returns (column of rows, column of tokens, limit of optional claims, rows of the table) of a packet.

    The table has 0 rows if the packet has a batch of another size: another graph should have been replayed.
    """
    first = packet_ptr + HEADER
    known = tl.where(tl.load(packet_ptr + BATCH) == batch, table_rows, 0)
    return first, first + (batch + 3) // 4 * 4, tl.load(packet_ptr + LIMIT), known


@triton.jit
def mark_columns(packet_ptr, batch):
    """Returns (number of marks in a packet, their first column); 0 marks if the packet has a batch of another size.

    It must load the count before the first barrier, because the plan sets the count to 0 later. A batch of 0 has no
    barrier, and no marks.
    """
    given = tl.load(packet_ptr + MARKS, mask=batch > 0, other=0)
    given = tl.where(tl.load(packet_ptr + BATCH) == batch, given, 0)
    return given, packet_ptr + tl.load(packet_ptr + 8 + MARKS)


@triton.jit
def resolve_marks(first, given, count, slots_ptr, count_ptr, entry_ptr, offset_ptr, slot_ptr, BLOCK: tl.constexpr):
    """Copies entries and offsets of `count` marks, and stores the slots that their registers hold.

    The columns of marks begin at `first` in the packet, and have room for all `given` marks.
    """
    width = (given + 3) // 4 * 4
    tl.store(count_ptr, count)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < count
        register = tl.load(first + 2 * width + index, mask=inside, other=0)
        tl.store(entry_ptr + index, tl.load(first + index, mask=inside, other=0), mask=inside)
        tl.store(offset_ptr + index, tl.load(first + width + index, mask=inside, other=0), mask=inside)
        tl.store(slot_ptr + index, tl.load(slots_ptr + register, mask=inside, other=0), mask=inside)


@triton.jit
def claim_counts(counters_ptr):
    """Returns the counters that a claim reads: free slots, reserve, slots claimed so far, claims refused so far.

    The plan loads them first, because these loads depend on nothing.
    """
    free = tl.load(counters_ptr + FREE)
    reserve = tl.load(counters_ptr + RESERVE)
    return free, reserve, tl.load(counters_ptr + CLAIMED), tl.load(counters_ptr + DEGRADED)


@triton.jit
def row_columns(row, slots_ptr, labels_ptr, tracked_ptr, source_ptr, TRACKED: tl.constexpr, LANES: tl.constexpr):
    """Returns (live slot, live label, source, tracked, slot a, slot b, label a, label b) of rows; a and b are lanes.

    The loads depend only on the row, so none waits for another. Columns that the strategy does not read are 0. Without
    a second lane, b is the first lane again.
    """
    known = row > 0
    live = row * 3
    live_slot = tl.load(slots_ptr + live, mask=known, other=0)
    live_label = tl.load(labels_ptr + live, mask=known, other=0)
    source = tl.load(source_ptr + row, mask=known, other=0)
    slot_a = tl.load(slots_ptr + live + 1, mask=known, other=0)
    tracked = row * 0
    if TRACKED:
        tracked = tl.load(tracked_ptr + row, mask=known, other=0)
    label_a = row * 0
    if LANES > 0:
        label_a = tl.load(labels_ptr + live + 1, mask=known, other=0)
    slot_b = slot_a
    label_b = label_a
    if LANES == 2:
        slot_b = tl.load(slots_ptr + live + 2, mask=known, other=0)
        label_b = tl.load(labels_ptr + live + 2, mask=known, other=0)
    return live_slot, live_label, source, tracked, slot_a, slot_b, label_a, label_b


@triton.jit
def claim_needed(need, bitmap_ptr, words, budget, CHUNK: tl.constexpr):
    """Claims one free slot for each entry in need, in batch order, up to the budget.

    Its barrier separates all loads of the caller from all stores of the caller.

    Returns (slots, 0 for none; claims granted; claims refused).
    """
    wanted = need.to(tl.int32)
    total = tl.sum(wanted, 0)
    all_loaded()  # otherwise a late warp reads new labels and a smaller budget, and claims for other rows
    granted = tl.maximum(tl.minimum(budget, total), 0)
    rank = tl.where(need, tl.cumsum(wanted, 0) - wanted, BIG)
    slot, taken = take_lowest(bitmap_ptr, words, granted, rank, CHUNK)
    return slot, taken, total - taken


@triton.jit
def take_lane(
    due, live, label, slot_a, slot_b, label_a, label_b, slots_ptr, labels_ptr, bitmap_ptr, words, budget,
    IN_PLACE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Chooses the lane that takes the snapshot of each row that is due, and fills and labels its register.

    Decisions from before the claim are kept as numbers, not as masks: AMD's wide warps have few registers for masks.

    Returns (slots of the lanes, 0 for none; claims granted; claims refused).
    """
    idle_a = (slot_a > 0) & (label_a == 0)
    idle = idle_a | ((slot_b > 0) & (label_b == 0))
    empty = (slot_a == 0) | (slot_b == 0)
    need = due & empty & (idle == 0)
    first = tl.where(idle, idle_a, tl.where(empty, slot_a == 0, label_a <= label_b))
    lane = tl.where(first, live + 1, live + 2)
    held = tl.where(due, tl.where(first, slot_a, slot_b), 0)
    spare = held * 0
    if IN_PLACE:  # if the claim is refused, overwrite the one lane that holds a slot
        spare = tl.where(need, tl.maximum(slot_a, slot_b), 0)
    claimed, granted, refused = claim_needed(need, bitmap_ptr, words, budget, CHUNK)
    chosen = tl.where(held > 0, held, claimed)
    if IN_PLACE:
        lane = tl.where(chosen > 0, lane, 2 * live + 3 - lane)
        chosen = tl.where(chosen > 0, chosen, spare)
    tl.store(slots_ptr + lane, chosen, mask=chosen > 0)
    tl.store(labels_ptr + lane, label, mask=chosen > 0)
    return chosen, granted, refused


@triton.jit
def book_claims(counters_ptr, free, claimed, degraded):
    """Stores the counters that claims have changed."""
    tl.store(counters_ptr + FREE, free)
    tl.store(counters_ptr + CLAIMED, claimed)
    tl.store(counters_ptr + DEGRADED, degraded)


@triton.jit
def count_accepted(rows_ptr, accepted_ptr, batch_ptr, pending_ptr, newest_ptr, table_rows, BLOCK: tl.constexpr):
    """Adds the accepted tokens of the last step to `pending`, once, and waits until all warps have stored."""
    entries = tl.load(batch_ptr)
    for start in range(0, entries, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < entries
        row = known_row(tl.load(rows_ptr + index, mask=inside, other=0), table_rows)
        accepted = tl.load(accepted_ptr + index, mask=inside, other=0)
        newest = tl.load(newest_ptr + row, mask=row > 0, other=0)
        pending = tl.load(pending_ptr + row, mask=row > 0, other=0)
        all_loaded()  # otherwise a late warp adds tokens that another warp has already added
        tl.store(pending_ptr + row, pending + tl.minimum(tl.maximum(accepted, 0), newest), mask=row > 0)
        tl.store(newest_ptr + row, 0, mask=row > 0)
    all_loaded()


@triton.jit(do_not_specialize=["batch", "table_rows", "words", "every", "room", "tail"])
def _plan(
    packet_ptr, slots_ptr, labels_ptr, tracked_ptr, source_ptr, bitmap_ptr, counters_ptr,
    out_rows_ptr, out_tokens_ptr, out_read_ptr, out_write_ptr, out_snapshot_ptr,
    mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr,
    pending_ptr, newest_ptr, tail_rows_ptr, tail_label_ptr, tail_pending_ptr, tail_store_ptr, tail_length_ptr,
    accepted_ptr, batch_ptr, batch, table_rows, words, every, room, tail,
    STRATEGY: tl.constexpr, LANES: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PAD: tl.constexpr, TAILS: tl.constexpr,
):  # fmt: skip
    if TAILS:
        defer = tl.load(packet_ptr + DEFER)
        count_accepted(tail_rows_ptr, accepted_ptr, batch_ptr, pending_ptr, newest_ptr, table_rows, BLOCK)
    rows_ptr, tokens_ptr, limit, table_rows = batch_columns(packet_ptr, batch, table_rows)
    marks, marks_ptr = mark_columns(packet_ptr, batch)
    free, reserve, claimed, degraded = claim_counts(counters_ptr)
    # With code motion, AMD's compiler would keep too many values of the next iteration in hardware registers.
    for start in tl.range(0, batch, BLOCK, disable_licm=True):
        index = start + tl.arange(0, BLOCK)
        inside = index < batch
        row = known_row(tl.load(rows_ptr + index, mask=inside, other=0), table_rows)
        tokens = tl.load(tokens_ptr + index, mask=inside, other=0)
        if TAILS:
            pending = tl.load(pending_ptr + row, mask=row > 0, other=0)
            drafts = tl.where(tokens < 0, -tokens // DRAFT, 0)
            tokens = tl.where(tokens < 0, -tokens % DRAFT, tokens)
        live_slot, live_label, source, tracked, slot_a, slot_b, label_a, label_b = row_columns(
            row, slots_ptr, labels_ptr, tracked_ptr, source_ptr, STRATEGY != NONE, LANES
        )
        length = tl.where(source > 0, tl.load(labels_ptr + source, mask=source > 0, other=0), live_label)
        read = tl.where(source > 0, tl.load(slots_ptr + source, mask=source > 0, other=0), live_slot)
        asks = tokens > 0
        if TAILS:
            asks = asks | (drafts > 0)
        real = (live_slot > 0) & asks  # padding, rows without a state and rows without tokens become row 0
        row = tl.where(real, row, 0)
        live = row * 3
        after = length + tokens
        write = live_slot
        snapshot = row * 0
        stores = real  # whether the step stores a state
        grows = real  # whether the stored state has new tokens
        if TAILS:
            mark = row * 0
            if STRATEGY != NONE:
                mark = (length + pending) // every * every
                mark = tl.where(mark > tl.maximum(length, tracked), mark, 0)
            waits = (tokens > 0) & (pending + tokens < defer)
            kept = ((drafts > 0) | (mark > 0) | waits) & (tokens <= tail)
            store = tl.where(mark > 0, mark - length, tl.where(waits, 0, pending))
            store = tl.where(kept, store, pending + tokens)
            store = tl.where((store == 0) & (source == 0), -1, store)
            after = length + tl.maximum(store, 0)
            stores = real & (store >= 0)
            grows = real & (store > 0)

        if STRATEGY == REDIRECT:
            due = stores & (length % every == 0) & (length > tracked) & (source == 0)
            held = tl.where(due, slot_a, 0)
            fresh, granted, refused = claim_needed(
                due & (slot_a == 0), bitmap_ptr, words, tl.minimum(free - reserve, limit), CHUNK
            )
            fresh = tl.where(held > 0, held, fresh)  # a row with an older snapshot goes on in the slot of this snapshot
            turn = fresh > 0
            tl.store(slots_ptr + live + 1, live_slot, mask=turn)
            tl.store(labels_ptr + live + 1, length, mask=turn)
            tl.store(slots_ptr + live, fresh, mask=turn)
            tl.store(tracked_ptr + row, length, mask=turn)
            write = tl.where(turn, fresh, live_slot)

        if (STRATEGY == PING_PONG) | (STRATEGY == LAZY):
            due = grows & (after % every == 0) & (after > tracked)
            snapshot, granted, refused = take_lane(
                due, live, after, slot_a, slot_b, label_a, label_b, slots_ptr, labels_ptr, bitmap_ptr, words,
                tl.minimum(free - reserve, limit), IN_PLACE, CHUNK,
            )  # fmt: skip

        if STRATEGY == NONE:
            granted = limit * 0
            refused = limit * 0
            all_loaded()  # otherwise a late warp takes the new label for the old one, or finds no marks
        free -= granted
        limit -= granted
        claimed += granted
        degraded += refused
        tl.store(labels_ptr + live, after, mask=row > 0)
        tl.store(source_ptr + row, 0, mask=(row > 0) & (source > 0))
        if TAILS:
            real = row > 0
            tl.store(pending_ptr + row, tl.where(kept, length + pending - after, 0), mask=real)
            tl.store(newest_ptr + row, tl.where(kept, tokens, 0), mask=real)
            tl.store(tail_label_ptr + index, tl.where(real, length, 0), mask=inside)
            tl.store(tail_pending_ptr + index, tl.where(real, pending, 0), mask=inside)
            tl.store(tail_store_ptr + index, tl.where(real, store, 0), mask=inside)
            tl.store(tail_length_ptr + index, tl.where(real, length + pending, 0), mask=inside)
            tl.store(accepted_ptr + index, tl.where(real, tl.maximum(tokens - drafts, 0), 0), mask=inside)
        tl.store(out_rows_ptr + index, row, mask=inside)
        tl.store(out_tokens_ptr + index, tl.where(row > 0, tokens, 0), mask=inside)
        tl.store(out_read_ptr + index, tl.where(row > 0, read, PAD), mask=inside)
        tl.store(out_write_ptr + index, tl.where(row > 0, write, PAD), mask=inside)
        if PAD != 0:
            snapshot = tl.where(snapshot > 0, snapshot, PAD)
        tl.store(out_snapshot_ptr + index, snapshot, mask=inside)
    if STRATEGY != NONE:
        book_claims(counters_ptr, free, claimed, degraded)
    resolve_marks(
        marks_ptr, marks, tl.minimum(marks, room), slots_ptr,
        mark_count_ptr, mark_entry_ptr, mark_offset_ptr, mark_slot_ptr, BLOCK,
    )  # fmt: skip
    if TAILS:
        tl.store(batch_ptr, batch)
    section = tl.arange(0, BLOCK)  # all sections but the batch are done
    tl.store(packet_ptr + section, 0, mask=(section < BATCH) | (section == MARKS))


KEPT = KeptLaunch(_plan)


def plan(
    registers: Registers, packet: Tensor, record: StepRecord, marks: StepMarks, rules: Rules,
    tails: TailRecord | None = None,
) -> None:  # fmt: skip
    """Launches the op; see `memstate.kernels.reference.tracking.plan`."""
    check_plan(registers, packet, record, marks, rules, tails)
    batch = record.rows.numel()
    block = block_for(batch)  # two rows per thread, up to 1024 rows at a time
    warps = warps_for(block)
    words = bitmap_words(registers.capacity)
    args = (
        packet, registers.slots, registers.labels, registers.tracked, registers.source,
        registers.bitmap, registers.counters, *record, *marks,
        *((registers.pending, registers.newest, *tails) if tails is not None else 9 * (registers.source,)),
        batch, registers.source.numel(), words, rules.every, marks.entry.numel(), rules.tail,
    )  # fmt: skip
    sizes = {
        "STRATEGY": int(rules.strategy), "LANES": rules.lanes, "IN_PLACE": rules.in_place, "BLOCK": block,
        "CHUNK": chunk_words(warps), "PAD": rules.pad, "TAILS": tails is not None,
    }  # fmt: skip
    KEPT.launch(args, sizes, warps, packet.device, alike=registers.trusted and rules.every < 2**31)
