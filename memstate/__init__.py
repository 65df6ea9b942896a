"""memstate: a memory manager for the recurrent state of hybrid language models.

A name is loaded when it is first used, so `import memstate` alone does not load torch.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstate.engine.capacity import Capacity, capacity
    from memstate.engine.chaos import Chaos
    from memstate.engine.forking import Fork
    from memstate.engine.manager import StateManager
    from memstate.engine.planner import Split
    from memstate.engine.pool import StatePool
    from memstate.engine.settings import Forward, Pages
    from memstate.engine.warmup import warm_up
    from memstate.errors import (
        AgreementLost,
        Asleep,
        Broken,
        ConfigurationError,
        DeviceFault,
        DoubleRelease,
        EmptyRegister,
        ForwardFault,
        InvalidArgument,
        LayoutMismatch,
        LeakFound,
        MemstateError,
        OutOfPages,
        OutOfRows,
        OutOfSlots,
        RegisterInUse,
        StaleHandle,
        UnsafeFolder,
    )
    from memstate.kernels.dispatch import Backend
    from memstate.prefix import Match, Prefix, SessionInfo, SessionLimits, policies
    from memstate.prefix.placement import Ends, Nowhere, Placement
    from memstate.requests.handles import Request, Row, Rows, Session, Snapshot
    from memstate.requests.steps import Step
    from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
    from memstate.slots.allocator import ClaimGroup, SlotAllocator
    from memstate.slots.audit import AuditReport
    from memstate.slots.readback import Readback
    from memstate.state import presets
    from memstate.state.layout import Plane, StateLayout
    from memstate.state.planes import Planes
    from memstate.state.sharding import Owned, Part
    from memstate.stats import ChaosStats, PrefetchStats, PrefixStats, Stats, TierStats
    from memstate.tiers import Fetch, FileStore, Mooncake, MooncakeStore, Prefetch, Tiers

_import_module("memstate.alone")

if not (_Path(__file__).parent / "kernels" / "tables.py").is_file():
    raise ImportError(
        "memstate.kernels is missing: it is a symbolic link to ../kernels, and this checkout has none; "
        "clone with symbolic links enabled (git config core.symlinks true) or install a wheel"
    )

__version__ = "0.2.0"  # pyproject.toml reads it here

__all__ = [
    "AgreementLost",
    "Asleep",
    "AuditReport",
    "Backend",
    "Broken",
    "Capacity",
    "Chaos",
    "ChaosStats",
    "ClaimGroup",
    "ConfigurationError",
    "DeviceFault",
    "DoubleRelease",
    "EmptyRegister",
    "Ends",
    "Fetch",
    "FileStore",
    "Fork",
    "Forward",
    "ForwardFault",
    "InvalidArgument",
    "LayoutMismatch",
    "LazyPingPong",
    "LeakFound",
    "Match",
    "MemstateError",
    "Mooncake",
    "MooncakeStore",
    "NoTracking",
    "Nowhere",
    "OutOfPages",
    "OutOfRows",
    "OutOfSlots",
    "Owned",
    "Pages",
    "Part",
    "PingPong",
    "Placement",
    "Plane",
    "Planes",
    "Prefetch",
    "PrefetchStats",
    "Prefix",
    "PrefixStats",
    "Readback",
    "Redirect",
    "RegisterInUse",
    "Request",
    "Row",
    "Rows",
    "Session",
    "SessionInfo",
    "SessionLimits",
    "SlotAllocator",
    "Snapshot",
    "Split",
    "StaleHandle",
    "StateLayout",
    "StateManager",
    "StatePool",
    "Stats",
    "Step",
    "TierStats",
    "Tiers",
    "Tracking",
    "UnsafeFolder",
    "__version__",
    "capacity",
    "policies",
    "presets",
    "warm_up",
]

_MODULES = {
    "memstate.engine.capacity": "Capacity capacity",
    "memstate.engine.chaos": "Chaos",
    "memstate.engine.forking": "Fork",
    "memstate.engine.manager": "StateManager",
    "memstate.engine.planner": "Split",
    "memstate.engine.pool": "StatePool",
    "memstate.engine.settings": "Forward Pages",
    "memstate.engine.warmup": "warm_up",
    "memstate.errors": (
        "AgreementLost Asleep Broken ConfigurationError DeviceFault DoubleRelease EmptyRegister ForwardFault "
        "InvalidArgument LayoutMismatch LeakFound MemstateError OutOfPages OutOfRows OutOfSlots RegisterInUse "
        "StaleHandle UnsafeFolder"
    ),
    "memstate.kernels.dispatch": "Backend",
    "memstate.prefix": "Match Prefix SessionInfo SessionLimits policies",
    "memstate.prefix.placement": "Ends Nowhere Placement",
    "memstate.requests.handles": "Request Row Rows Session Snapshot",
    "memstate.requests.steps": "Step",
    "memstate.requests.tracking": "LazyPingPong NoTracking PingPong Redirect Tracking",
    "memstate.slots.allocator": "ClaimGroup SlotAllocator",
    "memstate.slots.audit": "AuditReport",
    "memstate.slots.readback": "Readback",
    "memstate.state": "presets",
    "memstate.state.layout": "Plane StateLayout",
    "memstate.state.planes": "Planes",
    "memstate.state.sharding": "Owned Part",
    "memstate.stats": "ChaosStats PrefetchStats PrefixStats Stats TierStats",
    "memstate.tiers": "Fetch FileStore Mooncake MooncakeStore Prefetch Tiers",
}

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports a name that is not among them
    _SOURCE = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name):
        if name in _SOURCE:
            module = _import_module(_SOURCE[name])
            value = getattr(module, name, None) or _import_module(f"{module.__name__}.{name}")  # a submodule
            globals()[name] = value
            return value
        if not name.startswith("_") and name.isidentifier() and _find_spec(f"memstate.{name}"):
            return _import_module(f"memstate.{name}")  # such as memstate.errors
        raise AttributeError(f"module 'memstate' has no attribute {name!r}")

    def __dir__():
        return sorted(__all__)
