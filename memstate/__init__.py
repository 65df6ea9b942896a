"""memstate: a memory manager for the recurrent state of hybrid language models.

A name is loaded when it is first used, so `import memstate` alone does not load torch.
"""

# ruff: isort: skip_file
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstate.engine.capacity import capacity as capacity
    from memstate.engine.manager import StateManager as StateManager
    from memstate.engine.settings import (
        Forward as Forward,
        Pages as Pages,
    )
    from memstate.engine.warmup import warm_up as warm_up
    from memstate.errors import (
        AgreementLost as AgreementLost,
        Asleep as Asleep,
        Broken as Broken,
        ConfigurationError as ConfigurationError,
        DeviceFault as DeviceFault,
        DoubleRelease as DoubleRelease,
        ForwardFault as ForwardFault,
        InvalidArgument as InvalidArgument,
        LayoutMismatch as LayoutMismatch,
        LeakFound as LeakFound,
        MemstateError as MemstateError,
        OutOfPages as OutOfPages,
        OutOfRows as OutOfRows,
        OutOfSlots as OutOfSlots,
        StaleHandle as StaleHandle,
    )
    from memstate.kernels.dispatch import Backend as Backend
    from memstate.prefix import (
        Match as Match,
        Prefix as Prefix,
        SessionLimits as SessionLimits,
        policies as policies,
    )
    from memstate.prefix.placement import (
        Ends as Ends,
        Nowhere as Nowhere,
    )
    from memstate.requests.handles import (
        Request as Request,
        Row as Row,
        Rows as Rows,
        Session as Session,
        Snapshot as Snapshot,
    )
    from memstate.requests.steps import Step as Step
    from memstate.requests.tracking import (
        LazyPingPong as LazyPingPong,
        NoTracking as NoTracking,
        PingPong as PingPong,
        Redirect as Redirect,
        Tracking as Tracking,
    )
    from memstate.slots.allocator import SlotAllocator as SlotAllocator
    from memstate.state import presets as presets
    from memstate.state.layout import (
        Plane as Plane,
        StateLayout as StateLayout,
    )
    from memstate.state.planes import Planes as Planes
    from memstate.state.sharding import Part as Part
    from memstate.stats import Stats as Stats
    from memstate.tiers import (
        FileStore as FileStore,
        Mooncake as Mooncake,
        Prefetch as Prefetch,
        Tiers as Tiers,
    )

_import_module("memstate.alone")

if not (_Path(__file__).parent / "kernels" / "tables.py").is_file():
    raise ImportError(
        "memstate.kernels is missing: it is a symbolic link to ../kernels, and this checkout has none; "
        "clone with symbolic links enabled (git config core.symlinks true) or install a wheel"
    )

__version__ = "0.3.0"  # pyproject.toml reads it here

_MODULES = {
    "memstate.engine.capacity": "capacity",
    "memstate.engine.manager": "StateManager",
    "memstate.engine.settings": "Forward Pages",
    "memstate.engine.warmup": "warm_up",
    "memstate.errors": (
        "AgreementLost Asleep Broken ConfigurationError DeviceFault DoubleRelease ForwardFault InvalidArgument "
        "LayoutMismatch LeakFound MemstateError OutOfPages OutOfRows OutOfSlots StaleHandle"
    ),
    "memstate.kernels.dispatch": "Backend",
    "memstate.prefix": "Match Prefix SessionLimits policies",
    "memstate.prefix.placement": "Ends Nowhere",
    "memstate.requests.handles": "Request Row Rows Session Snapshot",
    "memstate.requests.steps": "Step",
    "memstate.requests.tracking": "LazyPingPong NoTracking PingPong Redirect Tracking",
    "memstate.slots.allocator": "SlotAllocator",
    "memstate.state": "presets",
    "memstate.state.layout": "Plane StateLayout",
    "memstate.state.planes": "Planes",
    "memstate.state.sharding": "Part",
    "memstate.stats": "Stats",
    "memstate.tiers": "FileStore Mooncake Prefetch Tiers",
}
__all__ = ["__version__", *sorted(name for names in _MODULES.values() for name in names.split())]

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
