"""Plan and accept for every strategy, with nothing due and with every row at a boundary: device time.

A boundary at every token makes every row due in every step; boundaries 2^30 tokens apart make none due.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

from memstate.cli.bench.task import Figure, Setting, Task, differing
from memstate.engine.capacity import STRATEGIES
from memstate.engine.manager import NO_LIMIT, StateManager
from memstate.engine.settings import Forward
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Strategy
from memstate.requests.handles import Request
from memstate.requests.tracking import Tracking
from memstate.slots.packet import Packet
from memstate.slots.registers import Longs
from memstate.state.layout import Plane, StateLayout

SIZES, TOY_SIZES = (1, 64, 256), (2,)
NEVER, ALWAYS = 2**30, 1
DUE = {NEVER: "nothing due", ALWAYS: "all due"}
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)  # bytes are another benchmark's
WINDOW, ACCEPTED = 3, 2  # tokens drafted and accepted
STEPS = 5  # compared with the reference: lanes are empty, filled and taken again


class _Rows:
    """A manager with `size` rows in one batch; plans come past its mirror, from then on its own again."""

    def __init__(self, backend: Backend, tracking: Tracking, size: int, window: bool) -> None:
        self.mem = StateManager(
            LAYOUT, slots=4 * size + 4, max_requests=size, tracking=tracking, backend=backend.name,
            device=backend.device, overlap=not window, forward=Forward(speculation=window),
        )  # fmt: skip
        rows = self.mem.admit([Request(i) for i in range(size)])
        self.mem.submit()
        self.file = self.mem._parts.registers
        tokens = np.full(size, WINDOW if window else 1)
        self.batch = self._packet(rows.indices, tokens)
        self.accepted = self._packet(np.full(size, ACCEPTED))
        self.rules = self.mem._parts.mirror.rules
        self.record = self.mem._parts.log.record(size)
        self.outcome = self.mem._parts.log.outcome(size) if window else None

    def _packet(self, *columns: Longs) -> Tensor:
        return torch.from_numpy(Packet().encode(columns, NO_LIMIT)).to(self.mem.backend.device)

    def plan(self) -> None:
        """What a decode step launches."""
        self.file.plan(self.batch, self.record, self.mem._parts.log.marks, self.rules)

    def draft(self) -> None:
        rules = self.rules._replace(strategy=Strategy.WINDOW)
        self.file.plan(self.batch, self.record, self.mem._parts.log.marks, rules)

    def accept(self) -> None:
        assert self.outcome is not None
        self.file.accept(self.accepted, self.record, self.outcome, self.rules)

    def speculate(self) -> None:
        self.draft()
        self.accept()

    def wrong(self, twin: "_Rows") -> str:
        """What differs: the step, registers, owners."""
        mine, other = self.file.table, twin.file.table
        pairs = [(name, getattr(mine, name), getattr(other, name)) for name in ("slots", "labels", "tracked", "source")]
        pairs += zip(self.record._fields, self.record, twin.record, strict=True)
        if self.outcome is not None and twin.outcome is not None:
            pairs += zip(("accepted", "crossed"), self.outcome, twin.outcome, strict=True)
        return differing([*pairs, ("owners", self.file.owners(), twin.file.owners())])


def _task(setting: Setting, name: str, size: int, window: bool) -> Task:
    """One strategy, batch size and kind of step: plain steps, or windows of drafted tokens."""
    backends, case = (setting.make_backend(), setting.reference()), f"R={size} {name}"
    pairs = {
        every: [_Rows(backend, STRATEGIES[name](every), size, window) for backend in backends]
        for every in ((NEVER,) if name == "none" else (NEVER, ALWAYS))
    }

    def check() -> str:
        for every, (mine, twin) in pairs.items():
            for _ in range(STEPS):
                for rows in (mine, twin):
                    (rows.speculate if window else rows.plan)()
                if found := mine.wrong(twin):
                    return f"{DUE[every]}: {found}"
        return ""

    def measure() -> list[Figure]:
        found: list[Figure] = []
        for every, (rows, _) in pairs.items():
            due = f"{case}, {DUE[every]}"
            if window:
                found += setting.alone("accept", due, rows.accept, rows.draft)
                found += setting.in_graph("window and accept", f"{due}, in a graph", rows.speculate)
            else:
                found += setting.alone("plan", due, rows.plan)
                found += setting.in_graph("step", f"{due}, in a graph", rows.plan)
            rows.mem.device.check()
        return found

    return Task(f"{'accept' if window else 'plan'}, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields plain and speculative steps of every strategy, for 1, 64 and 256 rows."""
    for size, name, window in product(setting.sizes(SIZES, TOY_SIZES), STRATEGIES, (False, True)):
        yield _task(setting, name, size, window)
