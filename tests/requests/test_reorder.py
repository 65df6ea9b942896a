"""Reorders of many rows: rows that a reorder leaves out end and make room for forks of the others, in one packet."""

from random import Random

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.planes import MAKERS, I, Loop, every_strategy
from tests.support.scan import scan


def reordered(loop: Loop, rows: list[ms.Row], entries: list[int]) -> list[ms.Row]:
    fed = [loop.fed[row] for row in rows]
    result = list(loop.mem.reorder(rows, entries).rows)
    for row, entry in zip(result, entries, strict=True):
        loop.fed[row] = list(fed[entry])
    return result


@every_strategy
def test_every_row_goes_on_from_the_one_that_it_was(backend: Backend, name: str) -> None:
    random = Random(7)
    loop = Loop(backend, MAKERS[name](), slots=20, rows=5)
    rows = loop.admit(*(ms.Request(name) for name in "abcd"))
    loop.advance(rows, 3)
    for _ in range(8):
        rows = reordered(loop, rows, [random.randrange(4) for _ in rows])
        if random.random() < 0.7:  # without a step, the next reorder finds rows that have not read their shared state
            loop.advance(rows, random.randrange(1, 4))
        scan(loop.mem)
    loop.advance(rows)
    assert all(loop.holds(loop.slot(row), row, len(loop.fed[row])) for row in rows)
    assert name != "redirect" or loop.mem.stats().copied_bytes == 0
    loop.mem.end(rows)
    assert loop.mem.free_slots == 20


def test_rows_that_nobody_names_make_room_for_the_forks(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I), slots=4, rows=3, pages=6, page_size=2, pages_per_row=2)
    rows = loop.admit(*(ms.Request(name, length=3) for name in "abc"))
    loop.advance(rows, 3)
    assert (loop.mem.free_slots, loop.mem.free_pages) == (1, 0)
    fork = loop.mem.reorder(rows, [1, 1, 1])
    assert fork.rows[0] == rows[1]
    assert [loop.mem.info(row).length for row in fork.rows] == [3] * 3
    # three slots are written and one is read; a page is shared
    assert (loop.mem.free_slots, loop.mem.free_pages) == (0, 2)
    loop.mem.submit()
    old = loop.mem.device.page_table[rows[1].index, 1]
    new = [int(loop.mem.device.page_table[row.index, 1]) for row in fork.rows[1:]]
    assert fork.page_copies == [(page, int(old)) for page in new]
    with pytest.raises(ms.StaleHandle):
        loop.mem.info(rows[0])
    again = loop.mem.reorder(fork.rows, [2, 2, 0])  # before their first step, the shared state has a slot of its own
    assert again.rows[0] == fork.rows[2]
    scan(loop.mem)


@pytest.mark.parametrize("n", [2, 32])
def test_a_reorder_is_one_upload_and_one_launch(backend: Backend, n: int) -> None:
    loop = Loop(backend, ms.Redirect(I), slots=3 * n, rows=n)
    rows = loop.admit(*(ms.Request(number) for number in range(n)))
    loop.advance(rows, 2)
    loop.mem.submit()
    loop.mem.backend.counts.reset()
    loop.mem.reorder(rows, [entry // 2 for entry in range(n)])
    loop.mem.submit()
    counts = loop.mem.backend.counts
    assert (counts.uploads, dict(counts.launches), counts.syncs) == (1, {"ownership": 1}, 0)


@pytest.mark.parametrize("short", [ms.OutOfSlots, ms.OutOfRows, ms.OutOfPages])
def test_a_reorder_is_made_whole_or_not_at_all(backend: Backend, short: type[ms.MemstateError]) -> None:
    loop = Loop(backend, ms.Redirect(I), slots=8, rows=4, pages=8, page_size=2, pages_per_row=2)
    rows = loop.admit(*(ms.Request(name, length=3) for name in "abc"))
    loop.advance(rows, 3)
    taken = loop.mem.pool.allocator.claim(4 if short is ms.OutOfSlots else 0)
    pages = owners.kv_pages(loop.mem).claim(2 if short is ms.OutOfPages else 0)
    before = [loop.mem.free_slots, loop.mem.free_pages, loop.mem.stats().rows_used]
    entries = [0, 0, 1, 1, 1] if short is ms.OutOfRows else [0, 0, 1, 2]
    with pytest.raises(short):
        loop.mem.reorder(rows, entries)
    assert [loop.mem.free_slots, loop.mem.free_pages, loop.mem.stats().rows_used] == before
    loop.mem.pool.allocator.release(taken)
    owners.kv_pages(loop.mem).release(pages)
    loop.advance(rows)
    assert all(loop.holds(loop.slot(row), row, 4) for row in rows)
    scan(loop.mem)


def test_rows_that_cannot_be_forked_or_ended_are_refused(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I), pages=12, page_size=2, pages_per_row=3, prefix=ms.Prefix())
    talk = loop.mem.sessions.open("talk")
    a, b = loop.admit(ms.Request("a", length=6), ms.Request("b", tokens=[1, 2, 3], session=talk))
    loop.advance([a, b])
    with pytest.raises(ms.InvalidArgument, match="turns of sessions"):
        loop.mem.reorder([a, b], [0])
    step = loop.step([b])
    for entries in ([1, 0], [0]):
        with pytest.raises(ms.InvalidArgument, match="unsettled"):
            loop.mem.reorder([a, b], entries)
    loop.mem.settle(step, [True])
    with pytest.raises(ms.InvalidArgument, match="finished"):
        loop.mem.reorder([a, b], [1])
    assert loop.mem.reorder([a], [0]) == ((a,), []) and loop.mem.reorder([], []) == ((), [])
    assert len(loop.mem.reorder([a], []).rows) == 0
    loop.mem.end([b])
    scan(loop.mem)
    assert loop.mem.free_slots == 16
