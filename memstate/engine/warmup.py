"""Compiles the kernels of a manager before serving starts.

It sends the recorded changes, then launches each of these kernels on empty inputs. These launches change no state.
"""

import numpy as np
import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument
from memstate.kernels.tables import HEADER_INTS, Strategy


def warm_up(mem: StateManager) -> int:
    """Compiles the kernels of steps and ownership changes: launches each on an empty packet and null rows.

    It repeats the kernels of steps for every batch size that needs its own compilation. It does not compile other
    kernels: those of your layers, of the tiers, of `claim`, `release` and `zero` of `mem.pool`, and of `gather` and
    `scatter` of `mem.planes`. Call it between steps, before you capture CUDA graphs.

    Args:
        mem: the manager.

    Returns:
        The number of launches.

    Raises:
        InvalidArgument: a step is open, whose forward would read other vectors.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> ms.warm_up(mem) > 0, mem.free_slots
        (True, 8)

    Syncs: no.
    """
    mem._enter()
    for step in mem._log.unsettled:
        if step.window or step is mem._stepping.open:
            raise InvalidArgument(
                f"warm_up while step {step.serial} is open would overwrite its vectors: call it before the plan, or "
                + ("after the accept" if step.window else "tell submit(step) that the forward is launched")
            )
    mem.submit()
    before = mem.backend.counts.total_launches
    header = np.zeros(HEADER_INTS, np.int32)
    header[HEADER_INTS // 2 :] = HEADER_INTS
    mem._log.overwritten()
    mem._commands.ring.send(header, mem._commands.step)
    mem._commands.step[HEADER_INTS:] = 0
    mem._commands.capture_changes()
    batch = mem._log.max_batch
    _plan(mem, batch)
    while batch > 1:  # a batch is compiled for the next power of two
        batch = (batch + 1) // 2
        _plan(mem, batch)
    nothing = torch.zeros(1, dtype=torch.int32, device=mem.backend.device)
    mem._registers.resolve(nothing)
    mem._registers.owners()
    mem.pool.copy(nothing, nothing, due=0)
    if mem.forward.speculation:
        _scatter(mem, nothing)
    return mem.backend.counts.total_launches - before


def _plan(mem: StateManager, batch: int) -> None:
    """Plans, and accepts, null rows."""
    record = mem._log.record(batch)  # the next plan overwrites it
    packet, rules = mem._commands.step, mem._mirror.rules
    mem._registers.plan(packet, record, rules)
    if mem.forward.speculation:
        mem._registers.plan(packet, record, rules._replace(strategy=Strategy.WINDOW))
        mem._registers.accept(packet, record, mem._log.outcome(batch), rules)


def _scatter(mem: StateManager, nothing: Tensor) -> None:
    """Scatters a window of every plane, in each form that `accept` takes: one token, one padding entry."""
    layers, device, columns = mem.layout.layers, mem.backend.device, (nothing,) * 4
    for plane in mem.layout.planes:
        states = torch.zeros((layers, 1, 1, *plane.shape), dtype=plane.dtype, device=device)
        mem.planes.scatter_accepted(plane.name, states, *columns)
        for taps, channels in {plane.shape, plane.shape[::-1]} if len(plane.shape) == 2 else ():
            inputs = torch.zeros((layers, 1, taps + 1, channels), dtype=plane.dtype, device=device)
            mem.planes.scatter_inputs(plane.name, inputs, *columns)
