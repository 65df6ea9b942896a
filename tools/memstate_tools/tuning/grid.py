"""Lists the configurations to try, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod

from memstate.errors import InvalidArgument
from memstate.kernels.configs import Config

BEST_OF_EACH, COMBINATIONS = 2, 12  # values of each axis that are combined, and the largest number of combinations
Axes = Mapping[str, Sequence[int]]  # axis -> values to try, the default first


def axes_of(kind: type[Config], timed: bool, space: Axes | None = None) -> dict[str, Sequence[int]]:
    """Returns the axes of a kernel. Without times, axes that do not change compiled code are left out.

    Args:
        kind: Class of the kernel's configurations.
        timed: Whether configurations are timed.
        space: Values of some axes to try instead of the usual ones.

    Raises:
        InvalidArgument: The kernel has no such axis.
    """
    axes = {axis.name: axis.metadata for axis in fields(kind)}
    if unknown := (space or {}).keys() - axes:
        raise InvalidArgument(f"axis {', '.join(sorted(unknown))}: {kind.kernel} has {', '.join(axes) or 'no axis'}")
    return {name: (space or {}).get(name, how["values"]) for name, how in axes.items() if timed or how["compiled"]}


def one_at_a_time(kind: type[Config], axes: Axes) -> list[Config]:
    """Returns the default, then configurations that differ from it in one axis, the cheapest axis first.

    Raises:
        InvalidArgument: A value is not allowed.
    """
    default = kind()
    try:
        others = [replace(default, **{axis: value}) for axis, values in axes.items() for value in values]
    except ValueError as error:
        raise InvalidArgument(f"{kind.kernel}: {error}") from error
    return list(dict.fromkeys([default, *others]))


def combinations(kind: type[Config], axes: Axes, goodness: Mapping[Config, float]) -> list[Config]:
    """Returns combinations of the best values of every axis, the most promising first.

    The gain expected of a combination is the product of the gains of its single values.

    Args:
        kind: Class of the kernel's configurations.
        axes: The axes.
        goodness: Configuration -> how good it is (more is better), for those that were tried; 0 if it is excluded.
    """
    default = kind()
    gains: dict[str, dict[int, float]] = {}
    for axis, values in axes.items():
        scores = {value: goodness.get(replace(default, **{axis: value}), 0.0) for value in values}
        best = sorted((value for value in values if scores[value]), key=lambda value: -scores[value])
        gains[axis] = {value: scores[value] for value in best[:BEST_OF_EACH]}
    promised: dict[Config, float] = {}
    for chosen in product(*(gains[axis] for axis in axes)):
        config = replace(default, **dict(zip(axes, chosen, strict=True)))
        promised[config] = prod(gains[axis][value] for axis, value in zip(axes, chosen, strict=True))
    untried = [config for config in sorted(promised, key=lambda each: -promised[each]) if config not in goodness]
    return untried[:COMBINATIONS]
