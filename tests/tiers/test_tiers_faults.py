"""Slow, failing or closed storage, and prefetches that end early: a hit is lost, but no record stays taken."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import memstate as ms
from memstate.errors import Asleep
from memstate.kernels.dispatch import Backend
from memstate.tiers.stores.base import Outcome
from tests.support.serving import PAGE
from tests.support.tiered import T, Tiered, settle, whole
from tests.support.virtual import ByHand, Clock, MemoryStore, Workers

pytestmark = pytest.mark.sample

ONE = whole(1)


def virtual(backend: Backend, store: MemoryStore, executor: ByHand | None = None, **more: object) -> Tiered:
    settings = {"store": store, "executor": executor or ByHand(), **more.pop("tiers", {})}  # type: ignore[dict-item]
    return Tiered(backend, **({"slots": 12, "tiers": settings} | more))  # type: ignore[arg-type]


def test_a_storage_that_never_answers_leaves_host_memory_evictable(plain: Backend) -> None:
    """Writes to storage may pin a quarter of the records of each kind, and at least one record."""
    for slots, pages, of_states, of_pages in ((8, 40, 2, 10), (2, 8, 1, 2)):
        jobs, store = ByHand(), MemoryStore()
        at = virtual(plain, store, jobs, tiers={"host_slots": slots, "host_pages": pages})
        for n in range(1, 20):
            at.pass_down(whole(n))
            states, kv = (cache._pinned for cache in at.caches)
            assert states <= of_states and kv <= of_pages
            assert tuple(whole(n)) in at.keeps(), "the last one always finds room"
            at.look()
        assert states == of_states and at.tiers.refused == 0 and not store.records
        before = at.tiers.write_missed
        at.drain()
        assert at.tiers.write_missed > before and at.tiers.write_failed == 0
        assert at.tiers.written == len(store.records)
        assert at.tiers.written + at.tiers.write_missed == at.moved[0] + at.moved[2]


def test_storage_that_fails_is_counted_and_host_memory_serves_on(plain: Backend) -> None:
    jobs, store = ByHand(), MemoryStore()
    store.broken = True
    at = virtual(plain, store, jobs)
    at.cache_prompts(ONE, T[:16])
    settle(at)
    at.drain()
    assert (at.tiers.written, at.tiers.write_failed, at.tiers.write_missed) == (0, 2 + 6, 0)
    at.give_up(pages=60)
    at.look(idle=True)
    assert at.turn([*ONE, 1], publish=False) == 8
    fetch = at.mem.prefetch(whole(9, 5))
    at.work()
    assert fetch.done and fetch.length == 0 and at.tiers.prefetch.failures == 1  # type: ignore[union-attr]


def test_writes_that_take_seconds_hold_nobody_up(plain: Backend) -> None:
    clock, store = Clock(), MemoryStore()
    jobs = Workers(clock, lambda: 5.0, workers=1)
    at = virtual(plain, store, jobs, tiers={"clock": clock})
    at.cache_prompts(*(whole(n) for n in range(1, 5)))
    settle(at)
    assert at.keeps() == {tuple(whole(n)) for n in range(1, 5)} and not store.records
    at.give_up(pages=60)
    assert at.turn([*ONE, 1], publish=False) == 8, "while it is being written"
    for _ in range(30):
        clock.advance(5.0)
        at.mem.poll()
    assert len(store.records) == at.tiers.written == at.moved[0] + at.moved[2]


@pytest.mark.parametrize("broken", [False, True])
def test_flush_and_close_end(broken: bool, plain: Backend, tmp_path: Path) -> None:
    """Afterwards the store has all that was cached, unless the store is broken, and no thread is left."""
    store, threads = MemoryStore(), set(threading.enumerate())
    store.broken = broken
    at = Tiered(plain, slots=12, tiers={"store": store, "write": "back", "threads": 1})
    at.cache_prompts(*(whole(n) for n in range(1, 5)), poll=False)
    at.mem.close()
    assert (at.tiers.written, at.tiers.write_failed) == ((0, 12) if broken else (12, 0))
    assert len(store.records) == at.tiers.written and at.tiers.leaked_records == 0 and at.keeps() == set()
    assert set(threading.enumerate()) <= threads


def test_a_closed_manager_goes_on_without_tiers(plain: Backend) -> None:
    at = Tiered(plain, tiers={"store": MemoryStore()}, slots=4)
    prompts = [[*whole(n, 2), 7] for n in range(6)]
    at.cache_prompts(*prompts)
    at.mem.close()
    at.mem.close()
    for prompt in prompts:
        assert at.turn(prompt) in (0, 2 * PAGE)
        at.mem.poll()
    assert at.tiers.host_states == at.tiers.host_pages == 0
    with pytest.raises(ms.ConfigurationError, match="the manager is closed"):
        at.mem.prefetch(prompts[0])
    assert at.mem.match(prompts[0]).host_length == 0
    at.below.flush()


def test_kv_that_sleeps_is_not_filed(plain: Backend) -> None:
    """The manager does not put the engine's KV to sleep; a state whose KV cannot be packed is not filed."""
    store = MemoryStore()
    at = Tiered(plain, tiers={"store": store, "write": "back"})
    at.cache_prompts(whole(1))
    assert at.pages_kv is not None
    at.mem.submit()
    at.pages_kv.sleep()
    with pytest.raises(Asleep):
        at.cache.evict_states(1)
    for call in (at.below.flush, at.mem.close):
        with pytest.raises(Asleep):
            call()
    assert at.tiers.host_pages == 0
    assert at.below.host.kv is not None and at.below.host.kv.pool.free == at.below.host.kv.pool.records
    at.pages_kv.wake()
    at.give_up(pages=60)
    at.pages_kv.sleep()
    before = at.mem.free_slots, at.mem.free_pages
    with pytest.raises(Asleep):
        at.mem.admit([ms.Request("r", tokens=[*whole(1), 1])])
    assert (at.mem.free_slots, at.mem.free_pages) == before
    at.pages_kv.wake()
    assert at.turn([*whole(1), 1], publish=False) == 2 * PAGE


@pytest.mark.parametrize("answer", [None, [], [Outcome.DONE] * 99, KeyError("x")])
def test_whatever_put_answers_is_a_failure_at_most(answer: Any, plain: Backend) -> None:
    store = MemoryStore()
    store.put = Mock(side_effect=[answer] * 9)  # type: ignore[method-assign]
    at = Tiered(plain, tiers={"store": store, "executor": ByHand()})
    at.cache_prompts(whole(1))
    at.mem.submit()
    at.mem.poll()
    at.drain()
    assert at.tiers.write_failed == 3 and at.tiers.written == 0  # the writes of a state and of two pages
