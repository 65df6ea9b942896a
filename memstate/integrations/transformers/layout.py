"""Turns what a model keeps in its cache into the planes of a state, and remembers which layer has its state where."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.integrations.transformers.probe import Attended, Findings, Held, probe
from memstate.state.layout import Plane, StateLayout

NAMES = {"conv": "conv", "recurrent": "ssm"}


class Place(NamedTuple):
    """Where the state of one layer lies: `mem.planes[plane][number]`, and of that `[:, part]` where `part` is a number.

    Attributes:
        layer: number of the layer in the model.
        kind: "conv" or "recurrent".
        state: number of the state within the layer.
        plane: name of the plane.
        number: layer of the plane.
        part: entry of the plane's first axis, where a layer of the plane holds several states; None: it holds one.
    """

    layer: int
    kind: str
    state: int
    plane: str
    number: int
    part: int | None

    def of(self, plane: Any) -> Tensor:
        """Returns the state of this place in the tensors of its plane, whether of all slots or of a batch."""
        tensor: Tensor = plane[self.number]
        return tensor if self.part is None else tensor[:, self.part]


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
    """

    state: StateLayout
    places: tuple[Place, ...] = field(repr=False)
    attended: tuple[Attended, ...] = field(repr=False)
    argument: str
    layers: int
    continues: bool

    def of_layer(self, layer: int) -> dict[tuple[str, int], Place]:
        """Returns the places of one layer, by kind and number of the state."""
        return {(place.kind, place.state): place for place in self.places if place.layer == layer}


def layout(model: Any) -> ModelLayout:
    """Returns what one state of a model is made of, read off its own cache.

    The model runs on 8 tokens, a few times. States of equal shape and dtype are one plane. So no list of families is
    needed, and dtypes and window widths are those that the model really uses.

    Args:
        model: a model of Transformers with its weights, on the device where it is going to run.

    Returns:
        The layout, with a map from layers to planes.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache.

    Syncs: yes.
    """
    return layout_of(probe(model))


def layout_of(found: Findings) -> ModelLayout:
    """Returns the layout of what a probe found.

    Args:
        found: what `probe` returned.
    """
    state, places = grouped(found.held)
    return ModelLayout(state, places, found.attended, found.argument, found.layers, found.continues)


def grouped(held: Sequence[Held]) -> tuple[StateLayout, tuple[Place, ...]]:
    """Returns planes for states of any shapes, and the place of each state.

    Every plane of a StateLayout exists once in each layer. Planes of different numbers of states share the greatest
    common divisor of these numbers as their layers. A layer of a plane then holds several states, and no byte is
    wasted.

    Args:
        held: the states.
    """
    groups: dict[tuple[str, tuple[int, ...], torch.dtype], list[Held]] = {}
    for each in held:
        groups.setdefault((each.kind, each.shape, each.dtype), []).append(each)
    layers = gcd(*map(len, groups.values()))
    planes, places, taken = [], {}, Counter[str]()
    for (kind, shape, dtype), members in groups.items():
        taken[kind] += 1
        name = NAMES.get(kind, kind) + (str(taken[kind]) if taken[kind] > 1 else "")
        parts = len(members) // layers
        planes.append(Plane(name, shape if parts == 1 else (parts, *shape), dtype))
        for number, each in enumerate(members):
            part = None if parts == 1 else number % parts
            places[each] = Place(each.layer, kind, each.state, name, number // parts, part)
    return StateLayout(tuple(planes), layers), tuple(places[each] for each in held)
