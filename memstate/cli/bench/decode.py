"""Decode steps of a model's recurrent layers, with nothing due and with every row at a boundary.

What is timed is the forward in a CUDA graph, and beside it a whole step as it is submitted: plan, forward, settle. The
outputs and states of the forward are compared with the reference first, in the first and the last layer.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from memstate.cli.bench.clock import Act, Clock
from memstate.cli.bench.copy import OVERHEAD, TOY
from memstate.cli.bench.forward import Forward
from memstate.cli.bench.task import Figure, Setting, Task
from memstate.cli.bench.track import ALWAYS, DUE, NEVER, SIZES, STRATEGIES, beside_idle
from memstate.engine.manager import StateManager
from memstate.kernels.tables import StepRecord
from memstate.requests.handles import Request
from memstate.requests.tracking import NoTracking
from memstate.state.layout import StateLayout
from memstate.state.presets import qwen3_next

MODEL, TOY_SIZES = "qwen3_next", (2,)
BOUND = {"conv": 1e-2, "delta": 1e-2, "state": 1e-5}  # of |got - expected| / |expected|: outputs are bf16, states fp32
MOST_COPIED = 2 * 2**30  # bytes of the yardstick
FILLED = 3  # steps until every strategy has taken its lanes


class _Bench:
    """A manager, its forward and one plan of all rows, for one strategy."""

    def __init__(self, setting: Setting, layout: StateLayout, name: str, size: int, every: int) -> None:
        self.setting, self.name, self.size, self.every = setting, name, size, every
        tracking = STRATEGIES[name](every)
        slots = tracking.most_slots(True) * size
        self.mem = StateManager(
            layout, slots=slots, max_requests=size, tracking=tracking, backend=setting.make_backend().name,
            device=setting.device,
        )  # fmt: skip
        for plane in self.mem.planes.values():
            plane.normal_()
        self.mem.scrub_null()
        self.rows = list(self.mem.admit([Request(i) for i in range(size)]))
        self.forward = Forward(self.mem.backend, self.mem.planes, size)
        self.replays: dict[int, Act] = {}  # by the record that a step uses
        for _ in range(FILLED):
            self.step()
        self.planned = self.mem.plan(self.rows)

    def step(self) -> None:
        """What a decode loop submits for a token a row."""
        step = self.mem.plan(self.rows)
        self.replays.get(step.parity, partial(self.forward, step.record))()
        self.mem.settle(step)

    def capture(self, clock: Clock) -> None:
        """From here on forwards are replayed, one graph for each of the two records."""
        for _ in range(2):
            step = self.mem.plan(self.rows)
            replay = self.replays[step.parity] = clock.captured(partial(self.forward, step.record))
            replay()
            self.mem.settle(step)

    def check(self) -> str:
        """What the kernels and the reference make of one step of the first and the last layer."""
        record, planes = self.planned.record, self.mem.planes
        taken = int((record.snapshot > 0).sum())
        if taken != (self.size if self.writes_snapshots else 0) or not bool((record.write > 0).all()):
            return f"the plan writes {record.write.tolist()} and snapshots {record.snapshot.tolist()}"
        for layer in {0, len(planes["ssm"]) - 1}:
            twins = {name: plane[layer : layer + 1].clone() for name, plane in planes.items()}
            oracle = Forward(self.setting.reference(), twins, self.size)
            for name in ("x", "weight", "q", "k", "v", "decay", "beta"):
                setattr(oracle, name, getattr(self.forward, name))
            self.forward.mixed.fill_(torch.nan)
            self.forward.out.fill_(torch.nan)
            self.forward.layer(layer, record)
            oracle.layer(0, record)
            written = torch.cat([record.write, record.snapshot[record.snapshot > 0]]).long()
            conv, ssm = (planes[name][layer] for name in ("conv", "ssm"))
            errors = {
                "conv": _error(self.forward.mixed, oracle.mixed),
                "delta": _error(self.forward.out, oracle.out),
                "state": _error(ssm[written], twins["ssm"][0][written]),
            }
            if not torch.equal(conv[written].view(torch.int16), twins["conv"][0][written].view(torch.int16)):
                return f"layer {layer}: conv windows differ"
            if bad := [f"{name} {error:.2g}" for name, error in errors.items() if not error <= BOUND[name]]:
                return f"layer {layer}: off the reference by {', '.join(bad)}"
        return ""

    def times(self, clock: Clock) -> dict[str, float]:
        """Seconds of the forward of this plan, and of a whole step."""
        record: StepRecord = self.planned.record
        forward = clock.in_graph(partial(self.forward, record))
        self.mem.settle(self.planned)
        self.capture(clock)
        return {"forward": forward, "decode step": clock.alone(self.step)}

    @property
    def writes_snapshots(self) -> bool:
        """Whether the forward writes every state twice; Redirect's snapshots are the slots that were read."""
        return self.every == ALWAYS and self.name in ("ping-pong", "lazy")

    @property
    def moved(self) -> int:
        """Bytes of states that the forward reads and writes."""
        return (2 + self.writes_snapshots) * self.size * self.mem.layout.payload_bytes_per_slot


def _error(got: Tensor, expected: Tensor) -> float:
    difference = (got.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


class _Task:
    """Checks and measures one bench, which exists only meanwhile: states of a model are large.

    idle: seconds of the same strategy with nothing due, by operation; filled by the task that finds them.
    """

    def __init__(self, setting: Setting, layout: StateLayout, name: str, size: int, every: int) -> None:
        self.setting, self.name, self.every = setting, name, every
        self.make = partial(_Bench, setting, layout, name, size, every)
        self.case = f"{'' if setting.toy else f'{MODEL}, '}R={size} {name}, {DUE[every]}"
        self._bench: _Bench | None = None

    def check(self) -> str:
        self._bench = self.make()
        return self._bench.check()

    def measure(self, idle: dict[str, float], clock: Clock) -> list[Figure]:
        assert self._bench is not None
        bench, self._bench = self._bench, None
        entries, setting = [], self.setting
        for op, seconds in bench.times(clock).items():
            entries.append(beside_idle(setting, op, self.case, seconds, idle, op, self.every))
            if op == "forward":
                other = partial(_copy_rate, bench, clock)
                entries.append(setting.entry(op, self.case, bench.moved / seconds, "bytes/s", "device-copy", other))
        return entries


def _copy_rate(bench: _Bench, clock: Clock) -> float:
    """Bytes a second, read and written, of a plain copy of as many bytes, or of enough to fill the device."""
    size = min(bench.moved // 2, MOST_COPIED)
    to, of = torch.empty(2, size, dtype=torch.uint8, device=bench.mem.planes.device).random_(0, 256)
    return 2 * size / clock.alone(partial(to.copy_, of))


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields every strategy, for the batches of 1, 64 and 256 rows whose states fit."""
    layout = TOY if setting.toy else qwen3_next()
    free = 2**40 if setting.toy else torch.cuda.mem_get_info(setting.device)[0]
    for size, (name, strategy) in product(TOY_SIZES if setting.toy else SIZES, STRATEGIES.items()):
        if size > 1 and (3 * size + OVERHEAD) * layout.bytes_per_slot + 2 * MOST_COPIED > 0.75 * free:
            continue
        idle: dict[str, float] = {}
        for every in (NEVER,) if strategy is NoTracking else (NEVER, ALWAYS):
            task = _Task(setting, layout, name, size, every)
            yield Task(f"decode, {task.case}", task.check, partial(task.measure, idle))
