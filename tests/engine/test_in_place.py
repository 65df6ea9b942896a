"""Engines whose kernels update one slot in place: copies before and after the forward, counted to the byte."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.loops import InPlace
from tests.support.planes import MAKERS, POISON, I, both_orders, every_snapshot, every_strategy
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


@every_snapshot
@both_orders
def test_B36_a_snapshot_costs_one_copy(backend: Backend, name: str, overlap: bool) -> None:
    loop = InPlace(backend, MAKERS[name](), overlap=overlap)
    a, b = (loop.admit(ms.Request(x))[0] for x in "ab")
    loop.advance([a, None, b], 2 * I + 1)
    assert loop.mem.stats().snapshots == loop.copied == 4  # two rows at two boundaries
    for row, snapshot in zip((a, b), loop.mem.publish([a, b]), strict=True):
        assert snapshot and snapshot.length == 2 * I and loop.holds(loop.node(snapshot), row, 2 * I)
        assert loop.holds(loop.slot(row), row, 2 * I + 1)
    scan(loop.mem)


def test_off_the_boundary_nothing_is_launched(backend: Backend) -> None:
    for tracking in (ms.Redirect(I), ms.PingPong(I), ms.LazyPingPong(I)):
        loop = InPlace(backend, tracking)
        (row,) = loop.admit()
        loop.advance([row], 1)
        counts = loop.mem.backend.counts
        counts.reset()
        loop.advance([row], 2)
        assert dict(counts.launches) == {"plan": 2}
        loop.advance([row], 2)
        assert counts.launches["copy_slots"] == 1 and counts.syncs == 0


RING = ms.StateLayout(
    (ms.Plane("ring", (I,), torch.int64, rewritten_each_step=False), ms.Plane("ssm", (2,), torch.int64)), 2
)


@every_strategy
def test_only_planes_written_in_part_are_copied(backend: Backend, name: str) -> None:
    """A ring of the last inputs, of which a step writes one cell. The other plane is written whole, and not copied."""
    mem = on(backend, RING, slots=6, max_requests=2, tracking=MAKERS[name]())
    for plane in mem.planes.values():
        plane.view(torch.uint8).fill_(POISON)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for t in range(1, 2 * I + 2):
        step = mem.plan(rows)
        mem.planes["ring"][:, step.write.long(), t % I] = t
        new = mem.planes["ssm"][:, step.read.long()] + 1
        for slots in (step.snapshot, step.write):
            mem.planes["ssm"][:, slots.long()] = new
        mem.device.scrub_null()
        mem.settle(step)
    stats = mem.stats()
    assert stats.copied_bytes == stats.snapshots * RING.layers * RING.block_bytes(RING.planes[0])
    mem.submit()
    for row in rows:
        live = int(mem.device.live_slots[row.index])
        assert mem.planes["ring"][1, live].tolist() == [8, 9, 6, 7] and mem.planes["ssm"][1, live].tolist() == [9, 9]
    for snapshot in mem.publish(rows) if name != "none" else ():
        assert snapshot and snapshot.length == 2 * I
        (slot,) = mem.device.read_slots([snapshot]).wait().tolist()
        assert mem.planes["ring"][0, slot].tolist() == [8, 5, 6, 7] and mem.planes["ssm"][0, slot].tolist() == [8, 8]
    scan(mem)
