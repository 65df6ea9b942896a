"""Counts and microseconds of the host for every scheduler operation, beside SGLang's own code where it is installed.

Both sides run in one process and on one thread, in turns. A figure is the least CPU time of the thread in any turn:
what the code costs where nothing disturbs it. On a CPU our launches do nothing, and neither do data moves. What the
peer launches are small torch operations; on a GPU each would be a launch, so they count as its host time.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memstate.cli.bench import host_peer
from memstate.cli.bench.task import Figure, Setting, Task, take_turns
from memstate.engine.manager import StateManager
from memstate.kernels.dispatch import OPS
from memstate.requests.handles import Request, Row, Rows, Snapshot
from memstate.requests.tracking import LazyPingPong, PingPong, Redirect, Tracking
from memstate.slots.registers import Longs
from memstate.state.layout import Plane, StateLayout

EVERY, TOY_EVERY = 256, 16  # tokens between snapshots; 256 is the peer's default
DECODES = ((1, 0), (256, 0), (256, 16), (256, 256))  # rows, rows at a boundary
TOY_DECODES = ((1, 0), (3, 0), (3, 1), (3, 3))
FORMS = ("", "other batch", "list")  # of the batch: that of the step before; others; a list of handles
LIVES, TOY_LIVES = (1, 64, 256), (1, 3)  # rows that are admitted, published and released together
TURNS, TOY_TURNS = 61, 2
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)
KINDS: dict[str, type[PingPong | LazyPingPong | Redirect]] = {
    "ping-pong": PingPong, "lazy": LazyPingPong, "redirect": Redirect,
}  # fmt: skip
OURS = "memstate"
UNITS = ("launches", "uploads", "syncs")
Timer = Callable[[str, Callable[[], object]], object]


class Side(Protocol):
    """Requests whose operations are timed."""

    def turn(self, timer: Timer) -> None:
        """Does everything once, each operation inside of a call of the timer."""
        ...

    def counted(self, act: Callable[[], object]) -> NDArray[np.int64]:
        """Makes a call and returns how often it launches, uploads and waits for the device."""
        ...

    def silence(self) -> None:
        """Makes our launches do nothing, on a CPU, where they are no launches."""
        ...

    def wrong(self) -> str:
        """Returns what is wrong after a turn; empty if nothing is."""
        ...


def cpu_seconds(act: Callable[[], object], device: torch.device) -> float:
    """Returns the CPU time that this thread spends in a call, after the device has finished what came before.

    Syncs: yes, on a GPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - begin) * 1e-9


class Ours:
    """A manager whose operations are timed.

    Attributes:
        mem: The manager.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int) -> None:
        self.mem = StateManager(
            LAYOUT, slots=5 * size, max_requests=size, tracking=tracking, backend=setting.backend, device=setting.device
        )

    def counted(self, act: Callable[[], object]) -> NDArray[np.int64]:
        """See `Side`."""
        before = self._counts()
        act()
        return self._counts() - before

    def silence(self) -> None:
        """See `Side`."""
        for op in OPS:
            setattr(self.mem.backend, op, lambda *_: None)

    def _counts(self) -> NDArray[np.int64]:
        counts = self.mem.backend.counts
        return np.array([counts.total_launches, counts.uploads, counts.syncs], np.int64)


class Life(Ours):
    """Requests that are admitted, reach a boundary, publish their snapshots, and end; then the snapshots are dropped.

    What an operation records is submitted inside of it. In `together`, all four share a submit, as in a scheduler step.

    Args:
        setting: Where it runs.
        tracking: The strategy.
        size: Number of requests.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int) -> None:
        super().__init__(setting, tracking, size)
        self._size, self._published = size, 0

    def turn(self, timer: Timer) -> None:
        """See `Side`."""
        mem, requests = self.mem, [Request(i) for i in range(self._size)]
        rows: list[Rows] = []
        kept: list[Snapshot | None] = []

        def submitted(op: str, act: Callable[[], object]) -> None:
            def call() -> None:
                act()
                mem.submit()

            timer(op, call)

        def together() -> None:
            old = rows.pop()
            snapshots = mem.publish(old)
            mem.release(old)
            mem.drop(snapshots)
            rows.append(mem.admit(requests))

        submitted("admit", lambda: rows.append(mem.admit(requests)))
        self._reach(rows[0])
        submitted("publish", lambda: kept.extend(mem.publish(rows[0])))
        submitted("release", lambda: mem.release(rows.pop()))
        self._published += sum(snapshot is not None for snapshot in kept)
        submitted("drop", lambda: mem.drop(kept))

        rows.append(mem.admit(requests))
        self._reach(rows[0])
        submitted("together", together)
        mem.release(rows.pop())
        mem.submit()

    def _reach(self, rows: Rows) -> None:
        """Takes rows over a boundary. Under Redirect the step behind it takes the snapshot."""
        for tokens in (self.mem.tracking.every, 1):
            self.mem.settle(self.mem.plan(rows, tokens))

    def wrong(self) -> str:
        """Every request must have had a snapshot in each turn, and nothing may be left."""
        self.mem.check()
        stats, report = self.mem.stats(), self.mem.audit()
        if not report.clean or stats.free != stats.capacity:
            return f"{stats.free} of {stats.capacity} slots free; {report}"
        return "" if self._published == 2 * self._size else f"{self._published} snapshots of {2 * self._size}"


class Decode(Ours):
    """Requests that decode: a step of all of them, some at a boundary.

    Args:
        setting: Where it runs.
        tracking: The strategy.
        size: Number of requests.
        due: Number of requests at a boundary.
        form: The batch, one of `FORMS`.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, due: int, form: str) -> None:
        super().__init__(setting, tracking, size)
        self._due, self._form = due, form
        self._rows = self.mem.admit([Request(i) for i in range(size)])
        self._length = np.zeros(size, np.int64)
        self._taken = 0

    def _move(self, tokens: Longs) -> None:
        self.mem.settle(self.mem.plan(self._rows, tokens.tolist()))
        self._length += tokens

    def turn(self, timer: Timer) -> None:
        """See `Side`. Between two turns, requests go where the next one needs them."""
        mem, every = self.mem, int(self.mem.tracking.every)
        early = np.arange(len(self._rows)) < self._due  # a boundary is next
        at = self._length % every
        self._move(np.where(~early & (at > every // 2 - 1), every - at, 1))
        target = np.where(early, every - 2 + mem.tracking.reads_old_slot, every // 2 - 1)
        self._move(target - self._length % every)
        self._move(np.ones(len(early), np.int64))
        steps, before = [], mem.stats().snapshots
        batch: Sequence[Row] = self._rows
        if self._form:
            batch = list(batch) if self._form == "list" else batch[::-1]
        timer("plan", lambda: steps.append(mem.plan(batch)))
        timer("settle", lambda: mem.settle(steps[0]))
        self._taken = mem.stats().snapshots - before
        self._length += 1

    def wrong(self) -> str:
        """The step must have taken as many snapshots as were due."""
        self.mem.check()
        report = self.mem.audit()
        if not report.clean:
            return str(report)
        return "" if self._taken == self._due else f"{self._taken} snapshots of {self._due}"


def _check(make: Callable[[], Side]) -> str:
    """Two turns with kernels that work must leave nothing wrong."""
    side = make()
    for _ in range(2):
        side.turn(lambda op, act: act())
    return side.wrong()


def _of_ops(side: Side, measure: Callable[[Callable[[], object]], Any]) -> dict[str, Any]:
    """Returns what one turn costs, by operation."""
    spent: dict[str, Any] = {}
    side.turn(lambda op, act: spent.__setitem__(op, measure(act)))
    if "plan" in spent:
        spent["decode"] = spent["plan"] + spent["settle"]
    elif "drop" in spent and "together" not in spent:  # the peer does one after the other
        spent["together"] = sum(spent.values())
    return spent


def _measure(
    setting: Setting, case: str, make: Callable[[], Side], make_peer: Callable[[], Side] | None
) -> list[Figure]:
    ours = make()
    sides: dict[str, Side] = {OURS: ours}
    peers: dict[str, Side] = {host_peer.NAME: make_peer()} if make_peer is not None else {}
    found = defaultdict[str, dict[tuple[str, str], float]](dict)  # by side: operation, unit

    def count(_: int, name: str, side: Side) -> None:
        for op, numbers in _of_ops(side, side.counted).items():
            found[name] |= {(op, unit): float(n) for unit, n in zip(UNITS, numbers, strict=True)}

    def spend(_: int, name: str, side: Side) -> None:
        for op, seconds in _of_ops(side, lambda act: cpu_seconds(act, setting.device)).items():
            key = op, "host us"
            found[name][key] = min(found[name].get(key, inf), seconds * 1e6)

    take_turns(sides, peers, 2, count, f"host, {case}")
    if setting.device.type == "cpu":
        ours.silence()
    take_turns(sides, peers, TOY_TURNS if setting.toy else TURNS, spend, f"host, {case}")
    figures = []
    for (op, unit), value in found[OURS].items():
        other = found[host_peer.NAME].get((op, unit)) if peers else None
        ratio = value / other if other else None
        figures.append(
            Figure(op, setting.case(case), value, unit, None if other is None else host_peer.NAME, other, ratio)
        )
    return figures


def _peer_can_run(setting: Setting) -> bool:
    if not setting.compares(host_peer.NAME) or setting.device.type != "cpu":
        return False
    try:
        host_peer.load()
    except ImportError as error:
        print(f"host: measured without {host_peer.NAME}: {error}", file=sys.stderr)
        return False
    return True


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields decode steps, then admissions with what follows them, for each strategy that takes snapshots.

    Lazy stands beside the peer's lazy strategy; the others stand beside the peer's default, which is ping-pong.
    """
    there, every = _peer_can_run(setting), TOY_EVERY if setting.toy else EVERY
    for name, kind in KINDS.items():
        peer = partial(host_peer.SglangStates, lazy=name == "lazy", every=every) if there else None
        for size, due in TOY_DECODES if setting.toy else DECODES:
            for form in FORMS if size > 1 and not due else ("",):
                case = f"R={size} {name}, {due} due, {form}".removesuffix(", ")
                decode: Callable[[], Side] = partial(Decode, setting, kind(every), size, due, form)
                other = partial(peer, size=size, due=due) if peer else None
                yield Task(f"host, {case}", partial(_check, decode), partial(_measure, setting, case, decode, other))
        for size in TOY_LIVES if setting.toy else LIVES:
            case = f"R={size} {name}"
            life = partial(Life, setting, kind(every), size)
            other = partial(peer, size=size) if peer else None
            yield Task(f"host, {case}", partial(_check, life), partial(_measure, setting, case, life, other))
    if there:
        yield from _adapters(setting, every)


def _adapters(setting: Setting, every: int) -> Iterator[Task]:
    """Yields SGLang's own scheduler code over the pool of `memstate.integrations.sglang`, beside its own pool."""
    for name in ("ping-pong", "lazy"):
        cases: list[tuple[str, dict[str, Any]]] = [
            *((f"R={size} {name}, {due} due", {"size": size, "due": due})
              for size, due in (TOY_DECODES if setting.toy else DECODES)),
            *((f"R={size} {name}", {"size": size}) for size in (TOY_LIVES if setting.toy else LIVES)),
        ]  # fmt: skip
        for case, numbers in cases:
            peer = partial(host_peer.SglangStates, lazy=name == "lazy", every=every, **numbers)
            ours, case = partial(peer, adapted=True), f"{case}, adapters"
            yield Task(f"host, {case}", partial(_check, ours), partial(_measure, setting, case, ours, peer))
