"""Hands the states of a batch to any layer: copies of the slots, copied back behind each forward."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.integrations.transformers.layout import ModelLayout, Place
from memstate.integrations.transformers.probe import states_of
from memstate.requests.steps import Step
from memstate.requests.tracking import NoTracking, Redirect


class Gathered:
    """Moves the states of one batch between the slots of a manager and the layers of a cache.

    After each step the slots have all states.

    Args:
        mem: the manager.
        found: where the states of the model lie.
        layers: the layers of the cache.
        keep: whether the layers keep their copies behind a step. If the next step goes on with the same rows where this
            one ended, nothing is gathered.
    """

    def __init__(self, mem: StateManager, found: ModelLayout, layers: list[Any], keep: bool = False) -> None:
        self.mem, self.found, self.layers, self._keep = mem, found, layers, keep
        self._batch: dict[str, Tensor] = {}
        self._given: list[tuple[dict[int, Tensor | None], int, Tensor]] = []  # states of a layer, number, what it got
        self._kept: Step | None = None  # whose states the layers keep

    def begin(self, step: Step, fresh: bool) -> bool:
        """Gives every layer the states of a batch, in one launch for each plane, or none if the layers have them.

        Args:
            step: the planned step.
            fresh: whether no row has a state yet.

        Returns:
            Whether the layers had them.

        Syncs: no.
        """
        kept, self._kept = self._kept, None
        if kept is not None and goes_on(kept, step):
            return True
        planes, with_grad = self.mem.planes, torch.is_grad_enabled()
        self._batch = {name: planes.gather(name, step.read) for name in planes}
        self._given = []
        for place in self.found.places:
            tensor = place.of(self._batch[place.plane])
            state = tensor.clone() if with_grad else tensor  # layers change it in place, and a graph may need it
            give(self.layers[place.layer], place, state, tensor, fresh)
            self._given.append((states_of(self.layers[place.layer], place.kind), place.state, tensor))
        return False

    @torch.no_grad()
    def end(self, step: Step) -> None:
        """Stores the states that the layers left, in one launch for each plane, or two where a step takes snapshots.

        Args:
            step: the step of `begin`.

        Syncs: no.
        """
        for name, batch in self.collect().items():
            self.mem.planes.scatter(name, step.write, batch)
            if not isinstance(self.mem.tracking, Redirect | NoTracking):  # these never write a second slot
                self.mem.planes.scatter(name, step.snapshot, batch)
        if self._keep:
            self._kept = step
        else:
            self.drop()

    def collect(self) -> dict[str, Tensor]:
        """Returns the states that the layers left: plane name -> `layer batch ...`. Syncs: no."""
        for states, number, given in self._given:
            left = states[number]
            if left is not None and left is not given:
                given.copy_(left)
                states[number] = given
        return self._batch

    def drop(self) -> None:
        """Takes the states away from the layers."""
        self._batch, self._given, self._kept = {}, [], None
        drop(self.layers, self.found)


def goes_on(last: Step, step: Step) -> bool:
    """Returns whether a step reads the states that another step left: of the same rows, at the same lengths.

    Args:
        last: a step that was settled.
        step: a later step.
    """
    one, other = last.batch, step.batch
    if one is not other and not (
        np.array_equal(one.numbers, other.numbers) and np.array_equal(one.generation, other.generation)
    ):
        return False
    return np.array_equal(last.after, step.before)


def give(layer: Any, place: Place, state: Any, like: Tensor, fresh: bool) -> None:
    """Sets one state of a layer of Transformers, as if the layer had made it itself.

    Args:
        layer: the layer.
        place: which of its states.
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


def drop(layers: list[Any], found: ModelLayout) -> None:
    """Takes the states away from the layers of a cache.

    Args:
        layers: the layers.
        found: which of them have states.
    """
    for place in found.places:
        layer = layers[place.layer]
        states_of(layer, place.kind)[place.state] = None
        _initialized(layer, place.kind)[place.state] = False


def _initialized(layer: Any, kind: str) -> dict[int, bool]:
    found: dict[int, bool] = (
        layer.is_conv_states_initialized if kind == "conv" else layer.is_recurrent_states_initialized
    )
    return found
