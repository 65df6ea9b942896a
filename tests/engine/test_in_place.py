"""Engines whose kernels update one slot in place: copies before and after the forward, counted to the byte."""

import random

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside
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


@every_strategy
@pytest.mark.parametrize("direct", [False, True])
def test_a_hit_costs_one_copy_each(backend: Backend, name: str, direct: bool) -> None:
    loop = InPlace(backend, MAKERS[name](), direct_hits=direct)
    (row,) = loop.admit()
    loop.advance([row], I)
    (snapshot,) = loop.mem.end([row], keep="handle")
    assert snapshot and snapshot.length == I
    before = loop.copied
    rows = loop.admit(ms.Request("b", resume=snapshot), ms.Request("c", resume=snapshot))
    for again in rows:
        loop.fed[again] = loop.fed[row][:I]
    loop.advance(rows)
    assert loop.copied == before + 2
    for again in rows:
        assert loop.holds(loop.slot(again), again, I + 1)
    assert loop.holds(loop.node(snapshot), row, I)
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


def test_a_cancelled_step_copies_no_snapshot(backend: Backend) -> None:
    loop = InPlace(backend, ms.PingPong(I))
    (row,) = loop.admit()
    loop.advance([row], I - 1)
    step = loop.step([row], run=False)
    loop.mem.cancel(step)
    loop.mem.submit()
    assert loop.copied == 0
    scan(loop.mem)


@every_snapshot
def test_B26_a_copy_comes_before_the_next_forward(backend: Backend, name: str) -> None:
    """Overlap, and a batch that repeats, so that the plan in between submits nothing."""
    loop = InPlace(backend, MAKERS[name](), overlap=True)
    (row,) = loop.admit()
    flight = loop.step([row])
    for _ in range(3 * I):
        ahead = loop.step([row])
        loop.mem.settle(flight)
        flight = ahead
        for snapshot in loop.mem.publish([row]):
            if snapshot:
                assert loop.holds(loop.node(snapshot), row, snapshot.length)
                loop.mem.drop([snapshot])
                loop.mem.submit()
    assert loop.copied == 3
    scan(loop.mem)


def test_B26_also_before_anything_is_settled(backend: Backend) -> None:
    loop = InPlace(backend, ms.PingPong(1), overlap=True)
    (row,) = loop.admit()
    first, second = loop.step([row]), loop.step([row])
    loop.mem.settle(first)
    for length in (2, 1):
        (snapshot,) = loop.mem.publish([row])
        assert snapshot and snapshot.length == length and loop.holds(loop.node(snapshot), row, length)
    loop.mem.settle(second)
    scan(loop.mem)


@pytest.mark.parametrize("name", ["ping-pong", "lazy"])
def test_submit_keeps_the_order_of_copies_and_owners(backend: Backend, name: str) -> None:
    """A lane released and claimed again right after the forward belongs to its new owner."""
    loop = InPlace(backend, MAKERS[name](), slots=6, rows=3, overlap=False)
    first = loop.mem.pool.allocator.claim(1)
    (row,) = loop.admit()
    loop.advance([row], I - 1)
    lane = loop.slot(row, 1)
    loop.mem.pool.allocator.release(first)
    step = loop.step([row])  # at the boundary; its copy is still due
    loop.mem.end([row])
    tenants = loop.admit(ms.Request("b"), ms.Request("c"))
    loop.mem.submit()
    assert lane in [loop.slot(tenant) for tenant in tenants]  # what was a lane is live now
    loop.mem.settle(step)
    for tenant in tenants:
        assert not loop.planes.wrong({loop.slot(tenant): ()})  # zeroed, and not overwritten by the late copy
    scan(loop.mem)


@pytest.mark.sample(interpreter=1)
@every_strategy
@both_orders
@pytest.mark.parametrize("seed", range(2))
def test_B36_random_loops_hold_what_was_fed(backend: Backend, name: str, overlap: bool, seed: int) -> None:
    """Chunks beside single tokens, tight slots, ends and hits: every state and snapshot, byte by byte."""
    rng = random.Random(seed)
    direct = rng.random() < 0.5
    loop = InPlace(backend, MAKERS[name](), overlap=overlap, slots=11, rows=3, max_batch=4, direct_hits=direct)
    running: list[ms.Row] = []
    kept: list[tuple[ms.Snapshot, tuple[int, ...]]] = []
    for _ in range(30):
        while len(running) < 3 and rng.random() < 0.7:
            resume, fed = rng.choice(kept) if kept and rng.random() < 0.6 else (None, ())
            try:
                (row,) = loop.mem.admit([ms.Request("x", resume=resume)])
            except ms.OutOfSlots:
                break
            loop.fed[row] = list(fed)
            running.append(row)
        batch = [*rng.sample(running, rng.randint(0, len(running))), None]
        sizes = [
            rng.randint(1, loop.mem.info(row).next_boundary - loop.mem.info(row).length) if row else 0 for row in batch
        ]
        step = loop.step(batch, sizes, limit=rng.choice((0, 1, 99)))
        over = [row is not None and rng.random() < 0.15 for row in batch]
        loop.mem.settle(step, over)
        done = [row for row, is_over in zip(batch, over, strict=True) if is_over]
        for row in [row for row in running if row in done or rng.random() < 0.3]:
            made = loop.mem.end([row], keep="handle") if row in done else loop.mem.publish([row])
            kept += [(snapshot, tuple(loop.fed[row][: snapshot.length])) for snapshot in made if snapshot]
        running = [row for row in running if row not in done]
        scan(loop.mem)
        assert not loop.planes.wrong({loop.node(snapshot): fed for snapshot, fed in kept})
        begun = [row for row in running if not inside.registers(loop.mem).source[row.index]]
        assert not loop.planes.wrong({loop.slot(row): tuple(loop.fed[row]) for row in begun if loop.fed[row]})
        while len(kept) > 2:
            loop.mem.drop([kept.pop(0)[0]])
    loop.mem.audit().raise_if_leaking()


RING = ms.StateLayout(
    (ms.Plane("ring", (I,), torch.int64, rewritten_each_step=False), ms.Plane("ssm", (2,), torch.int64)), 2
)


@every_strategy
def test_only_planes_written_in_part_are_copied(backend: Backend, name: str) -> None:
    """A ring of the last inputs with a cursor: a step writes one cell. The other plane is written whole, and is not
    copied.
    """
    where = {"backend": backend.name, "device": backend.device}
    mem = ms.StateManager(RING, slots=6, max_requests=2, tracking=MAKERS[name](), **where)
    for plane in mem.planes.values():
        plane.view(torch.uint8).fill_(POISON)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for t in range(1, 2 * I + 2):
        step = mem.plan(rows)
        for read, write, snapshot in zip(step.read.tolist(), step.write.tolist(), step.snapshot.tolist(), strict=True):
            mem.planes["ring"][:, write, t % I] = t
            mem.planes["ssm"][:, write] = mem.planes["ssm"][:, read] + 1
            if snapshot:
                mem.planes["ssm"][:, snapshot] = mem.planes["ssm"][:, write]
        mem.settle(step)
    stats = mem.stats()
    ring = RING.layers * RING.block_bytes(RING.planes[0])
    assert stats.copied_bytes == stats.snapshots * ring
    mem.submit()
    for row in rows:
        live = int(mem.device.live_slots[row.index])
        assert mem.planes["ring"][1, live].tolist() == [8, 9, 6, 7] and mem.planes["ssm"][1, live].tolist() == [9, 9]
    for snapshot in mem.publish(rows):
        if name == "none":
            continue
        assert snapshot and snapshot.length == 2 * I
        (slot,) = mem.device.read_slots([snapshot]).wait().tolist()
        assert mem.planes["ring"][0, slot].tolist() == [8, 5, 6, 7] and mem.planes["ssm"][0, slot].tolist() == [8, 8]
    scan(mem)
