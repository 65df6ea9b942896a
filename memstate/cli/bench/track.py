"""Plan, settle and accept for every strategy, with nothing due and with every row at a boundary: device time.

A boundary at every token makes every row due in every step; boundaries 2^30 tokens apart make none due.
"""

from collections.abc import Iterator

import torch

from memstate.cli.bench.clock import Clock, nothing
from memstate.cli.bench.task import Figure, Setting, Task, differing
from memstate.engine.manager import NO_LIMIT, StateManager
from memstate.engine.settings import Forward
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Strategy
from memstate.requests.handles import Request
from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.state.layout import Plane, StateLayout

SIZES, TOY_SIZES = (1, 64, 256), (2,)
STRATEGIES: dict[str, type[Tracking]] = {
    "none": NoTracking, "ping-pong": PingPong, "lazy": LazyPingPong, "redirect": Redirect,
}  # fmt: skip
NEVER, ALWAYS = 2**30, 1
DUE = {NEVER: "nothing due", ALWAYS: "all due"}
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)  # bytes are another benchmark's
WINDOW, ACCEPTED = 3, 2  # tokens drafted and accepted
STEPS = 5  # compared with the reference: lanes are empty, filled and taken again


def beside_idle(
    setting: Setting, op: str, case: str, seconds: float, idle: dict[str, float], key: str, every: int
) -> Figure:
    """Makes the entry of a step; one with every row due stands beside the same step with nothing due.

    Args:
        setting: Of the benchmark.
        op: Operation of the entry.
        case: Case of the entry.
        seconds: Of the step.
        idle: Seconds of steps with nothing due, by key; filled by them.
        key: Of the step.
        every: `NEVER` or `ALWAYS`.
    """
    if every == NEVER:
        idle[key] = seconds
    if every == NEVER or key not in idle:
        return Figure(op, setting.case(case), seconds * 1e6, "us")
    return setting.entry(op, case, seconds * 1e6, "us", "nothing-due", lambda: idle[key] * 1e6)


class _Rows:
    """A manager with `size` rows in one batch; plans and settles come past its mirror, from then on its own again."""

    def __init__(self, backend: Backend, tracking: Tracking, size: int, window: bool) -> None:
        self.mem = StateManager(
            LAYOUT, slots=4 * size + 4, max_requests=size, tracking=tracking, backend=backend.name,
            device=backend.device, overlap=not window, forward=Forward(speculation=window),
        )  # fmt: skip
        rows = self.mem.admit([Request(i) for i in range(size)])
        self.mem.submit()
        self.file, device = self.mem._registers, self.mem.backend.device
        self.rows = torch.tensor([row.index for row in rows], dtype=torch.int32).to(device)
        tokens = torch.ones_like(self.rows)
        self.tokens, self.accepted = tokens * WINDOW if window else tokens, tokens * ACCEPTED
        self.rules = self.mem._mirror.rules
        self.record = self.mem._log.next_record(size)
        self.outcome = self.mem._log.outcome(size) if window else None

    def plan(self) -> None:
        self.file.plan(self.rows, self.tokens, self.record, self.rules, NO_LIMIT)

    def settle(self) -> None:
        self.file.settle(self.record, None)

    def step(self) -> None:
        """What a decode step launches: settle where the mirror says that lanes can go."""
        self.plan()
        if self.mem.tracking.releases_at_settle and self.rules.every == ALWAYS:
            self.settle()

    def draft(self) -> None:
        rules = self.rules._replace(strategy=Strategy.WINDOW)
        self.file.plan(self.rows, self.tokens, self.record, rules, NO_LIMIT)

    def accept(self) -> None:
        assert self.outcome is not None
        self.file.accept(self.accepted, self.record, self.outcome, self.rules, NO_LIMIT)

    def speculate(self) -> None:
        self.draft()
        self.accept()
        if self.mem.tracking.releases_at_settle and self.rules.every == ALWAYS:
            self.settle()

    def wrong(self, twin: "_Rows") -> str:
        """What differs: the step, registers, owners. Generations differ between any two managers."""
        mine, other = self.file.table, twin.file.table
        columns, step = ("slots", "labels", "tracked", "source"), ("tokens", "read", "write", "snapshot", "after")
        pairs = [(name, getattr(mine, name), getattr(other, name)) for name in columns]
        pairs += [(name, getattr(self.record, name), getattr(twin.record, name)) for name in step]
        if self.outcome is not None and twin.outcome is not None:
            pairs += zip(("accepted", "crossed"), self.outcome, twin.outcome, strict=True)
        return differing([*pairs, ("owners", self.file.owners(), twin.file.owners())])


class _Bench:
    """One strategy, batch size and kind of step."""

    def __init__(self, setting: Setting, name: str, size: int, window: bool) -> None:
        self.setting, self.window = setting, window
        self.name, self.case = name, f"R={size} {name}"
        self.pairs = {}
        for every in (NEVER, ALWAYS) if name != "none" else (NEVER,):
            tracking = STRATEGIES[name](every)
            backends = (setting.make_backend(), setting.reference())
            self.pairs[every] = [_Rows(backend, tracking, size, window) for backend in backends]

    def check(self) -> str:
        for every, pair in self.pairs.items():
            for _ in range(STEPS):
                for rows in pair:
                    (rows.speculate if self.window else rows.step)()
                if found := pair[0].wrong(pair[1]):
                    return f"{DUE[every]}: {found}"
        return ""

    def measure(self, clock: Clock) -> list[Figure]:
        idle: dict[str, float] = {}
        entries = []
        for every, (rows, _) in self.pairs.items():
            times = self._accept(clock, rows) if self.window else self._plan(clock, rows, every)
            for (op, way), seconds in times.items():
                case = f"{self.case}, {DUE[every]}{way}"
                entries.append(beside_idle(self.setting, op, case, seconds, idle, op + way, every))
            rows.mem.check()
        return entries

    def _plan(self, clock: Clock, rows: _Rows, every: int) -> dict[tuple[str, str], float]:
        releases = rows.mem.tracking.releases_at_settle and every == ALWAYS
        times = {("plan", ""): clock.alone(rows.plan, rows.settle if releases else nothing)}
        if releases:
            times["settle", ""] = clock.alone(rows.settle, rows.plan)
        times["step", ", in a graph"] = clock.in_graph(rows.step)
        return times

    def _accept(self, clock: Clock, rows: _Rows) -> dict[tuple[str, str], float]:
        return {
            ("accept", ""): clock.alone(rows.accept, rows.draft),
            ("window and accept", ", in a graph"): clock.in_graph(rows.speculate),
        }


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields plain and speculative steps of every strategy, for 1, 64 and 256 rows."""
    for size in TOY_SIZES if setting.toy else SIZES:
        for name in STRATEGIES:
            for window in (False, True):
                bench = _Bench(setting, name, size, window)
                kind = "accept" if window else "plan and settle"
                yield Task(f"{kind}, {bench.case}", bench.check, bench.measure)
