"""Hands states to the layers of a cache in the better of two ways, and says which."""

from typing import Any, Final, Literal, get_args

from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError
from memstate.integrations.transformers.gathered import Gathered
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.on_slots import OnSlots, install
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
        self._direct = OnSlots(mem, found, layers) if wanted else None
        if wanted:
            install(model)
        self._now: OnSlots | None = None

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
        self._now = self._direct if columns == 1 and not fresh else None
        if self._now is not None:
            self._now.begin(step)
            return False
        return self._gathered.begin(step, fresh)

    def end(self, step: Step) -> None:
        """Stores what the layers left. Syncs: no."""
        if self._now is not None:
            self._now.end()
        else:
            self._gathered.end(step)

    def drop(self) -> None:
        """Takes the states away from the layers after a forward that failed."""
        self._gathered.drop()
