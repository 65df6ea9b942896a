"""Finds the layout of a model that a caller names: a preset, a path, a configuration or a layout."""

from collections.abc import Mapping
from os import PathLike
from os.path import exists
from typing import Any

from memstate.errors import InvalidArgument
from memstate.state.layout import StateLayout
from memstate.state.presets import CHECKPOINTS, from_config


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
