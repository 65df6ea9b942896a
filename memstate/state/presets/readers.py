"""Reads the state of a layer from the fields of a configuration. Knows how to compute a state, and no model type.

A missing field is an error and never a default, because a wrong layout is worse than none. A reader gets the fields,
the number of a layer with state, and the names of its fields as `memstate.state.presets.rules` has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import lcm, prod

import torch

from memstate.checks import is_whole
from memstate.state.layout import Plane
from memstate.state.presets import families, tails
from memstate.state.presets.families import LayerState, matrices, window
from memstate.state.presets.fields import Fields
from memstate.state.presets.layers import COMPRESSED, attending, compressors, kinds
from memstate.state.presets.tails import OF_MODEL
from memstate.state.sharding import Part

LEAST = torch.tensor(-1e30, device="cpu").item()  # exponent of a sum without tokens, as fp32 holds it
Reader = Callable[..., LayerState]  # (fields, number of a layer with state, names of fields ..) -> its state


def kv_heads(fields: Fields, layer: int) -> tuple[int, int]:
    """Returns (KV heads of a layer, size of a head). Raises: InvalidArgument."""
    if fields.get("attn") is not None:
        own = attending(fields)[layer]
        return own.number("num_kv_heads", "num_heads"), fields.number("hidden_size") // own.number("num_heads")
    prefix = "swa_" if fields.get("swa_num_key_value_heads") is not None and _sliding(fields, layer) else ""
    heads = fields.number(f"{prefix}num_key_value_heads")
    names = [name for name in (f"{prefix}head_dim", "attention_head_dim") if fields.get(name) is not None]
    return heads, fields.number(*names) if names else _head_size(fields, "num_attention_heads")


def _sliding(fields: Fields, layer: int) -> bool:
    """Returns whether a layer attends only to a window, and so has other KV heads. Raises: InvalidArgument.

    A layer that runs several times has its own number for the first run, and numbers behind all layers for the others.
    """
    if (start := fields.get("loop_layer_index_start")) is not None and layer >= fields.number("num_hidden_layers"):
        looped = fields.number("loop_layer_index_end") - start
        layer = start + (layer - fields.number("num_hidden_layers")) % looped
    if fields.get("layer_types") is not None:
        return kinds(fields, "layer_types")[layer] == "hybrid_sliding"
    return layer in fields.numbers("local_layer_ids", range(fields.number("num_hidden_layers")))


def _head_size(fields: Fields, heads: str) -> int:
    return fields.number("hidden_size") // fields.number(heads)


def gated_delta(fields: Fields, layer: int, *names: str, by_key: bool = False) -> LayerState:
    """Reads a gated delta rule, which may also add embeddings of n-grams in some layers, as in Qwen4-Exp.

    These layers also keep the inputs of a dilated convolution, and the last tokens. At the start of a text, the missing
    last tokens are the token that ends a text.
    """
    key_heads, value_heads, *_ = names
    fields.require_multiple(value_heads, key_heads)
    kept = families.delta_rule(*map(fields.number, names), by_key=by_key)
    if not fields.get("ple_layer_ids"):
        return kept
    if layer + 1 not in fields.numbers("ple_layer_ids", range(1, fields.number("num_hidden_layers") + 1)):
        return kept
    before, channels = fields.number("ngram_size") - 1, fields.number("hc_count") * fields.number("hidden_size")
    inputs = Plane("conv", (channels, (fields.number("ple_conv_kernel_size") - 1) * (before + 1)), OF_MODEL)
    ends = fields.get("eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    tokens = Plane("conv", (before,), torch.int64, fill=end if is_whole(end) else 0)
    conv, ssm = kept.planes
    return kept._replace(planes=(conv, inputs, tokens, ssm), rings=())


def kimi(fields: Fields, _: int, heads: str, dim: str, width: str) -> LayerState:
    """Reads Kimi's rule."""
    count, size = fields.number(heads), fields.number(dim)
    return families.delta_rule(count, count, size, size, fields.number(width), by_key=True)


def jet(fields: Fields, _: int, heads: str, dim: str, expand: str, width: str) -> LayerState:
    """Reads a gated delta rule with one convolution, of values, whose weights depend on the token: Jet-Nemotron."""
    count, size = fields.number(heads), fields.number(dim)
    value = fields.scaled(size, expand)
    return families.linear(count, size, value, window(Part("v", count, value), width=fields.number(width)))


def lightning(fields: Fields, _: int, heads: str, dim: str, *queries: str) -> LayerState:
    """Reads lightning attention. `queries` may name a field with the number of query heads, which must be the same."""
    if any(fields.get(name) not in (None, fields.number(heads)) for name in queries):
        raise fields.refused(heads, *queries, expected="as many heads of queries as of keys")
    return families.lightning(
        fields.number(heads), fields.number(dim) if fields.get(dim) is not None else _head_size(fields, heads)
    )


def mamba2(
    fields: Fields, layer: int, heads: str, dim: str, groups: str, state: str, width: str, *wide: str
) -> LayerState:
    """Reads Mamba-2. If layers have fields of their own, in `block_configs`, those come before the model's.

    `wide` names fields for the channels of all heads: maybe one for their number, then two for factors of it. They are
    missing if the class does not require that: heads of Nemotron-H are not expand * hidden_size channels.
    """
    if blocks := fields.get("block_configs"):
        kinds(fields, "block_configs")  # refuses what is no list of blocks
        block, every = dict(enumerate(blocks)).get(layer), (heads, dim, groups, state, width, *wide)
        own = block if isinstance(block, Mapping) else {}
        fields = Fields({name: own.get(name, fields.get(name)) for name in ("model_type", *every)})
    count, fixed = fields.number(heads), fields.get(dim) not in (None, "auto")
    fields.require_multiple(heads, groups)
    there = [names for names in (wide[:-2], wide[-2:]) if names and all(fields.get(name) is not None for name in names)]
    names = there[0] if there else ()
    channels = prod(map(fields.number, names))
    size = fields.number(dim) if fixed or not names else channels // count
    if names and count * size != channels:
        raise fields.refused(heads, dim, *names, expected=f"heads of one size that make up {channels} channels")
    return families.mamba2(count, size, *map(fields.number, (groups, state, width)))


def mamba(fields: Fields, _: int, state: str, width: str, *wide: str) -> LayerState:
    """Reads Mamba. `wide` names fields for its channels: maybe one for their number, then two for factors of it."""
    # Prefer intermediate_size: Falcon-Mamba-7B has expand 16, but its channels are only twice its hidden size.
    channels = wide[:1] if len(wide) == 3 and fields.get(wide[0]) is not None else wide[-2:]
    return families.mamba(prod(map(fields.number, channels)), fields.number(state), fields.number(width))


def mamba_heads(fields: Fields, _: int, heads: str, state: str, width: str, *dim: str) -> LayerState:
    """Reads Mamba with channels in heads, ssm `head channel state`: Zamba, https://arxiv.org/abs/2405.16712, PLaMo 2.

    `dim` names a field for the channels of a head, or two for factors of the channels of all heads.
    """
    count, total = fields.number(heads), prod(map(fields.number, dim))
    if len(dim) > 1 and total % count:
        raise fields.refused(*dim, heads, expected=f"{total} channels in heads of one size")
    size, states = total if len(dim) == 1 else total // count, fields.number(state)
    conv = window(Part("x", count, size), width=fields.number(width))
    rings = tails.of_window(conv), tails.of_channels(count, size, states)
    return LayerState((conv, matrices(count, size, states)), rings=rings)


def mamba3(fields: Fields, _: int, expand: str, hidden: str, dim: str, state: str, rotated: str) -> LayerState:
    """Reads Mamba-3 with the fields of flash-linear-attention; `rope_fraction` of a head is rotated, pair by pair."""
    turned, channels = fields.get(rotated), fields.number(expand) * fields.number(hidden)
    if turned not in (0.5, 1.0) or fields.get("is_mimo"):
        raise fields.refused(rotated, "is_mimo", expected="0.5 or 1.0, and one input and output")
    size, states = fields.number(dim), fields.number(state)
    if channels % size:
        raise fields.refused(expand, hidden, dim, expected=f"{channels} channels in heads of one size")
    return families.mamba3(channels // size, size, states, int(states * turned) // 2)


def short_conv(fields: Fields, _: int, hidden: str, width: str) -> LayerState:
    """Reads a gated short convolution: a window over the channels, no ssm plane.

    See https://arxiv.org/abs/2511.23404.
    """
    return families.convolutions(window(Part("x", fields.number(hidden)), width=fields.number(width)))


def short_convs(fields: Fields, layer: int, width: str, *_: str) -> LayerState:
    """Reads four short convolutions of a layer, as in Inkling: of keys, values, and the outputs of attention and MLP.

    Every rank holds the windows of the outputs. The classes compute all four in fp32.
    """
    taps = fields.number(width)
    keys = replace(window(Part("head", *kv_heads(fields, layer)), width=taps), dtype=torch.float32)
    outputs = Plane("conv", (fields.number("hidden_size"), taps - 1), torch.float32)
    return families.convolutions(keys, keys, outputs, outputs)


def convolved_attention(fields: Fields, layer: int, first: str, second: str) -> LayerState:
    """Reads compressed convolutional attention, as in Zaya: a window over q | k for two convolutions, and half a value.

    See https://arxiv.org/abs/2510.04476. Half of the last value is kept. Every rank holds it, because its
    heads do not divide.
    """
    heads, size = kv_heads(fields, layer)
    width = fields.number(first) + fields.number(second) - 1
    conv = window(Part("q", fields.number("num_attention_heads"), size), Part("k", heads, size), width=width)
    return LayerState((conv, Plane("ssm", (heads * size // 2,), OF_MODEL)))


def compressed(fields: Fields, layer: int, dim: str, index_dim: str) -> LayerState:
    """Reads the windows that pool KV in a layer of DeepSeek-V4 and, if windows overlap, those that pool index keys.

    An open window belongs to the request, not to the state. So a state can be kept only at lengths at which the windows
    of all layers close.
    """
    pooling = compressors(fields)
    (kind, rate), size = pooling[layer], fields.number(dim)
    if kind != COMPRESSED[4]:
        return families.compressor("hca", rate, size)
    grid = lcm(*(rate for _, rate in pooling.values()))
    kv, index = (
        families.compressor("csa", rate, size, grid),
        families.compressor("index", rate, fields.number(index_dim), grid),
    )
    return LayerState(kv.planes + index.planes, rows=kv.rows + index.rows)


def rg_lru(fields: Fields, _: int, channels: str, width: str, heads: str) -> LayerState:
    """Reads a real-gated linear recurrence, https://arxiv.org/abs/2402.19427: a window, and ssm `channel`."""
    fields.require_multiple(channels, heads)
    count, total = fields.number(heads), fields.number(channels)
    conv = window(Part("x", count, total // count), width=fields.number(width))
    return families.channels(count, total // count, conv)


def mlstm(fields: Fields, _: int, heads: str, hidden: str, key: str, value: str) -> LayerState:
    """Reads the matrix memory of xLSTM, https://arxiv.org/abs/2405.04517: ssm `head key value`, norm and max of it."""
    count, size = fields.number(heads), fields.number(hidden)
    keys, values = (fields.scaled(size, factor) // count for factor in (key, value))
    memory = families.linear(count, keys, values)
    beside = (replace(matrices(count, *shape), name=name) for name, shape in (("norm", (keys,)), ("max", (1,))))
    return memory._replace(planes=(*memory.planes, *beside))


def rwkv4(fields: Fields, _: int, hidden: str, attention: str, *__: str) -> LayerState:
    """Reads RWKV-4, https://arxiv.org/abs/2305.13048: two token shifts, a sum, its weight, and the largest exponent."""
    size = fields.number(attention)
    shift, ssm = Plane("conv", (fields.number(hidden), 1), OF_MODEL), Plane("ssm", (size,), torch.float32)
    return LayerState((shift, shift, ssm, ssm, replace(ssm, name="max", fill=LEAST)))


def shifted(fields: Fields, hidden: str, heads: int, key: int, value: int) -> LayerState:
    """Returns two token shifts, the last inputs of time mixing and of channel mixing, and ssm `head key value`.

    Every rank holds the shifts.
    """
    shift = Plane("conv", (fields.number(hidden), 1), OF_MODEL)
    return families.linear(heads, key, value, shift, shift)


def rwkv7(fields: Fields, _: int, hidden: str, dim: str) -> LayerState:
    """Reads RWKV-7, https://arxiv.org/abs/2503.14456, with the fields of flash-linear-attention."""
    fields.require_multiple(hidden, dim)
    size, given = fields.number(dim), fields.get("value_dim")
    values = given if isinstance(given, list | tuple) else [given]  # one number for all layers, or one for each
    if any(each not in (None, fields.number(hidden)) for each in values):
        raise fields.refused("value_dim", hidden, expected="as many values as keys")
    heads = fields.number(hidden) // size
    kept = shifted(fields, hidden, heads, size, size)
    return kept._replace(rings=(*[tails.of_window(kept.planes[0])] * 2, tails.of_generalized_rule(heads, size)))
