"""How long one call takes: on a GPU by its events, at toy sizes by the clock of the process. Knows no operation."""

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

from memstate.cli.tune.timing import RUNS, WARM_UPS, DeviceStopwatch

GRAPH_SECONDS = 2e-3  # of a graph, behind which more calls say no more
IN_GRAPH = 20  # calls captured together, so that the launch of the graph hardly counts
Act = Callable[[], object]


class Time(Protocol):
    """A way to time a call."""

    __name__: str

    def __call__(self, act: Act) -> float: ...


def nothing() -> None:
    """What comes before a call that needs nothing before it."""


class Clock(Protocol):
    """Takes the median over many runs, in seconds."""

    def alone(self, act: Act, before: Act = nothing) -> float:
        """One call, submitted alone, with caches full of something else. before: what undoes the last one."""
        ...

    def in_graph(self, act: Act) -> float:
        """One of many calls in a row that the host has no part in, as in a replayed CUDA graph."""
        ...

    def captured(self, act: Act) -> Act:
        """The same call as a graph of its own, where there are graphs. `act` has run before."""
        ...


class DeviceClock:
    """Times with the events of a GPU. Syncs: yes, after every run.

    The cache is overwritten before every call, which also keeps the device busy while the host queues the call: what
    the host needs for a launch is in no figure.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = DeviceStopwatch(device)

    def alone(self, act: Act, before: Act = nothing) -> float:
        """See `Clock`."""
        return median([self._run(act, before) for _ in range(WARM_UPS + RUNS)][WARM_UPS:])

    def _run(self, act: Act, before: Act) -> float:
        before()
        return self._watch(act, warm=False)

    def in_graph(self, act: Act) -> float:
        """See `Clock`. `act` is called once before it is captured, and may not wait for the device or upload."""
        act()  # compiles and loads
        calls = max(1, min(IN_GRAPH, int(GRAPH_SECONDS / self._watch(act, warm=True))))
        replay = self.captured(act, calls)
        seconds = [self._watch(replay, warm=True) for _ in range(WARM_UPS + RUNS)][WARM_UPS:]
        return median(seconds) / calls

    def captured(self, act: Act, calls: int = 1) -> Act:
        """See `Clock`; calls: of the act, in one graph."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # runs nothing
            for _ in range(calls):
                act()
        return graph.replay


class ToyClock:
    """Takes the same course on a CPU, whose figures say nothing of a GPU."""

    RUNS = 1

    def alone(self, act: Act, before: Act = nothing) -> float:
        """See `Clock`."""
        return median(self._run(act, before) for _ in range(self.RUNS))

    def in_graph(self, act: Act) -> float:
        """See `Clock`; nothing is captured."""
        return self.alone(act)

    def captured(self, act: Act) -> Act:
        """See `Clock`; the call itself."""
        return act

    @staticmethod
    def _run(act: Act, before: Act) -> float:
        before()
        begin = time.perf_counter()
        act()
        return time.perf_counter() - begin
