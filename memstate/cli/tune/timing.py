"""How fast a kernel is on a GPU, beside a plain copy of the device in the same run. Knows no configuration."""

from collections.abc import Callable, Mapping

import torch

from memstate.cli.bench.clock import DeviceClock
from memstate.cli.workload import Model, Workload, fitting, make
from memstate.kernels.dispatch import Backend

BATCHES = (1, 8, 64)  # slots that move, or rows of a step: one, some, many
COPIES = 8  # of a slot: two batches of planes, what lies beside them, the twin of a check, and what torch allocates

Stopwatch = Callable[[Callable[[], object]], float]  # a call -> the seconds that the device takes for it


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Returns what measures calls on a GPU: with a cold cache, and without the host's part."""
    clock = DeviceClock(device)
    return lambda act: clock.alone(act).device


def workloads(kernel: str, model: Model, backend: Backend, free_bytes: int) -> dict[int, Workload]:
    """Returns the workloads of a kernel by the size of the batch; those that do not fit are left out, but the smallest.

    Args:
        kernel: Name of the kernel.
        model: Its states.
        backend: Runs the calls.
        free_bytes: Memory that may be used.
    """
    sizes, seed = fitting(BATCHES, COPIES * model.layout.bytes_per_slot, free_bytes), torch.seed() % 2**31
    return {size: make(kernel, model, size, backend, seed) for size in sizes}


def timings(batches: Mapping[int, Workload], stopwatch: Stopwatch) -> dict[str, tuple[float, int]]:
    """Times every operation under the present configuration: seconds of a call with a cold cache, bytes it moves."""
    return {
        f"{op}, {size}": (stopwatch(act), workload.nbytes[op])
        for size, workload in batches.items()
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
