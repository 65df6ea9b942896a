"""When each strategy takes a snapshot, what the snapshot holds, and what it costs. Lengths count from 0; I is 4."""

from collections.abc import Callable

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Count
from tests.support.planes import LAYOUT, MAKERS, I, Loop, both_orders, every_snapshot, every_strategy, running
from tests.support.scan import scan

# strategy -> slots that a request gets at its admission: (with overlap, without overlap)
ADMISSION = {"none": (1, 1), "ping-pong": (3, 2), "lazy": (2, 2), "redirect": (1, 1)}
AT_MOST = {"none": 1, "ping-pong": 3, "lazy": 3, "redirect": 2}


@every_strategy
def test_B15_a_request_of_one_token_is_no_padding(name: str, backend: Backend) -> None:
    loop = Loop(backend, MAKERS[name](), overlap=False, pages=4, page_size=1, pages_per_row=2)
    (row,) = loop.admit(ms.Request("short", length=1))
    step = loop.step([None, row])
    assert step.rows.tolist() == [0, row.index] and step.write.tolist() == [0, loop.slot(row)]
    assert (loop.mem.info(row).length, loop.label(row)) == (1, 1)
    loop.mem.settle(step, [False, True])
    (snap,) = loop.mem.end([row], keep="handle")
    assert snap and snap.length == 1 and loop.holds(loop.node(snap), row, 1)


@every_strategy
def test_B18_chunks_of_a_prefill_keep_slots_and_claim_nothing(name: str, backend: Backend) -> None:
    loop, row = running(backend, type(MAKERS[name]())(every=16), slots=6)
    loop.mem.submit()
    slots, free = [loop.slot(row, part) for part in range(3)], loop.mem.free_slots
    claimed, length = loop.count(Count.CLAIMED), 0
    for chunk in (5, 1, 6, 3):
        step = loop.step([row], chunk)
        length += chunk
        assert step.read.tolist() == step.write.tolist() == [slots[0]] and step.snapshot.tolist() == [0]
        assert [loop.slot(row, part) for part in range(3)] == slots and loop.labels(row) == [0, 0]
        assert loop.mem.info(row).length == loop.mem.info(row).confirmed == length and loop.holds(slots[0], row, length)
        loop.mem.settle(step)
    assert (loop.mem.free_slots, loop.count(Count.CLAIMED)) == (free, claimed)
    scan(loop.mem)


@every_strategy
@pytest.mark.parametrize("direct", [False, True], ids=["copied", "read directly"])
def test_B20_a_fresh_state_is_zero_and_a_resumed_one_is_not_zeroed(name: str, direct: bool, backend: Backend) -> None:
    loop, row = running(backend, MAKERS[name](), overlap=False, direct_hits=direct)
    loop.mem.submit()
    assert loop.holds(loop.slot(row), row, 0)
    zeroed = loop.mem.stats().zeroed_bytes
    assert zeroed == LAYOUT.bytes_per_slot  # lanes are not zeroed: they are written whole before they are read
    loop.advance([row], 5)
    (snap,) = loop.mem.end([row], keep="handle")
    assert snap
    (again,) = loop.admit(ms.Request("again", resume=snap))
    loop.fed[again] = loop.fed[row][: snap.length]
    step = loop.step([again])
    assert loop.holds(loop.slot(again), again, snap.length + 1) and loop.holds(loop.node(snap), again, snap.length)
    assert (step.read.tolist() == [loop.node(snap)]) == direct
    stats = loop.mem.stats()
    assert (stats.zeroed_bytes, stats.copied_bytes) == (zeroed, 0 if direct else LAYOUT.bytes_per_slot)


@both_orders
@every_strategy
def test_B21_slots_held_after_admission_and_at_most(name: str, overlap: bool, backend: Backend) -> None:
    loop = Loop(backend, MAKERS[name](), rows=2, slots=12, overlap=overlap)
    rows = loop.admit(ms.Request("a"), ms.Request("b"))
    expected = ADMISSION[name][not overlap]
    assert [loop.mem.info(row).slots for row in rows] == [expected] * 2 and loop.mem.free_slots == 12 - 2 * expected
    most = [expected]
    unsettled: list[ms.Step] = []
    for _ in range(4 * I):
        unsettled.append(loop.step(rows))
        most.append(max(loop.mem.info(row).slots for row in rows))
        assert sum(slot > 0 for slot in scan(loop.mem).slots.values()) == 12 - loop.mem.free_slots
        if len(unsettled) > overlap:
            loop.mem.settle(unsettled.pop(0))
    assert max(most) == (AT_MOST[name] if overlap or name != "ping-pong" else 2)


def test_B22_ping_pong_alternates_and_touches_lanes_at_boundaries_only(backend: Backend) -> None:
    loop, row = running(backend, ms.PingPong(I))
    loop.mem.submit()
    lanes = [loop.slot(row, 1), loop.slot(row, 2)]
    for length, lane in ((4, 0), (8, 1), (12, 0), (16, 1)):  # the plan prefers label 0, then the smaller label
        before = [block[:, lanes].clone() for block in loop.mem.planes.plane_map.blocks]
        loop.advance([row], 3)
        blocks = loop.mem.planes.plane_map.blocks
        assert all(torch.equal(block[:, lanes], old) for block, old in zip(blocks, before, strict=True))
        step = loop.step([row])
        assert step.snapshot.tolist() == [lanes[lane]] and loop.labels(row)[lane] == length
        assert loop.holds(lanes[lane], row, length) and loop.holds(loop.slot(row), row, length)
        other = [block[:, 1 - lane] for block in before]
        assert all(torch.equal(block[:, lanes[1 - lane]], old) for block, old in zip(blocks, other, strict=True))
        loop.mem.settle(step)
    assert [loop.slot(row, 1), loop.slot(row, 2)] == lanes


@every_snapshot
def test_B29a_a_wanted_length_is_a_boundary_once(name: str, backend: Backend) -> None:
    loop = Loop(backend, MAKERS[name]())
    (row,) = loop.admit(ms.Request("junction", snapshot_at=[6]))  # pages hold one token, so the mark is exactly at 6
    taken = []
    for length in range(1, 10):
        assert loop.mem.info(row).next_boundary == next(n for n in (4, 6, 8, 12) if n >= length)
        loop.advance([row])
        (snap,) = loop.mem.publish([row])
        if snap:
            taken.append(snap.length)
            assert loop.holds(loop.node(snap), row, snap.length)
    stats = loop.mem.stats()
    assert taken == [4, 6, 8] and stats.snapshots == 2 and stats.published == 3  # the state at 6 needs no lane
    assert stats.copied_bytes == (0 if name == "redirect" else loop.mem.layout.bytes_per_slot)
    loop.mem.end([row])
    assert stats.held_by_snapshots == 3 and loop.mem.free_slots == 16 - 3


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


@pytest.mark.parametrize("dead", [True, False])
def test_B25_an_overwritten_lane_counts_only_if_its_step_was_real(dead: bool, backend: Backend) -> None:
    loop, row = running(backend, ms.LazyPingPong(I), 6, slots=2)
    steps = [loop.step([row]), loop.step([row])]  # to 7 and 8; boundary 8 overwrites the snapshot of 4
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
    loop.mem.settle(loop.step([filling], 4))  # the row takes its first snapshot in the lane of its admission
    assert (loop.mem.info(decoding).length, loop.mem.info(waiting).length, loop.mem.free_slots) == (7, 7, 2)
    step = loop.step([filling, decoding], [3, 1])
    assert loop.mem.free_slots == 1
    assert [loop.mem.info(row).slots for row in (decoding, filling, waiting)] == [3, 2, 2]
    assert step.snapshot.tolist() == [0, loop.slot(decoding, 2)] and loop.labels(filling) == [4, 0]
    loop.mem.settle(step)
    assert loop.mem.free_slots == 2
    scan(loop.mem)


def test_B32_redirect_snapshots_without_moving_a_byte(backend: Backend) -> None:
    redirect, in_place = Loop(backend, ms.Redirect(I)), Loop(backend, ms.NoTracking(I))
    (row,), (twin,) = redirect.admit(), in_place.admit()
    for length in range(1, 4 * I):
        old = redirect.slot(row)
        before = {name: plane[:, old].clone() for name, plane in redirect.mem.planes.items()}
        redirect.advance([row])
        in_place.advance([twin])
        for name, plane in redirect.mem.planes.items():
            assert torch.equal(plane[:, redirect.slot(row)], in_place.mem.planes[name][:, in_place.slot(twin)])
            if length > I and (length - 1) % I == 0:
                assert redirect.slot(row, 1) == old != redirect.slot(row) and redirect.label(row, 1) == length - 1
                assert torch.equal(plane[:, old], before[name])
    assert redirect.mem.stats().snapshots == 3 and redirect.mem.stats().copied_bytes == 0
    assert redirect.mem.backend.counts.launches["copy_slots"] == 0
    assert redirect.mem.backend.counts.launches["run_data"] == 1  # the launch that zeroes the state of a new request


@both_orders
@pytest.mark.parametrize("direct", [False, True], ids=["copied", "read directly"])
def test_B36a_redirect_takes_no_snapshot_of_what_it_was_given(direct: bool, overlap: bool, backend: Backend) -> None:
    loop, row = running(backend, ms.Redirect(I), direct_hits=direct, overlap=overlap)
    loop.mem.settle(loop.step([row]))
    assert loop.slot(row, 1) == 0  # no snapshot: length 0 is a multiple of I, but no boundary
    loop.advance([row], 4)
    (snap,) = loop.mem.end([row], keep="handle", lengths=[4])  # the lane has this state; live stands for 5 tokens
    assert snap and snap.length == 4
    (again,) = loop.admit(ms.Request("again", resume=snap))
    loop.fed[again] = loop.fed[row][:4]
    loop.advance([again])
    assert loop.slot(again, 1) == 0 and loop.mem.info(again).length == 5 and loop.mem.free_slots == 16 - 2
    loop.advance([again], 4)
    assert loop.label(again, 1) == 8 and loop.holds(loop.slot(again, 1), again, 8)


CONFIGURATIONS: dict[str, tuple[Callable[[], ms.Tracking], dict[str, int]]] = {
    "every=6 is no multiple of 4: a snapshot fills whole KV pages": (
        lambda: ms.Redirect(6),
        {"page_size": 4, "pages": 8, "pages_per_row": 4},
    ),
    "every=0": (lambda: ms.PingPong(0), {}),
    "every=-4": (lambda: ms.NoTracking(-4), {}),
    "every=2.5": (lambda: ms.Redirect(2.5), {}),  # type: ignore[arg-type]
    "one lane with overlap": (lambda: ms.PingPong(I, lane_count=1), {"overlap": True}),
    "lane_count=3": (lambda: ms.PingPong(I, lane_count=3), {}),
    "lane_count=0": (lambda: ms.PingPong(I, lane_count=0), {"overlap": False}),
    "depth": (lambda: ms.LazyPingPong(I), {"overlap": 2}),
    "expected NoTracking": (lambda: "redirect", {}),  # type: ignore[return-value, dict-item]
    "max_requests=0": (lambda: ms.Redirect(I), {"rows": 0}),
    "preallocated=-1": (lambda: ms.Redirect(I), {"preallocated": -1}),
    "max_batch=0": (lambda: ms.Redirect(I), {"max_batch": 0}),
    "snapshots=-1": (lambda: ms.Redirect(I), {"snapshots": -1}),
    "size=0": (lambda: ms.Redirect(I), {"page_size": 0}),
    "give count and per_row": (lambda: ms.Redirect(I), {"pages": 8}),
}


@pytest.mark.parametrize("reason", CONFIGURATIONS)
def test_B35_what_cannot_work_is_refused_at_construction(reason: str) -> None:
    maker, settings = CONFIGURATIONS[reason]
    with pytest.raises(ms.ConfigurationError, match=reason):
        Loop(Backend("reference"), maker(), **settings)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tracking", [ms.PingPong(I, lane_count=2), *[maker() for maker in MAKERS.values()]], ids=repr)
def test_B35_what_works_is_accepted(tracking: ms.Tracking, overlap: bool) -> None:
    loop = Loop(Backend("reference"), tracking, overlap=overlap)
    assert loop.mem.info(loop.admit()[0]).slots <= tracking.most_slots(overlap)
