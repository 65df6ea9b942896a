"""Tries whether a model can decode on slots: all its layers must use the kernels, which must give the model's results.

Compares each call of a kernel with the model's own function on the same inputs. To compare logits would say less: in
low precision, the smallest difference can make a router choose another expert, and then all later values differ.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.engine.settings import Forward
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.on_slots import FUNCTIONS, Joined, Reference
from memstate.integrations.transformers.own import own_cache, read, sample
from memstate.integrations.transformers.probe import felt
from memstate.integrations.transformers.states import States
from memstate.requests.handles import Request
from memstate.requests.tracking import NoTracking
from memstate.state.layout import Plane
from memstate.state.presets.tails import Fields

LOG: Final = logging.getLogger("memstate.transformers")
IN_FLOAT: Final = ("gate", "beta", "dt")  # fields of tails that are float32 in every model
DECODED: Final = 3  # number of tokens that are decoded one by one
ROUNDED: Final = 16  # tolerance in eps: sums in another order round differently; a wrong kernel differs far more
NEAR: Final = 1e-3  # least tolerance, as a part of the largest value


@torch.no_grad()
def tried(model: Any, layout: ModelLayout) -> ModelLayout | str:
    """Returns the layout of a model that can decode on slots; for another model, a text that says why it cannot.

    Args:
        model: the model, in evaluation mode.
        layout: the model's layout for slots: windows are without their oldest input.

    Returns:
        The layout, with `tails` if the model can also check guesses on slots; or the text.

    Raises:
        AttributeError, LookupError, RuntimeError, TypeError, ValueError: a layer itself computes with a state, for
            which it got a reference.

    Syncs: yes.
    """
    calls = _run(model, layout, 0)
    if calls.apart:
        return calls.apart
    if any(felt(model, layout.argument, tokens, "conv", (..., 0)) for tokens in (1, DECODED)):
        return "a layer reads the oldest input of a window"
    tails = {place.plane: kept for place, kept in zip(layout.places, calls.kept, strict=True) if kept}
    if not layout.continues or not all(calls.kept):
        return layout
    guessing = replace(layout, tails=tuple(tails.items()))
    try:
        why = _run(model, guessing, DECODED).apart
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error)
    if why:
        LOG.info("%s checks guesses on copies of its states: %s", type(model).__name__, why)
    return layout if why else guessing


def _run(model: Any, layout: ModelLayout, tail: int) -> "_Calls":
    """Reads a few tokens on slots, runs the model's own functions as well, and returns the comparison.

    Args:
        model: the model.
        layout: the model's layout.
        tail: number of tokens of a step with guesses; 0: each step has one token.
    """
    ids, cache = sample(model), own_cache(model, layout.copies)
    prompt, last = ids[:, :-DECODED], ids[:, -DECODED:]
    backend = "reference" if model.device.type == "cpu" else "auto"  # Triton's interpreter is slow
    mem = StateManager(
        layout.with_tail(tail), slots=1, max_requests=1, tracking=NoTracking(), overlap=False, device=model.device,
        backend=backend, forward=Forward(tail=tail),
    )  # fmt: skip
    states, rows = States(model, mem, layout, cache.layers, "slots"), mem.admit([Request("trial")])
    start, calls = 0, _Calls([place.of(mem.planes[place.plane]) for place in layout.places])
    with _beside(model, calls):
        for chunk, drafts in ((prompt, 0), *((one, max(tail - 1, 0)) for one in last.split(tail or 1, 1))):
            step = mem.plan(rows, chunk.shape[1], drafts=drafts)
            states.begin(step, chunk.shape[1], drafts > 0)
            read(model, layout.argument, cache, chunk, start)
            start += chunk.shape[1]
            states.end(step)
            mem.accept(step, [1]) if drafts else mem.settle(step)
    for place, kept in zip(layout.places, calls.kept, strict=True):
        if kept is None:
            calls.apart = f"no kernel updates the {place.kind} state {place.state} of layer {place.layer}"
    return calls


class _Calls:
    """Records which states calls of kernels get, and compares what they return.

    Args:
        layers: for each state, its memory: a layer of a plane, `slot ...`.

    Attributes:
        apart: how the first wrong call differs from the model's own function; "" if none does.
        kept: for each state, the fields that a tail keeps of a token; None if no call got the state.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.apart = ""
        self.kept: list[Fields | None] = [None] * len(layers)
        self._first = [layer[0] for layer in layers]

    def take(self, plane: Tensor, inputs: dict[str, Tensor]) -> None:
        """Records that a call got a layer of a plane, `slot ...`, or a part of it; and the fields of its tail."""
        for number, first in enumerate(self._first):
            if 0 <= plane.data_ptr() - first.data_ptr() < first.numel() * first.itemsize:
                self.kept[number] = tuple(
                    Plane(name, tuple(one.shape[2:]), torch.float32 if name in IN_FLOAT else one.dtype)
                    for name, one in inputs.items()
                )

    def compare(self, name: str, actual: Tensor, expected: Tensor, eps: float) -> None:
        """Compares a kernel's result with that of the model's own function, for inputs whose dtype has this `eps`."""
        apart = float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-30))
        if not apart <= max(NEAR, ROUNDED * eps) and not self.apart:
            self.apart = f"the kernel for {name} differs by {apart:.1e} of the largest value"

    def beside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that accepts references, and also calls the model's own function to compare results."""
        own = inspect.unwrap(function, stop=lambda one: not hasattr(one, "takes_references"))
        signature = inspect.signature(own)

        def compared(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            named = ((name, one) for name, one in given.arguments.items() if isinstance(one, Reference | Joined))
            name, taken = next(named, ("", None))
            if taken is None:
                return function(*args, **kwargs)
            state = taken.window if isinstance(taken, Joined) else taken
            expected_state = given.arguments[name] = state.plane[state.step.read.long()]
            if isinstance(taken, Joined):
                given.arguments[name] = torch.cat([expected_state, taken.inputs], -1)
            expected = own(*given.args, **given.kwargs)
            coarsest = max(torch.finfo(one.dtype).eps for one in given.arguments.values() if _is_float(one))
            state.note = lambda inputs: self.take(state.plane, inputs)
            result = function(*args, **kwargs)
            out = result
            if isinstance(expected, tuple):  # the new state is in the result; other functions change the given one
                (expected, expected_state), (out, _) = expected, result
            if isinstance(taken, Joined):
                expected = expected[..., -taken.inputs.shape[-1] :]
            self.compare(own.__name__, out, expected, coarsest)
            if state.tail is None:  # with a tail, only a later step stores the state
                self.compare(own.__name__, state.plane[state.step.write.long()], expected_state, coarsest)
            return result

        return compared


def _is_float(one: object) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


@contextmanager
def _beside(model: Any, calls: _Calls) -> Iterator[None]:
    """In the block of a `with` statement, runs the model's own functions in addition to the kernels."""
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
