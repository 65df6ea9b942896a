"""What the fields of a configuration mean, model type by model type. Knows names of fields; imports no transformers.

A configuration is an object with attributes, a config.json as a dict, or the path of one, written before or after
transformers 5.0. A field that is missing is an error, never a default: a wrong layout is worse than none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Final

import torch

from memstate.checks import is_whole, whole
from memstate.errors import InvalidArgument
from memstate.state.grouping import grouped
from memstate.state.layout import Order, Plane, StateLayout
from memstate.state.presets import tails
from memstate.state.presets.families import (
    ConvOrder,
    Kept,
    SsmOrder,
    compressor,
    conv_ordered,
    convolutions,
    delta_rule,
    mamba,
    mamba2,
    mamba3,
    matrices,
    ssm_ordered,
    window,
)
from memstate.state.presets.fields import Fields
from memstate.state.presets.layers import (
    COMPRESSED,
    attention_layers,
    compressors,
    require_layers,
    sliding,
    state_layers,
)
from memstate.state.presets.tails import OF_MODEL
from memstate.state.sharding import Part

NESTED = 4  # configurations of text models inside one another; real ones have one or two
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # fields that have the text model
DTYPE = ("dtype", "torch_dtype")  # the second before transformers 5.0
SSM_DTYPE = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")  # what engines keep states in
Reader = Callable[[Fields, int], Kept]  # fields and the number of a layer with state


def _delta_rule(fields: Fields, _: int) -> Kept:
    fields.require_multiple("linear_num_value_heads", "linear_num_key_heads")
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    return delta_rule(*(fields.number(f"linear_{name}") for name in names))


def _ngram_delta(fields: Fields, layer: int) -> Kept:
    """A delta rule that in some layers also adds embeddings of n-grams, as Qwen4-Exp does.

    Beside the state of the rule these keep the inputs of a dilated convolution, and the last tokens: before the first
    one, those that end a text.
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
    """A reader for where a checkpoint has what the class keeps in fields of its own."""

    def read(fields: Fields, _: int) -> Kept:
        count, size = fields.number("linear_num_heads", heads), fields.number("linear_head_dim", dim)
        return delta_rule(count, count, size, size, fields.number("linear_conv_kernel_dim", width), by_key=True)

    return read


_KIMI: Final = _kimi(*(f"linear_attn_config.{name}" for name in ("num_heads", "head_dim", "short_conv_kernel_size")))


def _mamba2(
    heads: str, dim: str, groups: str, state: str, width: str, *, wide: Sequence[tuple[str, ...]] = ()
) -> Reader:
    """A reader for the five names that a model has for the same five dimensions.

    `wide` names fields whose product is the channels of all heads, where the class insists on it; of several the first
    that is there counts. Nemotron-H has heads that are not expand * hidden_size, and its class allows it.
    """

    def read(fields: Fields, _: int) -> Kept:
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


def _mamba(fields: Fields, _: int) -> Kept:
    # intermediate_size wins: Falcon-Mamba-7B has expand 16, and twice its hidden size in channels.
    wide = ("intermediate_size",) if fields.get("intermediate_size") is not None else ("expand", "hidden_size")
    return mamba(prod(map(fields.number, wide)), fields.number("state_size"), fields.number("conv_kernel"))


def _jamba(fields: Fields, _: int) -> Kept:
    channels = prod(map(fields.number, _EXPANDED))  # intermediate_size is that of the MLP
    return mamba(channels, fields.number("mamba_d_state"), fields.number("mamba_d_conv"))


def _zamba(fields: Fields, _: int) -> Kept:
    """Mamba with its channels in heads: ssm `head channel state`. See https://arxiv.org/abs/2405.16712."""
    channels, heads = prod(map(fields.number, _EXPANDED)), fields.number("n_mamba_heads")
    if channels % heads:
        raise fields.refused(*_EXPANDED, "n_mamba_heads", expected=f"{channels} channels in heads of one size")
    conv = window(Part("x", heads, channels // heads), width=fields.number("mamba_d_conv"))
    state = fields.number("mamba_d_state")
    rings = tails.of_window(conv), tails.of_channels(heads, channels // heads, state)
    return Kept((conv, matrices(heads, channels // heads, state)), rings=rings)


def _rwkv7(fields: Fields, _: int) -> Kept:
    """RWKV-7: ssm `head key value`, and two token shifts: the last input of time mixing and that of channel mixing.

    See https://arxiv.org/abs/2503.14456. The fields are those of flash-linear-attention. Every rank holds the shifts.
    """
    fields.require_multiple("hidden_size", "head_dim")
    size = fields.number("head_dim")
    heads = fields.number("hidden_size") // size
    shift = Plane("conv", (fields.number("hidden_size"), 1), OF_MODEL)
    rings = *[tails.of_window(shift)] * 2, tails.of_generalized_rule(heads, size)
    return Kept((shift, shift, matrices(heads, size, size)), ("key_value", "value_key"), rings=rings)


def _mamba3(fields: Fields, _: int) -> Kept:
    """Mamba-3, with the fields of flash-linear-attention: of the states of a head, a part is turned in pairs."""
    turned, channels = fields.get("rope_fraction"), fields.number("expand") * fields.number("hidden_size")
    if turned not in (0.5, 1.0) or fields.get("is_mimo"):
        raise fields.refused("rope_fraction", "is_mimo", expected="0.5 or 1.0, and one input and output")
    size, states = fields.number("head_dim"), fields.number("state_size")
    if channels % size:
        raise fields.refused("expand", "hidden_size", "head_dim", expected=f"{channels} channels in heads of one size")
    return mamba3(channels // size, size, states, int(states * turned) // 2)


def _short_conv(fields: Fields, _: int) -> Kept:
    """Gated short convolution: a window over the channels and no ssm plane. See https://arxiv.org/abs/2511.23404."""
    return convolutions(window(Part("x", fields.number("hidden_size")), width=fields.number("conv_L_cache")))


def _short_convs(fields: Fields, layer: int) -> Kept:
    """Four short convolutions of a layer, as in Inkling: of keys, values, and the outputs of attention and MLP.

    Every rank holds the windows of the outputs. The classes compute all four in fp32.
    """
    width = fields.number("conv_kernel_size", "sconv_kernel_size")
    keys = replace(window(Part("head", *_heads(fields, layer)), width=width), dtype=torch.float32)
    outputs = Plane("conv", (fields.number("hidden_size"), width - 1), torch.float32)
    return convolutions(keys, keys, outputs, outputs)


def _convolved_attention(fields: Fields, layer: int) -> Kept:
    """Compressed convolutional attention, as in Zaya: inputs of two convolutions over q | k, and the last half value.

    See https://arxiv.org/abs/2510.04476. Every rank holds the half value: its heads do not divide.
    """
    heads, size = _heads(fields, layer)
    width = fields.number("cca_time0") + fields.number("cca_time1") - 1
    conv = window(Part("q", fields.number("num_attention_heads"), size), Part("k", heads, size), width=width)
    return Kept((conv, Plane("ssm", (heads * size // 2,), OF_MODEL)))


def _compressed(fields: Fields, layer: int) -> Kept:
    """What pools KV in a layer of DeepSeek-V4, and in layers of overlapping windows also what pools keys of the index.

    Open windows belong to the request, so states can be kept where the windows of all layers close.
    """
    found = compressors(fields)
    (kind, rate), size = found[layer], fields.number("head_dim")
    if kind != COMPRESSED[4]:
        return compressor("hca", rate, size)
    grid = lcm(*(rate for _, rate in found.values()))
    kv, index = compressor("csa", rate, size, grid), compressor("index", rate, fields.number("index_head_dim"), grid)
    return Kept(kv.planes + index.planes, rows=kv.rows + index.rows)


_EXPANDED: Final = ("mamba_expand", "hidden_size")


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
    "glm5_next": _KIMI,  # a checkpoint without pictures has no nested text model
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
SLIDING_HEADS: Final = ("inkling_text", "inkling2_text")  # layers with a window have KV heads of their own


def from_config(
    config: object,
    *,
    ssm_dtype: torch.dtype | None = None,
    conv_dtype: torch.dtype | None = None,
    order: Order = "layer_major",
    ranks: int = 1,
    conv_order: ConvOrder = "channel_first",
    ssm_order: SsmOrder | None = None,
    tail: int = 0,
    layers: range | None = None,
) -> StateLayout:
    """The layout of a model, from a configuration object of transformers, or from a config.json.

    Planes have the dtypes, and their axes the order, that the classes of transformers give them. Windows have the
    inputs that a step needs from before. A configuration of several models stands for its text model. Where states of a
    kind differ in shape, or are in some layers only, they are several planes: conv, conv2. Windows that are open at no
    length of a kept state are planes of rows.

    Args:
        config: the configuration: an object, a dict, or the path of a config.json or of the folder that has one.
        ssm_dtype: of ssm planes; None: the field `mamba_ssm_dtype` or `mamba_ssm_cache_dtype`, without one as in the
            class, which is fp32 nearly everywhere.
        conv_dtype: of convolution windows; None: as in the class, which is nearly everywhere the dtype of the model.
            That is the field `dtype`, or bf16 without one.
        order: "layer_major" or "slot_major".
        ranks: tensor-parallel ranks; the layout is that of one of them. With more ranks than groups (q and k of a delta
            rule, B and C of Mamba-2) several ranks hold a group; heads of states are on one rank only.
        conv_order: how windows lie in memory: "channel_first", "width_first", or "engine": as SGLang and vLLM store
            those of the model, which is width first of Kimi's rule.
        ssm_order: how states lie in memory: "key_value" (default) or "value_key" of a delta rule, "dim_state" (default)
            or "state_dim" of Mamba-2, or "engine": as SGLang and vLLM store those of the model, which is "value_key"
            and "dim_state". Kernels take a plane of "value_key" or "state_dim" as `plane.mT`.
        tail: rows have tails, for steps of up to so many tokens (`Forward(tail=)`). The rings are planes of rows. Each
            is named after its plane and what its decode step calls it: conv_x of a convolution; ssm_k, ssm_v, ssm_gate,
            ssm_beta of a delta rule, with ssm_a and ssm_b in the place of ssm_beta of RWKV-7; ssm_x, ssm_b, ssm_dt of
            Mamba. conv2_x belongs to conv2, layer by layer. `planes.tail` has the tuple that a step takes. 0: no tails.
        layers: of the model, from 0, whose states are meant, such as those of a pipeline stage. None: all.

    Raises:
        InvalidArgument: the file cannot be read; the type is not known; fields are missing or contradict each other;
            the ranks do not divide, or outnumber the heads of states; the model has no such layers; an order is not
            one of the model; or with `tail`, a step has none.

    Example:
        >>> from memstate.state.presets import from_config
        >>> from_config({"model_type": "lfm2", "hidden_size": 64, "conv_L_cache": 3, "num_hidden_layers": 4,
        ...              "full_attn_idxs": [2]})
        StateLayout(conv x 3 layers, layer_major, 768 B per slot with 0 B padding)

    Syncs: no.
    """
    fields, dtype, engines = _text_model(config)
    require_layers(fields, layers)
    kind, tail = fields.get("model_type"), whole("tail", tail, least=0)
    states, rows, rings = list[Plane](), list[Plane](), list[tails.Fields]()
    for layer in _among(layers, state_layers(fields.config)):
        kept = READERS[kind](fields, layer).typed(dtype, conv_dtype, ssm_dtype or engines)
        if tail and not kept.rings:
            raise InvalidArgument(f"tail={tail}: {kind} keeps states whose steps have no tail")
        kept = kept if ssm_order is None else ssm_ordered(kept, ssm_order)
        states += conv_ordered(kept, conv_order).planes
        rows += kept.rows
        rings += kept.rings
    if not states:
        which = "layer of this configuration" if layers is None else f"layer in layers={layers!r}"
        raise InvalidArgument(f"{kind}: no {which} holds state")
    _require_heads(kind, states, whole("ranks", ranks))
    layout, lies = grouped(states, order)
    if tail:
        layout = tails.ringed(layout, [(name, ring) for (name, _), ring in zip(lies, rings, strict=True)], tail)
    elif rows:
        layout = replace(layout, rows=grouped(rows, order)[0])
    return layout.shard(ranks)


def kv_from_config(
    config: object, *, page_size: int, dtype: torch.dtype = torch.bfloat16, ranks: int = 1, layers: range | None = None
) -> StateLayout | None:
    """The layout of a KV page of a model, as if a page were a slot; None for a model without attention.

    A page has keys and values of every attention layer, which is `2 x KV heads x head size` elements a token and layer.
    With latent attention (`kv_lora_rank`, as in Kimi Linear) it is `kv_lora_rank + qk_rope_head_dim` elements, which is
    what vLLM and SGLang keep, and every rank has all of them. Windows of attention, KV that layers share, and keys of
    an index are not taken into account.

    Args:
        config: as for `from_config`.
        page_size: tokens of a page.
        dtype: of keys and values.
        ranks: tensor-parallel ranks; the layout is that of one of them. Ranks beyond the KV heads hold copies.
        layers: as for `from_config`.

    Raises:
        InvalidArgument: as for `from_config`.

    Example:
        >>> from memstate.state.presets import CHECKPOINTS, kv_from_config
        >>> kv_from_config(CHECKPOINTS["qwen3_next"], page_size=1)
        StateLayout(k, v x 12 layers, layer_major, 24.00 KiB per slot with 0 B padding)

    Syncs: no.
    """
    (fields, *_), page_size = _text_model(config), whole("page_size", page_size)
    require_layers(fields, layers)
    if fields.get("model_type") == "deepseek_v4":
        why = "its KV is a window and pooled entries, not keys and values of each token"
        raise InvalidArgument(f"deepseek_v4: {why}: give the bytes yourself, as kv_bytes_per_token of ms.capacity")
    attending = _among(layers, attention_layers(fields))
    if not attending:
        return None
    if fields.get("kv_lora_rank") is not None:
        width = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim", least=0)
        return StateLayout((Plane("latent", (page_size, width), dtype),), len(attending))
    planes = []
    for layer in attending:
        heads, size = _heads(fields, layer)
        parts = (Part("head", heads),)
        planes += [Plane(name, (page_size, heads, size), dtype, parts=parts, axis=1) for name in ("k", "v")]
    return grouped(planes)[0].shard(ranks)


def _heads(fields: Fields, layer: int) -> tuple[int, int]:
    """KV heads of a layer and the size of one. Raises: InvalidArgument."""
    own = "swa_" if fields.get("model_type") in SLIDING_HEADS and sliding(fields, layer) else ""
    heads = fields.number(f"{own}num_key_value_heads")
    names = [name for name in (f"{own}head_dim", "attention_head_dim") if fields.get(name) is not None]
    size = fields.number(*names) if names else fields.number("hidden_size") // fields.number("num_attention_heads")
    return heads, size


def _among(layers: range | None, found: tuple[int, ...]) -> tuple[int, ...]:
    return found if layers is None else tuple(layer for layer in found if layer in layers)


def _require_heads(kind: str, states: Sequence[Plane], ranks: int) -> None:
    """Refuses more ranks than states have heads, which would hold copies: no engine runs that. Groups may be copied."""
    for plane in states:
        for part in plane.parts:
            if (plane.name == "ssm" or part.name == "x") and part.units < ranks:
                why = f"a state has {part.units} units of part {part.name}, and each is on one rank"
                raise InvalidArgument(f"{kind} for {ranks} ranks: {why}: expected at most {part.units} ranks")


def _text_model(config: object) -> tuple[Fields, torch.dtype, torch.dtype | None]:
    """The fields of the text model of a configuration, its dtype, and that of its states where a field says it.

    Raises:
        InvalidArgument: the type is not known, or the dtype is none.
    """
    fields = Fields.of(config)
    dtype, engines = fields.dtype(*DTYPE), fields.dtype(*SSM_DTYPE)
    for _ in range(NESTED):
        if (text := next((text for name in TEXT if (text := fields.get(name)) is not None), None)) is None:
            break
        fields = Fields(text)  # a nested configuration without a dtype is as the whole
        dtype, engines = fields.dtype(*DTYPE) or dtype, fields.dtype(*SSM_DTYPE) or engines
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise InvalidArgument(
            f"model_type {kind!r}: the known ones are {', '.join(sorted(READERS))}; "
            "for another model, use memstate.integrations.transformers.layout, or a StateLayout of your own"
        )
    return fields, dtype or torch.bfloat16, engines
