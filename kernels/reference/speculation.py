"""Accept as the rules are written down: the oracle of `memstate.kernels.speculation` and the path without Triton."""

import numpy as np
from torch import Tensor

from memstate.kernels.checks import check_accept
from memstate.kernels.reference.host import on_host
from memstate.kernels.reference.tracking import batch_columns, claims
from memstate.kernels.rules import Columns, Longs, accept_snapshots
from memstate.kernels.tables import LIMIT_CELL, REGISTERS_PER_ROW, Accepted, Registers, Rules, StepRecord


def accept(registers: Registers, packet: Tensor, record: StepRecord, outcome: Accepted, rules: Rules) -> None:
    """Moves the labels of a speculative step on by what was accepted, and finds a slot for the boundary it crossed.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        packet: int32, laid out as `memstate.kernels.tables.Section` says. The first column of its batch has the tokens
            of each entry that are real; an entry with 0 changes nothing, and becomes padding. Its limit is the number
            of optional claims.
        record: of the plan with `Strategy.WINDOW`. Changed: `write` and `snapshot` are decided now.
        outcome: int32 `batch` columns. Changed.
        rules: as for `plan`.

    Raises:
        ValueError: naming a column that does not fit.

    Syncs: no.
    """
    check_accept(registers, packet, record, outcome)
    with on_host(*registers[:4], registers.bitmap, registers.counters, packet, *record, *outcome) as arrays:
        slots, labels, tracked, source, bitmap, counters, sent = arrays[:7]
        entries, tokens, _, write, snapshot = arrays[7:12]
        out = dict(zip(Accepted._fields, arrays[12:], strict=True))
        given: Longs = np.minimum(batch_columns(sent, len(entries))[0], tokens)
        planned = entries.astype(np.int64)
        known = np.where((planned > 0) & (planned < len(source)) & (given > 0), planned, 0)
        at = np.flatnonzero((known > 0) & (slots[known * REGISTERS_PER_ROW] != 0))
        rows, accepted = known[at], given[at]
        live = rows * REGISTERS_PER_ROW
        length = labels[np.where(source[rows] > 0, source[rows], live)].astype(np.int64)
        columns = Columns(slots, labels, tracked, source)
        claim = claims(bitmap, counters, int(sent[LIMIT_CELL]))
        lanes, mark = accept_snapshots(columns, rules, rows, length, length + accepted, claim)
        labels[live], source[rows] = length + accepted, 0
        taken = (lanes > 0) & (mark > 0)
        for column in (write, snapshot, *out.values()):
            column[:] = 0
        write[at], snapshot[at] = slots[live], np.where(taken, slots[lanes], 0)
        out["accepted"][at], out["crossed"][at] = accepted, np.where(taken, mark - length, 0)
