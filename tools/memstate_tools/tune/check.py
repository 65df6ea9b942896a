"""Checks that a kernel gives the results of the reference under a configuration.

Copies are compared byte for byte, with the bytes around their planes. Other kernels are compared on their workloads.
"""

import torch
from torch import Tensor

from memstate.kernels.configs import Config, CopyConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import HEADER_INTS, ZERO_SOURCE, Section
from memstate.kernels.tuned import trying
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate_tools.compile.build import blame_cache
from memstate_tools.models import Model
from memstate_tools.workload import Act, Workload, make

SLOTS = 9
ROWS = 3  # rows of a checked workload
CANARY = 64  # bytes before and after every arena


def wrong(config: Config, model: Model, backend: Backend, seed: int) -> str:
    """Returns what a configuration computes wrong on fresh random values; empty if nothing is wrong.

    An error of the launch is returned too, because a configuration may need more than a device has.

    Args:
        config: The configuration to check.
        model: The model with the states.
        backend: The backend whose launches are checked.
        seed: Seed of the values.

    Raises:
        ConfigurationError: Triton cannot write its cache.

    Syncs: yes, on a GPU.
    """

    def made(backend: Backend) -> Workload:
        if type(config) is CopyConfig:
            return _copies(config.entries, model.layout, backend, seed)
        return make(config.kernel, model, ROWS, backend, seed)

    tried, expected = made(backend), made(Backend("reference", backend.device))
    for name, act in tried.acts.items():
        expected.acts[name]()
        try:
            with trying(config):
                act()
            differ = tried.differing(expected)
        except Exception as error:  # Triton and the driver raise errors of any kind
            blame_cache(error)
            return f"{name} raises {type(error).__name__}: {' '.join(str(error).split())}"
        if differ:
            return f"{name}: {differ} differs from the reference, seed {seed}"
    return ""


def _copies(entries: int, layout: StateLayout, backend: Backend, seed: int) -> Workload:
    """Returns operations on random bytes, with canaries around every arena. The null slot has random bytes as well."""
    memory: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        memory.append(torch.empty(nbytes + 2 * CANARY, dtype=torch.uint8, device=backend.device))
        return memory[-1][CANARY : CANARY + nbytes]

    planes = Planes(layout, SLOTS, backend, allocate)
    generator = torch.Generator(backend.device).manual_seed(seed)
    for whole in memory:
        whole.random_(0, 256, generator=generator)
    return Workload(_operations(planes, entries), {}, {f"arena {at}": whole for at, whole in enumerate(memory)})


def _operations(planes: Planes, entries: int) -> dict[str, Act]:
    """Returns copies, zeros and a packet, over three chunks of entries. Entries at the ends of chunks are due.

    The smallest chunks have 16 entries, which leaves room for the invalid ids after the first entry.
    """
    n = 2 * entries + 3
    ends = (0, entries - 1, entries, n - 1)
    dst, src = [0] * n, [1 + at % SLOTS for at in range(n)]
    # two copies to unknown slots, one from a slot to itself, and one from an unknown slot
    dst[1:5], src[1:5] = [-1, SLOTS + 1, 5, 4], [3, 3, 5, SLOTS + 1]
    for at, to, of in zip(ends, (1, 2, 3, 4), (6, 7, 8, 9), strict=True):
        dst[at], src[at] = to, of
    ids = [0] * n
    ids[1:3] = [-3, SLOTS + 1]
    for at, slot in zip(ends, (2, 6, 0, 5), strict=True):
        ids[at] = slot

    registers = [0, 3, 8, 0, 9, 7]  # slots of registers 0 to 5; register 3 is empty
    to_registers, of_registers = [0] * n, [2] * n
    for at, to, of in zip(ends, (1, 5, 3, 4), (2, ZERO_SOURCE, 2, ZERO_SOURCE), strict=True):
        to_registers[at], of_registers[at] = to, of
    padding = [0] * (-n % 4)
    header = [0] * HEADER_INTS
    header[Section.DATA], header[HEADER_INTS // 2 + Section.DATA] = n, HEADER_INTS
    packet = [*header, *to_registers, *padding, *of_registers, *padding]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=planes.device)

    return {
        "copy_slots": lambda: planes.copy(on_device(dst), on_device(src)),
        "zero_slots": lambda: planes.zero(on_device(ids)),
        "run_data": lambda: planes.run_data(on_device(registers), on_device(packet)),
    }
