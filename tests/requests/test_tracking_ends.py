"""How requests end and what they leave: overlap, dead steps, abort, retract, publish, cancel. I is 4."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import MAKERS, I, Loop, both_orders, every_snapshot, every_strategy, running
from tests.support.scan import scan


def all_free(loop: Loop) -> bool:
    """Returns True if nothing is held; an independent scan must find every slot and page free."""
    seen = scan(loop.mem)
    loop.mem.audit().raise_if_leaking()
    loop.mem.device.check()
    return seen.slots == {} and len(seen.free) == loop.mem.free_slots == loop.mem.stats().capacity


@every_snapshot
def test_B26_overlap_loses_nothing_and_overwrites_nothing_published(name: str, backend: Backend) -> None:
    loop = Loop(backend, MAKERS[name](), rows=2, slots=16)
    rows = loop.admit(ms.Request("a"), ms.Request("b"))
    kept: list[tuple[ms.Snapshot, ms.Row]] = []
    last = loop.step(rows)
    for _ in range(4 * I):
        step = loop.step(rows)  # this step is planned before the last one is settled
        loop.mem.settle(last)
        assert all(loop.mem.info(row).confirmed == loop.mem.info(row).length for row in rows)
        kept += [(snap, row) for snap, row in zip(loop.mem.publish(rows), rows, strict=True) if snap]
        last = step
        scan(loop.mem)
    loop.mem.settle(last)
    assert sorted(snap.length for snap, _ in kept) == [4, 4, 8, 8, 12, 12, 16, 16]
    assert all(loop.holds(loop.node(snap), row, snap.length) for snap, row in kept)
    loop.mem.end(rows)
    loop.mem.drop([snap for snap, _ in kept])
    assert all_free(loop)


@every_strategy
@pytest.mark.parametrize("length", [2, 6, 7])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real(
    name: str, length: int, late: bool, backend: Backend
) -> None:
    """The request ends at 3, 7 or 8 tokens: before the first boundary, before the second, or at it.

    A dead step follows. With `late`, the row ends only after the dead step is settled; it leaves the same state as
    without `late`.
    """
    loop, row = running(backend, MAKERS[name](), length)
    last, dead = loop.step([row]), loop.step([row])
    assert name in ("none", "redirect") or length != 6 or 8 in loop.labels(row)
    loop.mem.settle(last, [True])
    held = loop.mem.info(row).slots
    if late:
        loop.mem.settle(dead)
    assert loop.mem.info(row).confirmed == length + 1 and loop.mem.info(row).slots == held
    (snap,) = loop.mem.end([row], keep="handle")
    assert (snap and snap.length) == (None if name == "none" else {2: None, 6: 4, 7: 8}[length])
    if not late:
        assert loop.mem.free_slots == loop.mem.stats().capacity - (snap is not None)
        loop.mem.settle(dead)
    if snap:
        assert loop.holds(loop.node(snap), row, snap.length)
        loop.mem.drop([snap])
    assert all_free(loop)


@every_strategy
def test_B28_nothing_shorter_than_a_page_is_published(name: str, backend: Backend) -> None:
    loop = Loop(backend, MAKERS[name](), overlap=False, pages=6, page_size=I, pages_per_row=3)
    (row,) = loop.admit(ms.Request("short", length=3))
    loop.advance([row], 3)
    assert loop.mem.publish([row]) == [None] and loop.mem.end([row], keep="handle") == [None]
    assert all_free(loop) and loop.mem.free_pages == 6


@every_strategy
@both_orders
@pytest.mark.parametrize("how", ["abort", "retract"])
def test_B29_a_request_can_end_at_any_point(name: str, overlap: bool, how: str, backend: Backend) -> None:
    """A row ends before the first submit or after any plan or settle: all slots come back, and new rows start clean."""
    loop = Loop(backend, MAKERS[name](), slots=8, rows=2, overlap=overlap, pages=14, page_size=2, pages_per_row=6)
    order = ["plan", *["plan", "settle"] * 9] if overlap else ["plan", "settle"] * 9
    for point in range(len(order) + 1) if backend.name == "reference" else (0, 9, 16):
        row, other = loop.admit(ms.Request("first", length=12, snapshot_at=[6]), ms.Request("second", length=2))
        flying: list[ms.Step] = []
        for event in order[:point]:
            if event == "plan":
                flying.append(loop.step([None, row]))
            else:
                loop.mem.settle(flying.pop(0))
        known = loop.mem.info(row).confirmed
        (snap,) = loop.mem.end([row], keep="handle") if how == "retract" else loop.mem.end([row]) or [None]
        for step in flying:
            loop.mem.settle(step)
        with pytest.raises(ms.StaleHandle):
            loop.mem.plan([row])
        if snap:
            assert 0 < snap.length <= known and loop.holds(loop.node(snap), row, snap.length)
        (again,) = loop.admit(ms.Request("again", length=12, resume=snap))
        assert again.index == row.index and again.generation > row.generation
        loop.fed[again] = loop.fed[row][: snap.length if snap else 0]
        assert loop.mem.info(again).length == loop.mem.info(again).confirmed == len(loop.fed[again])
        loop.mem.settle(loop.step([other, again]))
        assert loop.holds(loop.slot(again), again, len(loop.fed[again])) and loop.labels(again) == [0, 0]
        loop.mem.end([again, other])
        loop.mem.drop([snap] if snap else [])
        assert all_free(loop) and loop.mem.free_pages == 14


@every_snapshot
def test_B31_the_cache_gets_the_tracked_slot_and_the_row_goes_on_with_another(name: str, backend: Backend) -> None:
    loop, row = running(backend, MAKERS[name]())
    with pytest.raises(ms.InvalidArgument, match="have no snapshot to publish"):
        loop.mem.publish([row], strict=True)
    loop.advance([row], 5)
    lane = loop.labels(row).index(4) + 1
    tracked = loop.slot(row, lane)
    (snap,) = loop.mem.publish([row], strict=True)
    assert snap and loop.node(snap) == tracked and loop.slot(row, lane) == 0
    with pytest.raises(ms.InvalidArgument, match="have no snapshot to publish"):
        loop.mem.publish([row], strict=True)
    assert loop.mem.publish([row]) == [None]
    loop.advance([row], 4)
    assert 8 in loop.labels(row) and tracked not in [loop.slot(row, part) for part in range(3)]
    assert loop.holds(tracked, row, 4) and loop.holds(loop.slot(row), row, 9)
    scan(loop.mem)


@both_orders
@pytest.mark.parametrize(("name", "expected"), [("ping-pong", 4), ("lazy", None), ("redirect", None), ("none", None)])
def test_B34_a_key_below_the_newest_snapshot(name: str, expected: int | None, overlap: bool, backend: Backend) -> None:
    tracking = ms.PingPong(I, lane_count=2) if name == "ping-pong" else MAKERS[name]()
    loop, row = running(backend, tracking, 10, overlap=overlap)
    (snap,) = loop.mem.end([row], keep="handle", lengths=[6])
    assert (snap and snap.length) == expected
    if snap:
        assert loop.holds(loop.node(snap), row, 4)
        loop.mem.drop([snap])
    assert all_free(loop)


@both_orders
@every_strategy
@pytest.mark.parametrize("length", [6, 7, 8])
def test_B36b_a_cancelled_step_leaves_no_label(name: str, length: int, overlap: bool, backend: Backend) -> None:
    """The step from `length` never runs, but states of `length` or fewer tokens can be published."""
    loop = Loop(backend, MAKERS[name](), overlap=overlap)
    row, other = loop.admit(ms.Request("a"), ms.Request("b"))
    loop.advance([row, other], 2)
    loop.advance([row], length - 2)
    snap, padding, second = loop.mem.cancel(loop.step([row, None, other], run=False), keep="handle")
    assert padding is None and second is None  # the row's live label is 3, but only 2 tokens were folded
    assert snap is None or loop.holds(loop.node(snap), row, snap.length)
    kept = None if name == "none" else 8 if length == 8 else 4
    if name == "ping-pong" and not overlap and length == 7:
        kept = None  # the cancelled step was to overwrite the only lane
    assert (snap and snap.length) == kept
    for handle in (row, other):
        with pytest.raises(ms.StaleHandle):
            loop.mem.info(handle)
    loop.mem.drop([snap] if snap else [])
    assert all_free(loop) and not any(loop.mem.inspect().labels)
