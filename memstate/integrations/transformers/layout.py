"""Makes the planes of a state from the tensors in a model's cache, and records where each layer's state lies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from memstate.integrations.transformers.probe import Attended, Findings, ProbedState
from memstate.state import grouping
from memstate.state.layout import Plane, StateLayout
from memstate.state.presets.tails import Fields, ringed

NAMES = {"conv": "conv", "recurrent": "ssm"}


class StatePlace(NamedTuple):
    """Where one state of a layer lies: `mem.planes[plane][number]`.

    Attributes:
        layer: number of the layer in the model.
        kind: "conv" or "recurrent".
        state: number of the state within the layer.
        plane: name of the plane.
        number: number of the layer within the plane.
    """

    layer: int
    kind: str
    state: int
    plane: str
    number: int

    def of(self, plane: Any) -> Tensor:
        """Returns the part at this place of an object with the tensors of a plane, for all slots or for a batch."""
        tensor: Tensor = plane[self.number]
        return tensor


@dataclass(frozen=True)
class ModelLayout:
    """The layout of one state of a model, and where the part of each layer lies.

    Attributes:
        state: the layout for a StateManager.
        places: one entry for each state of each layer.
        attended: one entry for each layer with KV.
        argument: name of the argument of the model's forward that takes a cache.
        layers: number of layers of the model's cache.
        continues: whether the model can read a chunk of several tokens after a state. If not, every chunk of a prompt
            except the first must have one token.
        takes_pads: whether prompts of several lengths can share a forward, with pads before the shorter ones.
        on_slots: whether decode can run memstate's kernels on slots.
        tails: for each plane (its name, the fields that a tail keeps for each token); empty if guesses cannot be
            checked on slots.
        copies: for each layer that the model adds at the end of its cache, the number of the layer that it copies.
        why: the reason why decode cannot run on slots; "" if it can.
    """

    state: StateLayout
    places: tuple[StatePlace, ...] = field(repr=False)
    attended: tuple[Attended, ...] = field(repr=False)
    argument: str
    layers: int
    continues: bool
    takes_pads: bool
    on_slots: bool
    tails: tuple[tuple[str, Fields], ...] = field(default=(), repr=False)
    copies: tuple[int, ...] = field(default=(), repr=False)
    why: str = field(default="", repr=False, compare=False)

    def with_tail(self, tail: int) -> StateLayout:
        """Returns the layout with rings for tails, if steps with guesses can run on slots.

        Args:
            tail: limit of the tokens of a step with guesses; 0 for no tails.
        """
        return ringed(self.state, self.tails, tail) if tail and self.tails else self.state


def layout_of(probed: Findings, on_slots: bool = False, why: str = "") -> ModelLayout:
    """Returns the layout of a model from the result of a probe.

    Args:
        probed: the result of `probe`.
        on_slots: whether decode can run on slots. Then windows are one input shorter: no layer reads the oldest one.
        why: the reason why decode cannot run on slots.
    """
    held = [
        one._replace(shape=(*one.shape[:-1], one.shape[-1] - (on_slots and one.kind == "conv"))) for one in probed.held
    ]
    state, places = grouped(held)
    return ModelLayout(
        state, places, probed.attended, probed.argument, probed.layers, probed.continues, probed.takes_pads, on_slots,
        copies=probed.copies, why=why,
    )  # fmt: skip


def grouped(held: Sequence[ProbedState]) -> tuple[StateLayout, tuple[StatePlace, ...]]:
    """Returns one layout for states of any shapes, and the place of each state in it.

    Args:
        held: the states of a model, as a probe reports them.
    """
    state, lies = grouping.grouped(
        [Plane(NAMES.get(one.kind, one.kind), one.shape, one.dtype, fill=one.start) for one in held]
    )
    places = (StatePlace(one.layer, one.kind, one.state, *lie) for one, lie in zip(held, lies, strict=True))
    return state, tuple(places)
