"""The end of a manager with tiers, transfers that arrive late, and what processes, threads and engines do to it."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import memstate as ms
from memstate.errors import Asleep
from memstate.kernels.dispatch import Backend
from memstate.tiers import FileStore
from memstate.tiers.stores.base import Outcome
from tests.support.planes import every_strategy
from tests.support.serving import PAGE
from tests.support.tiered import T, Tiered, below, settle, whole
from tests.support.tiered_late import Late
from tests.support.virtual import ByHand, MemoryStore
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)
TWO = (ONE, whole(2, 3))  # prompts that only host memory has


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


def test_another_process_goes_on_from_files(plain: Backend, tmp_path: Path) -> None:
    first = Tiered(plain, slots=14, tiers={"store": FileStore(tmp_path)})
    first.cache_prompts(T[:16], ONE)
    first.mem.close()
    at = Tiered(plain, slots=14, tiers={"store": FileStore(tmp_path)})
    assert at.mem.match([*ONE, 1]).host_length == 0
    assert [at.fetch(tokens).length for tokens in ([*ONE, 1], [*T[:16], 1, 2])] == [8, 16]
    assert [at.turn(tokens) for tokens in ([*ONE, 1], [*T[:16], 1, 2])] == [8, 16]
    assert (at.tiers.storage_hit_tokens, at.tiers.host_hit_tokens) == (24, 0)
    settle(at)
    at.below.flush()
    assert at.tiers.written == at.moved[0] + at.moved[2], "what came from storage is not written again"


@pytest.mark.parametrize(("write", "tokens"), [("through", 64), ("back", 128)])
def test_S10_a_manager_limits_prefetches_by_its_host_memory(
    write: str, tokens: int, plain: Backend, tmp_path: Path
) -> None:
    """Host memory has 40 pages.

    If it must also hold copies of the device's pages, only 20 of them count. Prefetches get 0.8 of those that count.
    """
    settings = {"store": FileStore(tmp_path), "prefetch": ms.Prefetch(threshold=4, stop="wait_complete")}
    at = Tiered(plain, slots=14, tiers=settings | {"write": write})
    assert at.mem.prefetch(T[:150]).tokens == tokens
    assert at.mem.prefetch(T[:150]).outcome == "limited"


@every_order_and_strategy
def test_nothing_reads_a_state_before_it_is_there(name: str, overlap: bool, late: list[Late], plain: Backend) -> None:
    at = below(plain, name, *TWO, overlap=overlap)
    rows = at.admit(*[ms.Request(n, tokens=[*ONE, n]) for n in range(2)])
    states, kv = late
    assert len(states.unread("into")) == len(kv.unread("into")) == 1
    at.run([*rows, None], publish=False)  # the step reads and checks the loaded states
    assert not states.unread("into") and not kv.unread("into")
    at.mem.poll()
    assert at.below.host.loads, "the host has not heard of it"
    for ticket in (*states.flying("into"), *kv.flying("into")):
        ticket.land()
    at.mem.poll()
    assert at.landed


@every_strategy
def test_a_request_that_ends_at_once_leaves_its_load_to_itself(name: str, late: list[Late], plain: Backend) -> None:
    """The row ends before its load has arrived. The record stays in use until then, and the loaded state is cached."""
    at = below(plain, name, *TWO)
    row = at.start([*ONE, 1])
    at.mem.end([row])
    host = at.below.host
    assert host.states.evict(9) == 1 and at.keeps() == {tuple(ONE)}, "the one that is not being copied"
    at.mem.poll()
    assert late[0].flying("into") and host.loads
    at.look(idle=True)
    at.below.settle()
    assert not host.loads and at.landed
    at.look(idle=True)
    assert at.mem.match([*ONE, 1]).length == 8


def test_a_record_that_is_being_filled_is_nobody_else_s(late: list[Late], plain: Backend) -> None:
    at = Tiered(plain, slots=6, tiers={"write": "back", "host_slots": 1, "host_pages": 8})
    at.cache_prompts(whole(1), whole(2))
    at.mem.submit()
    at.cache.evict_states(1)
    assert at.keeps() == {tuple(whole(1))} and late[0].flying("out")
    at.mem.poll()
    assert not at.landed, "poll waits for nothing"
    at.cache.evict_states(1)
    assert at.keeps() == {tuple(whole(1))} and at.tiers.refused == 1 and at.tiers.evicted_states == 0
    at.look(idle=True)
    settle(at)
    assert at.landed
    at.look(idle=True)
    at.cache_prompts(whole(3))
    at.give_up()
    assert at.keeps() == {tuple(whole(3))} and (at.tiers.refused, at.tiers.evicted_states) == (1, 1)


@pytest.mark.parametrize("ending", ["sleep", "reset", "clear", "close", "flush"])
def test_whatever_is_on_its_way_arrives_first(ending: str, late: list[Late], plain: Backend) -> None:
    at = below(plain, "redirect", *TWO, slots=12)
    at.cache_prompts(whole(3))
    at.mem.submit()
    at.mem.poll()  # the save is on its way
    at.mem.end([at.start([*ONE, 1])])  # the load is on its way
    assert [len(late[0].flying(kind)) for kind in ("out", "into")] == [1, 1]
    if ending == "sleep":
        at.mem.device.sleep()
        assert at.landed
        at.mem.device.wake()
    elif ending == "reset":
        at.mem.recover(keep=False)
    elif ending == "close":
        at.mem.close()
    else:
        getattr(at.below, ending)()
    assert not late[0].flying("into") and not late[0].flying("out") and at.landed
    assert [cache._pinned for cache in at.caches] == [0, 0]
    at.look(idle=True)
    if ending in ("reset", "clear", "close"):
        assert [len(cache) for cache in at.caches] == [0, 0]
    if ending != "close":
        assert at.turn([*T[:9]]) == 0
        at.empty()
