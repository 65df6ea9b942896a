"""Microseconds of the host for a scheduler operation: what batching saves, beside a row-by-row stand-in.

On a GPU launches and uploads are real, and nothing waits for them. Elsewhere every launch is stood in for by one small
torch operation, so that ours and the stand-in's cost the same: the figures then mean something as ratios only.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from memstate.cli.bench.clock import Clock
from memstate.cli.bench.naive import RowByRow
from memstate.cli.bench.task import Figure, Setting, Task
from memstate.engine.manager import StateManager
from memstate.kernels.dispatch import OPS
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.steps import Step
from memstate.requests.tracking import LazyPingPong, PingPong, Redirect, Tracking
from memstate.state.layout import Plane, StateLayout

SIZES, TOY_SIZES = (1, 64, 256), (1, 3)
EVERY = 4
ROUNDS, TOY_ROUNDS = 31, 2
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)
STRATEGIES: dict[str, Tracking] = {
    "ping-pong": PingPong(EVERY), "lazy": LazyPingPong(EVERY), "redirect": Redirect(EVERY),
}  # fmt: skip

Spent = dict[str, list[float]]  # operation -> seconds of each round


class _Timer:
    """Seconds that calls need to return, after the device has finished what came before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.spent: Spent = {}

    def __call__(self, op: str, act: Callable[[], object]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        act()
        self.spent.setdefault(op, []).append(time.perf_counter() - begin)

    def medians(self) -> dict[str, float]:
        """Microseconds; the first round, which may compile, does not count."""
        return {op: median(seconds[1:] or seconds) * 1e6 for op, seconds in self.spent.items()}


class _Ours:
    """One manager. real: launches do what they say, else on a CPU one torch operation stands in for each."""

    def __init__(self, setting: Setting, tracking: Tracking, size: int, real: bool) -> None:
        self.mem = StateManager(
            LAYOUT, slots=5 * size, max_requests=size, tracking=tracking, backend=setting.backend, device=setting.device
        )
        self.size = size
        if not real and setting.device.type == "cpu":
            cell = torch.zeros(8, dtype=torch.int32)
            for op in OPS:
                setattr(self.mem.backend, op, lambda *_: cell.add_(1))

    def round(self, timer: _Timer) -> None:
        """Requests that begin, step to a boundary and over it, are published, and end."""
        mem = self.mem
        rows: list[Row] = []
        steps: list[Step] = []
        kept: list[Snapshot | None] = []

        def admit() -> None:
            rows.extend(mem.admit([Request(i) for i in range(self.size)]))
            mem.submit()

        def plan() -> None:
            steps.append(mem.plan(rows))

        timer("admit", admit)
        boundary = EVERY + 1 if mem.tracking.reads_old_slot else EVERY
        for at in range(1, EVERY + 2):
            due = at == boundary
            timer("plan, all due" if due else "plan, nothing due", plan)
            timer("settle, all due" if due else "settle, nothing due", lambda: mem.settle(steps.pop()))

        def publish() -> None:
            kept.extend(mem.publish(rows))
            mem.submit()

        def release() -> None:
            mem.release(rows)
            mem.submit()

        timer("publish", publish)
        timer("release", release)
        mem.drop([snapshot for snapshot in kept if snapshot])
        mem.submit()

    def check(self) -> str:
        """Two rounds must leave nothing behind, and every row must have had a snapshot in each."""
        for _ in range(2):
            self.round(_Timer(self.mem.backend.device))
        self.mem.check()
        stats, report = self.mem.stats(), self.mem.audit()
        if not report.clean or stats.free != stats.capacity:
            return f"{stats.free} of {stats.capacity} slots free; {report}"
        return "" if stats.published == 2 * self.size else f"{stats.published} snapshots of {2 * self.size}"


class _Peer:
    """The stand-in through the same round."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.naive = RowByRow(size, 5 * size, EVERY, setting.device)
        self.rows = list(range(1, size + 1))

    def round(self, timer: _Timer) -> None:
        naive, rows = self.naive, self.rows
        kept: list[Tensor] = []
        timer("admit", lambda: naive.admit(rows))
        for at in range(1, EVERY + 2):
            timer("plan, all due" if at == EVERY else "plan, nothing due", lambda: naive.step(rows))
        timer("publish", lambda: kept.extend(naive.publish(rows)))
        timer("release", lambda: naive.release(rows))
        naive.drop(kept)

    def check(self) -> str:
        """Every slot must be free again, once."""
        self.round(_Timer(self.naive.device))
        free = sorted(self.naive.list.free.tolist())
        return "" if free == list(range(1, 5 * len(self.rows) + 1)) else f"row-by-row loses slots: {free}"


def _task(setting: Setting, name: str, size: int) -> Task:
    def check() -> str:
        return _Ours(setting, STRATEGIES[name], size, real=True).check() or _Peer(setting, size).check()

    def measure(clock: Clock) -> list[Figure]:
        rounds = TOY_ROUNDS if setting.toy else ROUNDS
        sides: tuple[_Ours | _Peer, ...] = (_Ours(setting, STRATEGIES[name], size, real=False), _Peer(setting, size))
        timers = [_Timer(setting.device) for _ in sides]
        for side, timer in zip(sides, timers, strict=True):
            for _ in range(rounds):
                side.round(timer)
        ours, theirs = (timer.medians() for timer in timers)
        return [_entry(setting, f"R={size} {name}", op, value, theirs) for op, value in ours.items()]

    return Task(f"host, R={size} {name}", check, measure)


def _entry(setting: Setting, case: str, op: str, value: float, theirs: dict[str, float]) -> Figure:
    op, _, due = op.partition(", ")
    case = f"{case}, {due}" if due else case
    key = f"{op}, {due}" if due else op
    if key not in theirs:
        return Figure(op, setting.case(case), value, "host us")
    return setting.entry(op, case, value, "host us", "row-by-row", partial(theirs.__getitem__, key))


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields admit, plan, settle, publish and release of 1, 64 and 256 rows; one stand-in for all strategies."""
    for size in TOY_SIZES if setting.toy else SIZES:
        for name in STRATEGIES:
            yield _task(setting, name, size)
