"""Tries whether a model can decode on slots: its layers must do so, and every kernel must do what the model's own does.

Each call of a kernel is compared with the model's own function on the same inputs. Logits would say less: in a low
precision a router may choose another expert after the smallest difference, and then all that follows differs.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.on_slots import FUNCTIONS, Reference
from memstate.integrations.transformers.probe import felt, own_cache, sample
from memstate.integrations.transformers.states import States
from memstate.requests.handles import Request
from memstate.requests.tracking import NoTracking

DECODED: Final = 3  # steps
ROUNDED: Final = 16  # how often sums of another order may round; a wrong kernel is apart by far more
NEAR: Final = 1e-3  # of the largest value, at least


@torch.no_grad()
def why_copies(model: Any, found: ModelLayout) -> str:
    """Returns why a model has to decode on copies of its states, or "" if it can decode on slots.

    Args:
        model: the model, in evaluation mode.
        found: its layout, with windows without their oldest input.

    Raises:
        AttributeError, LookupError, RuntimeError, TypeError, ValueError: a layer computes with a state by itself.

    Syncs: yes.
    """
    ids, cache = sample(model), own_cache(model)
    backend = "reference" if model.device.type == "cpu" else "auto"  # the interpreter would take long
    mem = StateManager(
        found.state, slots=1, max_requests=1, tracking=NoTracking(), overlap=False, device=model.device, backend=backend
    )
    states, rows, calls = States(model, mem, found, cache.layers, "slots"), mem.admit([Request("trial")]), _Calls()
    with _beside(model, calls):
        for chunk in (ids[:, :-DECODED], *ids[:, -DECODED:].split(1, 1)):
            step = mem.plan(rows, chunk.shape[1])
            states.begin(step, chunk.shape[1])
            model(input_ids=chunk, use_cache=True, **{found.argument: cache})
            states.end(step)
            mem.settle(step)
    for place in found.places:
        if not calls.took(place.of(mem.planes[place.plane])):
            return f"no kernel updates the {place.kind} state {place.state} of layer {place.layer}"
    if calls.apart:
        return calls.apart
    if any(felt(model, found.argument, tokens, "conv", (..., 0)) for tokens in (1, DECODED)):
        return "a layer reads the oldest input of a window"
    return ""


class _Calls:
    """What the calls of kernels took and gave.

    Attributes:
        apart: what the first call gave that is not what the model's own function gives; "": all gave the same.
    """

    def __init__(self) -> None:
        self.apart = ""
        self._taken: set[int] = set()

    def took(self, plane: Tensor) -> bool:
        """Whether a call took a state of a layer, `slot ...`, or a part of it."""
        first = plane[0]
        return any(0 <= taken - first.data_ptr() < first.numel() * first.itemsize for taken in self._taken)

    def compare(self, name: str, found: Tensor, expected: Tensor, eps: float) -> None:
        """Compares what a kernel gave with what the model's own function gives on inputs that round by `eps`."""
        apart = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-30))
        if not apart <= max(NEAR, ROUNDED * eps) and not self.apart:
            self.apart = f"the kernel for {name} differs by {apart:.1e} of the largest value"

    def beside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that takes references, and that runs the model's own function beside them."""
        own = inspect.unwrap(function, stop=lambda one: not hasattr(one, "takes_references"))
        signature = inspect.signature(own)

        def compared(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            reference = next(((name, one) for name, one in given.arguments.items() if isinstance(one, Reference)), None)
            if reference is None:
                return function(*args, **kwargs)
            name, state = reference
            expected_state = given.arguments[name] = state.plane[state.step.read.long()]
            expected = own(*given.args, **given.kwargs)
            coarsest = max(torch.finfo(one.dtype).eps for one in given.arguments.values() if _is_float(one))
            found = function(*args, **kwargs)
            out = found
            if isinstance(expected, tuple):  # with the new state; others change the state that they are given
                (expected, expected_state), (out, _) = expected, found
            self._taken.add(state.plane.data_ptr())
            self.compare(own.__name__, out, expected, coarsest)
            self.compare(own.__name__, state.plane[state.step.write.long()], expected_state, coarsest)
            return found

        return compared


def _is_float(one: object) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


@contextmanager
def _beside(model: Any, calls: _Calls) -> Iterator[None]:
    """Has the model's own functions run beside the kernels."""
    replaced = [
        (module, name, function)
        for module in {sys.modules[type(part).__module__] for part in model.modules()}
        for name in FUNCTIONS
        if (function := getattr(module, name, None)) is not None and hasattr(function, "takes_references")
    ]
    for module, name, function in replaced:
        setattr(module, name, calls.beside(function))
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)
