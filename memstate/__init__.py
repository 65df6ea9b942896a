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

from memstate import presets
from memstate.admission import Fork
from memstate.allocator import ClaimGroup, SlotAllocator
from memstate.audit import AuditReport
from memstate.engine import StateManager
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
from memstate.holders import Snapshot
from memstate.kernels.dispatch import Backend
from memstate.layout import Plane, StateLayout
from memstate.pool import StatePool
from memstate.prefix import Match, Prefix, policies
from memstate.readback import Readback
from memstate.requests import Request, Row, Rows, Session
from memstate.split import Owned, Part
from memstate.stats import PrefetchStats, PrefixStats, Stats, TierStats
from memstate.steps import Step
from memstate.storage import Storage
from memstate.tiers import Fetch, FileStore, Mooncake, MooncakeStore, Prefetch, Tiers
from memstate.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.warmup import warm_up

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
    "Part",
    "PingPong",
    "Plane",
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
    "Storage",
    "TierStats",
    "Tiers",
    "Tracking",
    "UnsafeFolder",
    "policies",
    "presets",
    "warm_up",
]
