"""Lists the configurations to try, in order."""

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import product
from math import prod

from memstate.errors import InvalidArgument
from memstate.kernels.configs import CONFIGS, Config
from memstate_tools.models import Model, model_of

BEST_OF_EACH, COMBINATIONS = 2, 12  # values of each axis that are combined, and the largest number of combinations
STANDINS = {"selective": "nemotron_h"}  # kernel -> model for it, if the chosen model has no state for the kernel
DEFAULT_STANDIN = "qwen3_next"


def one_at_a_time(kernel: str, timed: bool, limit: int | None = None) -> list[Config]:
    """Returns the default, then configurations that differ from it in one axis, the cheapest axis first.

    Args:
        kernel: Name of the kernel.
        timed: Whether configurations are timed. If not, axes that do not change compiled code are left out.
        limit: Largest number of configurations. None: all.

    Raises:
        InvalidArgument: The limit is below 1.
    """
    if limit is not None and limit < 1:
        raise InvalidArgument(f"limit {limit}: at least 1 configuration must be tried")
    default = CONFIGS[kernel]()
    configs = [default]
    for axis, values in axes_of(kernel, timed).items():
        configs += [replace(default, **{axis: value}) for value in values if value != getattr(default, axis)]
    return configs[:limit]


def combinations(kernel: str, timed: bool, goodness: Mapping[Config, float], limit: int | None = None) -> list[Config]:
    """Returns combinations of the best values of every axis, the most promising first.

    The gain expected of a combination is the product of the gains of its single values.

    Args:
        kernel: Name of the kernel.
        timed: Whether configurations are timed. If not, axes that do not change compiled code are left out.
        goodness: Configuration -> how good it is (more is better), for tried configurations that are not excluded.
        limit: Largest number of configurations of both rounds together.
    """
    default, axes = CONFIGS[kernel](), axes_of(kernel, timed)
    gains: dict[str, dict[int, float]] = {}
    for axis, values in axes.items():
        scores = {value: goodness.get(replace(default, **{axis: value}), 0.0) for value in values}
        best = sorted((value for value in values if scores[value]), key=lambda value: -scores[value])
        gains[axis] = {value: scores[value] for value in best[:BEST_OF_EACH]}
    promised: dict[Config, float] = {}
    for chosen in product(*(gains[axis] for axis in axes)):
        config = replace(default, **dict(zip(axes, chosen, strict=True)))
        promised[config] = prod(gains[axis][value] for axis, value in zip(axes, chosen, strict=True))
    tried = set(one_at_a_time(kernel, timed))
    most = COMBINATIONS if limit is None else max(0, min(COMBINATIONS, limit - len(tried)))
    return [config for config in sorted(promised, key=lambda each: -promised[each]) if config not in tried][:most]


def axes_of(kernel: str, timed: bool) -> dict[str, tuple[int, ...]]:
    """Returns axis -> values to try, the default first."""
    axes = fields(CONFIGS[kernel])
    return {axis.name: axis.metadata["values"] for axis in axes if timed or axis.metadata["compiled"]}


def model_for(kernel: str, name: str) -> tuple[str, Model]:
    """Returns the name of a model and the model: the chosen one, or another if that has no state for the kernel.

    Raises:
        InvalidArgument: There is no such preset. The message names the presets.
    """
    model = model_of(name)
    if not model.has(kernel):
        name = STANDINS.get(kernel, DEFAULT_STANDIN)
        model = model_of(name)
    return name, model
