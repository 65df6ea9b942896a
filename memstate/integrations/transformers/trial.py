"""Tries whether a model can decode on slots: its layers must do so, and every kernel must do what the model's own does.

Each call of a kernel is compared with the model's own function on the same inputs. Logits would say less: in a low
precision a router may choose another expert after the smallest difference, and then all that follows differs.
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
IN_FLOAT: Final = ("gate", "beta", "dt")  # fields of tails that are fp32 in every model
DECODED: Final = 3  # steps
ROUNDED: Final = 16  # how often sums of another order may round; a wrong kernel is apart by far more
NEAR: Final = 1e-3  # of the largest value, at least


@torch.no_grad()
def tried(model: Any, found: ModelLayout) -> ModelLayout | str:
    """Returns the layout of a model that can decode on slots, or why it has to decode on copies of its states.

    Args:
        model: the model, in evaluation mode.
        found: its layout, with windows without their oldest input.

    Returns:
        The layout, with what tails keep if the model can also check guesses on slots.

    Raises:
        AttributeError, LookupError, RuntimeError, TypeError, ValueError: a layer computes with a state by itself.

    Syncs: yes.
    """
    calls = _run(model, found, 0)
    if calls.apart:
        return calls.apart
    if any(felt(model, found.argument, tokens, "conv", (..., 0)) for tokens in (1, DECODED)):
        return "a layer reads the oldest input of a window"
    tails = {place.plane: kept for place, kept in zip(found.places, calls.kept, strict=True) if kept}
    if not found.continues or not all(calls.kept):
        return found
    guessing = replace(found, tails=tuple(tails.items()))
    try:
        why = _run(model, guessing, DECODED).apart
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error)
    if why:
        LOG.info("%s checks guesses on copies of its states: %s", type(model).__name__, why)
    return found if why else guessing


def _run(model: Any, found: ModelLayout, tail: int) -> "_Calls":
    """Reads a few tokens on slots beside the model's own functions.

    Args:
        model: the model.
        found: its layout.
        tail: tokens of one step with guesses; 0: steps of one token.
    """
    ids, cache = sample(model), own_cache(model, found.copies)
    prompt, last = ids[:, :-DECODED], ids[:, -DECODED:]
    backend = "reference" if model.device.type == "cpu" else "auto"  # the interpreter would take long
    mem = StateManager(
        found.with_tail(tail), slots=1, max_requests=1, tracking=NoTracking(), overlap=False, device=model.device,
        backend=backend, forward=Forward(tail=tail),
    )  # fmt: skip
    states, rows = States(model, mem, found, cache.layers, "slots"), mem.admit([Request("trial")])
    start, calls = 0, _Calls([place.of(mem.planes[place.plane]) for place in found.places])
    with _beside(model, calls):
        for chunk, drafts in ((prompt, 0), *((one, max(tail - 1, 0)) for one in last.split(tail or 1, 1))):
            step = mem.plan(rows, chunk.shape[1], drafts=drafts)
            states.begin(step, chunk.shape[1], drafts > 0)
            read(model, found.argument, cache, chunk, start)
            start += chunk.shape[1]
            states.end(step)
            mem.accept(step, [1]) if drafts else mem.settle(step)
    for place, kept in zip(found.places, calls.kept, strict=True):
        if kept is None:
            calls.apart = f"no kernel updates the {place.kind} state {place.state} of layer {place.layer}"
    return calls


class _Calls:
    """What the calls of kernels took and gave.

    Args:
        layers: of the planes, `slot ...`, one for each state.

    Attributes:
        apart: what the first call gave that is not what the model's own function gives; "": all gave the same.
        kept: what a tail keeps of a token, for each state; None: no call took it.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self.apart = ""
        self.kept: list[Fields | None] = [None] * len(layers)
        self._first = [layer[0] for layer in layers]

    def take(self, plane: Tensor, inputs: dict[str, Tensor]) -> None:
        """Notes that a call took a state of a layer, `slot ...`, or a part of it, and what its tail keeps."""
        for number, first in enumerate(self._first):
            if 0 <= plane.data_ptr() - first.data_ptr() < first.numel() * first.itemsize:
                self.kept[number] = tuple(
                    Plane(name, tuple(one.shape[2:]), torch.float32 if name in IN_FLOAT else one.dtype)
                    for name, one in inputs.items()
                )

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
            found = function(*args, **kwargs)
            out = found
            if isinstance(expected, tuple):  # with the new state; others change the state that they are given
                (expected, expected_state), (out, _) = expected, found
            if isinstance(taken, Joined):
                expected = expected[..., -taken.inputs.shape[-1] :]
            self.compare(own.__name__, out, expected, coarsest)
            if state.tail is None:  # otherwise a later step stores it
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
