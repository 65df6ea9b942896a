"""Reads the state of models of flash-linear-attention, by model type: many of their rules have the same fields.

The states are those of its layers, in fp32, with keys first. The windows of q, k and v are one plane.
"""

from dataclasses import replace
from typing import NamedTuple

from memstate.state.layout import Plane
from memstate.state.presets import families
from memstate.state.presets.families import LayerState, matrices, window
from memstate.state.presets.fields import Fields
from memstate.state.presets.readers import shifted
from memstate.state.sharding import Part


class Sizes(NamedTuple):
    """Heads of queries, heads of keys, heads of values; keys and values of a head."""

    heads: int
    key_heads: int
    value_heads: int
    key: int
    value: int


def sizes(fields: Fields) -> Sizes:
    """Returns the sizes of a layer, from the sizes of a head or from those of all heads. Raises: InvalidArgument."""
    heads = fields.number("num_heads")
    given = ("num_kv_heads", "num_v_heads")
    key_heads, value_heads = (heads if fields.get(name) is None else fields.number(name) for name in given)
    if fields.get("head_dim") is not None:
        key = fields.number("head_dim")
        return Sizes(heads, key_heads, value_heads, key, fields.scaled(key, "expand_v"))
    hidden = fields.number("hidden_size")
    key, value = (fields.scaled(hidden, name) // heads for name in ("expand_k", "expand_v"))
    return Sizes(heads, key_heads, value_heads, key, value)


def windows(fields: Fields, *parts: Part) -> tuple[Plane, ...]:
    """Returns the window of the short convolutions, none if the model has none. Raises: InvalidArgument."""
    if not isinstance(fields.get("use_short_conv"), bool):
        raise fields.refused("use_short_conv", expected="true or false")
    return (window(*parts, width=fields.number("conv_size")),) if fields.get("use_short_conv") else ()


def delta(fields: Fields, _: int, *, by_key: bool = False) -> LayerState:
    """Reads a gated delta rule, or one without gates; with `by_key`, Kimi's."""
    heads, _, value_heads, key, value = sizes(fields)
    kept = families.delta_rule(heads, value_heads, key, value, 2, by_key=by_key)
    convs = windows(fields, *kept.planes[0].parts)
    return kept._replace(planes=(*convs, kept.planes[1]), rings=kept.rings[-1 - len(convs) :])


def corrected(fields: Fields, layer: int) -> LayerState:
    """Reads Comba, https://arxiv.org/abs/2506.02475: the state of a gated delta rule. Its steps take other inputs."""
    return delta(fields, layer)._replace(rings=(), summed=None)


def product(fields: Fields, _: int) -> LayerState:
    """Reads a gated delta product, https://arxiv.org/abs/2502.10297: each token has several keys and values."""
    heads, _, value_heads, key, value = sizes(fields)
    parts = [Part("q", heads, key)]
    for part in (Part("k", heads, key), Part("v", value_heads, value)):
        parts += [replace(part, name=f"{part.name}{n}") for n in range(fields.number("num_householder"))]
    return families.linear(value_heads, key, value, *windows(fields, *parts))


def conditioned(fields: Fields, layer: int, *, by_key: bool = False) -> LayerState:
    """Reads a delta rule whose keys are scaled by a running sum of them."""
    kept, own = delta(fields, layer, by_key=by_key), sizes(fields)
    scale = matrices(own.value_heads if by_key else own.heads, own.key)
    return LayerState((*kept.planes, replace(scale, name="scale")), kept.orders)


def mesa(fields: Fields, _: int) -> LayerState:
    """Reads MesaNet, https://arxiv.org/abs/2506.05233: two matrices of keys and keys, and of keys and values."""
    heads, size = fields.number("num_heads"), fields.number("head_dim")
    conv = window(Part("q", heads, size), Part("k", heads, size), width=fields.number("conv_size"))
    return LayerState((conv, *[matrices(heads, size, size)] * 2))


def attention(fields: Fields, _: int, *, short: bool = True) -> LayerState:
    """Reads linear attention with or without gates; some models never have short convolutions."""
    heads, key_heads, _, key, value = sizes(fields)
    if fields.get("feature_map") in ("hedgehog", "dpfp"):
        raise fields.refused("feature_map", expected="a map that does not make keys longer")
    parts = Part("q", heads, key), Part("k", key_heads, key), Part("v", key_heads, value)
    return families.linear(heads, key, value, *(windows(fields, *parts) if short else ()))


def slots(fields: Fields, layer: int, *, short: bool = True) -> LayerState:
    """Reads attention to a fixed number of slots, https://arxiv.org/abs/2409.07146: keys and values of each slot."""
    kept, own, number = attention(fields, layer, short=short), sizes(fields), fields.number("num_slots")
    return LayerState((*kept.planes[:-1], matrices(own.heads, own.key, number), matrices(own.heads, number, own.value)))


def hgrn(fields: Fields, _: int) -> LayerState:
    """Reads HGRN, https://arxiv.org/abs/2311.04823: a recurrence of single channels."""
    channels = fields.scaled(fields.number("hidden_size"), "expand_ratio")
    return families.channels(channels, 1, *windows(fields, Part("i", channels), Part("f", channels)))


def expanded(fields: Fields, _: int, *, normed: bool = False) -> LayerState:
    """Reads HGRN2, https://arxiv.org/abs/2404.07904, and LightNet, which also keeps the norm of its keys."""
    fields.require_multiple("hidden_size", "expand_ratio")
    size = fields.number("expand_ratio")
    heads = fields.number("hidden_size") // size
    parts = Part("q", heads, size), Part("k", heads, size), Part("v", heads, size)
    kept = families.linear(heads, size, size, *windows(fields, *parts))
    norm = [replace(matrices(heads, size), name="norm")] if normed else []
    return kept._replace(planes=(*kept.planes, *norm))


def rodimus(fields: Fields, _: int) -> LayerState:
    """Reads Rodimus, https://arxiv.org/abs/2410.06577: ssm `channel state`, of twice as many channels as inputs."""
    channels = -(-2 * fields.number("hidden_size") // 8) * 8
    ssm = families.mamba(channels, fields.number("expand_ratio"), 1).planes[1]
    return LayerState((*windows(fields, Part("x", channels)), ssm))


def rwkv6(fields: Fields, _: int) -> LayerState:
    """Reads RWKV-6, https://arxiv.org/abs/2404.05892."""
    own = sizes(fields)
    return shifted(fields, "hidden_size", own.heads, own.key, own.value)
