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

from memstate.allocator import ClaimGroup, SlotAllocator
from memstate.audit import AuditReport
from memstate.engine import StateManager
from memstate.errors import (
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
)
from memstate.holders import Snapshot
from memstate.layout import Plane, StateLayout
from memstate.pool import StatePool
from memstate.requests import Request, Row, Rows
from memstate.stats import Stats
from memstate.steps import Step
from memstate.storage import Storage
from memstate.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.warmup import warm_up

__all__ = [
    "AuditReport",
    "ClaimGroup",
    "ConfigurationError",
    "DeviceFault",
    "DoubleRelease",
    "EmptyRegister",
    "InvalidArgument",
    "LayoutMismatch",
    "LazyPingPong",
    "LeakFound",
    "MemstateError",
    "NoTracking",
    "OutOfPages",
    "OutOfRows",
    "OutOfSlots",
    "PingPong",
    "Plane",
    "Redirect",
    "RegisterInUse",
    "Request",
    "Row",
    "Rows",
    "SlotAllocator",
    "Snapshot",
    "StaleHandle",
    "StateLayout",
    "StateManager",
    "StatePool",
    "Stats",
    "Step",
    "Storage",
    "Tracking",
    "warm_up",
]
