"""Counts and times one operation on two sides, ours and SGLang's, for host benchmarks.

Both sides run in one process and on one thread, in turns. A figure is the smallest CPU time of the thread over all
turns: the cost of the code without disturbance. On a CPU, our launches and data moves do nothing. SGLang launches small
torch operations; on a GPU each would be a launch, so they count as its host time.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from memstate.engine.capacity import STRATEGIES
from memstate.engine.manager import StateManager
from memstate.kernels.dispatch import OPS
from memstate.requests.tracking import Tracking
from memstate.state.layout import Plane, StateLayout
from memstate_tools.bench import host_peer, radix_peer
from memstate_tools.bench.clock import cpu_seconds
from memstate_tools.bench.task import Measured, Setting, Task, take_turns

EVERY, TOY_EVERY = 256, 16  # tokens between snapshots; 256 is SGLang's default
TURNS, TOY_TURNS = 61, 2
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)
KINDS = {name: kind for name, kind in STRATEGIES.items() if name != "none"}
OURS, BARE = "memstate", f"{host_peer.NAME} without states"
PLAIN = "plain-step"  # our own step without the measured feature, or in a small pool, as a peer
UNITS = ("launches", "uploads", "syncs")
CALLS = ("frames", "calls")  # counts of Python
Timer = Callable[[str, Callable[[], object]], object]


class HostSide(Protocol):
    """Requests whose operations are timed."""

    def turn(self, timer: Timer) -> None:
        """Makes one turn. Each operation is one call of the timer."""
        ...

    def counted(self, act: Callable[[], object]) -> NDArray[np.int64]:
        """Makes a call. Returns how many launches, uploads and waits for the device it makes."""
        ...

    def silence(self) -> None:
        """Makes our launches do nothing. On a CPU a launch would run the operation instead."""
        ...

    def wrong(self) -> str:
        """Returns a text that says what is wrong after a turn; empty if nothing is."""
        ...


def python_calls(act: Callable[[], object]) -> NDArray[np.int64]:
    """Makes a call. Returns how many Python frames run in it, and how many calls it makes, including calls of builtins.

    The call itself does not count. A generator counts each time it resumes.
    """
    before, events = sys.getprofile(), list[str]()
    sys.setprofile(lambda frame, event, of: events.append(event))
    try:
        act()
    finally:
        sys.setprofile(before)
    frames = events.count("call") - 1
    # one of the builtin calls is `sys.setprofile`
    return np.array([frames, frames + events.count("c_call") - 1], np.int64)


class TimedManager:
    """A manager whose operations are timed.

    Attributes:
        mem: The manager.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, **settings: Any) -> None:
        given = {"layout": LAYOUT, "slots": 5 * size, "max_requests": size, "tracking": tracking, **settings}
        self.mem = StateManager(**given, backend=setting.backend, device=setting.device)

    def counted(self, act: Callable[[], object]) -> NDArray[np.int64]:
        """See `HostSide`."""
        before = self._counts()
        act()
        return self._counts() - before

    def silence(self) -> None:
        """See `HostSide`."""
        for op in OPS:
            setattr(self.mem.backend, op, lambda *_: None)

    def _counts(self) -> NDArray[np.int64]:
        counts = self.mem.backend.counts
        return np.array([counts.total_launches, counts.uploads, counts.syncs], np.int64)


def check(make: Callable[[], HostSide]) -> str:
    """Makes two turns with working kernels. Returns what is wrong after them; empty if nothing is.

    Syncs: yes.
    """
    side = make()
    for _ in range(2):
        side.turn(lambda op, act: act())
    return side.wrong()


def _of_ops(side: HostSide, measure: Callable[[Callable[[], object]], Any]) -> dict[str, Any]:
    """Returns the cost of each operation in one turn."""
    spent: dict[str, Any] = {}
    side.turn(lambda op, act: spent.__setitem__(op, measure(act)))
    if "accept" in spent:
        spent["verify"] = spent["plan"] + spent["accept"]
    elif "plan" in spent:
        spent["decode"] = spent["plan"] + spent["settle"]
    elif "drop" in spent and "together" not in spent:  # the peer makes the four operations one after the other
        spent["together"] = sum(spent.values())
    if "changes" in spent:
        spent = {"step": spent["changes"] + spent["decode"]}
    return spent


def measure(
    setting: Setting, case: str, make: Callable[[], HostSide], make_peers: Mapping[str, Callable[[], HostSide]]
) -> list[Measured]:
    """Returns the figures of our operations, compared with those of the peer.

    Args:
        setting: The setting of the benchmark.
        case: Name of the case.
        make: Makes our side.
        make_peers: Name of a peer -> function that makes it. The peer named `BARE`, if there is one, has no states: the
            difference from SGLang's figures is the cost of states.

    Syncs: yes.
    """
    ours = make()
    sides: dict[str, HostSide] = {OURS: ours}
    peers = {name: make_peer() for name, make_peer in make_peers.items()}
    values = defaultdict[str, dict[tuple[str, str], float]](dict)  # side -> (operation, unit) -> value

    def count(_: int, name: str, side: HostSide) -> None:
        for op, numbers in _of_ops(side, side.counted).items():
            values[name] |= {(op, unit): float(n) for unit, n in zip(UNITS, numbers, strict=True)}

    def spend(_: int, name: str, side: HostSide) -> None:
        for op, seconds in _of_ops(side, lambda act: cpu_seconds(act, setting.device)).items():
            key = op, "host us"
            values[name][key] = min(values[name].get(key, inf), seconds * 1e6)

    take_turns(sides, peers, 2, count, f"host, {case}")
    for name, side in (sides | peers).items() if setting.device.type == "cpu" else ():
        side.silence()
        if isinstance(side, TimedManager):
            for op, numbers in _of_ops(side, python_calls).items():
                values[name] |= {(op, unit): float(n) for unit, n in zip(CALLS, numbers, strict=True)}
    take_turns(sides, peers, setting.sizes(TURNS, TOY_TURNS), spend, f"host, {case}")
    if {host_peer.NAME, BARE} <= peers.keys():
        for (op, unit), value in values[BARE].items():
            values[OURS]["states", unit] = values[OURS][op, unit]
            values[host_peer.NAME]["states", unit] = values[host_peer.NAME][op, unit] - value
    figures, peer = list[Measured](), next((name for name in peers if name != BARE), "")
    for (op, unit), value in values[OURS].items():
        other = values[peer].get((op, unit))
        figures += setting.rows(op, case, value, unit, {} if other is None else {peer: other})
    return figures


def peer_can_run(setting: Setting) -> bool:
    """Returns whether SGLang is wanted and can run. If it cannot run, prints the reason to stderr."""
    return setting.device.type == "cpu" and radix_peer.can_run(setting, "host", host_peer.load)


def task(
    setting: Setting, case: str, make: Callable[[], HostSide], make_peers: Mapping[str, Callable[[], HostSide]]
) -> Task:
    """Returns the task that checks our side, then measures our side and the peers: see `measure`."""
    return Task(f"host, {case}", partial(check, make), partial(measure, setting, case, make, make_peers))
