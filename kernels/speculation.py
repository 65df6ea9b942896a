"""Accept: what a speculative step came to, by the tracking rules, for a whole batch in one launch. Knows no plane.

    plan (WINDOW)   forward: reads `read`, keeps the state after every token in a window   accept   scatter   settle
                    nothing changes                                                        labels, lanes, bytes

The accepted length is known when accept runs, so the step can neither be dead nor be taken back.
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.bitmap import chunk_words
from memstate.kernels.catalog import CompileCase
from memstate.kernels.checks import check_accept
from memstate.kernels.kept import Kept
from memstate.kernels.levels import bitmap_words
from memstate.kernels.tables import Accepted, Registers, Rules, StepRecord, Strategy
from memstate.kernels.tracking import (
    batch_columns,
    book_claims,
    claim_counts,
    claim_needed,
    constants,
    known_row,
    row_columns,
    shape,
    take_lane,
    variants,
)
from memstate.kernels.warps import all_loaded

NONE = tl.constexpr(int(Strategy.NONE))
PING_PONG = tl.constexpr(int(Strategy.PING_PONG))
LAZY = tl.constexpr(int(Strategy.LAZY))
REDIRECT = tl.constexpr(int(Strategy.REDIRECT))


@triton.jit(do_not_specialize=["batch", "table_rows", "words", "every"])
def _accept(
    packet_ptr, rows_ptr, tokens_ptr, write_ptr, snapshot_ptr, accepted_ptr, crossed_ptr,
    slots_ptr, labels_ptr, tracked_ptr, source_ptr, bitmap_ptr, counters_ptr,
    batch, table_rows, words, every,
    STRATEGY: tl.constexpr, LANES: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    given_ptr, _, limit, table_rows = batch_columns(packet_ptr, batch, table_rows)
    free, reserve, claimed, degraded = claim_counts(counters_ptr)
    for start in tl.range(0, batch, BLOCK, disable_licm=True):
        index = start + tl.arange(0, BLOCK)
        inside = index < batch
        row = known_row(tl.load(rows_ptr + index, mask=inside, other=0), table_rows)
        given = tl.load(given_ptr + index, mask=inside, other=0)
        accepted = tl.minimum(given, tl.load(tokens_ptr + index, mask=inside, other=0))
        live_slot, live_label, source, tracked, slot_a, slot_b, label_a, label_b = row_columns(
            row, slots_ptr, labels_ptr, tracked_ptr, source_ptr, STRATEGY != NONE, LANES
        )
        length = tl.where(source > 0, tl.load(labels_ptr + source, mask=source > 0, other=0), live_label)
        real = (live_slot > 0) & (accepted > 0)
        row = tl.where(real, row, 0)
        live = row * 3
        after = length + accepted
        write = live_slot
        snapshot = row * 0

        # The last boundary that the window crossed behind the prompt. Under Redirect one at its very end is the next
        # step's: free.
        reach = after
        if STRATEGY == REDIRECT:
            reach = after - 1
        mark = reach // every * every
        mark = tl.where(mark > tl.maximum(length, tracked), mark, 0)
        crossing = real & (mark > 0)

        if STRATEGY == REDIRECT:
            due = real & (length % every == 0) & (length > tracked) & (source == 0)
            turning = due & (crossing == 0)  # the slot that was read is the snapshot, as in a step of one token
            held = tl.where(crossing | turning, slot_a, 0)
            kept = tl.where(turning, length, mark)
            fresh, granted, refused = claim_needed(
                (crossing | turning) & (slot_a == 0), bitmap_ptr, words, tl.minimum(free - reserve, limit), CHUNK
            )
            fresh = tl.where(held > 0, held, fresh)
            turn = (fresh > 0) & (mark == 0)
            tl.store(slots_ptr + live + 1, tl.where(turn, live_slot, fresh), mask=fresh > 0)
            tl.store(labels_ptr + live + 1, kept, mask=fresh > 0)
            tl.store(tracked_ptr + row, kept, mask=fresh > 0)
            tl.store(slots_ptr + live, fresh, mask=turn)
            write = tl.where(turn, fresh, live_slot)
            snapshot = tl.where(turn, 0, fresh)

        if (STRATEGY == PING_PONG) | (STRATEGY == LAZY):
            snapshot, granted, refused = take_lane(
                crossing, live, mark, slot_a, slot_b, label_a, label_b, slots_ptr, labels_ptr, bitmap_ptr, words,
                tl.minimum(free - reserve, limit), IN_PLACE, CHUNK,
            )  # fmt: skip

        if STRATEGY == NONE:
            granted = limit * 0
            refused = limit * 0
            all_loaded()  # or a late warp takes the new label for the old one; else `claim_needed` holds the barrier
        free -= granted
        limit -= granted
        claimed += granted
        degraded += refused
        tl.store(labels_ptr + live, after, mask=row > 0)
        tl.store(source_ptr + row, 0, mask=(row > 0) & (source > 0))
        tl.store(write_ptr + index, tl.where(row > 0, write, 0), mask=inside)
        tl.store(snapshot_ptr + index, snapshot, mask=inside)
        tl.store(accepted_ptr + index, tl.where(row > 0, accepted, 0), mask=inside)
        tl.store(crossed_ptr + index, tl.where(snapshot > 0, mark - length, 0), mask=inside)
    if STRATEGY != NONE:
        book_claims(counters_ptr, free, claimed, degraded)


KEPT = Kept(_accept)


def accept(registers: Registers, packet: Tensor, record: StepRecord, outcome: Accepted, rules: Rules) -> None:
    """Launches the op; see `memstate.kernels.reference.speculation.accept`."""
    check_accept(registers, packet, record, outcome)
    batch = record.rows.numel()
    block, warps = shape(batch)
    words = bitmap_words(registers.capacity)
    args = (
        packet, record.rows, record.tokens, record.write, record.snapshot, *outcome,
        registers.slots, registers.labels, registers.tracked, registers.source,
        registers.bitmap, registers.counters, batch, registers.source.numel(), words, rules.every,
    )  # fmt: skip
    sizes = constants(rules) | {"BLOCK": block, "CHUNK": chunk_words(warps)}
    KEPT.launch(args, sizes, warps, packet.device, alike=registers.trusted and rules.every < 2**31)


def compile_cases() -> list[CompileCase]:
    """Every strategy from the smallest batch on; none moves plane bytes."""
    pointers = (
        "packet_ptr", "rows_ptr", "tokens_ptr", "write_ptr", "snapshot_ptr", "accepted_ptr", "crossed_ptr",
        "slots_ptr", "labels_ptr", "tracked_ptr", "source_ptr", "bitmap_ptr", "counters_ptr",
    )  # fmt: skip
    return variants("accept", _accept, pointers, windows=False)
