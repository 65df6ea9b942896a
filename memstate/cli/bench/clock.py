"""How long one call takes: on a GPU by its events, elsewhere by the clock of the process. Knows no operation.

Triton's own timers cannot undo a call between two runs, nor bound the calls that one graph holds; these can.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

RUNS, WARM_UPS = 21, 3
FLOOD_BYTES = 512 * 2**20  # takes longer to write than the host needs to queue a run
GRAPH_SECONDS = 2e-3  # of a graph; longer graphs give the same figure
IN_GRAPH = 20  # calls captured together, so that the launch of the graph hardly counts
Act = Callable[[], object]


def nothing() -> None:
    """Does nothing: for calls that need nothing before or after them."""


def host_seconds(act: Act, device: torch.device | None = None) -> float:
    """Returns how long a call takes to return, after the device has finished what came before.

    Syncs: yes, on a GPU.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Clock:
    """Times a call once by the clock of the process, as at toy sizes: its figures say nothing about a GPU."""

    def alone(self, act: Act, before: Act = nothing) -> float:
        """Returns the seconds of one call, submitted alone, with caches full of something else.

        Args:
            act: The call.
            before: Called before each run, not timed; undoes the last run.
        """
        before()
        return host_seconds(act)

    def in_graph(self, act: Act) -> float:
        """Returns the seconds of one of many calls in a row without the host, as in a replayed CUDA graph."""
        return self.alone(act)

    def captured(self, act: Act) -> Act:
        """Returns the call as a graph of its own, where there are graphs. `act` must have run before."""
        return act


class DeviceClock(Clock):
    """Takes medians over many runs with the events of a GPU.

    The cache is overwritten before every run. That keeps the device busy while the host queues the call, so that no
    figure includes the host's time.

    Syncs: yes, after every run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flood = torch.empty(max(4 * cache, FLOOD_BYTES), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.current_stream(device)

    def alone(self, act: Act, before: Act = nothing) -> float:
        """See `Clock`."""
        return median([self._run(act, before) for _ in range(WARM_UPS + RUNS)][WARM_UPS:])

    def _run(self, act: Act, before: Act = nothing, warm: bool = False) -> float:
        before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flood.zero_()
        if warm:
            act()
        begin.record(self._stream)
        act()
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def in_graph(self, act: Act) -> float:
        """See `Clock`. `act` is called once before it is captured, and may not wait for the device or upload."""
        act()  # compiles and loads
        calls = max(1, min(IN_GRAPH, int(GRAPH_SECONDS / self._run(act, warm=True))))
        replay = self.captured(act, calls)
        return median([self._run(replay, warm=True) for _ in range(WARM_UPS + RUNS)][WARM_UPS:]) / calls

    def captured(self, act: Act, calls: int = 1) -> Act:
        """See `Clock`; the graph holds `calls` of the act."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # runs nothing
            for _ in range(calls):
                act()
        return graph.replay
