"""Makes the manager of a model, and remembers where the model's states and KV lie in it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import RLock, Thread, current_thread
from typing import Any, Final
from weakref import WeakKeyDictionary

from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.errors import ConfigurationError, LayoutMismatch
from memstate.integrations.transformers.kv import KvPages
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.left import Left, release
from memstate.integrations.transformers.reading import layout
from memstate.integrations.transformers.weights import weights_of
from memstate.kernels.dispatch import Backend

PAGE: Final = 16  # tokens of a KV page
LONGEST: Final = 2048  # tokens of the longest request, if there is a prefix cache and `tokens` is not given


@dataclass
class Binding:
    """What the integration keeps for one manager.

    Attributes:
        layout: the layout of the manager's model.
        weights: name of the weights with which the states were computed.
        kv: the KV pages; None until a server uses them.
        left: the rows and snapshots of caches that were deleted without `close`.
        begun: (weak reference to the cache whose forward began last, the thread of this forward); None if this
            forward has ended.
        lock: held while a server runs a step.
        runs: the thread in which `run` of a server drives the manager, or None.
    """

    layout: ModelLayout
    weights: str
    kv: KvPages | None = None
    left: list[Left] = field(default_factory=list)
    begun: tuple[Callable[[], Any], Thread] | None = None
    lock: Any = field(default_factory=RLock)  # reentrant, so that after an interrupt the same thread can take it again
    runs: Thread | None = None


_BOUND: WeakKeyDictionary[StateManager, Binding] = WeakKeyDictionary()


def manager(model: Any, *, slots: int, max_requests: int, tokens: int | None = None, **settings: Any) -> StateManager:
    """Makes a StateManager for a model. Reads layout, dtypes and device from the model, and all its weights once.

    Args:
        model: a model of Transformers with its weights, on the device where it will run.
        slots: number of states that fit in memory.
        max_requests: number of requests that can run at the same time.
        tokens: tokens of the longest request of `serve`, prompt and answer together. There will be KV pages for
            `max_requests` such requests; with a prefix cache, for twice as many. None: 2048 with a prefix cache;
            without one there are no pages, which is enough for `generate`. Give `pages=` instead to choose number and
            size of pages yourself.
        **settings: all other arguments of `StateManager`. With `forward=Forward(tail=)`, rows get the memory
            of tails (rings) if the model decodes on slots.

    Returns:
        The manager, for `StateCache` and `serve`. With `tiers=`, tiers keep KV with the states, and the name of the
        weights is added to `tiers.model`, so that records of other weights are never used.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache, settings contradict each other, or the model
            is on a CPU with kernels for a GPU.

    Syncs: yes.
    """
    bound = Binding(layout(model), weights_of(model))
    settings.setdefault("device", model.device)
    prefix, tiers, attended = settings.get("prefix"), settings.get("tiers"), bound.layout.attended
    if tokens is not None and settings.get("pages") is not None:
        raise ConfigurationError(f"tokens={tokens} and pages={settings['pages']} both say how many pages: give one")
    if settings.get("pages") is None and (tokens is not None or prefix is not None):
        per_row = -(-(tokens or LONGEST) // PAGE)
        count = per_row * max_requests * (1 if prefix is None else 2)
        settings["pages"] = Pages(size=PAGE, count=count, per_row=per_row) if attended else Pages(size=PAGE)
    pages = settings.get("pages")
    if tiers is not None:
        tiers = settings["tiers"] = replace(tiers, model=f"{tiers.model}, weights {bound.weights}")
        if tiers.kv is None and pages is not None and pages.count and attended:
            backend = Backend(settings.get("backend", "auto"), settings["device"])
            bound.kv = KvPages(bound.layout, pages.count, pages.size, backend)
            settings["tiers"] = replace(tiers, kv=bound.kv.planes)
    state = bound.layout.with_tail(getattr(settings.get("forward"), "tail", 0))
    mem = StateManager(state, slots=slots, max_requests=max_requests, **settings)
    _BOUND[mem] = bound
    return mem


def bound_to(model: Any, mem: StateManager) -> Binding:
    """Returns the `Binding` of a manager, after checks that a model has the layers and weights of this manager.

    Args:
        model: the model.
        mem: a manager that `manager` made, or one with the layout of the model.

    Raises:
        LayoutMismatch: the manager has other planes than the model, or was made for a model with other layers.
        ConfigurationError: the manager has states of other weights, or the model is in training mode.
    """
    if model.training:
        raise ConfigurationError("the model is in training mode, in which answers are random: call model.eval()")
    model_layout = layout(model)
    if model_layout.state.planes != mem.layout.planes or model_layout.state.layers != mem.layout.layers:
        raise LayoutMismatch(f"the manager has {mem.layout}, and the model needs {model_layout.state}: use mst.manager")
    weights = weights_of(model)
    bound = _BOUND.setdefault(mem, Binding(model_layout, weights))
    if bound.layout != model_layout:
        raise LayoutMismatch(
            f"the manager was made for a model with states or KV in other layers than {type(model).__name__}: use "
            "mst.manager"
        )
    if bound.weights != weights:
        raise ConfigurationError(
            f"the manager is for states of the weights {bound.weights}, and this {type(model).__name__} of the path "
            f"{model.config.name_or_path!r} has the weights {weights}: make a manager for it with mst.manager"
        )
    return bound


def kv_of(bound: Binding, mem: StateManager) -> KvPages | None:
    """Returns the KV pages of a manager. Makes them at the first call.

    Args:
        bound: the result of `bound_to`.
        mem: the manager.

    Returns:
        The pages, or None if no layer attends.

    Raises:
        ConfigurationError: the manager has no KV pages.
    """
    if bound.kv is None and bound.layout.attended:
        if not mem.device.page_table.numel():
            raise ConfigurationError("the manager has no KV pages: give mst.manager tokens=, of the longest request")
        bound.kv = KvPages(bound.layout, mem.stats().pages, mem.pages.size, mem.backend)
    return bound.kv


def leave(mem: StateManager, left: Left) -> None:
    """Notes what a deleted cache has not released; the next cache or server does it. Calls no method of the manager.

    Args:
        mem: the manager.
        left: the cache's rows, snapshots and step.
    """
    if mem in _BOUND:
        _BOUND[mem].left.append(left)


def release_left(mem: StateManager) -> None:
    """Releases what deleted caches have left, and rows of a forward that this thread has not finished. Syncs: no."""
    if (bound := _BOUND.get(mem)) is None:
        return
    if bound.begun is not None and bound.begun[1] is current_thread():
        cache, bound.begun = bound.begun[0](), None
        if cache is not None:
            cache.end(failed=True)
    if number := len(bound.left):
        bound.left[:number] = [one for one in bound.left[:number] if not release(mem, one)]
