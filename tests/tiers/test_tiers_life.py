"""The end of a manager with tiers, its limits, and what a store answers."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import memstate as ms
from memstate.errors import Asleep
from memstate.tiers import FileStore
from memstate.tiers.stores.base import Outcome
from tests.support.tiered_small import KV, PAGE, PAGES, push_down, tiered, turn, whole
from tests.support.virtual import MemoryStore

pytestmark = pytest.mark.sample

ONE = whole(1)


@pytest.mark.parametrize("broken", [False, True])
def test_flush_and_close_end(broken: bool) -> None:
    """Afterwards the store has all that was cached, unless the store is broken, and no thread is left.

    The manager goes on without tiers.
    """
    store, threads = MemoryStore(), set(threading.enumerate())
    store.broken = broken
    mem = tiered(tiers={"store": store, "write": "back", "threads": 1, "executor": None})
    for n in range(1, 5):
        turn(mem, whole(n))
    mem.close()
    mem.close()
    figures = mem.stats().tiers
    assert (figures.written, figures.write_failed) == ((0, 12) if broken else (12, 0))
    assert len(store.records) == figures.written and figures.leaked_records == 0
    assert set(threading.enumerate()) <= threads
    for n in range(1, 8):
        assert turn(mem, [*whole(n), 7]) in (0, 2 * PAGE)
        mem.poll()
    with pytest.raises(ms.ConfigurationError, match="the manager is closed"):
        mem.prefetch(ONE)
    mem.prefix.evict_states(99)
    mem.prefix.evict_pages(99)
    mem.tiers.flush()
    assert mem.match([*ONE, 7]).host_length == mem.stats().tiers.host_states == mem.stats().tiers.host_pages == 0


def test_kv_that_sleeps_is_not_filed() -> None:
    """The manager does not put the engine's KV to sleep; a state whose KV cannot be packed is not filed."""
    kv = ms.Planes(KV, PAGES, ms.Backend("reference"))
    mem = tiered(tiers={"store": MemoryStore(), "write": "back", "kv": kv})
    turn(mem, ONE)
    mem.submit()
    kv.sleep()
    for call in (lambda: mem.prefix.evict_states(1), mem.tiers.flush, mem.close):
        with pytest.raises(Asleep):
            call()
    pool = mem.tiers.host.kv.pool
    assert mem.stats().tiers.host_pages == 0 and pool.free == pool.records
    kv.wake()
    push_down(mem)
    kv.sleep()
    before = mem.free_slots, mem.free_pages
    with pytest.raises(Asleep):
        mem.admit([ms.Request("r", tokens=[*ONE, 1])])
    assert (mem.free_slots, mem.free_pages) == before
    kv.wake()
    assert turn(mem, [*ONE, 1]) == 2 * PAGE


@pytest.mark.parametrize("answer", [None, [], [Outcome.DONE] * 99, KeyError("x")])
def test_whatever_put_answers_is_a_failure_at_most(answer: Any) -> None:
    store = MemoryStore()
    store.put = Mock(side_effect=[answer] * 9)  # type: ignore[method-assign]
    mem = tiered(tiers={"store": store})
    push_down(mem, ONE)
    figures = mem.stats().tiers
    assert figures.write_failed == 3 and figures.written == 0  # the writes of a state and of two pages


@pytest.mark.parametrize(("write", "tokens"), [("through", 64), ("back", 128)])
def test_S10_a_manager_limits_prefetches_by_its_host_memory(write: str, tokens: int, tmp_path: Path) -> None:
    """Host memory has 40 pages.

    If it must also hold copies of the device's pages, only 20 of them count. Prefetches get 0.8 of those that count.
    """
    limits = ms.Prefetch(threshold=4, stop="wait_complete")
    mem = tiered(tiers={"store": FileStore(tmp_path), "prefetch": limits, "write": write, "executor": None})
    assert mem.prefetch(range(150)).tokens == tokens
    assert mem.prefetch(range(150)).outcome == "limited"
    mem.close()
