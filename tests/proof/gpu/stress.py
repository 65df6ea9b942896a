"""Runs a million plans of small batches in CUDA graphs of many plans, with an audit after every replay.

A program of a small batch has more threads than rows, so several warps hold the same row. A late warp must not decide
by values that another warp has already stored. Otherwise slots would be owned twice or lost, and lengths wrong.
"""

from itertools import product

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import AUDIT_FREE, REGISTERS_PER_ROW, Count
from memstate.slots.allocator import FAULTS
from memstate_tools.bench.track import _TrackedRows
from tests.proof.gpu.machine import Machine, Result, TimeIsUp

PLANS, TOY_PLANS = 1_000_000, 200
IN_GRAPH, TOY_IN_GRAPH = 250, 25
STRATEGIES = (ms.NoTracking, ms.PingPong, ms.LazyPingPong, ms.Redirect)
BATCHES, TOY_BATCHES = range(1, 34), (1, 2)
EVERY = (1, 3)  # tokens between boundaries: all rows are due in every step, or in every third step
WARM = 3  # number of steps that fill the lanes
LAST = 1.0  # seconds kept to write the result and exit


class Stress:
    """Rows with one strategy, batch size and distance of boundaries. Their plans are launched without a manager."""

    def __init__(self, machine: Machine, tracking: ms.Tracking, batch: int) -> None:
        self.rows = _TrackedRows(Backend(machine.backend, machine.device), tracking, batch, drafts=False)
        self.steps = 0
        self.live = torch.arange(1, batch + 1, device=machine.device) * REGISTERS_PER_ROW
        self.bad = torch.zeros(3, dtype=torch.int32, device=machine.device)  # failed audits of owners, lengths, counts
        for _ in range(WARM):
            self.step()

    def step(self) -> None:
        self.rows.plan()
        self.steps += 1

    def audit(self) -> None:
        """Counts faults on the device: slots owned twice or lost, wrong lengths, wrong counts. Syncs: no."""
        file = self.rows.file
        status, counters = file.owners()[1:], file.table.counters
        free = status == AUDIT_FREE
        wrong = (
            ~(free | (status == 1)),
            file.table.labels[self.live] != self.steps,
            torch.cat([counters[list(FAULTS)] != 0, (free.sum() != counters[Count.FREE]).view(1)]),
        )
        self.bad += torch.stack([one.any() for one in wrong])

    def faults(self) -> str:
        """Returns the faults that the audits have counted. Syncs: yes."""
        names = ("owners", "lengths", "counts")
        return ", ".join(f"{name} in {n} audits" for name, n in zip(names, self.bad.tolist(), strict=True) if n)


def course(machine: Machine, stress: Stress, plans: int, in_graph: int) -> tuple[int, str]:
    """Runs plans, most of them in graphs of `in_graph` plans. Returns the number of plans, and the faults."""

    def many() -> None:
        for _ in range(in_graph):
            stress.rows.plan()

    many()  # one eager launch before the capture
    stress.steps += in_graph
    stress.audit()
    replay, made = machine.capture(many), in_graph
    while made < plans and machine.left > LAST:
        replay()
        stress.steps += in_graph
        made += in_graph
        stress.audit()
    return made, stress.faults()


def prove(machine: Machine, result: Result) -> None:
    """Stresses every strategy with every batch size, the smallest batch first."""
    toy = machine.toy
    strategies = STRATEGIES[2:] if toy else STRATEGIES
    cases = list(product(TOY_BATCHES if toy else BATCHES, strategies))
    total, in_graph = (TOY_PLANS, TOY_IN_GRAPH) if toy else (PLANS, IN_GRAPH)
    each = -(-total // len(cases))
    result |= {"plans": 0, "audits": 0, "asked": total, "cases": 0}
    for number, (batch, strategy) in enumerate(cases):
        name = f"{strategy.__name__}, batch {batch}"
        if machine.left < 2 * LAST:
            raise TimeIsUp(f"{result['plans']} of {total} plans; not begun: {name}")
        stress = Stress(machine, strategy(EVERY[number % len(EVERY)]), batch)
        made, wrong = (0, stress.faults()) if machine.compiling else course(machine, stress, each, in_graph)
        result["plans"] += made
        result["audits"] += made // in_graph
        result["cases"] += 1
        if wrong:
            result["failures"].append(f"{name}, after {made} plans: {wrong}")
        if number % 8 == 0:
            machine.keep(result)
    if result["plans"] < total and not machine.compiling:
        raise TimeIsUp(f"{result['plans']} of {total} plans")
