"""Tests SGLang's prefix cache over memstate's tree against a list of all prefixes, with random calls."""

import os
import random
from array import array
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.prefix.policies import Lru, Place
from memstate_tools.bench.radix_peer import load

pytest.importorskip("sglang", reason="needs SGLang, see docs/sglang.md")
from memstate_tools.bench.no_torchvision import leave_out_torchvision
from tests.support.refusals import refusals

leave_out_torchvision()
sgl = load()
replace = import_module("memstate.integrations.sglang.replace")
core = import_module("memstate.integrations.sglang.core")

pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS, STATES = 120, 9
Key = tuple[int, ...]


class World:
    """SGLang's cache with its own allocators, and a list of all prefixes that it should have."""

    def __init__(self, page_size: int, states: Lru | None = None, in_place: bool = True, **named: Any) -> None:
        self.size = page_size
        self.slots = sgl.MambaSlotAllocator(size=STATES, device="cpu")
        self.kv = sgl.TokenToKVPoolAllocator(TOKENS, torch.int64, "cpu", None, False)
        pool = object.__new__(replace.HybridReqToTokenPool)  # an object without rows and tensors
        pool.mamba_allocator = self.slots
        parts = (sgl.ComponentType.FULL, sgl.ComponentType.MAMBA)
        with replace.in_place(prefix=ms.Prefix(states=states or Lru())) if in_place else nullcontext():
            self.tree = sgl.UnifiedRadixCache(
                sgl.CacheInitParams(
                    disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=self.kv, page_size=page_size,
                    tree_components=parts, enable_mamba_extra_buffer=True, **named,
                )
            )  # fmt: skip
        self.states: dict[Key, int] = {}
        self.locks: list[tuple[Key, Any, list[int]]] = []

    def match(self, tokens: Key, salt: str | None = None) -> Any:
        key = sgl.RadixKey(array("q", tokens), extra_key=salt)
        return self.tree.match_prefix(sgl.MatchPrefixParams(key=key))

    def indices(self, hit: Any) -> list[int]:
        ids: list[int] = self.tree.path_device_indices(hit.best_match_node).tolist()
        return ids

    def give_back(self, ids: Any, pool: Any) -> None:
        if ids is not None and ids.numel():
            pool.free(ids)

    def insert(self, tokens: Key, with_state: bool = True, salt: str | None = None) -> Any:
        """Computes the tokens that are not cached, and caches all.

        Returns the result of SGLang's `insert`, or None if there is no room.
        """
        hit = self.match(tokens, salt)
        lock, had = self.tree.lock(hit.best_match_node), hit.device_prefix_len
        fresh, slot = self.kv.alloc(len(tokens) - had), self.slots.alloc(1) if with_state else None
        came = None
        if fresh is not None and (slot is not None or not with_state):
            ids = torch.cat([self.tree.path_device_indices(hit.best_match_node), fresh])
            key = sgl.RadixKey(array("q", tokens), extra_key=salt)
            value = slot.clone() if slot is not None else None
            came = self.tree.insert(sgl.InsertParams(key=key, value=ids, mamba_value=value, prev_prefix_len=had))
            if came.mamba_exist and slot is not None:
                self.slots.free(slot)
            self.give_back(ids[max(had, len(tokens) // self.size * self.size) :], self.kv)
        else:
            self.give_back(fresh, self.kv)
            self.give_back(slot, self.slots)
        self.tree.unlock(lock)
        return came

    def check(self) -> None:
        """Checks that no KV or slot is lost, or has two owners."""
        tokens, states = self.tree.total_size()
        held, slots = self.tree.all_values_flatten().tolist(), self.tree.all_mamba_values_flatten().tolist()
        assert len(set(held)) == len(held) == tokens == TOKENS - self.kv.available_size()
        assert len(set(slots)) == len(slots) == states == STATES - self.slots.available_size()
        for sizes in ((self.tree.full_evictable_size(), self.tree.full_protected_size()),
                      (self.tree.mamba_evictable_size(), self.tree.mamba_protected_size())):  # fmt: skip
            assert min(sizes) >= 0
        assert self.tree.full_evictable_size() + self.tree.full_protected_size() == tokens
        assert self.tree.mamba_evictable_size() + self.tree.mamba_protected_size() == states


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_lose_nothing(seed: int, page_size: int) -> None:
    rng, world = random.Random(seed), World(page_size)
    hits = evicted = locked = 0
    for _ in range(400):
        pages = [[rng.randrange(2)] * page_size for _ in range(rng.randrange(1, 7))]
        tokens = (*(token for page in pages for token in page), *range(rng.choice([0, page_size - 1])))
        draw = rng.random()
        if draw < 0.45:
            came = world.insert(tokens, rng.random() < 0.7, rng.choice([None, "tenant"]))
            if came is not None:
                end = came.last_device_node
                assert len(world.tree.path_device_indices(end)) == len(tokens) // page_size * page_size
        elif draw < 0.6:
            hit = world.match(tokens)
            assert hit.device_prefix_len % page_size == 0
            assert hit.full_kv_hit_length >= hit.device_prefix_len
            skip = (sgl.ComponentType.MAMBA,) if rng.random() < 0.3 else ()
            lock = world.tree.lock(hit.best_match_node, skip)
            world.locks.append((tokens[: hit.device_prefix_len], lock, world.indices(hit)))
            hits += hit.device_prefix_len > 0
            locked += 1
        elif draw < 0.75 and world.locks:
            world.tree.unlock(world.locks.pop(rng.randrange(len(world.locks)))[1])
        else:
            before = world.tree.total_size()
            asked = rng.randrange(12), rng.randrange(3)
            gone = world.tree.evict(sgl.EvictParams(num_tokens=asked[0], mamba_num=asked[1]))
            after = world.tree.total_size()
            assert before[0] - after[0] == gone.num_tokens_evicted
            assert before[1] - after[1] == gone.mamba_num_evicted
            evicted += sum(before) > sum(after)
        world.check()
        for tokens, lock, ids in world.locks:  # locked KV stays unchanged
            assert world.tree.path_device_indices(lock.node).tolist() == ids
            if sgl.ComponentType.MAMBA not in lock.receipt.skipped_lock_components:
                assert world.match(tokens).device_prefix_len == len(tokens)
    assert hits and evicted and locked
    for _, lock, _ in world.locks:
        world.tree.unlock(lock)
    world.tree.sanity_check()
    world.tree.evict(sgl.EvictParams(num_tokens=TOKENS, mamba_num=STATES))
    world.check()
    assert (world.kv.available_size(), world.slots.available_size()) == (TOKENS, STATES)


def test_an_eviction_for_an_allocation_stops_where_it_is_enough() -> None:
    world = World(1)
    for first in range(8):
        assert world.insert((first, *range(100, 114)), with_state=first < 4) is not None
    assert world.kv.available_size() == 0
    world.tree.evict_for_alloc(sgl.EvictParams(num_tokens=20))
    assert world.kv.available_size() == 30  # two leaves were evicted, each with its state and KV
    world.check()


def test_what_a_request_starts_from_can_go_once_it_has_been_read() -> None:
    world = World(1)
    world.insert((1, 2, 3))
    lock = world.tree.lock(world.match((1, 2, 3)).best_match_node)
    assert world.tree.mamba_evictable_size() == 0
    mamba = import_module("dataclasses").replace(lock.receipt, skipped_lock_components=(sgl.ComponentType.FULL,))
    world.tree.dec_lock_ref(lock.node, mamba)
    lock.receipt.skipped_lock_components += (sgl.ComponentType.MAMBA,)
    assert (world.tree.mamba_evictable_size(), world.tree.full_evictable_size()) == (1, 0)
    world.tree.unlock(lock)
    world.tree.sanity_check()


def test_requests_with_much_in_common_follow_each_other() -> None:
    world = World(1)
    prompts = [(1, 1), (2, 1), (2, 2), (2, 2, 3)]
    for prompt in prompts:
        world.insert(prompt)
    handles = [world.match(prompt).best_match_node for prompt in prompts]
    assert world.tree.dfs_weight_order(handles) == [3, 2, 1, 0]


class Raising(Lru):
    """A policy that raises when a state is added."""

    def admits(self, place: Place) -> bool:
        raise KeyError(place)


def test_an_insertion_that_a_policy_ends_leaves_all_ids_to_sglang() -> None:
    world = World(1, Raising())
    with pytest.raises(KeyError):
        world.insert((1, 2, 3))
    assert world.tree.total_size() == (0, 0)
    assert world.tree.all_values_flatten().numel() == world.tree.all_mamba_values_flatten().numel() == 0


def test_what_a_core_of_sglang_has_and_ours_lacks_is_refused_by_name() -> None:
    tree = World(1).tree.tree_core
    lacks = [name for name in dir(core.UnifiedTreeCoreInterface) if name not in {*dir(tree), "__abstractmethods__"}]
    assert {"set_hicache_enabled", "set_host_memory_buffer_only", "walk_for_kv_canary"} <= set(lacks)
    for name in lacks:
        with pytest.raises(ms.ConfigurationError, match=f"has no {name}: leave HiCache"):
            getattr(tree, name)
    assert not hasattr(tree, "nonesuch")


def test_each_tree_gets_policies_of_its_own_from_one_setting() -> None:
    prefix = ms.Prefix(states=Lru())
    with replace.in_place(prefix=prefix):
        worlds = [World(1, in_place=False), World(1, in_place=False)]  # two trees exist at the same time
    for world in worlds:
        world.insert((1, 2, 3))
        assert world.match((1, 2, 3, 4)).best_match_node.length == 3


def test_trees_in_place_of_others_end_in_turn() -> None:
    registry = import_module("sglang.srt.mem_cache.unified_cache.tree_core_registry")
    before = os.environ.get(replace.CHOICE)
    with replace.in_place(prefix=ms.Prefix()):
        outer = registry.get_tree_core_factory(replace.TREE)
        with replace.in_place(prefix=ms.Prefix()):
            assert registry.get_tree_core_factory(replace.TREE) is not outer
        assert registry.get_tree_core_factory(replace.TREE) is outer and os.environ[replace.CHOICE] == replace.TREE
    assert registry.get_tree_core_factory(replace.TREE) is None and os.environ.get(replace.CHOICE) == before
    with pytest.raises(ms.ConfigurationError, match="expected memstate"), replace.in_place(prefix=Lru()):
        pass


test_what_it_does_not_have_is_refused_by_name = refusals(
    ms.ConfigurationError,
    ({"enable_kv_cache_events": True}, "KV cache events"), ({"enable_session_radix_cache": True}, "session-radix"),
    call=lambda given: World(1, **given),
)  # fmt: skip
