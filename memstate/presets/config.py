"""What the fields of a configuration mean, model type by model type. Knows names of fields; imports no transformers.

A configuration is an object with attributes, or a config.json as a dict, written before or after transformers 5.0. A
field that is missing is an error, never a default: the layout of a model that nobody has is worse than none.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from memstate.errors import InvalidArgument
from memstate.layout import Order, StateLayout
from memstate.presets.families import DeltaRule, Family, Mamba, Mamba2, ShortConv

# Kinds of layers that hold state; checkpoints written before transformers 5.0 say "mamba".
STATE_LAYERS: Final = ("linear_attention", "conv", "hybrid", "mamba")


class Fields:
    """The fields of a configuration, which is an object with attributes or a dict; a dot leads into a nested one."""

    def __init__(self, config: object) -> None:
        self._config = config

    def get(self, path: str) -> Any:
        """A field, None if it is not there."""
        value: Any = self._config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value

    def number(self, *paths: str) -> int:
        """The first of these fields that is a number of 1 or more. Raises: InvalidArgument."""
        values = {path: self.get(path) for path in paths}
        for value in values.values():
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        found = ", ".join(f"{path} = {value!r}" for path, value in values.items())
        raise InvalidArgument(f"{self.get('model_type')} with {found}: expected a number of 1 or more")


def _delta_rule(fields: Fields) -> Family:
    return DeltaRule(
        key_heads=fields.number("linear_num_key_heads"),
        value_heads=fields.number("linear_num_value_heads"),
        key=fields.number("linear_key_head_dim"),
        value=fields.number("linear_value_head_dim"),
        width=fields.number("linear_conv_kernel_dim"),
    )


def _kimi(fields: Fields) -> Family:
    # The class has fields of its own for what the checkpoint keeps in a nested dict.
    heads = fields.number("linear_num_heads", "linear_attn_config.num_heads")
    dim = fields.number("linear_head_dim", "linear_attn_config.head_dim")
    width = fields.number("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size")
    return DeltaRule(heads, heads, dim, dim, width, width_first=True)


def _mamba2(heads: str, dim: str, groups: str, state: str, width: str) -> Callable[[Fields], Family]:
    """A reader for the five names that a model has for the same five dimensions."""

    def read(fields: Fields) -> Family:
        count = fields.number(heads)
        if fields.get(dim) not in (None, "auto"):
            size = fields.number(dim)
        elif fields.get("mamba_d_ssm") is not None:
            size = fields.number("mamba_d_ssm") // count
        else:
            size = fields.number("mamba_expand", "expand") * fields.number("hidden_size") // count
        return Mamba2(count, size, fields.number(groups), fields.number(state), fields.number(width))

    return read


def _mamba(fields: Fields) -> Family:
    # intermediate_size wins: Falcon-Mamba-7B has expand 16, and twice its hidden size in channels.
    wide = fields.get("intermediate_size") is not None
    channels = fields.number("intermediate_size") if wide else fields.number("expand") * fields.number("hidden_size")
    return Mamba(channels, fields.number("state_size"), fields.number("conv_kernel"))


def _jamba(fields: Fields) -> Family:
    channels = fields.number("mamba_expand") * fields.number("hidden_size")  # intermediate_size is that of the MLP
    return Mamba(channels, fields.number("mamba_d_state"), fields.number("mamba_d_conv"))


def _short_conv(fields: Fields) -> Family:
    return ShortConv(fields.number("hidden_size"), fields.number("conv_L_cache"))


_hybrid_mamba2 = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")

READERS: Final[Mapping[str, Callable[[Fields], Family]]] = {
    "qwen3_next": _delta_rule,
    "qwen3_5_text": _delta_rule,
    "qwen3_5_moe_text": _delta_rule,
    "olmo_hybrid": _delta_rule,
    "kimi_linear": _kimi,
    "nemotron_h": _mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "falcon_h1": _hybrid_mamba2,
    "bamba": _hybrid_mamba2,
    "granitemoehybrid": _hybrid_mamba2,
    "zamba2": _mamba2("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
    "mamba2": _mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "jamba": _jamba,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
}
EVERY_LAYER: Final = ("falcon_h1", "zamba2", "mamba2", "mamba", "falcon_mamba")  # every layer has a state


def state_layers(config: object) -> int:
    """How many layers of a configuration hold state, from whichever list of layers it has. Raises: InvalidArgument."""
    fields = Fields(config)
    kind = fields.get("model_type")
    if kind in EVERY_LAYER:
        return fields.number("num_hidden_layers")
    if kinds := fields.get("layer_types") or fields.get("layers_block_type"):
        return sum(layer in STATE_LAYERS for layer in kinds)
    if pattern := fields.get("hybrid_override_pattern"):
        return int(pattern.count("M"))
    if layers := fields.get("linear_attn_config.kda_layers"):
        return len(layers)
    for name in ("full_attn_idxs", "attn_layer_indices"):
        if (attention := fields.get(name)) is not None:
            return fields.number("num_hidden_layers") - len(attention)
    if fields.get("full_attention_interval") is not None:
        total = fields.number("num_hidden_layers")
        return total - total // fields.number("full_attention_interval")
    raise InvalidArgument(f"{kind} without layer_types: which of its layers hold state?")


def from_config(
    config: object,
    *,
    ssm_dtype: torch.dtype = torch.float32,
    conv_dtype: torch.dtype = torch.bfloat16,
    order: Order = "layer_major",
    ranks: int = 1,
) -> StateLayout:
    """The layout of one of `ranks` ranks for a configuration object of transformers, or for a config.json as a dict.

    A configuration of several models stands for its text model. Syncs: no.
    Raises: InvalidArgument for a type that is not known, for fields that are missing, and for ranks that do not divide.
    """
    fields = Fields(config)
    kind, text = fields.get("model_type"), fields.get("text_config")
    if kind not in READERS and text is not None:
        return from_config(text, ssm_dtype=ssm_dtype, conv_dtype=conv_dtype, order=order, ranks=ranks)
    if kind not in READERS:
        raise InvalidArgument(f"model_type {kind!r}: the known ones are {', '.join(sorted(READERS))}")
    layers = state_layers(config)
    if not layers:
        raise InvalidArgument(f"{kind}: no layer of this configuration holds state")
    planes = READERS[kind](fields).planes(ssm_dtype, conv_dtype)
    return StateLayout(planes, layers, order).shard(ranks)
