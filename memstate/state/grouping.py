"""Groups states of any shapes into one layout: equal states share a plane."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memstate.state.layout import Order, Plane, StateLayout


def grouped(states: Sequence[Plane], order: Order = "layer_major") -> tuple[StateLayout, tuple[tuple[str, int], ...]]:
    """Returns one layout for the states of all layers of a model, and where each state lies in it.

    Equal states share a plane. A second plane of the same name gets the number 2. The layout has as many layers as the
    plane with the most layers; other planes have their own number of layers.

    Args:
        states: one or more; every state of every layer of the model.
        order: order of the layout.

    Returns:
        The layout, and for each state (name of its plane, layer in this plane).
    """
    groups: dict[Plane, list[int]] = {}
    for at, state in enumerate(states):
        groups.setdefault(state, []).append(at)
    layers = len(max(groups.items(), key=lambda group: group[0].nbytes * len(group[1]))[1])
    planes, lies, taken = [], dict[int, tuple[str, int]](), Counter[str]()
    for like, members in groups.items():
        taken[like.name] += 1
        name = like.name + (str(taken[like.name]) if taken[like.name] > 1 else "")
        planes.append(replace(like, name=name, layers=None if len(members) == layers else len(members)))
        lies |= {at: (name, layer) for layer, at in enumerate(members)}
    return StateLayout(tuple(planes), layers, order), tuple(lies[at] for at in range(len(states)))
