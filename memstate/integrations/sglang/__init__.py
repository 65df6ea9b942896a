"""Replaces SGLang's classes for slots, states and rows by classes of memstate with the same names and methods.

slots       `MambaSlotAllocator`: slot ids, without SGLang
track       the track buffer of a request, with entries that the host can read and change
states      `MambaPool`: SGLang's tensors as planes
rows        `HybridReqToTokenPool` and `HybridMambaDecodeReqToTokenPool`: rows of requests and their slots
storage     a storage of SGLang's HiCache, over a store of memstate
staging     host memory through which records of the storage pass
prefix      the prefix cache as a part, for an engine that owns its pages and slots
core        the prefix cache as the tree core below SGLang's own cache
replace     `in_place`: lets SGLang use these classes instead of its own, in one process
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memstate.integrations.sglang.slots import MambaSlotAllocator

if TYPE_CHECKING:
    from memstate.integrations.sglang.replace import in_place
    from memstate.integrations.sglang.rows import HybridMambaDecodeReqToTokenPool, HybridReqToTokenPool
    from memstate.integrations.sglang.states import MambaPool
    from memstate.integrations.sglang.storage import StoreStorage

__all__ = [
    "HybridMambaDecodeReqToTokenPool",
    "HybridReqToTokenPool",
    "MambaPool",
    "MambaSlotAllocator",
    "StoreStorage",
    "in_place",
]

VERSIONS = ("0.5.21", "0.5.22", "0.5.23")  # SGLang versions with which these classes work

NEED_SGLANG = {
    "HybridMambaDecodeReqToTokenPool": "rows",
    "HybridReqToTokenPool": "rows",
    "MambaPool": "states",
    "StoreStorage": "storage",
    "in_place": "replace",
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, because its module needs SGLang."""
    if name not in NEED_SGLANG:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{NEED_SGLANG[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sglang":
            raise
        raise ImportError(f"{name} needs SGLang: pip install sglang") from error
