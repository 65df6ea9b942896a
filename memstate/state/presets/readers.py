"""Reads the state of a layer from the fields of a configuration, by model type. Imports no transformers.

A missing field is an error and never a default, because a wrong layout is worse than none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Final

import torch

from memstate.checks import is_whole
from memstate.state.layout import Plane
from memstate.state.presets import tails
from memstate.state.presets.families import (
    LayerState,
    compressor,
    convolutions,
    delta_rule,
    mamba,
    mamba2,
    mamba3,
    matrices,
    window,
)
from memstate.state.presets.fields import Fields
from memstate.state.presets.layers import COMPRESSED, compressors, sliding
from memstate.state.presets.tails import OF_MODEL
from memstate.state.sharding import Part

Reader = Callable[[Fields, int], LayerState]  # (fields, number of a layer with state) -> its state

SLIDING_HEADS: Final = ("inkling_text", "inkling2_text")  # model types whose sliding layers have other KV heads
_EXPANDED: Final = ("mamba_expand", "hidden_size")  # fields whose product is the channels of all heads


def kv_heads(fields: Fields, layer: int) -> tuple[int, int]:
    """Returns (KV heads of a layer, size of a head). Raises: InvalidArgument."""
    own = "swa_" if fields.get("model_type") in SLIDING_HEADS and sliding(fields, layer) else ""
    heads = fields.number(f"{own}num_key_value_heads")
    names = [name for name in (f"{own}head_dim", "attention_head_dim") if fields.get(name) is not None]
    size = fields.number(*names) if names else fields.number("hidden_size") // fields.number("num_attention_heads")
    return heads, size


def _delta_rule(fields: Fields, _: int) -> LayerState:
    fields.require_multiple("linear_num_value_heads", "linear_num_key_heads")
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    return delta_rule(*(fields.number(f"linear_{name}") for name in names))


def _ngram_delta(fields: Fields, layer: int) -> LayerState:
    """Reads a delta rule that also adds embeddings of n-grams in some layers, as in Qwen4-Exp.

    These layers also keep the inputs of a dilated convolution, and the last tokens. At the start of a text, the missing
    last tokens are the token that ends a text.
    """
    kept, total = _delta_rule(fields, layer), fields.number("num_hidden_layers")
    if not fields.get("ple_layer_ids") or layer + 1 not in fields.numbers("ple_layer_ids", range(1, total + 1)):
        return kept
    before, channels = fields.number("ngram_size") - 1, fields.number("hc_count") * fields.number("hidden_size")
    inputs = Plane("conv", (channels, (fields.number("ple_conv_kernel_size") - 1) * (before + 1)), OF_MODEL)
    ends = fields.get("eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    tokens = Plane("conv", (before,), torch.int64, fill=end if is_whole(end) else 0)
    conv, ssm = kept.planes
    return kept._replace(planes=(conv, inputs, tokens, ssm), rings=())


def _kimi(heads: str, dim: str, width: str) -> Reader:
    """Returns a reader of Kimi's rule; the arguments name the fields of a checkpoint that lacks those of the class."""

    def read(fields: Fields, _: int) -> LayerState:
        count, size = fields.number("linear_num_heads", heads), fields.number("linear_head_dim", dim)
        return delta_rule(count, count, size, size, fields.number("linear_conv_kernel_dim", width), by_key=True)

    return read


_KIMI: Final = _kimi(*(f"linear_attn_config.{name}" for name in ("num_heads", "head_dim", "short_conv_kernel_size")))


def _mamba2(
    heads: str, dim: str, groups: str, state: str, width: str, *, wide: Sequence[tuple[str, ...]] = ()
) -> Reader:
    """Returns a reader of Mamba-2; the first five arguments name a model's fields for the five dimensions.

    `wide` has tuples of fields; the product of the first tuple that a configuration has must be the channels of all
    heads. It is empty if the class does not require that: heads of Nemotron-H are not expand * hidden_size channels.
    """

    def read(fields: Fields, _: int) -> LayerState:
        count, fixed = fields.number(heads), fields.get(dim) not in (None, "auto")
        fields.require_multiple(heads, groups)
        there = [names for names in wide if all(fields.get(name) is not None for name in names)]
        names = there[0] if there else ()
        channels = prod(map(fields.number, names))
        size = fields.number(dim) if fixed or not names else channels // count
        if names and count * size != channels:
            raise fields.refused(heads, dim, *names, expected=f"heads of one size that make up {channels} channels")
        return mamba2(count, size, *map(fields.number, (groups, state, width)))

    return read


def _mamba(fields: Fields, _: int) -> LayerState:
    # Prefer intermediate_size: Falcon-Mamba-7B has expand 16, but its channels are only twice its hidden size.
    wide = ("intermediate_size",) if fields.get("intermediate_size") is not None else ("expand", "hidden_size")
    return mamba(prod(map(fields.number, wide)), fields.number("state_size"), fields.number("conv_kernel"))


def _jamba(fields: Fields, _: int) -> LayerState:
    channels = prod(map(fields.number, _EXPANDED))  # intermediate_size belongs to the MLP
    return mamba(channels, fields.number("mamba_d_state"), fields.number("mamba_d_conv"))


def _zamba(fields: Fields, _: int) -> LayerState:
    """Reads Mamba with channels in heads: ssm `head channel state`. See https://arxiv.org/abs/2405.16712."""
    channels, heads = prod(map(fields.number, _EXPANDED)), fields.number("n_mamba_heads")
    if channels % heads:
        raise fields.refused(*_EXPANDED, "n_mamba_heads", expected=f"{channels} channels in heads of one size")
    conv = window(Part("x", heads, channels // heads), width=fields.number("mamba_d_conv"))
    state = fields.number("mamba_d_state")
    rings = tails.of_window(conv), tails.of_channels(heads, channels // heads, state)
    return LayerState((conv, matrices(heads, channels // heads, state)), rings=rings)


def _rwkv7(fields: Fields, _: int) -> LayerState:
    """Reads RWKV-7: ssm `head key value`, and two token shifts, the last inputs of time mixing and of channel mixing.

    See https://arxiv.org/abs/2503.14456. The fields are those of flash-linear-attention. Every rank holds the shifts.
    """
    fields.require_multiple("hidden_size", "head_dim")
    size = fields.number("head_dim")
    heads = fields.number("hidden_size") // size
    shift = Plane("conv", (fields.number("hidden_size"), 1), OF_MODEL)
    rings = *[tails.of_window(shift)] * 2, tails.of_generalized_rule(heads, size)
    return LayerState((shift, shift, matrices(heads, size, size)), ("key_value", "value_key"), rings=rings)


def _mamba3(fields: Fields, _: int) -> LayerState:
    """Reads Mamba-3 with the fields of flash-linear-attention; `rope_fraction` of a head is rotated, pair by pair."""
    turned, channels = fields.get("rope_fraction"), fields.number("expand") * fields.number("hidden_size")
    if turned not in (0.5, 1.0) or fields.get("is_mimo"):
        raise fields.refused("rope_fraction", "is_mimo", expected="0.5 or 1.0, and one input and output")
    size, states = fields.number("head_dim"), fields.number("state_size")
    if channels % size:
        raise fields.refused("expand", "hidden_size", "head_dim", expected=f"{channels} channels in heads of one size")
    return mamba3(channels // size, size, states, int(states * turned) // 2)


def _short_conv(fields: Fields, _: int) -> LayerState:
    """Reads a gated short convolution: a window over the channels, no ssm plane.

    See https://arxiv.org/abs/2511.23404.
    """
    return convolutions(window(Part("x", fields.number("hidden_size")), width=fields.number("conv_L_cache")))


def _short_convs(fields: Fields, layer: int) -> LayerState:
    """Reads four short convolutions of a layer, as in Inkling: of keys, values, and the outputs of attention and MLP.

    Every rank holds the windows of the outputs. The classes compute all four in fp32.
    """
    width = fields.number("conv_kernel_size", "sconv_kernel_size")
    keys = replace(window(Part("head", *kv_heads(fields, layer)), width=width), dtype=torch.float32)
    outputs = Plane("conv", (fields.number("hidden_size"), width - 1), torch.float32)
    return convolutions(keys, keys, outputs, outputs)


def _convolved_attention(fields: Fields, layer: int) -> LayerState:
    """Reads compressed convolutional attention, as in Zaya: a window over q | k for two convolutions, and half a value.

    See https://arxiv.org/abs/2510.04476. Half of the last value is kept. Every rank holds it, because its
    heads do not divide.
    """
    heads, size = kv_heads(fields, layer)
    width = fields.number("cca_time0") + fields.number("cca_time1") - 1
    conv = window(Part("q", fields.number("num_attention_heads"), size), Part("k", heads, size), width=width)
    return LayerState((conv, Plane("ssm", (heads * size // 2,), OF_MODEL)))


def _compressed(fields: Fields, layer: int) -> LayerState:
    """Reads the windows that pool KV in a layer of DeepSeek-V4 and, if windows overlap, those that pool index keys.

    An open window belongs to the request, not to the state. So a state can be kept only at lengths at which the windows
    of all layers close.
    """
    pooling = compressors(fields)
    (kind, rate), size = pooling[layer], fields.number("head_dim")
    if kind != COMPRESSED[4]:
        return compressor("hca", rate, size)
    grid = lcm(*(rate for _, rate in pooling.values()))
    kv, index = compressor("csa", rate, size, grid), compressor("index", rate, fields.number("index_head_dim"), grid)
    return LayerState(kv.planes + index.planes, rows=kv.rows + index.rows)


def _hybrid_mamba2(*wide: tuple[str, ...]) -> Reader:
    names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return _mamba2(*names, wide=wide)


READERS: Final[Mapping[str, Reader]] = {
    "qwen3_next": _delta_rule,
    "qwen3_5_text": _delta_rule,
    "qwen3_5_moe_text": _delta_rule,
    "qwen4_exp_text": _ngram_delta,
    "olmo_hybrid": _delta_rule,
    "kimi_linear": _KIMI,
    "glm5_next_text": _KIMI,
    "glm5_next": _KIMI,  # checkpoints without vision have no nested text model
    "bailing_hybrid": _kimi("num_attention_heads", "head_dim", "short_conv_kernel_size"),
    "nemotron_h": _mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "falcon_h1": _hybrid_mamba2(("mamba_d_ssm",), _EXPANDED),
    "bamba": _hybrid_mamba2(_EXPANDED),
    "granitemoehybrid": _hybrid_mamba2(_EXPANDED),
    "zamba": _zamba,
    "zamba2": _mamba2(
        "n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", wide=[_EXPANDED]
    ),
    "mamba2": _mamba2(
        "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", wide=[("expand", "hidden_size")]
    ),
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "jamba": _jamba,
    "rwkv7": _rwkv7,
    "mamba3": _mamba3,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "zaya": _convolved_attention,
    "inkling_text": _short_convs,
    "inkling2_text": _short_convs,
    "deepseek_v4": _compressed,
}
