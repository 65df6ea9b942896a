"""Costs of a scheduler step: nothing but the counted launches reaches the device, and nothing waits for it.

Also the cost of bookkeeping in device memory.
"""

import pytest
import torch

import memstate as ms
from memstate import LazyPingPong, NoTracking, PingPong, Plane, Redirect, Request, Rows, SlotAllocator
from memstate.kernels.dispatch import Backend
from tests.support import inside
from tests.support.build import on
from tests.support.scan import scan
from tests.support.watch import Watch, real_launches

LAYOUT = ms.StateLayout([Plane("s", (4,), torch.float32)], layers=1)
STRATEGIES = [NoTracking(every=4), PingPong(every=4), LazyPingPong(every=4), Redirect(every=4)]
names = pytest.mark.parametrize("tracking", STRATEGIES, ids=lambda t: type(t).__name__)


@pytest.fixture
def poison() -> None:
    """Does nothing: poison would count as work of the device."""


def manager(backend: Backend, tracking: ms.Tracking, rows: int, **more: object) -> ms.StateManager:
    return on(
        backend, LAYOUT, slots=5 * rows + 4, max_requests=3 * rows, tracking=tracking, pages=12 * rows, page_size=4,
        pages_per_row=8, **more,
    )  # fmt: skip


def running(mem: ms.StateManager, n: int) -> Rows:
    """Returns requests after a prefill to the first boundary and one decode step, all submitted."""
    rows = mem.admit([Request(i, length=8) for i in range(n)])
    for tokens in (4, 1):
        mem.settle(mem.plan(rows, tokens))
    mem.submit()
    if mem.backend.device.type == "cuda":
        torch.cuda.synchronize()  # waits for all uploads, so that every upload buffer is free
    mem.backend.counts.reset()
    return rows


def cost(mem: ms.StateManager) -> tuple[int, dict[str, int], int]:
    counts = mem.backend.counts
    return counts.uploads, dict(counts.launches), counts.syncs


@pytest.mark.parametrize(
    ("tracking", "n"), [*((t, 1) for t in STRATEGIES), (PingPong(every=4), 256), (Redirect(every=4), 256)], ids=repr
)
def test_any_mix_is_one_upload_and_two_launches(backend: Backend, tracking: ms.Tracking, n: int) -> None:
    """One upload has publishes, releases, aborts, retractions, admissions into freed rows, a hit and pages."""
    mem = manager(backend, tracking, n)
    rows = running(mem, n)
    snapshots = mem.publish(rows[: n // 4])
    snapshots += mem.end(rows[n // 4 : n // 2], keep="handle")
    mem.end(rows[n // 2 : 3 * n // 4])
    snapshots += mem.end(rows[3 * n // 4 :], keep="handle")
    kept = [snapshot for snapshot in snapshots if snapshot]
    more = mem.admit([Request(f"new {i}", length=12, snapshot_at=[8]) for i in range(n - n // 4)])
    mem.admit([Request("back", length=12, resume=kept[-1])] if kept else [Request("fresh")])
    mem.extend(more[: n // 2], [16] * (n // 2))
    for _ in range(2):  # the second submit sends nothing
        mem.submit()
        assert cost(mem) == (1, {"ownership": 1, "run_data": 1}, 0)
    scan(mem)
    mem.device.check()


@pytest.mark.parametrize("direct", [False, True])
def test_hits_cost_the_same_for_one_and_for_many(backend: Backend, direct: bool) -> None:
    seen = []
    for n in (1, 32):
        mem = manager(backend, Redirect(every=4), n, direct_hits=direct)
        snapshots = mem.end(running(mem, n), keep="handle")
        assert None not in snapshots
        rows = mem.admit([Request(i, length=8, resume=snapshot) for i, snapshot in enumerate(snapshots)])
        step = mem.plan(rows, 1)
        assert (step.before == 4).all()
        seen.append(cost(mem))
    assert seen[0] == seen[1]
    assert seen[0] == (1, {"ownership": 1, "plan": 1} | ({} if direct else {"run_data": 1}), 0)


@names
def test_a_decode_step_is_one_plan_and_a_settle_launches_nothing(backend: Backend, tracking: ms.Tracking) -> None:
    """Steps at boundaries and between them, some with rows that finish, copy nothing and wait for nothing.

    A lane that a settle releases costs one more upload and launch, in the next plan.
    """
    mem = manager(backend, tracking, 4)
    rows = running(mem, 4)
    batch, pending, released = [*rows, None], False, False
    for at in range(9):
        mem.backend.counts.reset()
        step = mem.plan(batch, 1) if at < 8 else None
        uploads, launches, syncs = cost(mem)
        assert (launches, syncs) == ({"plan": 1} | ({"ownership": 1} if pending else {}) if step else {}, 0)
        assert uploads == (at == 0 or pending)  # the same batch as before is on the device already
        if step is None:
            break
        mem.extend(rows, [mem.info(row).length + 4 for row in rows])
        mem.submit()
        mem.backend.counts.reset()
        mem.settle(step, [at == 7, False, False, False, False])
        assert cost(mem) == (0, {}, 0)
        pending = bool(inside.commands(mem).queue) and at < 7
        released |= pending
    assert released == isinstance(tracking, ms.LazyPingPong)
    scan(mem)


@names
def test_T20_a_steady_step_with_drafts_is_one_launch(backend: Backend, tracking: ms.Tracking) -> None:
    """Numbers of accepted tokens take one small upload, or none if the sampler has written them."""
    rings = ms.StateLayout([Plane("s_x", (11, 4), torch.float32)], layers=1)
    layout = ms.StateLayout(LAYOUT.planes, layers=1, rows=rings)
    tracking = type(tracking)(every=64)  # no step reaches a boundary, where a lane could be released
    mem = on(backend, layout, slots=12, max_requests=3, tracking=tracking, overlap=False, tail=4)
    rows = running(mem, 3)
    mem.accept(mem.plan(rows, 4, drafts=3), [1, 2, 3])
    for written in (False, True):
        mem.backend.counts.reset()
        step = mem.plan(rows, 4, drafts=3)
        assert cost(mem) == (0, {"plan": 1}, 0)
        mem.accept(step, [4, 1, 2], written=written)
        assert cost(mem) == (int(not written), {"plan": 1}, 0)
        assert mem.backend.counts.upload_bytes == 4 * 3 * (not written)


@pytest.mark.parametrize("tracking", STRATEGIES[1:], ids=repr)
def test_in_place_nothing_is_launched_off_the_boundary(backend: Backend, tracking: ms.Tracking) -> None:
    mem = on(backend, LAYOUT, slots=8, max_requests=2, tracking=tracking, in_place=True)
    rows = mem.admit([Request("a")])
    for launches in ({"ownership": 1, "plan": 1, "run_data": 1}, {"plan": 1}, {"plan": 1}):
        mem.backend.counts.reset()
        mem.settle(mem.plan(rows))
        assert dict(mem.backend.counts.launches) == launches
    mem.settle(mem.plan(rows))
    mem.settle(mem.plan(rows))
    assert mem.backend.counts.launches["copy_slots"] == 1 and mem.backend.counts.syncs == 0


def test_B4_nothing_to_do_costs_nothing(backend: Backend) -> None:
    mem = manager(backend, Redirect(every=4), 2)
    rows = mem.admit([Request(i, length=4) for i in range(2)])
    mem.settle(mem.plan(rows, 1))
    mem.submit()
    mem.backend.counts.reset()
    assert mem.publish(rows) == [None, None]
    assert mem.publish([]) == mem.end([]) == mem.end([], keep="handle") == []
    assert tuple(mem.admit([])) == ()
    mem.end([])
    mem.drop([])
    mem.extend(rows, [4, 4])  # the rows have these pages already
    mem.extend([], [])
    mem.submit()
    assert cost(mem) == (0, {}, 0)


def busy(mem: ms.StateManager) -> None:
    """Does everything that a decode loop does, with hits, snapshots, retraction, a cancelled step and claimed slots."""
    rows = mem.admit([Request(i, length=8) for i in range(4)])
    for tokens in (4, 1, 1, 1, 1, 1):
        mem.extend(rows, [mem.info(row).length + 4 for row in rows])
        mem.settle(mem.plan([*rows, None], tokens))
    published = [snapshot for snapshot in mem.publish(rows) if snapshot]
    step = mem.plan([*rows, None], 1)
    mem.settle(step, [True, False, False, False, False])
    kept = [s for s in mem.end(rows[:2], keep="handle") if s] + published
    again = mem.admit([Request("again", length=12, resume=kept[0]), Request("new", length=4)] if kept else [])
    mem.cancel(mem.plan([*again, *rows[2:]], 1))
    mem.drop(kept)
    mem.pool.release(mem.pool.claim(1))
    mem.submit()


@pytest.mark.sample(interpreter=1)
@names
def test_launches_and_uploads_are_counted_and_nothing_else_reaches_the_device(
    backend: Backend, tracking: ms.Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    mem, watch = manager(backend, tracking, 4), Watch()
    with real_launches(monkeypatch) as seen:
        busy(mem)  # a first run creates what later runs use again
    assert len(seen) == (0 if backend.name == "reference" else mem.backend.counts.total_launches)
    assert mem.backend.counts.total_launches > 10
    mem.recover(keep=False)
    mem.submit()
    watch.let_pass(mem)
    with watch:
        busy(mem)
    assert dict(watch.seen) == {}
    assert (mem.backend.counts.syncs, mem.stats().upload_waits) == (0, 0)
    scan(mem)


def test_B9_handing_out_what_a_group_holds_reaches_no_device(backend: Backend) -> None:
    allocator = SlotAllocator(8, backend)
    watch = Watch()
    with allocator.group(6) as group, watch:
        ids = [group.claim(2), group.claim(1)]
    assert [slot for each in ids for slot in each.tolist()] == [1, 2, 3]
    assert dict(watch.seen) == {}


def bookkeeping(backend: Backend, slots: int, rows: int) -> int:
    """Returns the device bytes besides states and page table, summed over the tensors."""
    mem = on(backend, LAYOUT, slots=slots, max_requests=rows, max_batch=8)
    file, allocator = inside.registers(mem), mem.pool.allocator
    assert file.nbytes == file.cells.nbytes + allocator.bitmap.nbytes + allocator.counters.nbytes
    return file.nbytes - mem.device.page_table.nbytes


def test_bookkeeping_is_at_most_64_bytes_a_slot_and_64_a_row(backend: Backend) -> None:
    """Measures the bytes that 4000 more slots, or 4000 more rows, add. Every slot can hold a snapshot."""
    start = bookkeeping(backend, 1000, 1000)
    assert 8 < (bookkeeping(backend, 5000, 1000) - start) / 4000 <= 64
    assert 24 <= (bookkeeping(backend, 1000, 5000) - start) / 4000 <= 64
    assert start <= 1000 * 64 + 1000 * 64 + 4096  # 4096 more, since columns are rounded up
