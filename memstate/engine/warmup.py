"""Compiles the kernels of a manager before serving starts.

`warm_up` sends the recorded changes, then launches each kernel on empty inputs. These launches change no state.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument
from memstate.kernels.tables import HEADER_INTS
from memstate.slots.allocator import SlotAllocator

IDS = (torch.int32, torch.int64)  # dtypes that slot ids can have


def warm_up(mem: StateManager) -> int:
    """Compiles everything that serving launches: each kernel in each form that the settings of the manager can reach.

    These are the kernels of steps, of ownership changes, of `mem.pool`, of `gather` and `scatter` of `mem.planes`, and
    of the tiers. The call launches a kernel once for every size that needs its own compilation. Two things are not
    compiled: the launches of your forward, with `mem.planes.scatter_states` of its outputs, and copies of planes that
    you choose with `mem.planes.copy(planes=)`. Call it between steps, before you capture CUDA graphs.

    Args:
        mem: the manager.

    Returns:
        The number of launches.

    Raises:
        InvalidArgument: a step is open, and the call would overwrite the vectors that its forward reads.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> ms.warm_up(mem) > 0, mem.free_slots
        (True, 8)

    Syncs: yes.
    """
    mem._enter()
    for step in mem._parts.log.unsettled:
        if step.drafted or step is mem._parts.stepping.open:
            raise InvalidArgument(
                f"warm_up while step {step.serial} is open would overwrite its vectors: call it before the plan, or "
                + ("after the accept" if step.drafted else "tell submit(step) that the forward is launched")
            )
    mem.submit()
    before = mem.backend.counts.total_launches
    for family in FAMILIES:
        family(mem)
    return mem.backend.counts.total_launches - before


def _packets(mem: StateManager) -> None:
    header = np.zeros(HEADER_INTS, np.int32)
    header[HEADER_INTS // 2 :] = HEADER_INTS
    mem._parts.log.sent = None
    mem._parts.commands.ring.send(header, mem._parts.commands.step_views)
    mem._parts.commands.capture_changes()


def _steps(mem: StateManager) -> None:
    for batch in _sizes(mem._parts.log.max_batch):
        _plan(mem, batch)


def _plan(mem: StateManager, batch: int) -> None:
    """Plans a batch of padding."""
    record = mem._parts.log.record(batch)  # every plan overwrites this record
    packet, rules = mem._parts.commands.step, mem._parts.mirror.rules
    mem._parts.registers.plan(packet, record, mem._parts.log.marks, rules, mem._parts.log.tails)


def _readers(mem: StateManager) -> None:
    mem._parts.registers.resolve(_nothing(mem))
    mem._parts.registers.owners()


def _slots_by_id(mem: StateManager) -> None:
    """Claims and releases slots of allocators that only this function uses."""
    for n in _sizes(mem._parts.allocator.capacity, alike=32):
        scratch = SlotAllocator(mem._parts.allocator.capacity, mem.backend)
        scratch.release(scratch.claim(n))
        scratch.release(_nothing(mem, n, torch.int64))


def _copies(mem: StateManager) -> None:
    for dst, src in product(IDS, IDS):
        mem.planes.copy(_nothing(mem, 1, dst), _nothing(mem, 1, src), due=0)
    for ids in IDS:
        mem.planes.zero(_nothing(mem, 1, ids), due=0)
    if copied := mem._parts.stepping._copied:
        mem.planes.copy(_nothing(mem), _nothing(mem), planes=copied, due=0)


def _planes(mem: StateManager) -> None:
    """Gathers and scatters the null slot of each plane."""
    for ids in IDS:
        slots = _nothing(mem, 1, ids)
        mem.planes.load(mem.planes.save(slots), slots)
    mem.planes.scatter_states({}, mem._parts.log.marks, _nothing(mem, 2), _nothing(mem), _nothing(mem))


def _trees(mem: StateManager) -> None:
    """Launches `keep_path` on a path whose nodes have the right places already."""
    if mem.device.tails is not None and mem.planes.tailed:
        for ids in IDS:
            mem.device.keep_path(_nothing(mem, 1, ids)[None])


def _tiers(mem: StateManager) -> None:
    if mem.tiers is not None:
        mem.tiers.host.warm_up()


FAMILIES: tuple[Callable[[StateManager], None], ...] = (
    _packets, _steps, _readers, _slots_by_id, _copies, _planes, _trees, _tiers,
)  # fmt: skip


def _sizes(most: int, alike: int = 1) -> Iterator[int]:
    """Yields one size up to `most` for each power of two, since each has its own compilation.

    All sizes up to `alike` have the same compilation.
    """
    yield most
    while most > alike:
        most = (most + 1) // 2
        yield most


def _nothing(mem: StateManager, n: int = 1, dtype: torch.dtype = torch.int32) -> Tensor:
    """Returns a tensor of n zeros: null slots, or null registers."""
    return torch.zeros(n, dtype=dtype, device=mem.backend.device)
