"""Counts launches, uploads, synchronisations and moved bytes of every scheduler operation, for 1, 64 and 256 requests.

An operation is counted until its effect is on the device: what it records is submitted before the counts are read.
Counts are the same on every backend, because the orchestration is the same code.
"""

from collections.abc import Callable

import torch

from memstate.cli.bench.task import Figure
from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.requests.handles import Request, Rows
from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.state.layout import Plane, StateLayout

SIZES = (1, 64, 256)
EVERY = 4
LAYOUT = StateLayout(planes=(Plane("ssm", (2, 4, 4), torch.float32),), layers=1)
UNITS = ("launches", "uploads", "syncs", "bytes")
STRATEGIES: dict[str, Tracking] = {
    "none": NoTracking(EVERY), "ping-pong": PingPong(EVERY), "lazy": LazyPingPong(EVERY), "redirect": Redirect(EVERY),
}  # fmt: skip


class _Bench:
    """One manager, and the counts of one operation at a time."""

    def __init__(self, tracking: Tracking, size: int, backend: str, device: str) -> None:
        self.mem = StateManager(
            LAYOUT, slots=8 * size, max_requests=3 * size, tracking=tracking, backend=backend, device=device,
            max_batch=2 * size,
            pages=Pages(count=32 * size, size=EVERY, per_row=8),
        )  # fmt: skip
        self.size = size
        self.entries: list[Figure] = []
        self.case = f"R={size}"

    def count(self, op: str, act: Callable[[], object], case: str | None = None) -> None:
        """Runs `act` and submits what it recorded, and notes what that took."""
        self.mem.submit()
        before = self._counts()
        act()
        self.mem.submit()
        for unit, was, now in zip(UNITS, before, self._counts(), strict=True):
            self.entries.append(Figure(op, case or self.case, now - was, unit))

    def _counts(self) -> tuple[int, ...]:
        counts = self.mem.backend.counts
        return counts.total_launches, counts.uploads, counts.syncs, self.mem.planes.traffic.copied

    def admit(self, name: str) -> Rows:
        """R requests with pages for a few tokens."""
        return self.mem.admit([Request((name, i), length=2 * EVERY) for i in range(self.size)])

    def advance(self, rows: Rows, to: int) -> None:
        """Plans and settles until every row stands for `to` tokens."""
        while self.mem.info(rows[0]).length < to:
            self.mem.settle(self.mem.plan(rows))


def launches(
    backend: str = "auto", device: str = "cpu", progress: Callable[[int, int], None] | None = None
) -> list[Figure]:
    """Counts admit, publish, release, step (everything of a scheduler step together), plan, settle, copy and hit.

    plan and settle are counted at a boundary of every row: for each strategy, and the most of any strategy as the plain
    case `R=n`. `bytes` are those copied between slots.

    Args:
        backend: Name of the backend.
        device: Where tensors live.
        progress: Called with (done, total) sizes.

    Returns:
        One entry per operation, case and unit.

    Raises:
        ValueError: The backend cannot run here.
    """
    entries: list[Figure] = []
    for done, size in enumerate(SIZES):
        entries += _ownership(size, backend, device)
        steps = [
            entry for name, tracking in STRATEGIES.items() for entry in _steps(name, tracking, size, backend, device)
        ]
        most: dict[tuple[str, str], float] = {}
        for entry in steps:
            most[entry.op, entry.unit] = max(entry.value, most.get((entry.op, entry.unit), 0))
        entries += [Figure(op, f"R={size}", value, unit) for (op, unit), value in most.items()] + steps
        if progress:
            progress(done + 1, len(SIZES))
    return entries


def by_unit(entries: list[Figure]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns the entries as a table with a column per unit: headings and rows."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for entry in entries:
        cells.setdefault((entry.op, entry.case), {})[entry.unit] = f"{entry.value:.0f}"
    return ("op", "case", *UNITS), [[*key, *(row[unit] for unit in UNITS)] for key, row in cells.items()]


def _ownership(size: int, backend: str, device: str) -> list[Figure]:
    bench = _Bench(Redirect(every=EVERY), size, backend, device)
    mem = bench.mem
    rows: list[Rows] = []
    bench.count("admit", lambda: rows.append(bench.admit("a")))
    bench.advance(rows[0], EVERY + 1)
    bench.count("publish", lambda: mem.publish(rows[0]))
    bench.count("release", lambda: mem.end(rows[0]))

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
    half = torch.arange(1, 2 * size + 1, dtype=torch.int32, device=mem.backend.device)
    bench.count("copy", lambda: mem.pool.copy(half[:size], half[size:], due=size))
    return bench.entries


def _steps(name: str, tracking: Tracking, size: int, backend: str, device: str) -> list[Figure]:
    bench = _Bench(tracking, size, backend, device)
    mem = bench.mem
    rows = bench.admit("a")
    mem.extend(rows, [4 * EVERY] * size)
    bench.advance(rows, 2 * EVERY - (0 if tracking.reads_old_slot else 1))
    case = f"{bench.case} {name}"
    steps = []
    bench.count("plan", lambda: steps.append(mem.plan(rows)), case)
    bench.count("settle", lambda: mem.settle(steps[0]), case)
    return bench.entries
