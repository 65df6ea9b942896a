"""Forks: one state, many continuations, nothing copied where kernels read one slot and write another."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.planes import MAKERS, I, Loop, every_strategy, running
from tests.support.scan import scan


def forked(loop: Loop, row: ms.Row, *names: str) -> ms.engine.forking.Fork:
    fork = loop.mem.fork(row, names)
    for new in fork.rows:
        loop.fed[new] = list(loop.fed[row])
    return fork


def test_the_shared_state_goes_with_its_last_reader(backend: Backend) -> None:
    loop, row = running(backend, ms.Redirect(I), 2, slots=5)
    first, second = forked(loop, row, "b", "c").rows
    assert loop.mem.free_slots == 1  # three slots are written, one is read
    loop.mem.end([first])
    loop.advance([row])
    loop.mem.submit()
    assert loop.mem.free_slots == 2
    loop.advance([second])
    loop.mem.submit()
    assert loop.mem.free_slots == 3 and loop.holds(loop.slot(second), second, 3)
    scan(loop.mem)


@every_strategy
def test_full_pages_are_shared_and_the_rest_is_named(backend: Backend, name: str) -> None:
    loop = Loop(backend, MAKERS[name](), pages=12, page_size=2, pages_per_row=6)
    (row,) = loop.admit(ms.Request("a", length=5))
    loop.advance([row], 5)
    fork = forked(loop, row, "b", "c")
    loop.mem.submit()
    table = loop.mem.device.page_table
    mine = table[row.index, :3].tolist()
    for new, (to, of) in zip(fork.rows, fork.page_copies, strict=True):
        theirs = table[new.index, :3].tolist()
        assert theirs[:2] == mine[:2] and theirs[2] == to != mine[2] == of
    assert len({to for to, _ in fork.page_copies}) == 2 and loop.mem.free_pages == 12 - 3 - 2
    loop.mem.end([row])
    assert loop.mem.free_pages == 12 - 4
    loop.mem.end(fork.rows)
    scan(loop.mem)
    assert loop.mem.free_pages == 12


@every_strategy
def test_B17_a_fork_is_made_whole_or_not_at_all(backend: Backend, name: str) -> None:
    loop = Loop(backend, MAKERS[name](), slots=9, rows=3, pages=4, page_size=2, pages_per_row=2)
    (row,) = loop.admit(ms.Request("a", length=3))
    loop.advance([row], 3)
    before = (loop.mem.free_slots, loop.mem.free_pages, loop.mem.stats().rows_used)
    with pytest.raises(ms.OutOfRows):
        loop.mem.fork(row, ["b", "c", "d"])
    taken = owners.kv_pages(loop.mem).claim(2)
    with pytest.raises(ms.OutOfPages):
        loop.mem.fork(row, ["b"])
    owners.kv_pages(loop.mem).release(taken)
    group = loop.mem.pool.allocator.claim(loop.mem.free_slots)
    with pytest.raises(ms.OutOfSlots):
        loop.mem.fork(row, ["b"])
    loop.mem.pool.allocator.release(group)
    with pytest.raises(ms.InvalidArgument, match="sequence"):
        loop.mem.fork(row, "ab")
    step = loop.step([row])
    with pytest.raises(ms.InvalidArgument, match="unsettled"):
        loop.mem.fork(row, ["b"])
    loop.mem.settle(step, [True])
    with pytest.raises(ms.InvalidArgument, match="finished"):
        loop.mem.fork(row, ["b"])
    loop.mem.end([row])
    with pytest.raises(ms.StaleHandle):
        loop.mem.fork(row, ["b"])
    loop.mem.pool.allocator.check()
    scan(loop.mem)
    assert before[1] + 2 == loop.mem.free_pages and loop.mem.free_slots == 9


def test_without_a_holder_a_fork_is_refused_before_it_begins(backend: Backend) -> None:
    loop, row = running(backend, ms.Redirect(I), 2, snapshots=0)
    with pytest.raises(ms.InvalidArgument, match="no register is free"):
        loop.mem.fork(row, ["b"])
    assert loop.mem.free_slots == 15 and loop.mem.stats().rows_used == 1
    loop.advance([row])
    assert loop.holds(loop.slot(row), row, 3)
    scan(loop.mem)
