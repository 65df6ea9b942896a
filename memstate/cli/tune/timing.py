"""How fast a kernel is on a GPU, beside a plain copy of the device in the same run. Knows no configuration."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from memstate.cli.bench.clock import DeviceClock
from memstate.cli.due import fitting
from memstate.cli.workload import Model, Workload, make
from memstate.kernels.dispatch import Backend

BATCHES = (1, 8, 64)  # slots that move, or rows of a step: one, some, many
COPIES = 8  # of a slot: two batches of planes, what lies beside them, the twin of a check, and what torch allocates

Stopwatch = Callable[[Callable[[], object]], float]  # a call -> the seconds that the device takes for it


class Timing(NamedTuple):
    """What was measured of one operation.

    Attributes:
        seconds: Of a call, with a cold cache.
        nbytes: That it reads and writes.
    """

    seconds: float
    nbytes: int


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Returns what measures calls on a GPU: with a cold cache, and without the host's part."""
    clock = DeviceClock(device)
    return lambda act: clock.alone(act).device


class Course:
    """The workloads of one kernel for batches of several sizes that fit a device.

    Args:
        kernel: Name of the kernel.
        model: Its states.
        backend: Runs the calls.
        stopwatch: Times a call.
        free_bytes: Memory that may be used; batches that do not fit are left out, except the smallest.
    """

    def __init__(self, kernel: str, model: Model, backend: Backend, stopwatch: Stopwatch, free_bytes: int) -> None:
        self._stopwatch = stopwatch
        sizes = fitting(BATCHES, COPIES * model.layout.bytes_per_slot, free_bytes)
        seed = torch.seed() % 2**31
        self.workloads: dict[int, Workload] = {size: make(kernel, model, size, backend, seed) for size in sizes}

    def timings(self) -> dict[str, Timing]:
        """Times every operation under the present configuration."""
        return {
            f"{op}, {size}": Timing(self._stopwatch(act), workload.nbytes[op])
            for size, workload in self.workloads.items()
            for op, act in workload.acts.items()
        }


def yardstick(model: Model, device: torch.device, stopwatch: Stopwatch, free_bytes: int) -> dict[str, float]:
    """Returns how fast the device copies so many slots in one piece: bytes a second that are read and written."""
    slot = model.layout.bytes_per_slot
    rates = {}
    for size in fitting(BATCHES, COPIES * slot, free_bytes):
        to, of = torch.zeros(2, size * slot, dtype=torch.uint8, device=device).random_(0, 256)
        rates[f"{size} slots"] = 2 * size * slot / stopwatch(lambda to=to, of=of: to.copy_(of))  # type: ignore[misc]
    return rates
