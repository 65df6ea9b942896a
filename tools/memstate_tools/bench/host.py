"""Benchmarks host time and counts of every scheduler operation, compared with SGLang's own code if it is installed."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from memstate.requests.handles import Request, Rows, Snapshot
from memstate.requests.tracking import Tracking
from memstate.slots.registers import Longs
from memstate_tools.bench import drafts, host_peer, online
from memstate_tools.bench.host_peer import NAME
from memstate_tools.bench.host_sides import EVERY, KINDS, TOY_EVERY, HostSide, TimedManager, Timer, peer_can_run, task
from memstate_tools.bench.task import Setting, Task

DECODES = ((1, 0), (256, 0), (256, 16), (256, 256))  # (rows, rows at a boundary)
TOY_DECODES = ((1, 0), (3, 0), (3, 1), (3, 3))
LIVES, TOY_LIVES = (1, 64, 256), (1, 3)  # rows that are admitted, published and released together


class Life(TimedManager):
    """Requests that are admitted, reach a boundary, publish their snapshots, and end; then the snapshots are dropped.

    Each timed operation includes the submit of its changes. In `together`, all four operations share one submit, as in
    a scheduler step.

    Args:
        setting: The setting of the benchmark.
        tracking: The tracking strategy.
        size: Number of requests.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int) -> None:
        super().__init__(setting, tracking, size)
        self._size, self._published = size, 0

    def turn(self, timer: Timer) -> None:
        """See `HostSide`."""
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
            mem.end(old)
            mem.drop(snapshots)
            rows.append(mem.admit(requests))

        submitted("admit", lambda: rows.append(mem.admit(requests)))
        self._reach(rows[0])
        submitted("publish", lambda: kept.extend(mem.publish(rows[0])))
        submitted("release", lambda: mem.end(rows.pop()))
        self._published += sum(snapshot is not None for snapshot in kept)
        submitted("drop", lambda: mem.drop(kept))

        rows.append(mem.admit(requests))
        self._reach(rows[0])
        submitted("together", together)
        mem.end(rows.pop())
        mem.submit()

    def _reach(self, rows: Rows) -> None:
        """Moves rows over a boundary. Under Redirect, the next step takes the snapshot."""
        for tokens in (self.mem.tracking.every, 1):
            self.mem.settle(self.mem.plan(rows, tokens))

    def wrong(self) -> str:
        """Returns what is wrong: a request without a snapshot in a turn, or slots left in use; empty if nothing is."""
        self.mem.device.check()
        stats, report = self.mem.stats(), self.mem.audit()
        if not report.clean or stats.free != stats.capacity:
            return f"{stats.free} of {stats.capacity} slots free; {report}"
        return "" if self._published == 2 * self._size else f"{self._published} snapshots of {2 * self._size}"


class Decode(TimedManager):
    """Requests that decode: one step of all of them, some at a boundary.

    Args:
        setting: The setting of the benchmark.
        tracking: The tracking strategy.
        size: Number of requests.
        due: Number of requests at a boundary.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, due: int) -> None:
        super().__init__(setting, tracking, size)
        self._due = due
        self._rows = self.mem.admit([Request(i) for i in range(size)])
        self._length = np.zeros(size, np.int64)
        self._taken = 0

    def _move(self, tokens: Longs) -> None:
        self.mem.settle(self.mem.plan(self._rows, tokens.tolist()))
        self._length += tokens

    def turn(self, timer: Timer) -> None:
        """See `HostSide`. Outside of the timer, requests move to the lengths that the step needs."""
        mem, every = self.mem, int(self.mem.tracking.every)
        early = np.arange(len(self._rows)) < self._due  # requests whose next step is at a boundary
        at = self._length % every
        self._move(np.where(~early & (at > every // 2 - 1), every - at, 1))
        target = np.where(early, every - 2 + mem.tracking.reads_old_slot, every // 2 - 1)
        self._move(target - self._length % every)
        self._move(np.ones(len(early), np.int64))
        steps, before = [], mem.stats().snapshots
        timer("plan", lambda: steps.append(mem.plan(self._rows)))
        timer("settle", lambda: mem.settle(steps[0]))
        self._taken = mem.stats().snapshots - before
        self._length += 1

    def wrong(self) -> str:
        """Returns what is wrong, such as more or fewer snapshots than were due; empty if nothing is wrong."""
        self.mem.device.check()
        report = self.mem.audit()
        if not report.clean:
            return str(report)
        return "" if self._taken == self._due else f"{self._taken} snapshots of {self._due}"


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of decode steps, lives of requests, steps with drafts, and whole steps, for each strategy.

    Lazy is compared with SGLang's lazy strategy, the other strategies with its default, which is ping-pong. If SGLang
    can run, its scheduler code is also measured over the pool of `memstate.integrations.sglang`.
    """
    there, every = peer_can_run(setting), setting.sizes(EVERY, TOY_EVERY)
    decodes, lives = setting.sizes(DECODES, TOY_DECODES), setting.sizes(LIVES, TOY_LIVES)
    for name, kind in KINDS.items():
        peer = partial(host_peer.SglangStates, lazy=name == "lazy", every=every)
        cases: list[tuple[str, Callable[[], HostSide], dict[str, int]]] = []
        for size, due in decodes:
            numbers = {"size": size, "due": due}
            cases.append((f"R={size} {name}, {due} due", partial(Decode, setting, kind(every), **numbers), numbers))
        cases += [(f"R={size} {name}", partial(Life, setting, kind(every), size), {"size": size}) for size in lives]
        for case, ours, numbers in cases:
            yield task(setting, case, ours, {NAME: partial(peer, **numbers)} if there else {})
    for name in ("ping-pong", "lazy") if there else ():
        peer = partial(host_peer.SglangStates, lazy=name == "lazy", every=every)
        given = [(f"R={size} {name}, {due} due", partial(peer, size=size, due=due)) for size, due in decodes]
        given += [(f"R={size} {name}", partial(peer, size=size)) for size in lives]
        for case, theirs in given:
            yield task(setting, f"{case}, adapters", partial(theirs, adapted=True), {NAME: theirs})
    yield from drafts.tasks(setting, there, every)
    yield from online.tasks(setting, there)
