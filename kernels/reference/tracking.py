"""Plan and settle row by row, as the rules are written down: the oracle of `memstate.kernels.tracking`."""

from torch import Tensor

from memstate.kernels.checks import check_plan, check_settle
from memstate.kernels.reference.bitmap import give_back, take_lowest
from memstate.kernels.reference.host import Ints, on_host
from memstate.kernels.rules import Columns, plan_snapshot, superseded
from memstate.kernels.tables import Count, Registers, Result, Rules, StepRecord, Strategy


class Claims:
    """Free slots for one plan, in batch order, up to its budget."""

    def __init__(self, bitmap: Ints, counters: Ints, limit: int) -> None:
        self.bitmap, self.counters = bitmap, counters
        self.left = max(0, min(int(counters[Count.FREE] - counters[Count.RESERVE]), limit))

    def next(self) -> int:
        """The lowest free slot, 0 where the budget is spent."""
        slots = take_lowest(self.bitmap, min(1, self.left))
        if not slots.size:
            self.counters[Count.DEGRADED] += 1
            return 0
        self.left -= 1
        self.counters[Count.FREE] -= 1
        self.counters[Count.CLAIMED] += 1
        return int(slots[0])


def plan(registers: Registers, rows: Tensor, tokens: Tensor, record: StepRecord, rules: Rules, limit: int) -> None:
    """Decides read, write and snapshot slots for a batch, claims what the strategy needs and moves the labels on.

    Claims are granted in batch order.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        rows: int32 `batch`, each row at most once; 0, negative and rows beyond the table are padding.
        tokens: int32 `batch`, tokens of the step; an entry without any is padding.
        record: int32 `batch` columns. Changed.
        rules: of the tracking strategy, or with `Strategy.WINDOW` those of a speculative step, which changes nothing
            yet.
        limit: optional claims allowed, besides the budget (free slots less the reserve).

    Raises:
        ValueError: naming a column that does not fit.

    Syncs: no.
    """
    check_plan(registers, rows, tokens, record)
    with on_host(*registers[:6], *registers[7:9], *record) as arrays:
        slots, labels, tracked, snapshot_at, source, generation, bitmap, counters = arrays[:8]
        columns = Columns(slots, labels, tracked, snapshot_at, source)
        out = StepRecord(*arrays[8:])  # type: ignore[arg-type]
        claims = Claims(bitmap, counters, limit)
        for i, (row, n) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            live = 3 * row
            if not 0 < row < len(generation) or n <= 0 or slots[live] == 0:
                for column in out:
                    column[i] = 0
                continue
            origin = int(source[row]) or live
            length = int(labels[origin])
            after = length if rules.strategy == Strategy.WINDOW else length + n
            read = slots[origin]
            lane = plan_snapshot(columns, rules, row, length, after, claims.next)
            snapshot = slots[lane] if lane and rules.strategy != Strategy.REDIRECT else 0
            if rules.strategy != Strategy.WINDOW:
                labels[live] = after
                source[row] = 0
            values = (row, n, read, slots[live], snapshot, after, generation[row])
            for column, value in zip(out, values, strict=True):
                column[i] = value


def settle(registers: Registers, record: StepRecord, results: Tensor | None) -> None:
    """Releases the lanes of LazyPingPong that the newest real snapshot of their row supersedes.

    Entries that are dead, or whose row has been reused since, are skipped.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        record: the step whose results are known.
        results: int32 `batch`, a `Result` each, or None where every request goes on.

    Raises:
        ValueError: naming a column that does not fit.

    Syncs: no.
    """
    check_settle(registers, record, results)
    said = [Result.ALIVE] * record.rows.numel() if results is None else results.tolist()
    r = registers
    with on_host(*r[:6], r.bitmap, r.counters) as arrays:
        *columns, generation, bitmap, counters = arrays
        labels, released = arrays[1], []
        steps = zip(record.rows.tolist(), record.after.tolist(), record.generation.tolist(), said, strict=True)
        for row, after, step_generation, result in steps:
            if not 0 < row < len(generation) or generation[row] != step_generation or result == Result.DEAD:
                continue
            known = after if result == Result.ENDED else labels[3 * row]
            released += superseded(Columns(*columns), row, int(known))
        give_back(bitmap, counters, released, r.capacity)
