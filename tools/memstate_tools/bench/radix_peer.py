"""Runs SGLang's prefix cache for hybrid models on a CPU, as a peer: `UnifiedRadixCache` with FULL and MAMBA.

A key is a list of tokens, a state is one slot number. Tree, allocators and eviction are those of SGLang 0.5.23; only
tensors are left out, since no model runs. SGLang is no dependency: it is imported when the first cache is made.
"""

import importlib.util
import logging
import sys
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from memstate_tools.bench.clock import cpu_seconds
from memstate_tools.bench.no_torchvision import leave_out_torchvision
from memstate_tools.bench.task import Setting

NAME = "sglang"
CORE = "RustUnifiedTreeCore"
NAMES = {
    "InsertParams": "base_prefix_cache",
    "MatchPrefixParams": "base_prefix_cache",
    "EvictParams": "base_prefix_cache",
    "RadixKey": "radix_cache",
    "MambaSlotAllocator": "allocator.mamba",
    "PagedTokenToKVPoolAllocator": "allocator.paged",
    "TokenToKVPoolAllocator": "allocator.token",
    "HybridReqToTokenPool": "memory_pool",
    "CacheInitParams": "cache_init_params",
    "ComponentType": "unified_cache.components",
    "UnifiedRadixCache": "unified_radix_cache",
}  # name of the object -> its module in sglang.srt.mem_cache


@lru_cache
def load() -> SimpleNamespace:
    """Returns the objects of SGLang that the prefix cache uses.

    Raises:
        ImportError: SGLang cannot be used. The message is one line.
    """
    return imported({name: f"mem_cache.{at}" for name, at in NAMES.items()})


def can_run(setting: Setting, bench: str, load: Callable[[], object]) -> bool:
    """Returns whether SGLang is wanted and can be loaded. If it cannot, prints the reason to stderr."""
    if not setting.compares(NAME):
        return False
    try:
        load()
    except ImportError as error:
        print(f"{bench}: measured without {NAME}: {error}", file=sys.stderr)
        return False
    return True


def imported(names: Mapping[str, str]) -> SimpleNamespace:
    """Returns objects of SGLang, after setting it up for use without a model.

    Args:
        names: Name of the object -> its module in sglang.srt.

    Raises:
        ImportError: SGLang cannot be used. The message is one line.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("sglang is not installed: pip install --no-deps -r tests/proof/engines/sglang/pins.txt")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            leave_out_torchvision()
            objects = {name: getattr(import_module(f"sglang.srt.{at}"), name) for name, at in names.items()}
            context = import_module("sglang.srt.runtime_context").get_context()
            if not context.is_config_namespace_published("exec"):
                context.override_server_args(_mamba_cache_chunk_size=1).install()
    except Exception as error:  # an engine that looks for a device may raise any kind of error
        why = f"{type(error).__name__}: {error}"
        raise ImportError(f"sglang is there and cannot be used: {' '.join(why.split())[:300]}") from error
    logging.getLogger("sglang").setLevel(logging.ERROR)
    return SimpleNamespace(**objects)


class SglangCache:
    """SGLang's cache with a number of states and pages. It evicts the least recently used.

    Args:
        states: States that the cache keeps.
        pages: Pages that the cache keeps.
        longest: Pages of the longest key. A new key may use that many extra pages until the cache evicts others.
        size: Tokens of a page.

    Raises:
        ImportError: SGLang cannot be used.
    """

    def __init__(self, states: int, pages: int, longest: int, size: int = 1) -> None:
        self._sgl = sgl = load()
        self._most, self._size = (states, pages), size
        self._slots = sgl.MambaSlotAllocator(size=states + 1, device="cpu")
        self._total = pages + longest
        kind, sizes = sgl.TokenToKVPoolAllocator, [self._total * size]
        if size > 1:
            kind, sizes = sgl.PagedTokenToKVPoolAllocator, [*sizes, size]
        self._kv = kind(*sizes, import_module("torch").int64, "cpu", None, False)
        pool = object.__new__(sgl.HybridReqToTokenPool)  # made without rows and without tensors of states
        pool.mamba_allocator = self._slots
        parts = (sgl.ComponentType.FULL, sgl.ComponentType.MAMBA)
        self.tree = sgl.UnifiedRadixCache(
            sgl.CacheInitParams(
                disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=self._kv, page_size=size,
                tree_core_backend="rust", tree_components=parts, enable_mamba_extra_buffer=size > 1,
            )
        )  # fmt: skip
        # SGLang falls back to its Python core without a message
        if (core := type(self.tree.tree_core).__name__) != CORE:
            raise ImportError(f"sglang runs {core}, not {CORE}: its compiled core wants another torch or system")
        self._found: tuple[Any, int, Any] = (None, 0, None)  # key, pages and node of the last match

    @property
    def held(self) -> tuple[int, int]:
        """Number of states and of pages in use."""
        return self._most[0] + 1 - self._slots.available_size(), self._total - self._kv.available_size() // self._size

    def match(self, ids: Sequence[int]) -> int:
        """Returns the tokens of the longest prefix with a state at its end, and notes the use as SGLang does."""
        key = self._sgl.RadixKey(array("q", ids))
        hit = self.tree.match_prefix(self._sgl.MatchPrefixParams(key=key))
        self._found = key, hit.device_prefix_len, hit.best_match_node
        return int(hit.device_prefix_len)

    def insert(self, ids: Sequence[int]) -> float:
        """Inserts the key that was matched last, with a state at its end, and evicts states and pages above the limits.

        Returns:
            Seconds of insert and eviction, without allocation.

        Raises:
            MemoryError: There is no room.
        """
        key, hit, node = self._found
        fresh, slot = self._kv.alloc(len(ids) - hit), self._slots.alloc(1)
        if fresh is None or slot is None:
            raise MemoryError(f"no room for {len(ids) - hit} pages and a state beside {self.held}")
        indices = import_module("torch").cat([self.tree.path_device_indices(node), fresh]) if hit else fresh
        given = self._sgl.InsertParams(key=key, value=indices, mamba_value=slot.clone(), prev_prefix_len=hit)

        def insert() -> None:
            if self.tree.insert(given).mamba_exist:  # the tree already has a state there and keeps it
                self._slots.free(slot)
            states, pages = (max(0, held - most) for held, most in zip(self.held, self._most, strict=True))
            if pages or states:
                self.tree.evict(self._sgl.EvictParams(num_tokens=pages * self._size, mamba_num=states))

        return cpu_seconds(insert)
