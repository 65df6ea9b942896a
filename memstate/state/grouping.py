"""One layout for states of any shapes: equal states share a plane."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from memstate.state.layout import Order, Plane, StateLayout

Lies = tuple[str, int, int | None]  # name and layer of the plane, and the entry of its first axis, None: the layer


def grouped(states: Sequence[Plane], order: Order = "layer_major") -> tuple[StateLayout, tuple[Lies, ...]]:
    """Returns one layout for the states of all layers of a model, and where each of them lies in it.

    Equal states are one plane. A second plane of the same name gets the number 2. Every plane of a StateLayout exists
    once in each layer. Planes of different numbers of states share the greatest common divisor of these numbers as
    their layers. A layer of a plane then holds several states, in an axis before the others, and no byte is wasted.

    Args:
        states: each state of each layer of the model; one or more.
        order: of the layout.

    Returns:
        The layout, and for each state the name of its plane, the layer of the plane, and the entry of that layer's
        first axis; None where the layer is the state.
    """
    groups: dict[Plane, list[int]] = {}
    for at, state in enumerate(states):
        groups.setdefault(state, []).append(at)
    layers = gcd(*map(len, groups.values()))
    planes, lies, taken = [], dict[int, Lies](), Counter[str]()
    for like, members in groups.items():
        taken[like.name] += 1
        name = like.name + (str(taken[like.name]) if taken[like.name] > 1 else "")
        each = len(members) // layers
        shape, axis = ((each, *like.shape), like.axis + bool(like.parts)) if each > 1 else (like.shape, like.axis)
        planes.append(replace(like, name=name, shape=shape, axis=axis))
        for number, at in enumerate(members):
            lies[at] = (name, number // each, None if each == 1 else number % each)
    return StateLayout(tuple(planes), layers, order), tuple(lies[at] for at in range(len(states)))
