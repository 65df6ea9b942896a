"""Lists the rings of tails, in which a row keeps tokens that are not in its state yet. Knows no model.

A decode step keeps a token in the fields of `ConvTail`, `DeltaTail` or `SelectiveTail` of `memstate.kernels.tables`:
inputs in the dtype of the model; gates, beta and dt in fp32.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from memstate.state.layout import Plane, StateLayout
from memstate.state.sharding import Part

OF_MODEL: Final = torch.bfloat16  # stands for the dtype of the model
Fields = tuple[Plane, ...]  # fields of a tail, each with the shape of one token


def of_heads(name: str, heads: int, *shape: int, dtype: torch.dtype = OF_MODEL) -> Plane:
    """Returns a field `head ...` of one token."""
    return Plane(name, (heads, *shape), dtype, parts=(Part("head", heads),))


def of_window(conv: Plane) -> Fields:
    """Returns the field of a convolution; its window is `channel (width-1)`."""
    return (replace(conv, name="x", shape=conv.shape[:1]),)


def of_delta_rule(key_heads: int, heads: int, key: int, value: int, *, by_key: bool) -> Fields:
    """Returns the fields of a gated delta rule, with one gate per head, or with `by_key` one per key channel."""
    gate = of_heads("gate", heads, *[key] * by_key, dtype=torch.float32)
    k, v = of_heads("k", key_heads, key), of_heads("v", heads, value)
    return k, v, gate, of_heads("beta", heads, dtype=torch.float32)


def of_generalized_rule(heads: int, size: int) -> Fields:
    """Returns the fields of the rule of RWKV-7: `a` and `b` replace beta."""
    k, v, gate, _ = of_delta_rule(heads, heads, size, size, by_key=True)
    return k, v, gate, replace(k, name="a"), replace(k, name="b")


def of_selective(heads: int, dim: int, groups: int, state: int) -> Fields:
    """Returns the fields of Mamba-2."""
    x, b = of_heads("x", heads, dim), Plane("b", (groups, state), OF_MODEL, parts=(Part("group", groups),))
    return x, b, of_heads("dt", heads, dtype=torch.float32)


def of_channels(heads: int, channels: int, state: int) -> Fields:
    """Returns the fields of Mamba; with one head, ranks cut the channels."""
    x, b = of_heads("x", heads, channels), of_heads("b", heads, state)
    if heads == 1:
        x, b = replace(x, parts=(Part("x", channels),), axis=1), replace(b, parts=())
    return x, b, replace(x, name="dt", dtype=torch.float32)


def ringed(layout: StateLayout, fields: Sequence[tuple[str, Fields]], tail: int) -> StateLayout:
    """Returns a layout whose rows have rings of 3 * tail - 1 tokens.

    A ring has the name of its plane and its field, such as "ssm_k", and the layers of the plane.

    Args:
        layout: layout of the states.
        fields: for each state of each layer, (name of its plane, fields of its tail).
        tail: limit of a row's tokens in a step.
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
