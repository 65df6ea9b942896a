"""One layout for states of any shapes: equal states share a plane."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memstate.state.layout import Order, Plane, StateLayout


def grouped(states: Sequence[Plane], order: Order = "layer_major") -> tuple[StateLayout, tuple[tuple[str, int], ...]]:
    """Returns one layout for the states of all layers of a model, and where each of them lies in it.

    Equal states are one plane. A second plane of the same name gets the number 2. The layers of the layout are those of
    the largest plane; the others may have layers of their own.

    Args:
        states: each state of each layer of the model; one or more.
        order: of the layout.

    Returns:
        The layout, and for each state the name of its plane and the layer of the plane.
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
