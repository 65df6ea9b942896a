"""Puts memstate under SGLang's own scheduler, tree and sessions: classes of the same names and methods.

slots       `MambaSlotAllocator`: slot ids, without SGLang
track       the track buffer of a request, entries on the host
states      `MambaPool`: SGLang's tensors as planes
rows        `HybridReqToTokenPool` and `HybridMambaDecodeReqToTokenPool`: rows of requests and their slots
storage     a HiCache storage over a store
staging     the memory that its records pass through
prefix      the prefix cache as a part, for an engine that owns its pages and slots
core        the same as a tree core below SGLang's own cache
replace     `in_place`: puts these classes in the place of SGLang's, for a run
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

VERSIONS = ("0.5.21", "0.5.22", "0.5.23")  # of SGLang that these classes work with

NEED_SGLANG = {
    "HybridMambaDecodeReqToTokenPool": "rows",
    "HybridReqToTokenPool": "rows",
    "MambaPool": "states",
    "StoreStorage": "storage",
    "in_place": "replace",
}


def __getattr__(name: str) -> Any:
    """Imports what needs SGLang when it is first used."""
    if name not in NEED_SGLANG:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{NEED_SGLANG[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "sglang":
            raise
        raise ImportError(f"{name} needs SGLang: pip install sglang") from error
