"""Benchmarks decode steps of a model's recurrent layers, with nothing due and with every row at a boundary.

Two things are timed: the forward, in a CUDA graph; and a whole step, which is a graph of plan and forward, and then
the settle. Before that, outputs and states of the first and the last layer are compared with the reference.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from memstate.engine.capacity import STRATEGIES
from memstate.engine.manager import StateManager
from memstate.requests.handles import Request
from memstate.requests.tracking import NoTracking
from memstate.state.layout import StateLayout
from memstate.state.presets import qwen3_next
from memstate_tools.bench.clock import Act
from memstate_tools.bench.copy import OVERHEAD, TOY
from memstate_tools.bench.forward import BenchForward
from memstate_tools.bench.task import MOST_COPIED, Measured, Setting, Task
from memstate_tools.bench.track import ALWAYS, DUE, NEVER, SIZES

MODEL, TOY_SIZES = "qwen3_next", (2,)
# largest norm of (got - expected) over that of expected: outputs are bf16, states fp32
BOUND = {"conv": 1e-2, "delta": 1e-2, "state": 1e-5}
FILLED = 3  # steps until every strategy has taken its lanes


class _DecodeBench:
    """A manager, its forward and one plan of all rows, for one strategy."""

    def __init__(self, setting: Setting, layout: StateLayout, case: str, name: str, size: int, every: int) -> None:
        self.setting, self.case, self.size = setting, case, size
        # Redirect's snapshot is the slot that was read. With another strategy, the forward writes each state twice.
        self.writes_snapshots = every == ALWAYS and name in ("ping-pong", "lazy")
        tracking = STRATEGIES[name](every)
        slots = tracking.most_slots(True) * size
        self.mem = StateManager(
            layout, slots=slots, max_requests=size, tracking=tracking, backend=setting.make_backend().name,
            device=setting.device,
        )  # fmt: skip
        for plane in self.mem.planes.values():
            plane.normal_()
        self.mem.device.scrub_null()
        self.rows = list(self.mem.admit([Request(i) for i in range(size)]))
        self.forward = BenchForward(self.mem.backend, self.mem.planes, size)
        self.replay: Act | None = None
        for _ in range(FILLED):
            self.step()
        self.planned = self.mem.plan(self.rows)

    def step(self) -> None:
        """Makes the calls of a decode loop for one token of each row."""
        step = self.mem.plan(self.rows, replay=self.replay)
        if self.replay is None:
            self.forward(step.record)
        self.mem.settle(step)

    def check(self) -> str:
        """Compares one step of the first and the last layer with the reference. Returns the difference, or ""."""
        record, planes = self.planned.record, self.mem.planes
        taken = int((record.snapshot > 0).sum())
        if taken != (self.size if self.writes_snapshots else 0) or not bool((record.write > 0).all()):
            return f"the plan writes {record.write.tolist()} and snapshots {record.snapshot.tolist()}"
        for layer in {0, len(planes["ssm"]) - 1}:
            twins = {name: plane[layer : layer + 1].clone() for name, plane in planes.items()}
            oracle = BenchForward(self.setting.reference(), twins, self.size)
            for name in ("x", "weight", "decay", "beta"):
                setattr(oracle, name, getattr(self.forward, name))
            self.forward.mixed.fill_(torch.nan)
            self.forward.out.fill_(torch.nan)
            self.forward.layer(layer, record)
            states = twins["ssm"].clone()
            oracle.layer(0, record)
            written = torch.cat([record.write, record.snapshot[record.snapshot > 0]]).long()
            conv, ssm = (planes[name][layer] for name in ("conv", "ssm"))
            errors = {"conv": _error(self.forward.mixed, oracle.mixed)}
            oracle.mixed.copy_(self.forward.mixed)  # so that the second step has the same inputs
            twins["ssm"].copy_(states)
            oracle.backend.gated_delta_step(*oracle.given(0, record)[1])
            errors |= {
                "delta": _error(self.forward.out, oracle.out),
                "state": _error(ssm[written], twins["ssm"][0][written]),
            }
            if not torch.equal(conv[written].view(torch.int16), twins["conv"][0][written].view(torch.int16)):
                return f"layer {layer}: conv windows differ"
            if bad := [f"{name} {error:.2g}" for name, error in errors.items() if not error <= BOUND[name]]:
                return f"layer {layer}: off the reference by {', '.join(bad)}"
        return ""

    def measure(self) -> list[Measured]:
        """Times the forward of this plan, compares it with a plain copy of as many bytes, and times a whole step."""
        setting, moved = self.setting, self.moved
        figures = setting.in_graph("forward", self.case, partial(self.forward, self.planned.record), moved=moved)
        self.mem.settle(self.planned)
        # whole steps are replayed: ownership, plan and forward in one graph
        self.replay = setting.clock.captured(lambda: self.forward(self.mem.launch(self.size)))
        return [*figures, *setting.alone("decode step", self.case, self.step)]

    @property
    def moved(self) -> int:
        """Bytes of states that the forward reads and writes."""
        return (2 + self.writes_snapshots) * self.size * self.mem.layout.payload_bytes_per_slot


def _error(got: Tensor, expected: Tensor) -> float:
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def _task(setting: Setting, layout: StateLayout, name: str, size: int, every: int) -> Task:
    case = f"{'' if setting.toy else f'{MODEL}, '}R={size} {name}, {DUE[every]}"
    made: list[_DecodeBench] = []  # the check's bench, which the measurement reuses and then frees

    def check() -> str:
        made.append(_DecodeBench(setting, layout, case, name, size, every))
        return made[0].check()

    return Task(f"decode, {case}", check, lambda: made.pop().measure())


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields a task for every strategy and for batches of 1, 64 and 256 rows, if the states fit."""
    layout = setting.sizes(qwen3_next(), TOY)
    for size, (name, strategy) in product(setting.sizes(SIZES, TOY_SIZES), STRATEGIES.items()):
        if size > 1 and (3 * size + OVERHEAD) * layout.bytes_per_slot + 2 * MOST_COPIED > 0.75 * setting.free_bytes:
            continue
        for every in (NEVER,) if strategy is NoTracking else (NEVER, ALWAYS):
            yield _task(setting, layout, name, size, every)
