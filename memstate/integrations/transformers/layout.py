"""Turns what a model keeps in its cache into the planes of a state, and remembers which layer has its state where."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from memstate.integrations.transformers.probe import Attended, Findings, Held
from memstate.state import grouping
from memstate.state.layout import Plane, StateLayout
from memstate.state.presets.tails import Fields, ringed

NAMES = {"conv": "conv", "recurrent": "ssm"}


class Place(NamedTuple):
    """Where the state of one layer lies: `mem.planes[plane][number]`.

    Attributes:
        layer: number of the layer in the model.
        kind: "conv" or "recurrent".
        state: number of the state within the layer.
        plane: name of the plane.
        number: layer of the plane.
    """

    layer: int
    kind: str
    state: int
    plane: str
    number: int

    def of(self, plane: Any) -> Tensor:
        """Returns the state of this place in the tensors of its plane, whether of all slots or of a batch."""
        tensor: Tensor = plane[self.number]
        return tensor


@dataclass(frozen=True)
class ModelLayout:
    """What one state of a model is made of, and which layer has its part where.

    Attributes:
        state: the layout for a StateManager.
        places: one entry for each state of each layer.
        attended: one entry for each layer with KV.
        argument: the name under which the model's forward takes a cache.
        layers: number of layers of its cache.
        continues: whether a chunk of several tokens starts from the state before it. If not, all chunks of a prompt
            but the first must have one token.
        takes_pads: whether prompts of several lengths can share a forward, with pads before the shorter ones.
        on_slots: whether decode can run memstate's kernels on slots.
        tails: of each plane, what a tail keeps of a token; nothing where steps with guesses cannot run on slots.
        copies: of which layers the last layers of its cache are copies, which the model adds by itself.
        why: why decode cannot run on slots; "" where it can.
    """

    state: StateLayout
    places: tuple[Place, ...] = field(repr=False)
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
        """Returns the layout with the rings of tails, where steps with guesses can run on slots.

        Args:
            tail: tokens of a step with guesses; 0: none.
        """
        return ringed(self.state, self.tails, tail) if tail and self.tails else self.state


def layout_of(found: Findings, on_slots: bool = False, why: str = "") -> ModelLayout:
    """Returns the layout of what a probe found.

    Args:
        found: what `probe` returned.
        on_slots: whether decode can run on slots. Windows then have no input that no layer reads.
        why: why it cannot.
    """
    held = [
        one._replace(shape=(*one.shape[:-1], one.shape[-1] - (on_slots and one.kind == "conv"))) for one in found.held
    ]
    state, places = grouped(held)
    return ModelLayout(
        state, places, found.attended, found.argument, found.layers, found.continues, found.takes_pads, on_slots,
        copies=found.copies, why=why,
    )  # fmt: skip


def grouped(held: Sequence[Held]) -> tuple[StateLayout, tuple[Place, ...]]:
    """Returns one layout for states of any shapes, and the place of each state.

    Args:
        held: the states.
    """
    state, lies = grouping.grouped(
        [Plane(NAMES.get(one.kind, one.kind), one.shape, one.dtype, fill=one.start) for one in held]
    )
    places = (Place(one.layer, one.kind, one.state, *lie) for one, lie in zip(held, lies, strict=True))
    return state, tuple(places)
