"""Two sides of a host benchmark: ours and SGLang's, and how one operation of both is counted and timed.

Both sides run in one process and on one thread, in turns. A figure is the least CPU time of the thread in any turn:
what the code costs where nothing disturbs it. On a CPU our launches do nothing, and neither do data moves. What the
peer launches are small torch operations; on a GPU each would be a launch, so they count as its host time.
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
from memstate_tools.bench.task import Figure, Setting, Task, take_turns

EVERY, TOY_EVERY = 256, 16  # tokens between snapshots; 256 is the peer's default
TURNS, TOY_TURNS = 61, 2
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), 1)
KINDS = {name: kind for name, kind in STRATEGIES.items() if name != "none"}
OURS, BARE = "memstate", f"{host_peer.NAME} without states"
PLAIN = "plain-step"  # of ours, without what is measured
UNITS = ("launches", "uploads", "syncs")
CALLS = ("frames", "calls")  # of Python
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


def python_calls(act: Callable[[], object]) -> NDArray[np.int64]:
    """Makes a call, and returns how many Python frames run in it and how many calls it makes, those of builtins too.

    The call itself does not count, and a generator counts each time that it goes on.
    """
    before, events = sys.getprofile(), list[str]()
    sys.setprofile(lambda frame, event, of: events.append(event))
    try:
        act()
    finally:
        sys.setprofile(before)
    frames = events.count("call") - 1
    return np.array([frames, frames + events.count("c_call") - 1], np.int64)  # one sets the profile back


class Ours:
    """A manager whose operations are timed.

    Attributes:
        mem: The manager.
    """

    def __init__(self, setting: Setting, tracking: Tracking, size: int, **settings: Any) -> None:
        given = {"layout": LAYOUT, "slots": 5 * size, "max_requests": size, "tracking": tracking, **settings}
        self.mem = StateManager(**given, backend=setting.backend, device=setting.device)

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


def check(make: Callable[[], Side]) -> str:
    """Returns what is wrong after two turns with kernels that work; empty if nothing is.

    Syncs: yes.
    """
    side = make()
    for _ in range(2):
        side.turn(lambda op, act: act())
    return side.wrong()


def _of_ops(side: Side, measure: Callable[[Callable[[], object]], Any]) -> dict[str, Any]:
    """Returns what one turn costs, by operation."""
    spent: dict[str, Any] = {}
    side.turn(lambda op, act: spent.__setitem__(op, measure(act)))
    if "accept" in spent:
        spent["verify"] = spent["plan"] + spent["accept"]
    elif "plan" in spent:
        spent["decode"] = spent["plan"] + spent["settle"]
    elif "drop" in spent and "together" not in spent:  # the peer does one after the other
        spent["together"] = sum(spent.values())
    if "changes" in spent:
        spent = {"step": spent["changes"] + spent["decode"]}
    return spent


def measure(
    setting: Setting, case: str, make: Callable[[], Side], make_peers: Mapping[str, Callable[[], Side]]
) -> list[Figure]:
    """Returns what our operations cost, beside those of the peer.

    Args:
        setting: Where it runs.
        case: Names what is measured.
        make: Makes our side.
        make_peers: Makes the peer, and `BARE` where its steps are measured without states as well.

    Syncs: yes.
    """
    ours = make()
    sides: dict[str, Side] = {OURS: ours}
    peers = {name: make_peer() for name, make_peer in make_peers.items()}
    found = defaultdict[str, dict[tuple[str, str], float]](dict)  # by side: operation, unit

    def count(_: int, name: str, side: Side) -> None:
        for op, numbers in _of_ops(side, side.counted).items():
            found[name] |= {(op, unit): float(n) for unit, n in zip(UNITS, numbers, strict=True)}

    def spend(_: int, name: str, side: Side) -> None:
        for op, seconds in _of_ops(side, lambda act: cpu_seconds(act, setting.device)).items():
            key = op, "host us"
            found[name][key] = min(found[name].get(key, inf), seconds * 1e6)

    take_turns(sides, peers, 2, count, f"host, {case}")
    for name, side in (sides | peers).items() if setting.device.type == "cpu" else ():
        side.silence()
        if isinstance(side, Ours):
            for op, numbers in _of_ops(side, python_calls).items():
                if op == "step":
                    found[name] |= {(op, unit): float(n) for unit, n in zip(CALLS, numbers, strict=True)}
    take_turns(sides, peers, setting.sizes(TURNS, TOY_TURNS), spend, f"host, {case}")
    if {host_peer.NAME, BARE} <= peers.keys():
        for (op, unit), value in found[BARE].items():
            found[OURS]["states", unit] = found[OURS][op, unit]
            found[host_peer.NAME]["states", unit] = found[host_peer.NAME][op, unit] - value
    figures, peer = list[Figure](), next((name for name in peers if name != BARE), "")
    for (op, unit), value in found[OURS].items():
        other = found[peer].get((op, unit))
        figures += setting.rows(op, case, value, unit, {} if other is None else {peer: other})
    return figures


def peer_can_run(setting: Setting) -> bool:
    """Whether SGLang is wanted and can run here; says on stderr why it cannot."""
    return setting.device.type == "cpu" and radix_peer.can_run(setting, "host", host_peer.load)


def task(setting: Setting, case: str, make: Callable[[], Side], make_peers: Mapping[str, Callable[[], Side]]) -> Task:
    """Returns the task that checks our side and measures it beside the peers, see `measure`."""
    return Task(f"host, {case}", partial(check, make), partial(measure, setting, case, make, make_peers))
