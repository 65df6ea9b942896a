"""Puts memstate's prefix cache below SGLang's cache, as its tree core: it decides what matches and what is evicted.

SGLang's cache and sessions do not change, and use states at the ends of chunks and requests as before. They ask a *tree
core* which prefixes match, which are locked and which are evicted. SGLang's own cores evict what was not used for
longest; this core evicts by the policies of `Prefix`.

The ids of pages and states stay in SGLang's tensors on the device. This core has its own numbers, which stand for
places in these tensors. So nothing waits for the device.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import FreeComponentDeviceSlot, FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    EvictDeviceNextNodeResult,
    InsertStepResult,
    UnifiedTreeCoreInterface,
)
from sglang.srt.runtime_context import get_memory, mamba_checkpoint_grid
from torch import Tensor

from memstate.errors import ConfigurationError
from memstate.integrations.sglang.prefix import Gone, PrefixHit, PrefixPart
from memstate.prefix.settings import Prefix

FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA
# An eviction goes in parts: after each part, SGLang decides whether to go on. A part has PART pages, or the number of
# pages evicted so far divided by SHARE if that is more.
PART, SHARE = 4, 4


class Runs:
    """Maps numbers of pages to KV ids in tensors. A tensor that is added later has higher numbers.

    Args:
        page_size: Tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._size, self._next = page_size, 0
        self._firsts, self._runs = list[int](), dict[int, tuple[Tensor, int]]()

    def add(self, ids: Tensor) -> range:
        """Adds a tensor of KV ids. Returns the numbers of its pages."""
        first, pages = self._next, len(ids) // self._size
        self._next += pages
        self._firsts.append(first)
        self._runs[first] = ids, pages
        return range(first, self._next)

    def ids(self, pages: Sequence[int]) -> list[Tensor]:
        """Returns the KV ids of pages, in the order of `pages`, as slices of the tensors."""
        return [self._runs[first][0][start:end] for first, start, end in self._slices(pages)]

    def give_up(self, pages: Sequence[int]) -> list[Tensor]:
        """Removes pages, and returns their KV ids."""
        freed = list[Tensor]()
        for first, start, end in self._slices(pages):
            ids, left = self._runs.pop(first)
            freed.append(ids[start:end])
            if left := left - (end - start) // self._size:
                self._runs[first] = ids, left
        if len(self._firsts) > 2 * len(self._runs) + 100:
            self._firsts = sorted(self._runs)
        return freed

    def _slices(self, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        """Returns for each run of pages: (number of its tensor's first page, start and end token in the tensor)."""
        slices, size = list[tuple[int, int, int]](), self._size
        numbers = np.asarray(pages, np.int64)
        starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(pages)]
        for at, after in pairwise(starts):
            page, end = (pages[at], pages[after - 1] + 1) if at < after else (0, 0)
            while page < end:
                first = self._firsts[bisect_right(self._firsts, page) - 1]
                until = min(end, first + len(self._runs[first][0]) // size)
                slices.append((first, (page - first) * size, (until - first) * size))
                page = until
        return slices


class TreeCore:
    """The tree core of SGLang's `UnifiedRadixCache`, for a hybrid model without tiers below the device.

    Args:
        params: SGLang's `CacheInitParams`.
        components: SGLang's components of the cache.
        settings: Policies and limits of the prefix cache.

    Raises:
        ConfigurationError: A feature of SGLang is on that this core does not have.
    """

    enable_hicache = enable_storage = enable_external_cache_linker = is_write_back = has_swa_host_pool = False
    is_host_memory_buffer_only = enable_session_radix_cache = supports_rotation_base = is_eagle = False
    write_through_threshold, write_back_duplicate_reclaim_digest = 256, 0

    def __init__(self, params: Any, components: dict[ComponentType, Any], settings: Prefix | None = None) -> None:
        memory = get_memory()
        asked = {
            "layers that are neither attention nor recurrent": set(components) - {FULL, MAMBA},
            "--enable-hierarchical-cache": memory.enable_hierarchical_cache,
            "--enable-unified-cache-external-linker": memory.enable_unified_cache_external_linker,
            "--enable-session-radix-cache": params.enable_session_radix_cache,
            "KV cache events": params.enable_kv_cache_events,
            "EAGLE without recurrent layers": params.is_eagle and MAMBA not in components,
        }
        if refused := [what for what, on in asked.items() if on]:
            raise ConfigurationError(f"memstate's tree core has no {', '.join(refused)}: leave that out, or the core")
        self.page_size, self._part = params.page_size, PrefixPart(params.page_size, settings)
        allocator = params.token_to_kv_pool_allocator
        self.device = torch.device(allocator.device if allocator else "cpu")
        self.kv_events = KVCacheEventRecorder(enabled=False, page_size=params.page_size)
        self._nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self.reset()

    def __getattr__(self, name: str) -> Any:
        """Refuses by name what a core of SGLang has for HiCache and other features that can be switched on later."""
        if not hasattr(UnifiedTreeCoreInterface, name):
            raise AttributeError(f"TreeCore has no attribute {name!r}")
        raise ConfigurationError(
            f"memstate's tree core has no {name}: leave HiCache, or what needs it, off, or the core"
        )

    def reset(self) -> None:
        """Forgets all prefixes."""
        self._part.reset()
        self._runs = Runs(self.page_size)
        self._slots, self._states = dict[int, Tensor](), 0
        self.root_node = self._part.match((), leave=0)
        self.empty_match_result = self._result(self.root_node)
        self._quota: dict[ComponentType, int] = {}

    # -- lookups ----------------------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Returns how much of a prompt is cached."""
        hit = self._part.match(params.key.raw_token_ids(), self._salt(params.key), leave=0)
        return self._result(hit)

    def _result(self, hit: PrefixHit) -> MatchResult:
        kv = hit.branch or hit.length
        branch = kv // (grid := mamba_checkpoint_grid(self.page_size)) * grid
        return MatchResult(
            device_prefix_len=hit.length, last_device_node=hit, last_host_node=hit, best_match_node=hit,
            mamba_branching_seqlen=branch if branch > hit.length else None, full_kv_hit_length=kv, cache_actions=[],
        )  # fmt: skip

    @staticmethod
    def _salt(key: RadixKey) -> Any:
        return (key.extra_key, key.cache_salt) if key.extra_key or key.cache_salt else None

    def supports_fast_match_prefix(self) -> bool:
        """Returns False, so that SGLang does not match all waiting requests in each step."""
        return False

    def root_node_handle(self, extra_key: str | None = None) -> PrefixHit:
        """Returns the hit of the empty prefix."""
        return self.root_node

    def is_root(self, hit: PrefixHit) -> bool:
        """Returns whether a hit is that of the empty prefix."""
        return not hit.length

    def node_by_id(self, hit: PrefixHit) -> PrefixHit:
        """Returns the hit itself: it serves as its own id."""
        return hit

    def rotation_base_of(self, hit: PrefixHit) -> None:
        """Returns None, because pages are not spread over ranks."""

    def collect_full_device_indices(self, hit: PrefixHit, until: PrefixHit) -> Tensor:
        """Returns the KV ids of the whole prefix of a hit, one for each token."""
        parts = self._runs.ids(hit.pages)
        return torch.cat(parts) if parts else self._nothing

    def get_component_device_value(self, hit: PrefixHit, component: ComponentType) -> Tensor | None:
        """Returns the slot of the state of a hit, from which a request starts."""
        return self._slots.get(hit.state) if component == MAMBA and hit.state is not None else None

    def dfs_weight_order(self, hits: Sequence[PrefixHit]) -> list[int]:
        """Returns an order of requests: those with long common prefixes come one after the other."""
        paths = [self._part.path(hit) for hit in hits]
        weights = Counter(node for path in paths for node in path)
        first = {node: at for at, node in enumerate(weights)}
        keys = [[*((-weights[node], first[node]) for node in path), (1, 0)] for path in paths]
        return sorted(range(len(hits)), key=keys.__getitem__)

    # -- locks ------------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, hit: PrefixHit, skip_lock_components: Sequence[ComponentType] = ()) -> IncLockRefResult:
        """Locks a prefix and its state, or only the prefix."""
        self._part.lock(hit)
        if MAMBA in skip_lock_components:
            self._part.read(hit)
        return IncLockRefResult(skipped_lock_components=tuple(skip_lock_components))

    def dec_lock_ref(self, hit: PrefixHit, params: DecLockRefParams, skip_swa: bool = False) -> DecLockRefResult:
        """Ends a lock, or lets it keep only the prefix, not the state."""
        if FULL in params.skipped_lock_components:
            self._part.read(hit)
        else:
            self._part.unlock(hit, drop=False)
        return DecLockRefResult()

    # -- inserts ----------------------------------------------------------------------------------------------------

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        """Inserts the KV of a prefix and, if there is one, the state at its end."""
        assert params.key is not None and params.value is not None
        key, size = params.key.page_aligned(self.page_size), self.page_size
        if not len(key):
            empty = InsertResult(prefix_len=0, mamba_exist=True, last_device_node=self.root_node)
            return InsertStepResult(actions=[], result=empty)
        tokens, salt, ids = key.raw_token_ids(), self._salt(key), params.value[: len(key)]
        pages, state = self._runs.add(ids), None
        if params.mamba_value is not None:
            state = self._states = self._states + 1
            self._slots[state] = params.mamba_value
        try:
            came = self._part.insert(tokens, pages, state, salt)
        except BaseException:  # a policy raised: SGLang will free the ids that it gave
            self._runs.give_up(pages)
            self._slots.pop(state or 0, None)
            raise
        if came.had:
            self._runs.give_up(pages[: came.had // size])
        if state is not None and not came.kept:
            del self._slots[state]
        actions = self._freed(came.gone)
        if (twice := ids[params.prev_prefix_len : came.had]).numel():
            actions.append(FreeDeviceKV([twice]))
        result = InsertResult(prefix_len=came.had, mamba_exist=not came.kept, last_device_node=came.end)
        return InsertStepResult(actions=actions, result=result)

    def has_ongoing_insert(self) -> bool:
        """Returns False, because an insert ends in `begin_insert`."""
        return False

    def end_insert(self) -> list[Any]:
        """Returns an empty list, because an insert ends in `begin_insert`."""
        return []

    def _freed(self, gone: Gone) -> list[Any]:
        actions: list[Any] = [FreeDeviceKV(self._runs.give_up(gone.pages))] if gone.pages else []
        if gone.states:
            slots = [self._slots.pop(state) for state in gone.states]
            actions.append(FreeComponentDeviceSlot(slots, component_type=MAMBA))
        return actions

    # -- evictions --------------------------------------------------------------------------------------------------

    def evict_device_start(self, component: ComponentType, most: int) -> None:
        """Begins an eviction of at most `most` tokens or states."""
        self._quota[component] = most

    def evict_device_next_node(self, component: ComponentType, gone: dict[ComponentType, int]) -> Any:
        """Evicts some more pages, or one more state, unless enough of them were evicted."""
        result = EvictDeviceNextNodeResult()
        done, left = gone[component], self._quota[component] - gone[component]
        if left > 0 and component == FULL:
            pages = max(PART, done // self.page_size // SHARE)
            given = self._part.evict(pages=min(pages, -(-left // self.page_size)))
        else:
            given = self._part.evict(states=min(left, 1)) if left > 0 else Gone([], [])
        result.cache_actions.extend(self._freed(given))
        for which, number in ((FULL, len(given.pages) * self.page_size), (MAMBA, len(given.states))):
            if number:
                result.tracker[which] += number
                result.made_progress = True
        return result

    def evict_device_end(self, component: ComponentType) -> None:
        """Ends an eviction."""
        del self._quota[component]

    def evict_excess_path_states(self, hit: PrefixHit, *_: Any) -> None:
        """Evicts nothing, because the policies limit the number of states."""

    # -- sizes ------------------------------------------------------------------------------------------------------

    def component_evictable_size(self, component: ComponentType) -> int:
        """Returns the number of tokens or states that are not locked."""
        return self._sizes(*self._part.evictable).get(component, 0)

    def component_protected_size(self, component: ComponentType) -> int:
        """Returns the number of tokens or states that are locked."""
        return self._sizes(*self._part.held).get(component, 0) - self.component_evictable_size(component)

    def _sizes(self, pages: int, states: int) -> dict[Any, int]:
        return {FULL: pages * self.page_size, MAMBA: states}

    def total_size(self) -> tuple[int, int]:
        """Returns the numbers of cached tokens and states."""
        pages, states = self._part.held
        return pages * self.page_size, states

    def evictable_size(self) -> int:
        """Returns the number of tokens that are not locked."""
        return self.component_evictable_size(FULL)

    def protected_size(self) -> int:
        """Returns the number of tokens that are locked."""
        return self.component_protected_size(FULL)

    full_evictable_size, full_protected_size = evictable_size, protected_size

    def mamba_evictable_size(self) -> int:
        """Returns the number of states that are not locked."""
        return self.component_evictable_size(MAMBA)

    def mamba_protected_size(self) -> int:
        """Returns the number of states that are locked."""
        return self.component_protected_size(MAMBA)

    def swa_evictable_size(self) -> int:
        """Returns 0, because no layer has a sliding window."""
        return 0

    swa_protected_size = swa_evictable_size

    def all_values_flatten(self) -> Tensor:
        """Returns the KV ids of all cached tokens."""
        return torch.cat([self._nothing, *self._runs.ids(self._part.all_pages())])

    def all_mamba_values_flatten(self) -> Tensor:
        """Returns the slots of all cached states."""
        return torch.cat([self._nothing, *self._slots.values()])

    def take_events(self) -> list[Any]:
        """Returns an empty list, because the constructor refuses KV cache events."""
        return []

    def sanity_check(self, *_: Any) -> None:
        """Checks the counts. Raises LeakFound if one is wrong or anything is locked."""
        self._part.check()

    def pretty_print(self) -> None:
        """Prints the numbers of states and pages."""
        print(self._part)
