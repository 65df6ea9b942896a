"""Hits in host memory: what comes up, once for all who ask, and what every request then reads."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.planes import every_strategy
from tests.support.serving import written
from tests.support.tiered import NEEDS, T, Tiered, below, settle, whole
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)


@every_order_and_strategy
def test_a_prompt_goes_on_from_host_memory(name: str, overlap: bool, plain: Backend) -> None:
    at = below(plain, name, whole(1), whole(2, 3), overlap=overlap)
    match = at.mem.match([*whole(2, 3), 1])
    assert (match.length, match.kv_length, match.host_length) == (0, 0, 12)
    assert at.turn([*whole(2, 3), 1], goal=9) == 12
    assert at.turn([*ONE, 5, 6, 7], goal=3) == 8
    stats = at.mem.stats()
    assert stats.prefix and (stats.prefix.loaded, stats.prefix.hit_tokens) == (2, 20)
    assert at.moved[1::2] == (2, 5) and (at.tiers.host_hit_tokens, at.tiers.storage_hit_tokens) == (20, 0)


@pytest.mark.parametrize("staging", [1, 2, 50])
@every_strategy
def test_staging_of_any_size_carries_the_same_bytes(name: str, staging: int, plain: Backend) -> None:
    at = below(plain, name, *(whole(n, n) for n in range(1, 6)), tiers={"staging": staging})
    rows = [at.start([*whole(n, n), 1]) for n in (5, 3, 1)]
    assert [at.mem.info(row).length for row in rows] == [20, 12, 4]
    at.run(rows)
    at.look()
    at.mem.end(rows)
    settle(at)
    assert at.tiers.staging_bytes == at.below.host.staging_bytes > 0


def test_hits_through_the_kernels(backend: Backend) -> None:
    """Both strategies of starting: reading the state where it is, and copying it."""
    for name, staging in (("redirect", 1), ("lazy", 2)):
        at = below(backend, name, tiers={"staging": staging})
        assert at.turn([*ONE, 1], goal=2) == 8


@every_strategy
def test_kv_on_the_device_stays_and_the_rest_comes(name: str, plain: Backend) -> None:
    at = below(plain, name, T[:16], kv_stays=True)
    at.cache.evict_pages(2)
    at.look(idle=True)
    match = at.mem.match(T[:17])
    assert (match.length, match.kv_length, match.host_length) == (0, 8, 16)
    assert at.turn(T[:17], publish=False) == 16 and at.moved == (1, 1, 4, 2)


@every_strategy
def test_B64_a_tombstone_gets_its_state_back(name: str, plain: Backend) -> None:
    at = below(plain, name, kv_stays=True)
    (node,) = [node for _, node in at.cache.tree.walk()]
    assert node.evicted and node.snapshot is None and at.mem.match([*ONE, 1]).kv_length == 8
    row = at.start([*ONE, 1])
    assert at.mem.info(row).length == 8 and at.moved == (1, 1, 2, 0), "its KV was here"
    assert [each for _, each in at.cache.tree.walk()] == [node], "the same node"
    assert node.snapshot is not None and node.snapshot.length == 8 and not node.evicted
    at.checked([row])


@every_order_and_strategy
def test_prefixes_of_one_another_come_up_in_one_admission(name: str, overlap: bool, plain: Backend) -> None:
    """The longer one first, so that it is not the order of the requests that makes it work."""
    at = below(plain, name, T[:8], T[:20], T[:12], [*T[:8], *whole(9)], overlap=overlap, slots=18)
    prompts = [T[:21], T[:13], [*T[:8], 1], [*T[:8], *whole(9), 1]]
    rows = at.admit(*[ms.Request(n, tokens=tokens) for n, tokens in enumerate(prompts)])
    assert [at.mem.info(row).length for row in rows] == [20, 12, 8, 16]
    assert at.moved == (4, 4, 7, 7), "pages that they share came once"
    at.checked(rows)
    at.end(rows)


@every_strategy
def test_the_longer_of_device_and_host_memory_counts(name: str, plain: Backend) -> None:
    at = below(plain, name, T[:8], T[:16], states=1, kv_stays=True)  # the older one: the shorter
    assert at.mem.match(T[:12]).host_length == 8 and at.mem.match(T[:17]).host_length == 0
    assert at.turn(T[:17], publish=False) == 16 and at.moved[1::2] == (0, 0)
    at.give_up()
    at.cache_prompts(T[:8])  # computed again: this one is on the device now
    assert at.moved[1] == 0 and at.mem.match(T[:17]).length == 8
    assert at.turn(T[:17], publish=False) == 16 and at.moved[1::2] == (1, 0)


@every_strategy
def test_where_slots_are_short_the_state_becomes_the_row_s_own(name: str, plain: Backend) -> None:
    """No slot besides those that a request takes in any case."""
    at = below(plain, name, slots=NEEDS[name], kv_stays=True)
    row = at.start([*ONE, 1])
    assert at.mem.info(row).length == 8 and at.mem.free_slots == 0 and not at.cache.states
    at.checked([row])
    assert at.text[row] == written([*ONE, 1], 1)
    at.mem.end([row])
    settle(at)
    assert at.mem.free_slots == NEEDS[name]


@every_strategy
def test_where_slots_are_short_only_so_many_are_taken_over(name: str, plain: Backend) -> None:
    at = below(plain, name, whole(1), whole(2), slots=2 * NEEDS[name] + 1, kv_stays=True)
    rows = at.admit(*[ms.Request(n, tokens=[*whole(n), 1]) for n in (1, 2)])
    assert [at.mem.info(row).length for row in rows] == [8, 8] and at.cache.states == 1
    at.checked(rows)


@every_strategy
def test_a_state_that_two_start_from_is_not_taken_over(name: str, plain: Backend) -> None:
    """There is room for two requests and no state: both are admitted, and compute."""
    at = below(plain, name, slots=2 * NEEDS[name], kv_stays=True)
    before = at.moved
    rows = at.admit(*[ms.Request(n, tokens=[*ONE, n]) for n in range(2)])
    assert [at.mem.info(row).length for row in rows] == [0, 0] and at.moved == before
    at.look()
    at.checked(rows)


@every_strategy
def test_a_hit_that_requests_share_takes_one_slot_and_its_pages_once(name: str, plain: Backend) -> None:
    at = below(plain, name, ONE, slots=2 * NEEDS[name] + 1, pages=4)
    rows = at.admit(*[ms.Request(n, tokens=[*ONE, n]) for n in range(2)])
    assert [at.mem.info(row).length for row in rows] == [8, 8] and (at.mem.free_slots, at.mem.free_pages) == (0, 0)
    at.checked(rows)


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
    assert at.mem.info(row).length == 8 and at.cache.states == 2
    at.checked([row])
