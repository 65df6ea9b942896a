"""Hands states to the layers of a cache in the better of two ways, and says which."""

from typing import Any, Final, Literal, get_args

from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError
from memstate.integrations.transformers.gathered import Gathered, drop, give
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.on_slots import Reference, install
from memstate.kernels.dispatch import Backend
from memstate.requests.steps import Step

Kernels = Literal["auto", "slots", "gathered"]
NO_KERNELS: Final = "kernels='slots': this model does not call the functions that memstate has kernels for"


class States:
    """The states of the forwards of one cache.

    Args:
        model: the model.
        mem: the manager.
        found: where the states of the model lie.
        layers: the layers of the cache.
        kernels: "slots": decode runs memstate's kernels on slots; "gathered": layers get copies; "auto": slots on a
            GPU where the model can, otherwise copies.
        keep: whether layers keep the copies of a batch from step to step, where decode runs on copies.

    Attributes:
        kernels: "slots" or "gathered": how decode runs.

    Raises:
        ConfigurationError: the model cannot run on slots, or the strategy or the manager does not allow it.
    """

    def __init__(
        self, model: Any, mem: StateManager, found: ModelLayout, layers: list[Any], kernels: Kernels, keep: bool = False
    ) -> None:
        if kernels not in get_args(Kernels):
            raise ConfigurationError(f"kernels={kernels!r}: expected one of {get_args(Kernels)}")
        if kernels == "slots" and not found.on_slots:
            raise ConfigurationError(NO_KERNELS)
        wanted = found.on_slots and (kernels == "slots" or (kernels == "auto" and mem.backend.device.type == "cuda"))
        self.kernels: Kernels = "slots" if wanted else "gathered"
        self._gathered = Gathered(mem, found, layers, keep and not wanted)
        self._mem, self._found, self._layers = mem, found, layers
        self._backend = Backend(mem.backend.name, mem.backend.device)
        self._in_place = False  # whether the layers have references
        if wanted:
            install(model)

    def begin(self, step: Step, columns: int) -> bool:
        """Hands the states of a step to the layers.

        Args:
            step: the planned step.
            columns: tokens and pads of each entry.

        Returns:
            Whether the layers had them, from the step before.

        Syncs: no.
        """
        fresh = not step.before.any()
        self._in_place = self.kernels == "slots" and columns == 1 and not fresh
        if not self._in_place:
            return self._gathered.begin(step, fresh)
        for place in self._found.places:
            plane = place.of(self._mem.planes[place.plane])
            give(self._layers[place.layer], place, Reference(plane, step, self._backend), plane, fresh=False)
        return False

    def end(self, step: Step) -> None:
        """Stores what the layers left. Syncs: no."""
        if self._in_place:
            drop(self._layers, self._found)  # the kernels have stored the states
        else:
            self._gathered.end(step)

    def drop(self) -> None:
        """Takes the states away from the layers after a forward that failed."""
        self._gathered.drop()
