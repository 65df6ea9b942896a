"""LazyPingPong: when the second lane comes and goes, and what happens when nothing is free. Lengths from 0, I = 4."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import I, Loop, both_orders, running
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


@both_orders
def test_B23_lazy_holds_two_lanes_from_a_boundary_to_the_settle_after_it(overlap: bool, backend: Backend) -> None:
    loop, row = running(backend, ms.LazyPingPong(I), overlap=overlap)
    loop.mem.submit()
    held, free = loop.slot(row, 1), loop.mem.free_slots
    loop.advance([row], 3)
    step = loop.step([row])
    assert step.snapshot.tolist() == [held] and loop.labels(row) == [4, 0] and loop.mem.free_slots == free
    loop.mem.settle(step)
    for boundary in (8, 12, 16):
        loop.advance([row], boundary - 1 - loop.mem.info(row).length)
        assert loop.mem.info(row).slots == 2 and loop.mem.free_slots == free
        flying = [loop.step([row])]
        assert sorted(loop.labels(row)) == [boundary - 4, boundary] and loop.mem.free_slots == free - 1
        if overlap:
            flying.append(loop.step([row]))
        assert loop.mem.info(row).slots == 3
        for step in flying:
            loop.mem.settle(step)
            assert loop.mem.info(row).slots == 2 and loop.mem.free_slots == free
        loop.mem.submit()
        assert sorted(loop.labels(row)) == [0, boundary]
        lane = loop.labels(row).index(boundary) + 1
        assert loop.holds(loop.slot(row, lane), row, boundary)
    scan(loop.mem)


def exhausted(backend: Backend, overwrite: bool = True, **settings: bool) -> tuple[Loop, ms.Row, ms.Snapshot]:
    """A lazy row at length 11 with a snapshot at 8 in its only lane, another at 4 published, and nothing free."""
    loop, row = running(backend, ms.LazyPingPong(I, overwrite=overwrite), 5, slots=3, **settings)
    (snap,) = loop.mem.publish([row])
    assert snap and snap.length == 4
    loop.advance([row], 6)
    assert sorted(loop.labels(row)) == [0, 8] and loop.mem.free_slots == 0 and loop.mem.info(row).length == 11
    return loop, row, snap


@pytest.mark.parametrize("overwrite", [True, False])
def test_B24b_without_eviction_no_slot_count_changes(overwrite: bool, backend: Backend) -> None:
    loop, row, snap = exhausted(backend, overwrite)
    lane = loop.labels(row).index(8) + 1
    slot = loop.slot(row, lane)
    step = loop.step([row])
    assert step.snapshot.tolist() == [slot if overwrite else 0]
    assert loop.label(row, lane) == (12 if overwrite else 8) and loop.slot(row, lane) == slot
    assert loop.holds(slot, row, 12 if overwrite else 8)
    assert loop.mem.free_slots == 0 and loop.mem.info(row).slots == 2 and loop.mem.stats().degraded == 1
    loop.mem.settle(step)
    loop.advance([row], 3)
    assert (
        loop.mem.info(row).length == 15 and loop.holds(loop.slot(row), row, 15) and loop.holds(loop.node(snap), row, 4)
    )
    scan(loop.mem)


@pytest.mark.parametrize("dead", [True, False])
def test_B25_an_overwritten_lane_counts_only_if_its_step_was_real(dead: bool, backend: Backend) -> None:
    loop, row = running(backend, ms.LazyPingPong(I), 6, slots=2)
    steps = [loop.step([row]), loop.step([row])]  # to 7, and to 8, the second boundary: overwrites the snapshot of 4
    assert loop.labels(row)[0] == 8 and loop.holds(loop.slot(row, 1), row, 8)
    loop.mem.settle(steps[0], [dead])
    if not dead:
        loop.mem.settle(steps[1], [True])
    (snap,) = loop.mem.end([row], keep="handle")
    assert (snap is None) == dead and (snap is None or loop.holds(loop.node(snap), row, snap.length))
    assert snap is None or snap.length == 8
    loop.mem.drop([snap] if snap else [])
    assert loop.mem.free_slots == 2
    scan(loop.mem)


def test_B30_a_row_that_is_at_no_boundary_claims_nothing(backend: Backend) -> None:
    loop = Loop(backend, ms.LazyPingPong(I), slots=8)
    decoding, filling, waiting = loop.admit(*[ms.Request(name) for name in ("decodes", "prefills", "waits")])
    loop.advance([decoding, waiting], 7)
    loop.mem.settle(loop.step([filling], 4))  # its first snapshot, in the lane it was admitted with
    assert (loop.mem.info(decoding).length, loop.mem.info(waiting).length, loop.mem.free_slots) == (7, 7, 2)
    step = loop.step([filling, decoding], [3, 1])
    assert loop.mem.free_slots == 1
    assert [loop.mem.info(row).slots for row in (decoding, filling, waiting)] == [3, 2, 2]
    assert step.snapshot.tolist() == [0, loop.slot(decoding, 2)] and loop.labels(filling) == [4, 0]
    loop.mem.settle(step)
    assert loop.mem.free_slots == 2
    scan(loop.mem)
