"""Plan as the rules are written down: the oracle of `memstate.kernels.tracking`, and the path without Triton."""

import numpy as np
from torch import Tensor

from memstate.kernels.checks import check_plan
from memstate.kernels.reference.bitmap import take_lowest
from memstate.kernels.reference.host import Ints, on_host
from memstate.kernels.rules import Claim, Columns, Flags, Longs, plan_snapshots
from memstate.kernels.tables import (
    HEADER_INTS,
    LIMIT_CELL,
    REGISTERS_PER_ROW,
    Count,
    Registers,
    Rules,
    Section,
    StepRecord,
    Strategy,
)


def batch_columns(packet: Ints, batch: int) -> tuple[Longs, Longs]:
    """Returns both columns of a packet's batch, which begin behind its header; zeros if it has another size."""
    second = HEADER_INTS + (batch + 3) // 4 * 4
    fits = int(packet[Section.BATCH]) == batch
    rows, tokens = (packet[start : start + batch].astype(np.int64) * fits for start in (HEADER_INTS, second))
    return rows, tokens


def claims(bitmap: Ints, counters: Ints, limit: int) -> Claim:
    """Returns what hands out the free slots of one plan, lowest first, in batch order, up to its budget."""

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


def plan(registers: Registers, packet: Tensor, record: StepRecord, rules: Rules) -> None:
    """Decides read, write and snapshot slots for a batch, claims what the strategy needs and moves the labels on.

    Claims are granted in batch order.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        packet: int32, laid out as `memstate.kernels.tables.Section` says. Its batch has as many entries as a column of
            the record, or all of them are padding. Each row comes at most once; 0, negative rows and rows beyond the
            table are padding, and so is an entry without tokens. Its limit is the number of optional claims, besides
            the budget (free slots less the reserve). Changed: the counts of all sections but the batch become 0.
        record: int32 `batch` columns. Changed.
        rules: of the tracking strategy, or with `Strategy.WINDOW` those of a speculative step, which changes nothing
            yet.

    Raises:
        ValueError: naming a column that does not fit.

    Syncs: no.
    """
    check_plan(registers, packet, record)
    with on_host(*registers[:5], registers.bitmap, registers.counters, packet, *record) as arrays:
        slots, labels, tracked, snapshot_at, source, bitmap, counters, sent = arrays[:8]
        out = StepRecord(*arrays[8:])  # type: ignore[arg-type]
        given, tokens = batch_columns(sent, len(out.rows))
        known = np.where((given > 0) & (given < len(source)) & (tokens > 0), given, 0)
        at = np.flatnonzero((known > 0) & (slots[known * REGISTERS_PER_ROW] != 0))
        rows = known[at]
        live = rows * REGISTERS_PER_ROW
        origin = np.where(source[rows] > 0, source[rows], live)
        length = labels[origin].astype(np.int64)
        read = slots[origin]
        after = length + tokens[at]
        columns = Columns(slots, labels, tracked, snapshot_at, source)
        lanes = plan_snapshots(columns, rules, rows, length, after, claims(bitmap, counters, int(sent[LIMIT_CELL])))
        if rules.strategy != Strategy.WINDOW:
            labels[live], source[rows] = after, 0
        snapshot = np.where((lanes > 0) & (rules.strategy != Strategy.REDIRECT), slots[lanes], 0)
        for column, values in zip(out, (rows, tokens[at], read, slots[live], snapshot), strict=True):
            column[:] = 0
            column[at] = values
        sent[: Section.BATCH] = 0
