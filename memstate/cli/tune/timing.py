"""How fast copies are on a GPU, beside a plain copy of the device in the same run. Knows no configuration.

Triton times a call: it empties the cache before each run and takes the median.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch

from memstate.state.layout import StateLayout
from memstate.state.planes import Planes

DUE = (1, 8, 64)  # slots copied by a call: one row at a boundary, some, many
BATCH = 256  # entries of a call, most of them not due

Stopwatch = Callable[[Callable[[], object]], float]  # a call -> the seconds that the device takes for it


def device_seconds(act: Callable[[], object]) -> float:
    """Returns the seconds that a GPU takes for a call with a cold cache.

    Syncs: yes.
    """
    from triton.testing import do_bench

    return float(do_bench(act, return_mode="median")) / 1000


def score(rates: Sequence[float]) -> float:
    """Returns the geometric mean of rates, in which few and many slots weigh the same."""
    return float(prod(rate ** (1 / len(rates)) for rate in rates))


class Course:
    """Copies of a few slots among many entries, in planes of a layout that fit a device.

    Args:
        layout: Of the planes.
        storage_of: Makes planes with so many slots.
        free_bytes: Memory that may be used; cases that do not fit are left out, except the smallest.
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

    def copies(self, stopwatch: Stopwatch) -> dict[int, float]:
        """Times copies under the present configuration. Returns due slots -> bytes read and written a second."""
        return {
            due: self.moved(due) / stopwatch(partial(self.planes.copy, *columns))
            for due, columns in self._entries.items()
        }

    def yardstick(self, stopwatch: Stopwatch) -> dict[int, float]:
        """Times the device's copy of as many bytes in one piece. Returns due slots -> bytes a second."""
        parts = {due: self._plain[:, : due * self.slot_bytes] for due in self.due}
        return {due: self.moved(due) / stopwatch(partial(to.copy_, of)) for due, (to, of) in parts.items()}

    def moved(self, due: int) -> int:
        """Returns the bytes read and written by copies of `due` slots."""
        return 2 * due * self.slot_bytes


def cases(slot_bytes: int, free_bytes: int) -> tuple[int, ...]:
    """Returns the numbers of due slots whose planes, and a plain copy of them, fit three quarters of the memory."""
    fitting = tuple(due for due in DUE if 4 * due * slot_bytes <= 0.75 * free_bytes)
    return fitting or DUE[:1]
