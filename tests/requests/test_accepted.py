"""Snapshots at boundaries among accepted tokens, and states that depend on no old memory."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.scan import scan

LAYOUT = ms.StateLayout(planes=(ms.Plane("ssm", (4,), torch.float32),), layers=2)
each_tracking = pytest.mark.parametrize(
    "tracking", [ms.PingPong(256), ms.LazyPingPong(256), ms.Redirect(256)], ids=repr
)


def manager(backend: Backend, tracking: ms.Tracking) -> ms.StateManager:
    mem = on(backend, LAYOUT, slots=6, max_requests=2, tracking=tracking)
    mem.planes["ssm"].fill_(torch.nan)
    return mem


def fold(mem: ms.StateManager, row: ms.Row, tokens: int) -> None:
    """Folds tokens into a state that counts them, in steps that end at the boundaries inside."""
    end = mem.info(row).length + tokens
    while mem.info(row).length < end:
        n = min(end, mem.info(row).next_boundary) - mem.info(row).length
        step = mem.plan([row, None], [n, 0])
        real = step.write > 0
        for state in mem.planes["ssm"]:
            state[step.write[real].long()] = state[step.read[real].long()] + n
            kept = step.snapshot > 0
            state[step.snapshot[kept].long()] = state[step.write[kept].long()]
        mem.settle(step)


@each_tracking
@pytest.mark.parametrize(("before", "accepted", "stands_for"), [(250, 8, 256), (250, 5, None), (256, 1, 256)])
def test_B33_accepted_tokens_that_cross_a_multiple_leave_a_snapshot_of_it(
    backend: Backend, tracking: ms.Tracking, before: int, accepted: int, stands_for: int | None
) -> None:
    mem = manager(backend, tracking)
    (row,) = mem.admit([ms.Request("a")])
    fold(mem, row, before)
    taken = mem.stats().snapshots
    fold(mem, row, accepted)
    if before == 256 and not isinstance(tracking, ms.Redirect):
        assert mem.stats().snapshots == taken == 1  # the snapshot at 256 was taken earlier; 257 is no boundary
    (snapshot,) = mem.publish([row])
    assert (snapshot and snapshot.length) == stands_for
    if snapshot:
        (slot,) = mem.device.read_slots([snapshot]).wait().tolist()
        assert (mem.planes["ssm"][:, slot] == stands_for).all()
    scan(mem)


@pytest.mark.parametrize("tracking", [ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4)], ids=repr)
def test_G4_no_answer_depends_on_fresh_or_freed_memory(backend: Backend, tracking: ms.Tracking) -> None:
    mem = manager(backend, tracking)
    for turn in range(3):
        (row,) = mem.admit([ms.Request(turn)])
        fold(mem, row, 8)
        assert (mem.planes["ssm"][:, mem.device.live_slots[row.index].long()] == 8).all()
        (snapshot,) = mem.end([row], keep="handle")
        assert snapshot is not None and snapshot.length == 8
        (slot,) = mem.device.read_slots([snapshot]).wait().tolist()
        assert (mem.planes["ssm"][:, slot] == 8).all()
        mem.drop([snapshot])
        mem.submit()
        mem.planes["ssm"].fill_(torch.nan)  # every slot is free, and gets rubbish
    scan(mem)


RINGS = ms.StateLayout((ms.Plane("ssm_x", (8, 2), torch.float32, fill=None),), layers=1)
TAILED = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=1, rows=RINGS)


@pytest.mark.parametrize("tracking", [ms.PingPong(4), ms.LazyPingPong(4)], ids=repr)
def test_T9_a_lane_of_a_late_step_is_nobody_elses_before_its_forward(backend: Backend, tracking: ms.Tracking) -> None:
    """Once the previous step is accepted, the late step's snapshot is published and dropped.

    The late step's forward runs after that.
    """
    mem = on(backend, TAILED, slots=5, max_requests=6, tracking=tracking, forward=ms.Forward(tail=3))
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 3))
    first = mem.plan([row], 3, drafts=2)
    first.accepted[0] = 3
    late = mem.plan([row], 1)
    mem.accept(first, [3], written=True)
    slots = [slot for vector in (late.read, late.write, late.snapshot) for slot in vector.tolist() if slot > 0]
    snapshots = mem.publish([row])
    assert snapshots != [None]
    mem.drop(snapshots)
    # each request takes two slots: live and a lane
    others = mem.admit([ms.Request(f"b{n}") for n in range(mem.free_slots // 2)])
    mem.submit()
    mem.planes["ssm"][0, slots] = 777.0  # the forward of the late step
    mem.settle(late)
    assert not mem.planes["ssm"][0, mem.plan(others, 1).read.long()].any(), "a request starts from what it wrote"
