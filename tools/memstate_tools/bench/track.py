"""Benchmarks plans of every strategy, with nothing due and with every row at a boundary: device time.

With a boundary at every token, every row is due in every step. With boundaries 2^30 tokens apart, no row is due.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

from memstate.engine.capacity import STRATEGIES
from memstate.engine.manager import NO_LIMIT, StateManager
from memstate.engine.settings import Forward
from memstate.kernels.dispatch import Backend
from memstate.kernels.rules import DRAFTS
from memstate.requests.handles import Request
from memstate.requests.tracking import Tracking
from memstate.slots.packet import Packet
from memstate.slots.registers import Longs
from memstate.state.layout import Plane, StateLayout
from memstate_tools.bench.task import Measured, Setting, Task, differing

SIZES, TOY_SIZES = (1, 64, 256), (2,)
NEVER, ALWAYS = 2**30, 1
DUE = {NEVER: "nothing due", ALWAYS: "all due"}
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)  # the smallest states: this benchmark moves none
TAIL = 4  # tokens of a step with drafts; all but one are drafts
STEPS = 5  # steps that are compared with the reference: they fill empty lanes and then reuse them


class _TrackedRows:
    """A manager with `size` rows in one batch. Plans are launched directly, so the host does not count them."""

    def __init__(self, backend: Backend, tracking: Tracking, size: int, drafts: bool) -> None:
        self.mem = StateManager(
            LAYOUT, slots=4 * size + 4, max_requests=size, tracking=tracking, backend=backend.name,
            device=backend.device, forward=Forward(tail=TAIL * drafts),
        )  # fmt: skip
        rows = self.mem.admit([Request(i) for i in range(size)])
        self.mem.submit()
        self.file = self.mem._parts.registers
        tokens = np.full(size, -(DRAFTS * (TAIL - 1) + TAIL) if drafts else 1)
        self.batch = self._packet(rows.indices, tokens)
        self.rules = self.mem._parts.mirror.rules
        self.record = self.mem._parts.log.record(size)

    def _packet(self, *columns: Longs) -> Tensor:
        return torch.from_numpy(Packet().encode(columns, NO_LIMIT)).to(self.mem.backend.device)

    def plan(self) -> None:
        """Launches the plan of a decode step."""
        log = self.mem._parts.log
        self.file.plan(self.batch, self.record, log.marks, self.rules, log.tails)

    def wrong(self, twin: "_TrackedRows") -> str:
        """Returns which of step, registers and owners differ from those of the twin; empty if none does."""
        mine, other = self.file.table, twin.file.table
        pairs = [(name, getattr(mine, name), getattr(other, name)) for name in ("slots", "labels", "tracked", "source")]
        pairs += zip(self.record._fields, self.record, twin.record, strict=True)
        tails, others = self.mem._parts.log.tails, twin.mem._parts.log.tails
        if tails is not None and others is not None:
            pairs += zip(tails._fields, tails, others, strict=True)
        return differing([*pairs, ("owners", self.file.owners(), twin.file.owners())])


def _task(setting: Setting, name: str, size: int, drafts: bool) -> Task:
    """Returns the task of one strategy, batch size and kind of step: a plain step, or a step with drafts."""
    backends, case = (setting.make_backend(), setting.reference()), f"R={size} {name}{', drafts' * drafts}"
    pairs = {
        every: [_TrackedRows(backend, STRATEGIES[name](every), size, drafts) for backend in backends]
        for every in ((NEVER,) if name == "none" else (NEVER, ALWAYS))
    }

    def check() -> str:
        for every, (mine, twin) in pairs.items():
            for _ in range(STEPS):
                for rows in (mine, twin):
                    rows.plan()
                if differ := mine.wrong(twin):
                    return f"{DUE[every]}: {differ}"
        return ""

    def measure() -> list[Measured]:
        figures: list[Measured] = []
        for every, (rows, _) in pairs.items():
            due = f"{case}, {DUE[every]}"
            figures += setting.alone("plan", due, rows.plan)
            figures += setting.in_graph("step", f"{due}, in a graph", rows.plan)
            rows.mem.device.check()
        return figures

    return Task(f"plan, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of plain steps and of steps with drafts, for every strategy and 1, 64 and 256 rows."""
    for size, name, drafts in product(setting.sizes(SIZES, TOY_SIZES), STRATEGIES, (False, True)):
        yield _task(setting, name, size, drafts)
