"""Lets SGLang use classes of memstate instead of its own, in one process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from importlib import import_module
from typing import Any

from memstate.checks import shown
from memstate.errors import ConfigurationError
from memstate.integrations.sglang.rows import HybridMambaDecodeReqToTokenPool, HybridReqToTokenPool
from memstate.integrations.sglang.slots import MambaSlotAllocator
from memstate.integrations.sglang.states import MambaPool
from memstate.prefix.settings import Prefix

OURS = (MambaSlotAllocator, MambaPool, HybridReqToTokenPool, HybridMambaDecodeReqToTokenPool)
HOMES = ("sglang.srt.mem_cache.allocator.mamba", "sglang.srt.mem_cache.memory_pool", "sglang.srt.disaggregation.decode")
MAKERS = (*HOMES, "sglang.srt.mem_cache.kv_cache_configurator")  # modules that create objects of these classes
TREE, CHOICE = "memstate", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


@contextmanager
def in_place(prefix: Prefix | None = None) -> Iterator[None]:
    """Makes SGLang use memstate's pools and allocators instead of its own, until the end of the `with` statement.

    It changes names in SGLang's modules, only in this process. Some modules of SGLang only test whether a pool is of
    SGLang's hybrid class. Import such modules before: then they still test for SGLang's class, of which memstate's
    class is a subclass.

    Args:
        prefix: Policies of the prefix cache. With them, each cache of SGLang has memstate's tree and its own copy of
            these policies. None: SGLang's own tree.

    Raises:
        ConfigurationError: `prefix` is neither a `Prefix` nor None.

    Example::

        with in_place(prefix=memstate.Prefix()):
            run_scheduler_process(...)  # SGLang's
    """
    if not isinstance(prefix, Prefix | None):
        raise ConfigurationError(
            f"prefix={shown(prefix)}: expected memstate.Prefix(...), or None for SGLang's own tree"
        )
    before = [(name, ours.__name__, getattr(sys.modules[name], ours.__name__, None)) for name in MAKERS
              if name in sys.modules for ours in OURS]  # fmt: skip
    changed = [(module, name, theirs) for module, name, theirs in before if theirs is not None]
    ours = {each.__name__: each for each in OURS}
    try:
        for module, name, _ in changed:
            setattr(sys.modules[module], name, ours[name])
        with nullcontext() if prefix is None else _own_tree(prefix):
            yield
    finally:
        for module, name, theirs in changed:
            setattr(sys.modules[module], name, theirs)


@contextmanager
def _own_tree(prefix: Prefix) -> Iterator[None]:
    from memstate.integrations.sglang.core import TreeCore

    trees = import_module("sglang.srt.mem_cache.unified_cache.tree_core_registry")._TREE_CORE_REGISTRY
    homes: tuple[Any, Any] = (trees, os.environ)
    before = [(home, name, home.get(name)) for home, name in zip(homes, (TREE, CHOICE), strict=True)]

    def tree(params: Any, components: Any) -> TreeCore:
        return TreeCore(params, components, deepcopy(prefix))  # each tree needs its own policies

    trees[TREE], os.environ[CHOICE] = tree, TREE
    try:
        yield
    finally:
        for home, name, was in before:
            if was is None:
                del home[name]
            else:
                home[name] = was
