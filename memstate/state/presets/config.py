"""Computes the layouts of a state and of a KV page from a configuration of transformers. Imports no transformers.

A configuration is an object with attributes, a config.json as a dict, or the path of a config.json. It may be older
than transformers 5.0.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from memstate.checks import whole
from memstate.errors import InvalidArgument
from memstate.state.grouping import grouped
from memstate.state.layout import FLOATS, NUMBERS, Order, Plane, StateLayout
from memstate.state.presets import tails
from memstate.state.presets.families import ConvOrder, SsmOrder, conv_ordered, scaled, ssm_ordered
from memstate.state.presets.fields import Fields, require_dtype
from memstate.state.presets.layers import BOTH, STATE, with_roles
from memstate.state.presets.readers import kv_heads
from memstate.state.presets.rules import Rule, attention_layers, placed, rule_of
from memstate.state.sharding import Part

DTYPE: Final = ("dtype", "torch_dtype")  # "torch_dtype" before transformers 5.0
SSM_DTYPE: Final = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")  # dtype in which engines keep states
SSM_DTYPES: Final = (*FLOATS, *NUMBERS)


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
    """Returns the layout of a model, from a configuration object of transformers or from a config.json.

    The fields say by which rule the layers compute their states, whatever the name of the model: `rule` returns it.
    Planes have the dtypes and the order of axes of the classes of transformers. A window holds the earlier inputs that
    a step needs. A configuration of several models stands for its text model. If states of one kind differ in shape, or
    are in some layers only, they are several planes: conv, conv2. If a layer pools windows of tokens, its
    windows are planes of rows, unless a window is open at a length at which states are kept.

    Args:
        config: the configuration: an object, a dict, the path of a config.json, or the path of its folder.
        ssm_dtype: dtype of ssm planes. None takes the field `mamba_ssm_dtype` or `mamba_ssm_cache_dtype`, or else the
            dtype of the class, which is fp32 for nearly all models. With torch.int8 or torch.int16, for delta rules and
            Mamba-2, a plane ssm_scale follows ssm: an fp32 scale for each (head, value) or (head, dim).
        conv_dtype: dtype of convolution windows. None takes that of the class, which for nearly all models is the dtype
            of the model: the field `dtype`, or bf16 without it.
        order: "layer_major" or "slot_major".
        ranks: tensor-parallel ranks; the layout is that of one rank. With more ranks than groups (q and k of a delta
            rule, B and C of Mamba-2), several ranks hold the same group. Heads of states are on one rank only.
        conv_order: order of windows in memory: "channel_first", "width_first", or "engine", the order of SGLang and
            vLLM for the model: width first for Kimi's rule.
        ssm_order: order of states in memory: "key_value" (default) or "value_key" of a delta rule, "dim_state"
            (default) or "state_dim" of Mamba-2, or "engine", the order of SGLang and vLLM for the model: "value_key"
            and "dim_state". Pass a plane of "value_key" or "state_dim" to kernels as `plane.mT`.
        tail: limit of a row's tokens in a step, for rows with tails (`Forward(tail=)`); 0 for no tails. The rings are
            planes of rows. A ring has the name of its plane and of a field of the decode step: conv_x of a convolution;
            ssm_k, ssm_v, ssm_gate, ssm_beta of a delta rule; ssm_a and ssm_b instead of ssm_beta for RWKV-7; ssm_x,
            ssm_b, ssm_dt of Mamba. conv2_x belongs to conv2, layer by layer. `planes.tail` returns the tuple that a
            step takes.
        layers: layers of the model, from 0, whose states the layout has, such as a pipeline stage (default: all).

    Raises:
        InvalidArgument: the file cannot be read; the fields are those of no known rule, or of several; fields are
            missing or contradict each other; the ranks do not divide the heads, groups or channels, or outnumber the
            heads of states; the model has no such layers; the model has no such order; `tail` is not 0 and the steps of
            the model take no tail; or steps take no such dtype.

    Example:
        >>> from memstate.state.presets import from_config
        >>> from_config({"model_type": "lfm2", "hidden_size": 64, "conv_L_cache": 3, "num_hidden_layers": 4,
        ...              "full_attn_idxs": [2]})
        StateLayout(conv x 3 layers, layer_major, 768 B per slot with 0 B padding)

    Syncs: no.
    """
    fields, own, dtype, engines = _text_model(config)
    for what, asked, among in (("ssm_dtype", ssm_dtype, SSM_DTYPES), ("conv_dtype", conv_dtype, ())):
        if asked is not None:
            require_dtype(f"{what}={asked!r}", asked, among)
    _require_layers(fields, own, layers)
    kind, tail = fields.get("model_type"), whole("tail", tail, least=0)
    states, rows, rings = list[Plane](), list[Plane](), list[tails.Fields]()
    for layer in _among(layers, with_roles(placed(fields, own), STATE, BOTH)):
        kept = own.read(fields, layer).typed(dtype, conv_dtype, ssm_dtype or engines)
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
    return scaled(kind, layout, kept.summed).shard(ranks)


def rule(config: object) -> str:
    """Returns the name of the rule by which `from_config` reads a model, such as "gated delta rule".

    Args:
        config: the configuration, as in `from_config`.

    Raises:
        InvalidArgument: as in `from_config`.

    Example:
        >>> from memstate.state.presets import CHECKPOINTS, rule
        >>> rule(CHECKPOINTS["nemotron_h"])
        'Mamba-2'

    Syncs: no.
    """
    return _text_model(config)[1].name


def kv_from_config(
    config: object, *, page_size: int, dtype: torch.dtype = torch.bfloat16, ranks: int = 1, layers: range | None = None
) -> StateLayout | None:
    """Returns the layout of a KV page of a model, as if a page were a slot; None for a model without attention.

    A page has keys and values of every attention layer: `2 x KV heads x head size` elements per token and layer. With
    latent attention (`kv_lora_rank`, as in Kimi Linear), it has `kv_lora_rank + qk_rope_head_dim` elements per token
    and layer, as in vLLM and SGLang, and every rank has all of them. The layout does not consider that attention may
    have a window, that layers may share KV, or that an index may have keys.

    Args:
        config: the configuration, as in `from_config`.
        page_size: tokens of a page.
        dtype: dtype of keys and values.
        ranks: tensor-parallel ranks; the layout is that of one rank. More ranks than KV heads hold copies of heads.
        layers: layers of the model, as in `from_config`.

    Raises:
        InvalidArgument: as in `from_config`.

    Example:
        >>> from memstate.state.presets import CHECKPOINTS, kv_from_config
        >>> kv_from_config(CHECKPOINTS["qwen3_next"], page_size=1)
        StateLayout(k, v x 12 layers, layer_major, 24.00 KiB per slot with 0 B padding)

    Syncs: no.
    """
    (fields, own, *_), page_size = _text_model(config), whole("page_size", page_size)
    _require_layers(fields, own, layers)
    if own.name == "pooled windows":
        why = "its KV is a window and pooled entries, not keys and values of each token"
        kind = fields.get("model_type")
        raise InvalidArgument(f"{kind}: {why}: give the bytes yourself, as kv_bytes_per_token of ms.capacity")
    if not (attending := _among(layers, attention_layers(fields))):
        return None
    if fields.get("kv_lora_rank") is not None:
        width = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim", least=0)
        return StateLayout((Plane("latent", (page_size, width), dtype),), len(attending))
    planes = []
    for layer in attending:
        heads, size = kv_heads(fields, layer)
        parts = (Part("head", heads),)
        planes += [Plane(name, (page_size, heads, size), dtype, parts=parts, axis=1) for name in ("k", "v")]
    return grouped(planes)[0].shard(ranks)


def _among(layers: range | None, all_layers: tuple[int, ...]) -> tuple[int, ...]:
    return all_layers if layers is None else tuple(layer for layer in all_layers if layer in layers)


def _require_layers(fields: Fields, own: Rule, layers: range | None) -> None:
    """Refuses layers that a model does not have."""
    if layers is None:
        return
    total = len(placed(fields, own))
    if not isinstance(layers, range) or not layers or not {layers[0], layers[-1]} <= set(range(total)):
        few = total // 2
        why = f"expected a range of the {total} layers of the model, such as range({few}), or --layers 0:{few}"
        raise InvalidArgument(f"layers={layers!r}: {why}")


def _require_heads(kind: str, states: Sequence[Plane], ranks: int) -> None:
    """Refuses more ranks than heads of states: no engine copies heads. Groups may be copied."""
    for plane in states:
        for part in plane.parts:
            if (plane.name == "ssm" or part.name == "x") and part.units < ranks:
                why = f"a state has {part.units} units of part {part.name}, and each is on one rank"
                raise InvalidArgument(f"{kind} for {ranks} ranks: {why}: expected at most {part.units} ranks")


def _text_model(config: object) -> tuple[Fields, Rule, torch.dtype, torch.dtype | None]:
    """Returns (fields of the text model of a configuration, its rule, its dtype, the dtype that it has for states).

    Raises:
        InvalidArgument: the rule of the model is not known, or a dtype is invalid.
    """
    dtype = engines = None
    for fields in Fields.of(config).levels():  # without a dtype, a nested configuration has that of the outer one
        dtype, engines = fields.dtype(*DTYPE) or dtype, fields.dtype(*SSM_DTYPE, among=SSM_DTYPES) or engines
    return fields, rule_of(fields), dtype or torch.bfloat16, engines
