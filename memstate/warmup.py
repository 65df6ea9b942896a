"""Compiles what serving will launch before it serves. Launches everything once on nothing, and changes nothing."""

import numpy as np
import torch

from memstate.engine import NO_LIMIT, StateManager
from memstate.kernels.tables import HEADER_INTS


def warm_up(mem: StateManager) -> int:
    """Launches every kernel of the manager on an empty packet and null rows, for every batch size that compiles anew.

    Call it between steps, before CUDA graphs are captured. Returns the number of launches. Syncs: no.
    """
    mem.submit()
    before = mem.backend.counts.total_launches
    header = np.zeros(HEADER_INTS, np.int32)
    header[HEADER_INTS // 2 :] = HEADER_INTS
    packet = mem.commands.ring.send(header)
    mem.registers.ownership(packet)
    mem.pool.run_data(mem.registers.table.slots, packet, copied=0, zeroed=0)
    batch = mem.log.max_batch
    while batch:  # a batch is compiled for the next power of two
        _plan_and_settle(mem, batch)
        batch //= 2
    nothing = torch.zeros(1, dtype=torch.int32, device=mem.backend.device)
    mem.registers.resolve(nothing)
    mem.registers.owners()
    mem.pool.copy(nothing, nothing, due=0)
    return mem.backend.counts.total_launches - before


def _plan_and_settle(mem: StateManager, batch: int) -> None:
    rows = torch.zeros(batch, dtype=torch.int32, device=mem.backend.device)
    record = mem.log.next_record(batch)  # the next plan overwrites it
    tracking = mem.tracking
    mem.registers.plan(
        rows, rows, record, strategy=tracking.strategy, lanes=mem.mirror.lanes, every=tracking.every,
        in_place=tracking.in_place, limit=NO_LIMIT,
    )  # fmt: skip
    if tracking.releases_at_settle:
        mem.registers.settle(record, None)
        mem.registers.settle(record, rows)
