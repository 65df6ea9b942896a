"""Checks that a kernel gives the results of the reference under a configuration.

Copies have a check of their own, with entries at the ends of chunks. Other kernels are compared on their workloads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstate.kernels.configs import Config, CopyConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import HEADER_INTS, ZERO_SOURCE, Section
from memstate.kernels.tuned import trying
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate_tools.compile.build import blame_cache
from memstate_tools.maker import Maker
from memstate_tools.models import toy_of
from memstate_tools.tuning.subject import Subject
from memstate_tools.workload import Act, Workload

SLOTS = 9


def wrong(config: Config, subject: Subject, batches: Sequence[int], backend: Backend, toy: bool, seed: int) -> str:
    """Returns what a configuration computes wrong on fresh random values; empty if nothing is wrong.

    Each batch has values of its own. All memory is poisoned first, and memory around each tensor is compared as well.
    An error of the launch is returned too, because a configuration may need more than a device has. A file may choose a
    configuration by rows, so its bits are compared as well, with those under the default of axes that change no bits.

    Args:
        config: The configuration to check.
        subject: The kernel and its states.
        batches: Numbers of rows. In batches of more than one, some rows have slot 0.
        backend: The backend whose launches are checked.
        toy: Whether states are so small that an interpreter can run the kernel.
        seed: Seed of the values of the first batch.

    Raises:
        ConfigurationError: Triton cannot write its cache.

    Syncs: yes, on a GPU.
    """
    like = type(config)(**config.order)

    def compared(batch: int, seed: int) -> str:
        def made(backend: Backend) -> Workload:
            if type(config) is CopyConfig and subject.model:
                model = toy_of(subject.model, "copy") if toy else subject.model
                return _copies(config.entries, model.layout, backend, Maker(backend.device, seed))
            return subject.workload(batch, backend, seed, toy, padded=True)

        tried, expected = made(backend), made(Backend("reference", backend.device))
        twin = made(backend) if config.by_rows and not toy else None  # an interpreter adds in an order of its own
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
                far = tried.distance(expected, differ.split(", ")[0])
                return f"{name}: {differ} differs from the reference, batch {batch}, seed {seed}: {far}"
            if twin is not None:
                with trying(like):
                    twin.acts[name]()
                if differ := tried._replace(exact=True).differing(twin):
                    return f"{name}: {differ} has other bits than under {like}, batch {batch}, seed {seed}"
        return ""

    return next(filter(None, (compared(batch, seed + at) for at, batch in enumerate(batches))), "")


def _copies(entries: int, layout: StateLayout, backend: Backend, make: Maker) -> Workload:
    """Returns operations on random bytes. The null slot has random bytes as well."""
    arenas: list[Tensor] = []

    def allocate(nbytes: int) -> Tensor:
        arenas.append(make.arena(nbytes))
        return arenas[-1]

    planes = Planes(layout, SLOTS, backend, allocate)
    for arena in arenas:
        arena.random_(0, 256, generator=make.generator)
    written = {f"arena {at}": arena for at, arena in enumerate(arenas)}
    around = make.around({arena.data_ptr(): name for name, arena in written.items()})
    return Workload(_operations(planes, entries), {}, written | around)


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
