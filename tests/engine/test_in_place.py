"""Engines whose kernels update one slot in place: copies before and after the forward, counted to the byte."""

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.loops import InPlace
from tests.support.planes import MAKERS, I, both_orders, every_snapshot
from tests.support.scan import scan


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
