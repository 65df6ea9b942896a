"""Measures how long one call takes on the device and on the host: with events on a GPU, elsewhere with the host clock.

The module knows no operation. Triton's own timers cannot undo a call between two runs, and cannot limit the number of
calls in one graph.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

RUNS, WARM_UPS = 21, 3
FLUSH_BYTES = 256 * 2**20  # bytes read before a run; four times the cache if that is more
SLEEP, LONGEST_SLEEP = 100e-6, 50e-3  # seconds that the device sleeps while the host queues a run
CALIBRATION = 10**6  # cycles that the device sleeps in one calibration
WARMING = 0.3  # seconds of work, far more than an idle device needs to raise its clock
GRAPH_SECONDS = 2e-3  # seconds of a graph; longer graphs give the same figure
IN_GRAPH = 20  # largest number of calls in one graph: enough that the launch of the graph hardly counts
Act = Callable[[], object]


class Times(NamedTuple):
    """Seconds of one call.

    Attributes:
        device: From the start of the call's work on the device to its end.
        host: From the call to its return.
    """

    device: float
    host: float


def nothing() -> None:
    """Does nothing: for calls that need nothing before or after them."""


def host_seconds(act: Act, device: torch.device | None = None) -> float:
    """Returns the seconds until a call returns. The device finishes all earlier work first.

    Syncs: yes, on a GPU.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def cpu_seconds(act: Act, device: torch.device | None = None) -> float:
    """Returns the CPU seconds of this thread in a call. The device finishes all earlier work first.

    Syncs: yes, on a GPU.
    """
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.thread_time_ns()
    act()
    return (time.thread_time_ns() - begin) * 1e-9


class TooSlow(RuntimeError):
    """Says that a call has no device time: it waits for the device, or the host queues it too slowly."""

    def __init__(self) -> None:
        super().__init__(f"the call waits for the device, or takes the host over {LONGEST_SLEEP:g} s to queue")


class HostTimer:
    """Times a call once with the host clock, for toy sizes: its figures say nothing about a GPU."""

    def alone(self, act: Act, before: Act = nothing) -> Times:
        """Returns the seconds of one call that is submitted alone, with caches full of other data.

        Args:
            act: The call to time.
            before: Called before each run, not timed; undoes the last run.
        """
        before()
        seconds = host_seconds(act)
        return Times(seconds, seconds)

    def in_graph(self, act: Act) -> float:
        """Returns the seconds of one of many calls that run without the host in between, as in a CUDA graph."""
        return self.alone(act).device

    def captured(self, act: Act) -> Act:
        """Returns a call that replays `act` as a graph; on a CPU, `act` itself. `act` must have run before."""
        return act


class DeviceClock(HostTimer):
    """Takes medians over many runs, with the events of a GPU.

    Before each run the device reads more memory than its cache holds: so the cache has no data of the call, and nothing
    that must be written back. Then the device sleeps until the host has queued the call, so a device time never
    includes host time. If the device wakes before the call is queued, the run is repeated with a longer sleep.

    Syncs: yes, after every run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._read = torch.zeros(max(4 * cache, FLUSH_BYTES) // 4, dtype=torch.float32, device=device)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)
        self._stream = torch.cuda.current_stream(device)
        self._sleep = SLEEP
        self._cycles = self._cycles_a_second()

    def _cycles_a_second(self) -> float:
        """Returns the device's clock cycles per second, measured at work, because an idle device has a slow clock."""
        fastest, until = 0.0, time.perf_counter() + WARMING
        while not fastest or time.perf_counter() < until:
            torch.sum(self._read, dim=0, out=self._sum)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(self._stream)
            torch.cuda._sleep(CALIBRATION)
            end.record(self._stream)
            end.synchronize()
            fastest = max(fastest, CALIBRATION * 1000 / float(begin.elapsed_time(end)))
        return fastest

    def alone(self, act: Act, before: Act = nothing) -> Times:
        """See `HostTimer`. An untimed call comes first: it compiles and loads code."""
        before()
        act()
        torch.cuda.synchronize(self._device)
        return self._runs(act, before)

    def _runs(self, act: Act, before: Act = nothing, warm: bool = False) -> Times:
        self._sleep = SLEEP
        runs = [self._run(act, before, warm) for _ in range(WARM_UPS + RUNS)][WARM_UPS:]
        return Times(median(run.device for run in runs), median(run.host for run in runs))

    def _run(self, act: Act, before: Act = nothing, warm: bool = False) -> Times:
        """Times one call. With `warm`, an untimed call runs just before it.

        Raises:
            TooSlow: The call waits for the device, or the host needs too long to queue it.
        """
        while True:
            before()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # this only reads, because written lines would have to go back to memory
            torch.sum(self._read, dim=0, out=self._sum)
            if warm:
                act()
            torch.cuda._sleep(int(self._sleep * self._cycles))
            begin.record(self._stream)
            host = host_seconds(act)
            end.record(self._stream)
            hidden = not begin.query()  # whether the device still slept when the whole call was queued
            end.synchronize()
            if hidden:
                return Times(float(begin.elapsed_time(end)) / 1000, host)
            if self._sleep >= LONGEST_SLEEP:
                raise TooSlow
            self._sleep = min(2 * max(self._sleep, host), LONGEST_SLEEP)

    def in_graph(self, act: Act) -> float:
        """See `HostTimer`. `act` is called once before it is captured. It may not wait for the device or upload."""
        act()  # this call compiles and loads code
        self._sleep = SLEEP
        calls = max(1, min(IN_GRAPH, int(GRAPH_SECONDS / self._run(act, warm=True).device)))
        replay = self.captured(act, calls)
        return self._runs(replay, warm=True).device / calls

    def captured(self, act: Act, calls: int = 1) -> Act:
        """See `HostTimer`. The graph contains the call `calls` times."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # a capture runs nothing
            for _ in range(calls):
                act()
        return graph.replay
