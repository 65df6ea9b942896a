"""The rings of tails: what the memory of a row keeps of tokens that are not in its state yet. Knows no model.

The fields of `ConvTail`, `DeltaTail` and `SelectiveTail` in `memstate.kernels.tables` say what a decode step keeps of a
token: its inputs in the dtype of the model, gates and rates in fp32.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from memstate.state.layout import Plane, StateLayout
from memstate.state.sharding import Part

OF_MODEL: Final = torch.bfloat16  # of a plane that has the dtype of the model in the classes of transformers
Fields = tuple[Plane, ...]  # of a tail, each for one token


def of_heads(name: str, heads: int, *shape: int, dtype: torch.dtype = OF_MODEL) -> Plane:
    """A field with `head ...` of a token."""
    return Plane(name, (heads, *shape), dtype, parts=(Part("head", heads),))


def of_window(conv: Plane) -> Fields:
    """What a convolution keeps of a token, whose window is `channel (width-1)`."""
    return (replace(conv, name="x", shape=conv.shape[:1]),)


def of_delta_rule(key_heads: int, heads: int, key: int, value: int, *, by_key: bool) -> Fields:
    """What a gated delta rule keeps of a token, with a gate a head, or a key channel."""
    gate = of_heads("gate", heads, *[key] * by_key, dtype=torch.float32)
    k, v = of_heads("k", key_heads, key), of_heads("v", heads, value)
    return k, v, gate, of_heads("beta", heads, dtype=torch.float32)


def of_generalized_rule(heads: int, size: int) -> Fields:
    """What the rule of RWKV-7 keeps of a token: `a` and `b` in the place of beta."""
    k, v, gate, _ = of_delta_rule(heads, heads, size, size, by_key=True)
    return k, v, gate, replace(k, name="a"), replace(k, name="b")


def of_selective(heads: int, dim: int, groups: int, state: int) -> Fields:
    """What Mamba-2 keeps of a token."""
    x, b = of_heads("x", heads, dim), Plane("b", (groups, state), OF_MODEL, parts=(Part("group", groups),))
    return x, b, of_heads("dt", heads, dtype=torch.float32)


def of_channels(heads: int, channels: int, state: int) -> Fields:
    """What Mamba keeps of a token; of one head, ranks cut the channels."""
    x, b = of_heads("x", heads, channels), of_heads("b", heads, state)
    if heads == 1:
        x, b = replace(x, parts=(Part("x", channels),), axis=1), replace(b, parts=())
    return x, b, replace(x, name="dt", dtype=torch.float32)


def ringed(layout: StateLayout, fields: Sequence[tuple[str, Fields]], tail: int) -> StateLayout:
    """Returns a layout whose rows have rings of 3 * tail - 1 tokens.

    A ring is named after its plane and its field, such as "ssm_k", and has the layers of the plane.

    Args:
        layout: of the states.
        fields: for each state of each layer, the name of its plane, and what its tail keeps of a token.
        tail: tokens of a step.
    """
    of = dict(fields)
    rings = [
        replace(
            field, name=f"{plane.name}_{field.name}", shape=(3 * tail - 1, *field.shape),
            axis=field.axis + bool(field.parts), layers=plane.layers, fill=None,
        )
        for plane in layout.planes
        for field in of[plane.name]
    ]  # fmt: skip
    return replace(layout, rows=StateLayout(tuple(rings), layout.layers, layout.order))
