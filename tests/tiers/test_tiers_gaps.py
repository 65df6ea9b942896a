"""What no scenario asked for: looks that are no use, salts and stores that break the rules, managers asleep."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.tiered import T, Tiered, below, settle, whole
from tests.support.virtual import MemoryStore

ONE = whole(1)


def order(at: Tiered) -> list[list[bytes]]:
    """Keys by their last use."""
    return [[entry.key for entry in cache.entries()] for cache in at.caches]


def test_a_look_is_no_use(plain: Backend) -> None:
    at = below(plain, "redirect", ONE, T[:16], pages=12)
    before = order(at)
    assert at.mem.match([*ONE, 1]).host_length == 8 and order(at) == before
    at.start([*ONE, 1])
    assert order(at) != before and order(at)[0][-1] == before[0][0], "this is one"


def test_a_hit_is_worth_a_holder_that_the_cache_has(plain: Backend) -> None:
    """Few registers for snapshots, all of which the cache has filled: as a published state, a hit takes one's place."""
    at = Tiered(plain, slots=12, snapshots=2)
    at.cache_prompts(ONE)
    settle(at)
    at.give_up(pages=60)
    at.cache_prompts(whole(2), whole(3))
    assert owners.free(at.mem) == 0
    row = at.start([*ONE, 1])
    assert at.mem.length(row) == 8 and at.cache.states == 2
    at.checked([row])


@pytest.mark.parametrize("call", ["flush", "close"])
def test_a_manager_that_sleeps_gives_nothing_to_host_memory(call: str, plain: Backend) -> None:
    """Refused before anything is filed under a key, or not needed: no record of a state that was never copied."""
    at = Tiered(plain, slots=6, tiers={"write": "back"})
    at.cache_prompts(ONE)
    at.mem.sleep()
    with pytest.raises(ms.Asleep):
        getattr(at.below if call == "flush" else at.mem, call)()
    assert at.keeps() == set() and at.tiers.leaked_records == 0
    at.mem.wake()


def test_flushing_more_than_host_memory_holds_writes_all_of_it(plain: Backend) -> None:
    """In turns: what storage has by now makes room for the rest."""
    store = MemoryStore()
    at = Tiered(plain, slots=8, tiers={"store": store, "write": "back", "host_slots": 2, "host_pages": 4})
    at.cache_prompts(*(whole(n) for n in range(1, 6)))
    at.mem.submit()
    at.below.flush()
    assert sum(name.startswith("state") for name in store.records) == 5
    assert sum(name.startswith("kv") for name in store.records) == 10 and at.tiers.refused == 0
    at.mem.close()


def test_flushing_writes_kv_whose_state_is_here_already(plain: Backend) -> None:
    """Storage failed, and host memory gave up the KV. It has room for that of two states at a time."""
    store = MemoryStore()
    at = Tiered(plain, slots=8, tiers={"store": store, "host_pages": 4})
    store.broken = True
    at.cache_prompts(*(whole(n) for n in range(1, 4)))
    settle(at)
    at.drain()
    store.broken = False
    assert at.below.host.kv is not None and at.below.host.kv.evict(99) == 4 and len(at.keeps()) == 3
    at.below.flush()
    assert sum(name.startswith("kv") for name in store.records) == 6
    at.mem.close()
