"""memstate: a memory manager for the recurrent state of hybrid language models.

A name is loaded when it is first used, so `import memstate` alone does not load torch.
"""

# ruff: isort: skip_file
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstate.choices import explain as explain
    from memstate.engine.capacity import capacity as capacity
    from memstate.engine.manager import StateManager as StateManager
    from memstate.engine.settings import Forward as Forward, Pages as Pages
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
        OutOfRecords as OutOfRecords,
        OutOfRows as OutOfRows,
        OutOfSlots as OutOfSlots,
        StaleHandle as StaleHandle,
    )
    from memstate.kernels.dispatch import Backend as Backend
    from memstate.prefix import Match as Match, Prefix as Prefix, SessionLimits as SessionLimits, policies as policies
    from memstate.prefix.placement import Ends as Ends, Nowhere as Nowhere
    from memstate.requests.handles import (
        Parked as Parked,
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
    from memstate.state.layout import Plane as Plane, StateLayout as StateLayout
    from memstate.state.planes import Planes as Planes
    from memstate.state.sharding import Part as Part
    from memstate.stats import Stats as Stats
    from memstate.tiers import FileStore as FileStore, Mooncake as Mooncake, Objects as Objects
    from memstate.tiers import Prefetch as Prefetch, Tiers as Tiers

from memstate import alone as _alone, lazy as _lazy  # noqa: F401  `alone` refuses files of another package

if not (_Path(__file__).parent / "kernels" / "tables.py").is_file():
    raise ImportError(
        "memstate needs its .py files on disk, and memstate/kernels has none: install a wheel, not a zip or .pyc files "
        "alone; in a checkout it is a symbolic link to ../kernels: clone again with git config core.symlinks true"
    )

__version__ = "0.3.0"  # pyproject.toml reads it here

if not TYPE_CHECKING:  # a type checker reads the imports above, and reports a name that is not among them
    __getattr__, _names = _lazy.exports(__name__)
    __all__ = ["__version__", *_names]

    def __dir__():
        return sorted(__all__)
