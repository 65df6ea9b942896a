"""Plans a batch by the rules as ARCHITECTURE.md states them, in plain numpy.

Tests compare `memstate.kernels.tracking` with this reference, which replaces the kernels where Triton is missing.
"""

from functools import lru_cache

import numpy as np
from torch import Tensor

from memstate.kernels.checks import check_plan
from memstate.kernels.reference.bitmap import take_lowest
from memstate.kernels.reference.host import Ints, on_host
from memstate.kernels.rules import Claim, Columns, Flags, Longs, drafted, fold, plan_snapshots
from memstate.kernels.tables import (
    DEFER_CELL,
    HEADER_INTS,
    LIMIT_CELL,
    REGISTERS_PER_ROW,
    Count,
    Registers,
    Rules,
    Section,
    StepMarks,
    StepRecord,
    Strategy,
    TailRecord,
)


@lru_cache(maxsize=4)
def batch_of(columns: bytes, batch: int, table: int, tails: bool) -> tuple[Longs, Longs, Longs, Longs]:
    """Returns (entries of a packet's batch that are no padding, their rows, live registers and tokens).

    The result is cached, because a decode loop plans the same batch every step.

    Args:
        columns: the columns of the batch, as they lie in the packet.
        batch: entries of the batch.
        table: rows of the table, with row 0.
        tails: whether tokens can be negative, for drafts.
    """
    rows, tokens = np.frombuffer(columns, np.int32).reshape(2, -1)[:, :batch].astype(np.int64)
    reads = tokens != 0 if tails else tokens > 0
    at = np.flatnonzero(reads & (rows > 0) & (rows < table))
    return at, rows[at], rows[at] * REGISTERS_PER_ROW, tokens[at]


def claims(bitmap: Ints, counters: Ints, limit: int) -> Claim:
    """Returns a function that claims slots for one plan: lowest first, in batch order, up to the slot budget."""

    def claim(need: Flags) -> Ints:
        budget = min(int(counters[Count.FREE] - counters[Count.RESERVE]), limit)
        wanted = np.flatnonzero(need)
        taken = take_lowest(bitmap, max(0, min(budget, wanted.size)))
        slots = np.zeros(need.size, np.int32)
        slots[wanted[: taken.size]] = taken
        counters[Count.FREE] -= taken.size
        counters[Count.CLAIMED] += taken.size
        counters[Count.DEGRADED] += wanted.size - taken.size
        return slots

    return claim


def plan(
    registers: Registers, packet: Tensor, record: StepRecord, marks: StepMarks, rules: Rules,
    tails: TailRecord | None = None,
) -> None:  # fmt: skip
    """Decides read, write and snapshot slots for a batch, claims the slots that are needed, and advances the labels.

    Claims are granted in batch order.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        packet: int32, laid out as `memstate.kernels.tables.Section` says. If its batch has more or fewer entries than a
            column of the record, all entries are padding. No row occurs twice. Padding is an entry without tokens, or
            with a row that is 0, negative or beyond the table. The limit in the header bounds the optional
            claims, in addition to the budget (free slots minus the reserve). The marks name registers of snapshots,
            which no plan changes. Changed: the counts of all sections except the batch become 0.
        record: int32 `batch` columns. Changed.
        marks: int32 columns with room for marks. Changed: gets the packet's marks, with the slots that their registers
            hold; no marks if the packet has a batch of another size.
        rules: rules of the tracking strategy.
        tails: columns of rows with tails; None if and only if `rules.tail` is 0. They come with the decisions of the
            last plan, of whatever batch; this plan first makes the accepted tokens of that step pending. In the packet,
            n tokens of which d may be rejected are -(2**16 d + n), and `FOLD` stands for a row that only folds its
            tail. `DEFER_CELL` of the header has the argument `defer` of `rules.fold`. With tails, a state stands for
            fewer tokens than its row has, and the rules apply to the tokens of the state. Changed.

    Raises:
        ValueError: names a column that does not fit.

    Syncs: no.
    """
    check_plan(registers, packet, record, marks, rules, tails)
    of_tails = (registers.pending, registers.newest, *tails) if tails is not None else ()
    columns = registers.bitmap, registers.counters, packet, *record, *marks, *of_tails
    with on_host(*registers[:4], *columns) as arrays:
        slots, labels, tracked, source, bitmap, counters, sent = arrays[:7]
        out = StepRecord(*arrays[7:12])  # type: ignore[arg-type]
        batch, header = len(out.rows), sent[:HEADER_INTS].tolist()
        sections = sent[HEADER_INTS : HEADER_INTS + 2 * (-(-batch // 4) * 4)].tobytes()
        fits = batch if header[Section.BATCH] == batch else 0
        at, rows, live, tokens = batch_of(sections, fits, len(source), bool(of_tails))
        read = slots[live]
        if (held := read.nonzero()[0]).size < at.size:
            at, rows, live, tokens, read = at[held], rows[held], live[held], tokens[held], read[held]
        if of_tails:
            pending, newest, *rest = arrays[16:]
            seen = TailRecord(*rest)  # type: ignore[arg-type]
            _count_accepted(seen, pending, newest)
            tokens, drafts = drafted(tokens)
        origin = live
        if (begins := source[rows].nonzero()[0]).size:
            origin = live.copy()
            origin[begins] = source[rows[begins]]
            read = slots[origin]
        length = labels[origin].astype(np.int64)
        after = length + tokens
        columns = Columns(slots, labels, tracked, source)
        due = length, after
        if of_tails:
            before = pending[rows].astype(np.int64)
            folded = fold(columns, rules, rows, length, before, tokens, drafts, header[DEFER_CELL])
            due, after = folded.due(length), folded.after
            pending[rows], newest[rows] = folded.pending, folded.newest
            told = rows, length, before, folded.store, length + before, np.maximum(tokens - drafts, 0)
            for ints, numbers in zip(rest, told, strict=False):
                ints[:batch] = 0
                ints[at] = numbers
            rest[-1][0] = batch
        lanes = plan_snapshots(columns, rules, rows, *due, claims(bitmap, counters, header[LIMIT_CELL]))
        labels[live] = after
        source[rows[begins]] = 0
        snapshot = 0 if rules.strategy == Strategy.REDIRECT else np.where(lanes > 0, slots[lanes], 0)
        entries = slice(None) if at.size == batch else at
        for column, values in zip(arrays[7:12], (rows, tokens, read, slots[live], snapshot), strict=True):
            if entries is at:
                column[:] = 0
            column[entries] = values
        for of_slots in (out.read, out.write, out.snapshot) if rules.pad else ():
            of_slots[of_slots == 0] = rules.pad
        _resolve_marks(sent, header[Section.MARKS] if fits else 0, slots, *arrays[12:16])
        sent[: Section.BATCH] = sent[Section.MARKS] = 0


def _count_accepted(seen: TailRecord, pending: Ints, newest: Ints) -> None:
    """Adds the accepted tokens of the last step to `pending`, once."""
    entries = int(seen.batch[0])
    at = np.flatnonzero((seen.rows[:entries] > 0) & (seen.rows[:entries] < len(pending)))
    rows = seen.rows[at]
    pending[rows] += np.clip(seen.accepted[at], 0, newest[rows])
    newest[rows] = 0


def _resolve_marks(packet: Ints, given: int, slots: Ints, count: Ints, entry: Ints, offset: Ints, slot: Ints) -> None:
    """Copies the marks of a packet to the columns, with the slots that the registers hold."""
    count[0] = 0
    if not given:
        return
    start, width = int(packet[8 + Section.MARKS]), (given + 3) // 4 * 4
    count[0] = kept = min(given, len(entry))
    entries, offsets, registers = (packet[start + at * width :][:kept] for at in range(3))
    entry[:kept], offset[:kept], slot[:kept] = entries, offsets, slots[registers]
