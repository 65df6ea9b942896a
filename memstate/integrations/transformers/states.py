"""Hands the states of a batch to the layers of a cache, as references or copies, and stores the new states."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, get_args
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError
from memstate.integrations.transformers.between import Between, Found
from memstate.integrations.transformers.layout import ModelLayout, StatePlace
from memstate.integrations.transformers.on_slots import Reference, install
from memstate.integrations.transformers.probe import KINDS, states_of
from memstate.kernels.dispatch import Backend
from memstate.requests.steps import Step
from memstate.requests.tracking import NoTracking, Redirect

Kernels = Literal["auto", "slots", "gathered"]


class States:
    """Manages the states in the forwards of one cache. After each step, all states are in the slots.

    Args:
        model: the model.
        mem: the manager.
        layout: the model's layout.
        layers: the layers of the cache.
        kernels: "slots": decode runs memstate's kernels on slots; "gathered": layers get copies; "auto": slots on a GPU
            if the model can, otherwise copies.
        keep: if decode runs on copies, whether layers keep them for the next step. If that step has the same rows, at
            the lengths at which this step ended, no state is copied from slots.

    Attributes:
        kernels: how decode runs: "slots" or "gathered".
        verifies: whether steps with guesses run on slots, with the rows' tails.

    Raises:
        ConfigurationError: "slots" is asked for, and the model, the strategy or the manager does not allow it.
    """

    def __init__(
        self, model: Any, mem: StateManager, layout: ModelLayout, layers: list[Any], kernels: Kernels,
        keep: bool = False,
    ) -> None:  # fmt: skip
        if kernels not in get_args(Kernels):
            raise ConfigurationError(f"kernels={kernels!r}: expected one of {get_args(Kernels)}")
        if kernels == "slots" and not layout.on_slots:
            raise ConfigurationError(
                f"kernels='slots': {type(model).__name__} decodes on copies of its states (kernels='auto'), because "
                f"{layout.why}"
            )
        wanted = layout.on_slots and (kernels == "slots" or (kernels == "auto" and mem.backend.device.type == "cuda"))
        self.kernels: Kernels = "slots" if wanted else "gathered"
        self._mem, self._layout, self._layers, self._keep = mem, layout, layers, keep and not wanted
        self._backend = Backend(mem.backend.name, mem.backend.device)
        rings = layout.with_tail(mem.forward.tail).rows
        self.verifies = wanted and rings is not None and rings == mem.layout.rows
        self._batch: dict[str, Tensor] = {}  # plane -> copies of the states; empty while layers use the slots
        # (states of a layer, number of the state, the copy that the layer got)
        self._given: list[tuple[dict[int, Tensor | None], int, Tensor]] = []
        self._kept: Step | None = None  # the step whose states the layers keep
        self._gather: Callable[[], dict[str, Tensor] | None] | None = None
        self._looked: dict[tuple[int, str], Found] = {}
        # (layer, the states that a forward uses, the states to show)
        self._views: list[tuple[Any, tuple[Any, Any], tuple[Any, Any]]] = []
        if wanted:
            install(model)

    def show(self, gather: Callable[[], dict[str, Tensor] | None]) -> None:
        """Lets the layers show their states between two forwards.

        Args:
            gather: function that returns copies of the states, plane name -> `layer batch ...`; None if there are none.
        """
        self._gather, me = gather, ref(self)
        for number in dict.fromkeys(place.layer for place in self._layout.places):
            layer = self._layers[number]
            looks = (partial(_look, me, number, kind) for kind in KINDS)
            own = layer.conv_states, layer.recurrent_states
            self._views.append((layer, own, (Between(next(looks)), Between(next(looks)))))

    def look(self, layer: int, kind: str) -> Found:
        """Returns copies of the states of one kind of a layer, by number. Syncs: yes, once after each forward."""
        if not self._looked and self._gather is not None and (batch := self._gather()) is not None:
            for place in self._layout.places:
                state, short = place.of(batch[place.plane]), self._layout.on_slots and place.kind == "conv"
                shown = self._looked.setdefault((place.layer, place.kind), {})
                shown[place.state] = pad(state, (1, 0)) if short else state
        return self._looked.get((layer, kind), dict.fromkeys(range(self._layers[layer].number_of_states)))

    def hide(self) -> None:
        """Lets the layers show no states, as before the first forward."""
        self.drop()
        for place in self._layout.places:
            _initialized(self._layers[place.layer], place.kind)[place.state] = False

    def uncover(self, own: bool = False) -> None:
        """Puts into the layers the states to show between forwards or, if `own`, the states that a forward uses."""
        self._looked = {}
        for layer, mine, shown in self._views:
            layer.conv_states, layer.recurrent_states = mine if own else shown

    def begin(self, step: Step, columns: int, drafts: bool = False) -> bool:
        """Hands the states of a step to the layers: references, or copies in one launch for each plane.

        Args:
            step: the planned step.
            columns: number of tokens and pads of each entry.
            drafts: whether some of the tokens may be rejected; tails keep such tokens.

        Returns:
            Whether the layers still had the states, from the step before.

        Syncs: no.
        """
        kept, self._kept = self._kept, None
        self.uncover(own=True)
        if kept is not None and goes_on(kept, step):
            return True
        fresh, planes, with_grad = not step.before.any(), self._mem.planes, torch.is_grad_enabled()
        on_slots = drafts or (self.kernels == "slots" and columns == 1 and not fresh)
        self._batch = {} if on_slots else {name: planes.gather(name, step.read) for name in planes}
        self._given = []
        for place in self._layout.places:
            layer = self._layers[place.layer]
            if on_slots:
                plane = place.of(planes[place.plane])
                tail = planes.tail(place.plane, place.number) if self.verifies else None
                _give(layer, place, Reference(plane, step, self._backend, tail), plane, fresh)
                continue
            tensor = place.of(self._batch[place.plane])
            # layers change the state in place, and autograd may need the original
            state = tensor.clone() if with_grad else tensor
            _give(layer, place, state, tensor, fresh)
            self._given.append((states_of(layer, place.kind), place.state, tensor))
        return False

    def end(self, step: Step) -> None:
        """Stores the states that the layers have computed.

        Args:
            step: the step of `begin`.

        Syncs: no.
        """
        if self._batch:  # on slots, the kernels have stored the states
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                self.store(step, self.collect())
        if self._keep:
            self._kept = step
        else:
            self.drop()
        self.uncover()

    def collect(self) -> dict[str, Tensor]:
        """Returns the states in the layers, without grad: plane name -> `layer batch ...`. Syncs: no."""
        for states, number, given in self._given:
            left = states[number]
            if left is not None and left is not given:
                given.copy_(left)
                states[number] = given
        return self._batch

    def store(self, step: Step, states: dict[str, Tensor]) -> None:
        """Writes states to the slots of a step, in one launch for each plane, or two with snapshots.

        Args:
            step: the step.
            states: plane name -> `layer batch ...`.

        Syncs: no.
        """
        for name, batch in states.items():
            self._mem.planes.scatter(name, step.write, batch)
            if not isinstance(self._mem.tracking, Redirect | NoTracking):  # under these, a step writes one slot per row
                self._mem.planes.scatter(name, step.snapshot, batch)

    def drop(self) -> None:
        """Takes the states from the layers."""
        self.uncover(own=True)
        self._batch, self._given, self._kept = {}, [], None
        for place in self._layout.places:
            layer = self._layers[place.layer]
            states_of(layer, place.kind)[place.state] = None
            # if the cache shows states, its layers count as initialized
            _initialized(layer, place.kind)[place.state] = bool(self._views)


def _look(states_ref: ref[States], layer: int, kind: str) -> Found:
    states = states_ref()
    return {} if states is None else states.look(layer, kind)


def goes_on(last: Step, step: Step) -> bool:
    """Returns whether a step reads exactly the states that another step wrote: same rows, same lengths.

    Args:
        last: a step that was settled.
        step: a later step.
    """
    one, other = last.batch, step.batch
    if one is not other and not (
        np.array_equal(one.numbers, other.numbers) and np.array_equal(one.generation, other.generation)
    ):
        return False
    return not (last.after != step.before).any()


def _give(layer: Any, place: StatePlace, state: Any, like: Tensor, fresh: bool) -> None:
    """Sets one state of a layer of Transformers, as if the layer had made the state.

    Args:
        layer: the layer.
        place: the place of the state.
        state: the state.
        like: a tensor with the last axis, dtype and device of the state.
        fresh: whether no row has a state yet.
    """
    states_of(layer, place.kind)[place.state] = state
    _initialized(layer, place.kind)[place.state] = True
    if place.kind == "conv":
        layer.conv_kernel_size[place.state] = like.shape[-1]
        layer.dtype = like.dtype
    layer.device = like.device
    layer.has_previous_state[place.state] = not fresh


def _initialized(layer: Any, kind: str) -> dict[int, bool]:
    own: dict[int, bool] = layer.is_conv_states_initialized if kind == "conv" else layer.is_recurrent_states_initialized
    return own
