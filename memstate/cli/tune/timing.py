"""How fast copies are on a GPU, in the same run as a plain copy of the device. Knows no configuration.

What is timed is cold: before every run the cache is overwritten. That also keeps the device busy while the host queues
the run, so that the time of the host's launch is not in it. `warm` is the same without the overwriting in between, for
who reads what a kernel has just written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import median
from typing import Protocol

import torch

from memstate.state.layout import StateLayout
from memstate.state.planes import Planes

DUE = (1, 8, 64)  # slots copied by a call: one row at a boundary, some, many
BATCH = 256  # entries of a call, most of them not due
RUNS = 21
WARM_UPS = 3
FLOOD_BYTES = 512 * 2**20  # takes longer to write than the host needs to queue a run

Act = Callable[[], object]


class Stopwatch(Protocol):
    """Measures one run."""

    def __call__(self, act: Act, *, warm: bool) -> float:
        """Seconds that the device took for `act`; warm: after it ran just before."""
        ...


class DeviceStopwatch:
    """Times with the events of a device. Syncs: yes, after every run."""

    def __init__(self, device: torch.device) -> None:
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flood = torch.empty(max(4 * cache, FLOOD_BYTES), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.current_stream(device)

    def __call__(self, act: Act, *, warm: bool) -> float:
        """See `Stopwatch`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flood.zero_()
        if warm:
            act()
        begin.record(self._stream)
        act()
        end.record(self._stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclass(frozen=True)
class Rate:
    """Bytes a second, read and written together, at the median of the runs."""

    cold: float
    warm: float


def rate(act: Act, nbytes: int, stopwatch: Stopwatch, runs: int = RUNS) -> Rate:
    """How fast `act` moves `nbytes`, read and written together; the first runs, which may compile, do not count."""
    for _ in range(WARM_UPS):
        stopwatch(act, warm=True)
    cold, warm = ([stopwatch(act, warm=kind) for _ in range(runs)] for kind in (False, True))
    return Rate(nbytes / median(cold), nbytes / median(warm))


def score(rates: Sequence[Rate]) -> float:
    """One number for few and for many slots: the geometric mean of the cold rates, in which both weigh the same."""
    return float(prod(one.cold ** (1 / len(rates)) for one in rates))


class Course:
    """Copies of a few slots among many entries, in planes of a layout that fit a device.

    free_bytes: memory that may be used; cases that do not fit are left out, but for the smallest one.
    """

    def __init__(self, layout: StateLayout, storage_of: Callable[[int], Planes], free_bytes: int) -> None:
        self.slot_bytes = layout.bytes_per_slot
        self.due = cases(self.slot_bytes, free_bytes)
        self.planes = storage_of(2 * max(self.due))
        size = max(self.due) * self.slot_bytes
        self._plain = torch.empty(2, size, dtype=torch.uint8, device=self.planes.device)
        for memory in (self._plain, *self.planes.arenas):
            memory.random_(0, 256)  # bytes that are all the same may move faster
        self.planes.scrub_null()
        self._entries = {due: self._spread(due) for due in self.due}

    def _spread(self, due: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots in random order, evenly among the entries of a batch."""
        shuffled = torch.randperm(2 * max(self.due))[: 2 * due] + 1
        columns = torch.zeros(2, max(BATCH, due), dtype=torch.int32)
        columns[:, :: columns.shape[1] // due][:, :due] = shuffled.view(2, due).int()
        dst, src = columns.to(self.planes.device)
        return dst, src

    def copies(self, stopwatch: Stopwatch) -> dict[int, Rate]:
        """Copies of slots under the configuration of now: due slots -> rate."""
        return {
            due: rate(partial(self.planes.copy, *columns), self.moved(due), stopwatch)
            for due, columns in self._entries.items()
        }

    def yardstick(self, stopwatch: Stopwatch) -> dict[int, Rate]:
        """The device's copy of as many bytes in one piece each: due slots -> rate."""
        parts = {due: self._plain[:, : due * self.slot_bytes] for due in self.due}
        return {due: rate(partial(to.copy_, of), self.moved(due), stopwatch) for due, (to, of) in parts.items()}

    def moved(self, due: int) -> int:
        """Bytes read and written by copies of `due` slots."""
        return 2 * due * self.slot_bytes


def cases(slot_bytes: int, free_bytes: int) -> tuple[int, ...]:
    """The numbers of due slots whose planes, and as much again for the plain copy, fit three quarters of the memory."""
    fitting = tuple(due for due in DUE if 4 * due * slot_bytes <= 0.75 * free_bytes)
    return fitting or DUE[:1]
