"""Counts launches, uploads, waits and moved bytes of every scheduler operation, for 1, 64 and 256 requests.

The changes of an operation are submitted before its counts are read, so the counts include their effect. All backends
give the same counts, because they share the code that launches.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from memstate.cli.units import measured
from memstate.engine.capacity import STRATEGIES
from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.requests.handles import Request, Rows
from memstate.requests.tracking import Redirect, Tracking
from memstate.state.layout import Plane, StateLayout
from memstate_tools.bench.task import Measured

SIZES = (1, 64, 256)
EVERY = 4
LAYOUT = StateLayout(planes=(Plane("ssm", (2, 4, 4), torch.float32),), layers=1)
T = TypeVar("T")
UNITS = ("launches", "uploads", "syncs", "bytes")


class _LaunchBench:
    """A manager, and the counts of one operation at a time."""

    def __init__(self, tracking: Tracking, size: int, backend: str, device: str, suffix: str = "") -> None:
        self.mem = StateManager(
            LAYOUT, slots=8 * size, max_requests=3 * size, tracking=tracking, backend=backend, device=device,
            max_batch=2 * size, pages=Pages(count=32 * size, size=EVERY, per_row=8),
        )  # fmt: skip
        self.size, self.case = size, f"R={size}{suffix}"
        self.entries: list[Measured] = []

    def count(self, op: str, act: Callable[[], T]) -> T:
        """Runs `act`, submits its changes, and notes the counts of both."""
        self.mem.submit()
        before = self._counts()
        result = act()
        self.mem.submit()
        for unit, was, now in zip(UNITS, before, self._counts(), strict=True):
            self.entries.append(Measured(op, self.case, now - was, unit))
        return result

    def _counts(self) -> tuple[int, ...]:
        counts = self.mem.backend.counts
        return counts.total_launches, counts.uploads, counts.syncs, self.mem.planes.traffic.copied

    def admit(self, name: str) -> Rows:
        """Admits R requests with pages for a few tokens."""
        return self.mem.admit([Request((name, i), length=2 * EVERY) for i in range(self.size)])

    def advance(self, rows: Rows, to: int) -> None:
        """Plans and settles until the state of every row stands for `to` tokens."""
        while self.mem.info(rows[0]).length < to:
            self.mem.settle(self.mem.plan(rows))


def launches(
    backend: str = "auto", device: str = "cpu", progress: Callable[[int, int | None], None] | None = None
) -> list[Measured]:
    """Counts admit, publish, release, step (these three in one scheduler step), plan, settle, copy and hit.

    plan and settle are counted when every row is at a boundary, for each strategy. The plain case `R=n` has the largest
    count of any strategy. `bytes` are the bytes copied between slots.

    Args:
        backend: Name of the backend.
        device: Where tensors live.
        progress: Called with (sizes done, sizes in all).

    Returns:
        One entry per operation, case and unit.

    Raises:
        ValueError: The backend cannot run here.
    """
    entries: list[Measured] = []
    for done, size in enumerate(SIZES):
        entries += _ownership(_LaunchBench(Redirect(every=EVERY), size, backend, device))
        steps: list[Measured] = []
        for name, kind in STRATEGIES.items():
            steps += _steps(_LaunchBench(kind(EVERY), size, backend, device, f" {name}"))
        keys = dict.fromkeys((entry.op, entry.unit) for entry in steps)
        for op, unit in keys:
            most = max(entry.value for entry in steps if (entry.op, entry.unit) == (op, unit))
            entries.append(Measured(op, f"R={size}", most, unit))
        entries += steps
        if progress:
            progress(done + 1, len(SIZES))
    return entries


def by_unit(entries: list[Measured]) -> list[dict[str, str]]:
    """Returns a row for each operation and case, with the value of each unit."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        row = rows.setdefault((entry.op, entry.case), {"op": entry.op, "case": entry.case})
        row[entry.unit] = measured(entry.value, "bytes") if entry.unit == "bytes" else f"{entry.value:.0f}"
    return list(rows.values())


def _ownership(bench: _LaunchBench) -> list[Measured]:
    mem = bench.mem
    rows = bench.count("admit", lambda: bench.admit("a"))
    bench.advance(rows, EVERY + 1)
    bench.count("publish", lambda: mem.publish(rows))
    bench.count("release", lambda: mem.end(rows))

    old, ending = bench.admit("b"), bench.admit("c")
    bench.advance(old, EVERY + 1)

    def step() -> None:
        mem.publish(old)
        mem.end(ending)
        bench.admit("d")

    bench.count("step", step)
    mem.recover(keep=False)

    again = bench.admit("e")
    bench.advance(again, EVERY)
    kept = [snap for snap in mem.end(again, keep="handle") if snap]
    requests = [Request(("f", i), length=2 * EVERY, resume=snap) for i, snap in enumerate(kept)]
    bench.count("hit", lambda: mem.admit(requests))
    half = torch.arange(1, 2 * bench.size + 1, dtype=torch.int32, device=mem.backend.device)
    bench.count("copy", lambda: mem.pool.copy(half[: bench.size], half[bench.size :], due=bench.size))
    return bench.entries


def _steps(bench: _LaunchBench) -> list[Measured]:
    """Counts plan and settle when every row is at a boundary."""
    mem, rows = bench.mem, bench.admit("a")
    mem.extend(rows, [4 * EVERY] * bench.size)
    bench.advance(rows, 2 * EVERY - (0 if mem.tracking.reads_old_slot else 1))
    step = bench.count("plan", lambda: mem.plan(rows))
    bench.count("settle", lambda: mem.settle(step))
    return bench.entries
