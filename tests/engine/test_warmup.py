"""Warm-up launches everything that serving launches, and changes nothing."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on

LAYOUT = ms.StateLayout(planes=(ms.Plane("ssm", (2, 4), torch.float32),), layers=2)


@pytest.mark.parametrize("tracking", [ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4)], ids=repr)
def test_warm_up_changes_nothing_in_the_middle_of_a_run(backend: Backend, tracking: ms.Tracking) -> None:
    mem = on(backend, LAYOUT, slots=12, max_requests=40, tracking=tracking)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for _ in range(4):
        mem.settle(mem.plan(rows))
    step = mem.plan(rows)
    with pytest.raises(ms.InvalidArgument, match=r"warm_up .* step 4 is open"):
        ms.warm_up(mem)
    mem.submit(step)
    mem.planes["ssm"].fill_(torch.nan)
    before = [t.clone() for t in (mem._registers.cells, mem._allocator.bitmap, mem._allocator.counters)]
    launched = ms.warm_up(mem)
    after = (mem._registers.cells, mem._allocator.bitmap, mem._allocator.counters)
    assert launched > 4
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert mem.planes["ssm"].isnan().all()
    mem.settle(step)
    mem.settle(mem.plan(rows))
    mem.audit().raise_if_leaking()
    mem.check()


def test_warm_up_launches_every_operation_that_serving_launches(backend: Backend) -> None:
    mem = on(backend, LAYOUT, slots=12, max_requests=2, tracking=ms.LazyPingPong(2))
    ms.warm_up(mem)
    warm = set(mem.backend.counts.launches)
    mem.backend.counts.reset()
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for step in range(5):
        mem.settle(mem.plan(rows), [step == 4, False])
    mem.release(rows, publish=True)
    mem.audit()
    assert set(mem.backend.counts.launches) <= warm
