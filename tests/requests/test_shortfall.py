"""`shortfall` predicts the slots that boundaries lack: a caller that drops this number of snapshots loses no
snapshot that is due.
"""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.build import on
from tests.support.scan import scan

LAYOUT = ms.StateLayout(planes=(ms.Plane("ssm", (2, 4), torch.float32),), layers=1)
EVERY = 4


def crowded(backend: Backend, tracking: ms.Tracking, slots: int) -> tuple[ms.StateManager, ms.Rows]:
    """Returns a manager and two running requests, one step before each of them claims a slot.

    Snapshots of other requests fill the pool until no further request is admitted.
    """
    mem = on(backend, LAYOUT, slots=slots, max_requests=8, tracking=tracking)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for _ in range(EVERY if isinstance(tracking, ms.Redirect) else 2 * EVERY - 1):
        mem.settle(mem.plan(rows))
    while True:
        try:
            ending = mem.admit([ms.Request("filler")])
        except ms.OutOfSlots:
            return mem, rows
        mem.settle(mem.plan(ending))
        mem.end(ending, keep="handle")


@pytest.mark.parametrize("tracking", [ms.LazyPingPong(EVERY, overwrite=False), ms.Redirect(EVERY)], ids=repr)
@pytest.mark.parametrize("drop", [True, False])
def test_B24_boundaries_proceed_whose_shortfall_was_dropped(
    backend: Backend, drop: bool, tracking: ms.Tracking
) -> None:
    mem, rows = crowded(backend, tracking, 9)
    lacking = mem.shortfall(rows)
    assert lacking == 2 - mem.free_slots > 0
    kept = list(owners.states(mem).values())
    mem.drop(kept[: lacking if drop else 0])
    assert mem.shortfall(rows) == (0 if drop else lacking)
    before = mem.stats()
    mem.settle(mem.plan(rows))
    after, without = mem.stats(), 0 if drop else lacking
    assert (after.degraded, after.snapshots - before.snapshots) == (without, 2 - without)
    assert len(owners.states(mem)) == len(kept) - (lacking if drop else 0)
    scan(mem)
    mem.device.check()
