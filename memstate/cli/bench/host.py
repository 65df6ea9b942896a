"""Microseconds of the host for every scheduler operation.

On a GPU launches and uploads are real, and nothing waits for them. Elsewhere one small torch operation stands in for
every launch, so that the figures hold the host's work and no kernel's.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from memstate.cli.bench.clock import host_seconds
from memstate.cli.bench.launches import EVERY, SIZES, STRATEGIES
from memstate.cli.bench.task import Figure, Setting, Task
from memstate.engine.manager import StateManager
from memstate.kernels.dispatch import OPS
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.steps import Step
from memstate.requests.tracking import Tracking
from memstate.state.layout import Plane, StateLayout

TOY_SIZES = (1, 3)
ROUNDS, TOY_ROUNDS = 31, 2
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)
Timer = Callable[[str, Callable[[], object]], object]


def _manager(setting: Setting, tracking: Tracking, size: int) -> StateManager:
    return StateManager(
        LAYOUT, slots=5 * size, max_requests=size, tracking=tracking, backend=setting.backend, device=setting.device
    )


def _round(mem: StateManager, size: int, timer: Timer) -> None:
    """Requests that begin, step to a boundary and over it, are published, and end."""
    rows: list[Row] = []
    steps: list[Step] = []
    kept: list[Snapshot | None] = []

    def call(op: str, act: Callable[[], object]) -> None:
        def submitted() -> None:
            act()
            mem.submit()

        timer(op, submitted)

    call("admit", lambda: rows.extend(mem.admit([Request(i) for i in range(size)])))
    boundary = EVERY + 1 if mem.tracking.reads_old_slot else EVERY
    for at in range(1, EVERY + 2):
        due = "all due" if at == boundary else "nothing due"
        timer(f"plan, {due}", lambda: steps.append(mem.plan(rows)))
        timer(f"settle, {due}", lambda: mem.settle(steps.pop()))
    call("publish", lambda: kept.extend(mem.publish(rows)))
    call("release", lambda: mem.release(rows))
    mem.drop([snapshot for snapshot in kept if snapshot])
    mem.submit()


def _check(setting: Setting, tracking: Tracking, size: int) -> str:
    """Two rounds must leave nothing behind, and every row must have had a snapshot in each."""
    mem = _manager(setting, tracking, size)
    for _ in range(2):
        _round(mem, size, lambda op, act: act())
    mem.check()
    stats, report = mem.stats(), mem.audit()
    if not report.clean or stats.free != stats.capacity:
        return f"{stats.free} of {stats.capacity} slots free; {report}"
    return "" if stats.published == 2 * size else f"{stats.published} snapshots of {2 * size}"


def _measure(setting: Setting, name: str, tracking: Tracking, size: int) -> list[Figure]:
    mem = _manager(setting, tracking, size)
    if setting.device.type == "cpu":
        cell = torch.zeros(8, dtype=torch.int32)
        for op in OPS:
            setattr(mem.backend, op, lambda *_: cell.add_(1))
    spent = defaultdict[str, list[float]](list)
    for _ in range(TOY_ROUNDS if setting.toy else ROUNDS):
        _round(mem, size, lambda op, act: spent[op].append(host_seconds(act, setting.device)))
    entries = []
    for op, times in spent.items():
        op, _, due = op.partition(", ")
        case = f"R={size} {name}, {due}".removesuffix(", ")
        entries.append(setting.micros(op, case, median(times[1:]), "host us"))  # the first round may compile
    return entries


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields admit, plan, settle, publish and release of 1, 64 and 256 rows."""
    for size in TOY_SIZES if setting.toy else SIZES:
        for name, tracking in STRATEGIES.items():
            if name != "none":  # it takes no snapshot
                given = (setting, tracking, size)
                measure = partial(_measure, setting, name, tracking, size)
                yield Task(f"host, R={size} {name}", partial(_check, *given), measure)
