"""Hands the states of a batch to any layer: copies of the slots before a forward, copied back behind it."""

from typing import Any

from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.integrations.transformers.layout import ModelLayout, Place
from memstate.integrations.transformers.probe import states_of
from memstate.requests.steps import Step
from memstate.requests.tracking import NoTracking, Redirect


class Gathered:
    """Moves the states of one batch between the slots of a manager and the layers of a cache.

    Args:
        mem: the manager.
        found: where the states of the model lie.
        layers: the layers of the cache.
    """

    def __init__(self, mem: StateManager, found: ModelLayout, layers: list[Any]) -> None:
        self.mem, self.found, self.layers = mem, found, layers
        self._batch: dict[str, Tensor] = {}

    def begin(self, step: Step, fresh: bool) -> None:
        """Gives every layer the states of a batch, in one launch for each plane.

        Args:
            step: the planned step.
            fresh: whether no row has a state yet.

        Syncs: no.
        """
        planes = self.mem.planes
        self._batch = {name: planes.gather(name, step.read) for name in planes}
        for place in self.found.places:
            tensor = place.of(self._batch[place.plane])
            give(self.layers[place.layer], place, tensor, tensor, fresh)

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
        self.drop()

    def collect(self) -> dict[str, Tensor]:
        """Returns the states that the layers left: plane name -> `layer batch ...`. Syncs: no."""
        for place in self.found.places:
            given = place.of(self._batch[place.plane])
            left = states_of(self.layers[place.layer], place.kind)[place.state]
            if left is not None and left.data_ptr() != given.data_ptr():
                given.copy_(left)
        return self._batch

    def drop(self) -> None:
        """Takes the states away from the layers."""
        self._batch = {}
        drop(self.layers, self.found)


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
