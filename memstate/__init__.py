"""memstate: a memory manager for the recurrent state of hybrid language models."""

try:
    from memstate.kernels import tables as _tables  # noqa: F401
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("memstate"):
        raise
    raise ImportError(
        "memstate.kernels is missing: it is a symbolic link to ../kernels, and this checkout has none; "
        "clone with symbolic links enabled (git config core.symlinks true) or install a wheel"
    ) from error

from memstate.engine.admission import Fork
from memstate.engine.manager import StateManager
from memstate.engine.pool import StatePool
from memstate.engine.settings import Forward, Pages
from memstate.engine.warmup import warm_up
from memstate.errors import (
    AgreementLost,
    Asleep,
    ConfigurationError,
    DeviceFault,
    DoubleRelease,
    EmptyRegister,
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
from memstate.prefix import Match, Prefix, policies
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
from memstate.stats import PrefetchStats, PrefixStats, Stats, TierStats
from memstate.tiers import Fetch, FileStore, Mooncake, MooncakeStore, Prefetch, Tiers

__all__ = [
    "AgreementLost",
    "Asleep",
    "AuditReport",
    "Backend",
    "ClaimGroup",
    "ConfigurationError",
    "DeviceFault",
    "DoubleRelease",
    "EmptyRegister",
    "Fetch",
    "FileStore",
    "Fork",
    "Forward",
    "InvalidArgument",
    "LayoutMismatch",
    "LazyPingPong",
    "LeakFound",
    "Match",
    "MemstateError",
    "Mooncake",
    "MooncakeStore",
    "NoTracking",
    "OutOfPages",
    "OutOfRows",
    "OutOfSlots",
    "Owned",
    "Pages",
    "Part",
    "PingPong",
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
    "SlotAllocator",
    "Snapshot",
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
    "policies",
    "presets",
    "warm_up",
]
