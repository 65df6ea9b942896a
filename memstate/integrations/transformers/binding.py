"""Makes the manager of a model, and remembers which model a manager was made for."""

from typing import Any
from weakref import WeakKeyDictionary

from memstate.engine.manager import StateManager
from memstate.errors import LayoutMismatch
from memstate.integrations.transformers.layout import ModelLayout, layout

_BOUND: WeakKeyDictionary[StateManager, ModelLayout] = WeakKeyDictionary()


def manager(model: Any, *, slots: int, max_requests: int, **settings: Any) -> StateManager:
    """Makes a StateManager for a model: layout, dtypes and device are read off the model.

    Args:
        model: a model of Transformers with its weights, on the device where it is going to run.
        slots: number of states that the memory holds.
        max_requests: requests that can run at a time.
        **settings: all other arguments of `StateManager`.

    Returns:
        The manager, for `StateCache`.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache, or settings contradict each other.

    Syncs: yes.
    """
    found = layout(model)
    settings.setdefault("device", model.device)
    mem = StateManager(found.state, slots=slots, max_requests=max_requests, **settings)
    _BOUND[mem] = found
    return mem


def layout_for(model: Any, mem: StateManager) -> ModelLayout:
    """Returns where the states of a model lie in a manager.

    Args:
        model: the model.
        mem: a manager that `manager` made, or one with the layout of the model.

    Raises:
        LayoutMismatch: the manager has other planes than the model.
    """
    found = _BOUND.get(mem)
    if found is None:
        found = layout(model)
        if found.state.planes != mem.layout.planes or found.state.layers != mem.layout.layers:
            raise LayoutMismatch(f"the manager has {mem.layout}, and the model needs {found.state}: use mst.manager")
        _BOUND[mem] = found
    return found
