"""Accept row by row, as the rules are written down: the oracle of `memstate.kernels.speculation` and the CPU path."""

from torch import Tensor

from memstate.kernels.checks import check_accept
from memstate.kernels.reference.host import on_host
from memstate.kernels.reference.tracking import Claims
from memstate.kernels.rules import Columns, accept_snapshot
from memstate.kernels.tables import Accepted, Registers, Rules, StepRecord


def accept(
    registers: Registers, accepted: Tensor, record: StepRecord, outcome: Accepted, rules: Rules, limit: int
) -> None:
    """Moves the labels of a speculative step on by what was accepted, and finds a slot for the boundary it crossed.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        accepted: int32 `batch`, tokens of each entry that are real; an entry with 0 changes nothing.
        record: of the plan with `Strategy.WINDOW`. Changed: `write`, `snapshot` and `after` are decided now, and
            entries whose row was reused since become padding.
        outcome: int32 `batch` columns. Changed.
        rules: as for `plan`.
        limit: as for `plan`.

    Raises:
        ValueError: naming a column that does not fit.

    Syncs: no.
    """
    check_accept(registers, accepted, record, outcome)
    with on_host(*registers[:6], *registers[7:9], *record, *outcome) as arrays:
        slots, labels, tracked, snapshot_at, source, generation, bitmap, counters = arrays[:8]
        columns = Columns(slots, labels, tracked, snapshot_at, source)
        step = StepRecord(*arrays[8:15])  # type: ignore[arg-type]
        out = Accepted(*arrays[15:])  # type: ignore[arg-type]
        claims = Claims(bitmap, counters, limit)
        for i, given in enumerate(accepted.tolist()):
            row, n = int(step.rows[i]), min(given, int(step.tokens[i]))
            live = 3 * row
            step.snapshot[i] = out.accepted[i] = out.crossed[i] = 0
            if not 0 < row < len(generation) or n <= 0 or slots[live] == 0 or generation[row] != step.generation[i]:
                step.write[i] = step.after[i] = 0
                continue
            length = int(labels[source[row] or live])
            after = length + n
            lane, mark = accept_snapshot(columns, rules, row, length, after, claims.next)
            slot = int(slots[lane]) if lane and mark else 0
            labels[live] = after
            source[row] = 0
            step.write[i], step.snapshot[i], step.after[i] = slots[live], slot, after
            out.accepted[i], out.crossed[i] = n, mark - length if slot else 0
