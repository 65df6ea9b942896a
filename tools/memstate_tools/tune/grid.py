"""Lists the configurations to try, in order, and the keys under which they are stored."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import gcd, prod

from memstate.errors import InvalidArgument
from memstate.kernels.tables import TILE_BYTES
from memstate.kernels.tuned import (
    CONFIGS,
    Config,
    GatherConfig,
    conv_key,
    copy_key,
    delta_key,
    int8_key,
    selective_key,
)
from memstate.state.layout import MOVE_BYTES
from memstate_tools.models import AXES as INT8_AXES
from memstate_tools.models import Model, model_of

BEST_OF_EACH, COMBINATIONS = 2, 12  # values of each axis that are combined, and the largest number of combinations
FREE_AXIS = "programs_per_sm"  # the compiled code does not depend on the number of programs

# the cheapest axis first: other programs of a launch need no compilation; other warps and entries need one, but do not
# change the block of bytes that a program moves at a time
WARPS = (4, 8, 2)
MOVES = {
    FREE_AXIS: (4, 2, 8, 1, 16), "warps": WARPS, "entries": (256, 512, 128), "lanes": (4096, 2048, 8192, 1024),
}  # fmt: skip
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "copy": MOVES,
    "gather": {"warps": WARPS, "lanes": (4096, 2048, 8192, 1024)},
    "scatter": MOVES,
    "pack": MOVES,
    "pack_int8": {FREE_AXIS: (4, 2, 8, 1, 16), "warps": WARPS, "block": (4096, 8192, 2048)},
    "gated_delta": {"warp_elements": (2048, 1024, 4096, 512), "block_value": (16, 8, 32, 64)},
    "selective": {"warp_elements": (2048, 1024, 512, 256), "tile_warps": (1, 2, 4)},
    "conv": {"warps": (1, 2, 4), "window_bytes": (2048, 4096, 1024)},
}
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
    return {axis: values for axis, values in AXES[kernel].items() if timed or axis != FREE_AXIS}


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


def key_of(kernel: str, model: Model) -> str:
    """Returns the key under which a kernel looks up a configuration, for planes that memstate allocates for a model."""
    layout = model.layout
    if kernel == "copy":
        return copy_key(MOVE_BYTES, sum(-(-run.nbytes // TILE_BYTES) for run in layout.runs(slots=1)))
    if kernel == "pack":
        blocks = [plane.nbytes for plane in layout.planes for _ in range(layout.layers_of(plane))]
        unit = gcd(MOVE_BYTES, *(block % TILE_BYTES for block in blocks))
        return copy_key(unit, sum(-(-block // TILE_BYTES) for block in blocks))
    if kernel in ("gather", "scatter"):
        largest = max(plane.elements * plane.dtype.itemsize for plane in layout.planes)
        unit = gcd(MOVE_BYTES, largest)
        return copy_key(unit, -(-largest // (GatherConfig().lanes * gcd(unit, 4))))
    if kernel == "conv":
        plane = model.plane("conv")
        channel_major = plane.shape[0] > plane.shape[1]
        return conv_key(min(plane.shape) + 1, channel_major, plane.dtype.itemsize)
    plane = model.plane("ssm")
    if kernel == "pack_int8":
        axis = INT8_AXES[model.rule]
        return int8_key(plane.shape[axis], prod(plane.shape[axis + 1 :]), plane.dtype.itemsize)
    (rows, columns), itemsize = plane.shape[-2:], plane.dtype.itemsize
    if kernel == "gated_delta":
        return delta_key(rows, columns, itemsize)
    return selective_key(rows, columns, model.rule == "mamba2", itemsize)
