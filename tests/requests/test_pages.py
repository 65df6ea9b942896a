"""KV pages: the lowest free page comes first, shared pages are counted, and the device's table follows the host."""

import random
from collections import Counter
from contextlib import suppress

import pytest
import torch

import memstate as ms
from memstate import InvalidArgument, OutOfPages, OutOfRows, OutOfSlots, Plane, Redirect, Request, Snapshot
from memstate.kernels.dispatch import Backend
from memstate.requests.pages import PageAllocator
from tests.support.build import on
from tests.support.scan import scan

LAYOUT = ms.StateLayout([Plane("s", (4,), torch.float32)], layers=1)


def manager(backend: Backend, pages: int = 10) -> ms.StateManager:
    return on(
        backend, LAYOUT, slots=6, max_requests=4, tracking=Redirect(every=4), pages=pages, page_size=4, pages_per_row=5
    )


def table(mem: ms.StateManager) -> list[list[int]]:
    mem.submit()
    rows: list[list[int]] = mem.device.page_table.tolist()
    return [[page for page in row if page] for row in rows[1:]]


def published(mem: ms.StateManager, name: str, length: int, room: int) -> Snapshot:
    """Returns a snapshot of `length` tokens. The request of the snapshot was admitted with pages for `room` tokens."""
    (row,) = mem.admit([Request(name, length=room)])
    for _ in range(length // 4):
        mem.settle(mem.plan([row], 4))
    (snapshot,) = mem.end([row], keep="handle")
    assert snapshot is not None
    assert snapshot.length == length
    return snapshot


def test_a_shared_page_is_free_with_its_last_holder() -> None:
    pages = PageAllocator(3)
    first = pages.claim(2)
    pages.share(first)
    pages.share(first[:1])
    pages.release(first)
    assert pages.free == 1
    pages.release(first)
    assert pages.free == 2
    assert list(pages.claim(2)) == [2, 3]
    pages.release([1])
    assert pages.free == 1


def test_few_and_many_pages_are_the_lowest_free_ones() -> None:
    rng, pages, held = random.Random(3), PageAllocator(4000), set[int]()
    for _ in range(200):
        n = min(rng.choice((0, 1, 20, 23, 24, 1000)), pages.free)
        lowest = [page for page in range(1, 4001) if page not in held][:n]
        assert list(pages.claim(n)) == lowest
        held.update(lowest)
        gone, shared = (rng.sample(sorted(held), min(len(held), rng.choice((0, 1, 23, 24, 900)))) for _ in range(2))
        pages.share(shared)
        assert pages.alone(gone) == len({*gone} - {*shared})
        assert pages.miscounts(Counter([*held, *shared])) == []
        pages.release(shared)
        pages.release(gone)
        held.difference_update(gone)
        assert pages.miscounts(dict.fromkeys(held, 1)) == []


def test_a_step_beyond_the_pages_is_refused(backend: Backend) -> None:
    mem = manager(backend)
    rows = mem.admit([Request("a", length=4), Request("b", length=8)])
    mem.settle(mem.plan(rows, 4))
    with pytest.raises(InvalidArgument, match="extend"):
        mem.plan(rows, 1)
    mem.extend(rows[:1], [5])
    step = mem.plan(rows, 1)
    assert step.after.tolist() == [5, 5]
    scan(mem)


def test_a_snapshot_keeps_the_pages_of_its_tokens(backend: Backend) -> None:
    mem = manager(backend)
    snapshot = published(mem, "a", length=8, room=17)
    assert (snapshot.pages, mem.free_pages) == ((1, 2), 8)
    rows = mem.admit([Request("b", length=12, resume=snapshot), Request("c", length=4, resume=snapshot)])
    assert table(mem)[:2] == [[1, 2, 3], [1, 2]]
    mem.drop([snapshot])
    mem.end(rows[:1])
    assert mem.free_pages == 8
    scan(mem)
    mem.end(rows[1:])
    assert mem.free_pages == 10
    scan(mem)


def test_the_pages_of_a_row_reused_are_its_own(backend: Backend) -> None:
    """A short request gets the row of a long one. Behind its own pages, no page of the long request may be read."""
    mem = manager(backend)
    rows = mem.admit([Request("long", length=20), Request("other", length=8)])
    mem.end(rows[:1])
    mem.admit([Request("short", length=4)])
    assert table(mem)[:2] == [[1], [6, 7]]
    scan(mem)


def test_pages_follow_the_model_under_random_use(backend: Backend, generator: torch.Generator) -> None:
    rng = random.Random(generator.initial_seed())
    mem = manager(backend, pages=12)
    rows, snapshots = [], []
    for turn in range(60 if backend.name == "reference" else 25):
        kind = rng.choice(("admit", "admit", "extend", "step", "end", "publish", "drop"))
        with suppress(OutOfPages, OutOfRows, OutOfSlots):
            if kind == "admit":
                resume = rng.choice([None, *snapshots])
                rows += mem.admit([Request(turn, length=rng.randint(0, 20), resume=resume)])
            elif kind == "extend" and rows:
                mem.extend(rows, [rng.randint(0, 20) for _ in rows])
            elif kind == "step" and rows:
                ready = [row for row in rows if mem.info(row).length + 4 <= 20]
                mem.extend(ready, [mem.info(row).length + 4 for row in ready])
                mem.settle(mem.plan(ready, 4))
            elif kind == "end" and rows:
                snapshots += [s for s in mem.end([rows.pop(rng.randrange(len(rows)))], keep="handle") if s]
            elif kind == "publish" and rows:
                snapshots += [s for s in mem.publish(rows) if s]
            elif kind == "drop" and snapshots:
                mem.drop([snapshots.pop(rng.randrange(len(snapshots)))])
        scan(mem)
    mem.end(rows)
    mem.drop(snapshots)
    scan(mem)
    assert (mem.free_pages, mem.free_slots) == (12, 6)
    mem.device.check()
