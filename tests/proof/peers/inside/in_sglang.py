"""A pytest plugin that puts memstate's pools below SGLang's own tests, or its pools and its tree.

The tests are older than the installed SGLang. A name that SGLang has moved since then is also where it was, with and
without memstate.
"""

import importlib
import os
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from notes import INSIDE

import memstate as ms
from memstate.errors import MemstateError
from memstate_tools.bench.no_torchvision import leave_out_torchvision

leave_out_torchvision()
sys.modules["datasets"] = MagicMock()  # for tests of whole models
CACHE = "sglang.srt.mem_cache"
# These modules import SGLang's classes before memstate's stand in their places.
radix, _, _ = (
    importlib.import_module(name)
    for name in (f"{CACHE}.unified_radix_cache", "sglang.srt.disaggregation.decode", f"{CACHE}.kv_cache_configurator")
)
actions, components, core, base, testing, utils = (
    importlib.import_module(name)
    for name in (
        f"{CACHE}.unified_cache.cache_action", f"{CACHE}.unified_cache.components",
        f"{CACHE}.unified_cache.unified_tree_core", f"{CACHE}.base_prefix_cache", "sglang.test.test_utils",
        "sglang.srt.utils",
    )
)  # fmt: skip
replace = importlib.import_module("memstate.integrations.sglang.replace")

SETTINGS = ms.Prefix() if os.environ[replace.CHOICE] == replace.TREE else None
os.environ[replace.CHOICE] = "python"  # the tests ask nodes, which SGLang's core in Rust does not hand out
made: list[Any] = []
place = ExitStack()


def hybrid(params: Any) -> Any:
    """Makes a prefix cache of a hybrid model, as the class `MambaRadixCache` did."""
    params.tree_components = components.ComponentType.FULL, components.ComponentType.MAMBA
    return radix.UnifiedRadixCache(params=params)


def match_prefix(self: Any, *args: Any, **given: Any) -> Any:
    """Notes which cache was asked last, of which `device_indices` of the result asks the ids."""
    base.MatchResult.device_indices = property(lambda result: self.path_device_indices(result.last_device_node))
    return own_match(self, *args, **given)


own_match, radix.UnifiedRadixCache.match_prefix = radix.UnifiedRadixCache.match_prefix, match_prefix
for old, new in (("tree", "base"), ("full", "full"), ("mamba", "mamba"), ("swa", "swa")):
    sys.modules[f"{components.__name__}.{old}_component"] = importlib.import_module(f"{components.__name__}.{new}")
home = sys.modules[f"{CACHE}.mamba_radix_cache"] = ModuleType("mamba_radix_cache")
vars(home)["MambaRadixCache"] = hybrid
actions.ReplaceWriteThroughOnNodeSplit = actions.UpdatePendingBackupOnNodeSplit
radix.UnifiedLRUList, radix.UnifiedTreeNode = core.UnifiedLRUList, core.UnifiedTreeNode
testing.retry = lambda call, **_: call()  # a second try would hide why the first one failed
utils.get_device = utils.common.get_device = lambda *_: "cpu"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """Puts memstate's classes in place, also under the names that the tests have imported."""
    if INSIDE.on:
        place.enter_context(replace.in_place(SETTINGS))
        for ours in replace.OURS:
            for module in list(sys.modules.values()):
                name = ours.__name__
                if str(getattr(module, "__name__", "")).startswith("test_") and hasattr(module, name):
                    place.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, ours)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: Any) -> None:
    """Gives SGLang its classes back."""
    place.close()


def check() -> list[str]:
    """Asks the slots of each pool for wrong frees."""
    found = []
    for slots in made:
        try:
            slots.check()
        except MemstateError as error:
            found.append(f"{type(error).__name__}: {error}")
    made.clear()
    return found


def _noted(make: Any) -> Any:
    def noted(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        made.append(self)
        INSIDE.used += INSIDE.on

    return noted


def _told(make: Any) -> Any:
    def told(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        INSIDE.refused.append(f"{type(self).__name__}: {self}")

    return told


replace.MambaSlotAllocator.__init__ = _noted(replace.MambaSlotAllocator.__init__)
MemstateError.__init__ = _told(MemstateError.__init__)  # type: ignore[method-assign]
INSIDE.last.append(check)
