"""Has a preset, a function that returns a layout, for each known checkpoint, and `from_config` for all others.

A preset takes the keywords of `from_config`: ssm_dtype (torch.float32; torch.int16 and torch.int8 add a plane
ssm_scale), conv_dtype (torch.bfloat16), order ("layer_major"), ranks (1; the layout is that of one tensor-parallel
rank), conv_order, ssm_order, tail (0) and layers (all).

    conv_order   "channel_first" for windows of `channel (width-1)` (default), "width_first" for `(width-1) channel`;
                 "engine" for the order of SGLang and vLLM: width first for Kimi Linear, channel first for other models
    ssm_order    of a delta rule: "key_value" for states of `head key value` (default), "value_key" for
                 `head value key`; of Mamba-2: "dim_state" for `head dim state` (default), "state_dim" for
                 `head state dim`; "engine" for the order of SGLang and vLLM: "value_key" and "dim_state"

No preset waits for a device. Each raises InvalidArgument if the ranks do not divide its heads, or outnumber them.
"""

import json
from collections.abc import Mapping
from os import PathLike
from os.path import exists
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import torch

from memstate.errors import InvalidArgument
from memstate.state.layout import Order, StateLayout
from memstate.state.presets.config import from_config, kv_from_config, rule
from memstate.state.presets.families import ConvOrder, SsmOrder
from memstate.state.presets.rules import register, state_layers

__all__ = [
    "CHECKPOINTS",
    "ConvOrder",
    "Options",
    "SsmOrder",
    "bamba",
    "codestral_mamba",
    "falcon_h1",
    "falcon_mamba",
    "from_config",
    "granite_hybrid",
    "kimi_linear",
    "kv_from_config",
    "lfm2",
    "mamba",
    "nemotron_h",
    "qwen3_5",
    "qwen3_next",
    "register",
    "rule",
    "state_layers",
]


class Options(TypedDict, total=False):
    """The keywords of a preset; `from_config` has their defaults."""

    ssm_dtype: torch.dtype
    conv_dtype: torch.dtype
    order: Order
    ranks: int
    conv_order: ConvOrder
    ssm_order: SsmOrder | None
    tail: int
    layers: range | None


# The fields of each checkpoint's config.json that decide state and KV. Most differ from the defaults of the class of
# transformers. If a checkpoint has no `head_dim`, it is hidden_size / num_attention_heads. falcon_h1 is no checkpoint,
# it has the defaults of its class, but d_ssm = expand * hidden_size.
CHECKPOINTS: Final[dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("checkpoints.json").read_text("utf-8")
)


def qwen3_next(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Qwen3-Next-80B-A3B: Gated DeltaNet in 36 of 48 layers."""
    return from_config(CHECKPOINTS["qwen3_next"], **options)


def qwen3_5(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Qwen3.5-27B: Gated DeltaNet in 48 of 64 layers."""
    return from_config(CHECKPOINTS["qwen3_5"], **options)


def nemotron_h(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Nemotron-H-8B: Mamba-2 in 24 of 52 layers."""
    return from_config(CHECKPOINTS["nemotron_h"], **options)


def falcon_h1(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of a Falcon-H1 with the default sizes of its class: Mamba-2 and attention in all 32 layers."""
    return from_config(CHECKPOINTS["falcon_h1"], **options)


def granite_hybrid(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Granite-4.0-H-Micro: Mamba-2 in 36 of 40 layers."""
    return from_config(CHECKPOINTS["granite_hybrid"], **options)


def kimi_linear(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Kimi-Linear-48B-A3B: Kimi Delta Attention in 20 of 27 layers."""
    return from_config(CHECKPOINTS["kimi_linear"], **options)


def lfm2(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of LFM2-1.2B: short convolutions in 10 of 16 layers, and no ssm plane."""
    return from_config(CHECKPOINTS["lfm2"], **options)


def falcon_mamba(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Falcon-Mamba-7B: Mamba in all 64 layers."""
    return from_config(CHECKPOINTS["falcon_mamba"], **options)


def bamba(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Bamba-9B: Mamba-2 in 29 of 32 layers."""
    return from_config(CHECKPOINTS["bamba"], **options)


def codestral_mamba(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Mamba-Codestral-7B: Mamba-2 in all 64 layers."""
    return from_config(CHECKPOINTS["codestral_mamba"], **options)


def mamba(**options: Unpack[Options]) -> StateLayout:
    """Returns the layout of Mamba-2.8B: Mamba in all 64 layers."""
    return from_config(CHECKPOINTS["mamba"], **options)


def named(model: object, *, ranks: int = 1, **options: Any) -> tuple[str, object, StateLayout]:
    """Returns the name of a model for messages, its configuration, and the layout of its state on one rank.

    Args:
        model: a preset such as "qwen3_next", the path of a config.json, a configuration object or dict, or the
            `StateLayout` of the whole model, which is its own configuration.
        ranks: tensor-parallel ranks.
        options: further arguments of `from_config`. They do not change a `StateLayout`.

    Raises:
        InvalidArgument: the model is not known, or the configuration cannot be read.
    """
    if isinstance(model, StateLayout):
        return "layout", model, model.shard(ranks)
    name, config = model if isinstance(model, str) else type(model).__name__, model
    if isinstance(model, str) and model.replace("-", "_") in CHECKPOINTS:
        config = CHECKPOINTS[model.replace("-", "_")]
    elif isinstance(model, PathLike):
        name = str(model)
    elif isinstance(model, Mapping):
        name = str(model.get("model_type"))
    try:
        return name, config, from_config(config, ranks=ranks, **options)
    except InvalidArgument as error:
        if isinstance(config, str) and not exists(config):
            raise InvalidArgument(f"{error}, or one of the presets {', '.join(CHECKPOINTS)}") from error
        raise
