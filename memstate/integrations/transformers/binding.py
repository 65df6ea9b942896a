"""Makes the manager of a model, and remembers where the model's states and KV lie in it."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.errors import ConfigurationError, LayoutMismatch, StaleHandle
from memstate.integrations.transformers.kv import KvPages
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.reading import layout
from memstate.kernels.dispatch import Backend
from memstate.requests.handles import Row, Snapshot

PAGE: Final = 16  # tokens
LONGEST: Final = 2048  # tokens of a request with a prefix cache


@dataclass
class Bound:
    """What belongs to a manager.

    Attributes:
        found: where the states lie.
        kv: the KV pages; None until a server attends to them.
        left: rows and snapshots of caches that were forgotten without `close`.
    """

    found: ModelLayout
    kv: KvPages | None = None
    left: list[tuple[list[Row], list[Snapshot | None]]] = field(default_factory=list)


_BOUND: WeakKeyDictionary[StateManager, Bound] = WeakKeyDictionary()


def manager(model: Any, *, slots: int, max_requests: int, tokens: int | None = None, **settings: Any) -> StateManager:
    """Makes a StateManager for a model: layout, dtypes and device are read off the model.

    Args:
        model: a model of Transformers with its weights, on the device where it is going to run.
        slots: number of states that the memory holds.
        max_requests: requests that can run at a time.
        tokens: tokens of the longest request of `serve`, prompt and answer. KV pages are made for `max_requests` of
            these, and with a prefix cache for twice as many. None: 2048 with a prefix cache, otherwise no pages, which
            is enough for `generate`. Use `pages=` instead to choose their number and size.
        **settings: all other arguments of `StateManager`.

    Returns:
        The manager, for `StateCache` and `serve`. With `tiers=`, KV goes down with the states.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache, settings contradict each other, or the model
            is on a CPU with kernels for a GPU.

    Syncs: yes.
    """
    bound = Bound(layout(model))
    settings.setdefault("device", model.device)
    prefix, tiers = settings.get("prefix"), settings.get("tiers")
    if settings.get("pages") is None and (tokens is not None or prefix is not None):
        per_row = -(-(tokens or LONGEST) // PAGE)
        count = per_row * max_requests * (1 if prefix is None else 2)
        settings["pages"] = Pages(size=PAGE, count=count, per_row=per_row) if bound.found.attended else Pages(size=PAGE)
    pages = settings.get("pages")
    if tiers is not None and tiers.kv is None and pages is not None and pages.count and bound.found.attended:
        backend = Backend(settings.get("backend", "auto"), settings["device"])
        bound.kv = KvPages(bound.found, pages.count, pages.size, backend)
        settings["tiers"] = replace(tiers, kv=bound.kv.planes)
    mem = StateManager(bound.found.state, slots=slots, max_requests=max_requests, **settings)
    _BOUND[mem] = bound
    return mem


def _bound(model: Any, mem: StateManager) -> Bound:
    found = layout(model)
    if mem not in _BOUND:
        if found.state.planes != mem.layout.planes or found.state.layers != mem.layout.layers:
            raise LayoutMismatch(f"the manager has {mem.layout}, and the model needs {found.state}: use mst.manager")
        _BOUND[mem] = Bound(found)
    if found != _BOUND[mem].found:
        raise LayoutMismatch(
            f"the manager was made for a model with {_BOUND[mem].found.state}, and {type(model).__name__} has "
            f"{found.state}, or other KV: use a manager of its own"
        )
    return _BOUND[mem]


def layout_for(model: Any, mem: StateManager) -> ModelLayout:
    """Returns where the states of a model lie in a manager.

    Args:
        model: the model.
        mem: a manager that `manager` made, or one with the layout of the model.

    Raises:
        LayoutMismatch: the manager has other planes than the model.
    """
    return _bound(model, mem).found


def kv_for(model: Any, mem: StateManager) -> KvPages | None:
    """Returns the KV pages of a manager, and makes them the first time.

    Args:
        model: the model.
        mem: a manager that `manager` made, or one with the layout of the model.

    Returns:
        The pages, or None if no layer attends.

    Raises:
        ConfigurationError: the manager hands out no pages.
        LayoutMismatch: the manager has other planes than the model.
    """
    bound = _bound(model, mem)
    if bound.kv is None and bound.found.attended:
        if not mem.page_table.numel():
            raise ConfigurationError("the manager has no KV pages: give mst.manager tokens=, of the longest request")
        count = mem.stats().pages
        bound.kv = KvPages(bound.found, count, mem.page_size, mem.backend)
    return bound.kv


def leave(mem: StateManager, rows: list[Row], snapshots: list[Snapshot | None]) -> None:
    """Notes what a cache leaves behind that is forgotten without `close`. It may be forgotten inside any call.

    Args:
        mem: the manager.
        rows: its rows.
        snapshots: its snapshots.
    """
    if rows and mem in _BOUND:
        _BOUND[mem].left.append((rows, snapshots))


def release_left(mem: StateManager) -> None:
    """Releases what forgotten caches left behind. Syncs: no."""
    while mem in _BOUND and (left := _BOUND[mem].left):
        rows, snapshots = left.pop()
        with suppress(StaleHandle):  # a reset of the manager ended them
            mem.abort(rows)
            mem.drop(snapshots)
