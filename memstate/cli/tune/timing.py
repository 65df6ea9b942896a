"""How fast copies are on a GPU, beside a plain copy of the device in the same run. Knows no configuration.

Triton times a call: it empties the cache before each run and takes the median.
"""

from collections.abc import Callable
from functools import partial

import torch

from memstate.cli.due import fitting, spread
from memstate.kernels.dispatch import Backend
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes

DUE = (1, 8, 64)  # slots copied by a call: one row at a boundary, some, many

Stopwatch = Callable[[Callable[[], object]], float]  # a call -> the seconds that the device takes for it
Rates = dict[str, float]  # bytes read and written a second, by the number of slots


def device_seconds(act: Callable[[], object]) -> float:
    """Returns the seconds that a GPU takes for a call with a cold cache.

    Syncs: yes.
    """
    from triton.testing import do_bench

    return float(do_bench(act, return_mode="median")) / 1000


class Course:
    """Copies of a few slots among many entries, in planes of a layout that fit a device.

    Args:
        layout: Of the planes.
        backend: Copies slots.
        stopwatch: Times a call.
        free_bytes: Memory that may be used; cases that do not fit are left out, except the smallest.
    """

    def __init__(self, layout: StateLayout, backend: Backend, stopwatch: Stopwatch, free_bytes: int) -> None:
        self.slot_bytes, self.stopwatch = layout.bytes_per_slot, stopwatch
        due = fitting(DUE, 4 * self.slot_bytes, free_bytes)
        most = max(due)
        self.planes = Planes(layout, 2 * most, backend)
        self._plain = torch.empty(2, most * self.slot_bytes, dtype=torch.uint8, device=self.planes.device)
        for memory in (self._plain, *self.planes.arenas):
            memory.random_(0, 256)  # bytes that are all the same may move faster
        self.planes.scrub_null()
        self._entries = {n: spread(n, most, self.planes.device) for n in due}

    def copies(self) -> Rates:
        """Times copies under the present configuration."""
        return self._rates({due: partial(self.planes.copy, *entries) for due, entries in self._entries.items()})

    def yardstick(self) -> Rates:
        """Times the device's copy of as many bytes in one piece."""
        parts = {due: self._plain[:, : due * self.slot_bytes] for due in self._entries}
        return self._rates({due: partial(to.copy_, of) for due, (to, of) in parts.items()})

    def _rates(self, acts: dict[int, Callable[[], object]]) -> Rates:
        return {f"{due} slots": 2 * due * self.slot_bytes / self.stopwatch(act) for due, act in acts.items()}
