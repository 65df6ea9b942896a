"""Which configurations are tried, and for which planes. Runs nothing."""

from dataclasses import replace
from itertools import product

from memstate.errors import InvalidArgument
from memstate.kernels.tables import TILE_BYTES
from memstate.kernels.tuned import CopyConfig, copy_key
from memstate.state.layout import MOVE_BYTES, Plane, StateLayout
from memstate.state.presets import CHECKPOINTS, from_config

LANES = (4096, 2048, 8192, 1024)
WARPS = (4, 8, 2)
ENTRIES = (256, 512, 128)
PROGRAMS_PER_SM = (4, 2, 8, 1, 16)
TOY_BYTES = TILE_BYTES + 1200  # of a plane: a whole tile, and one that ends in the middle of a step


def configurations(timed: bool, limit: int | None = None) -> list[CopyConfig]:
    """Returns the default and what lies around it, in order; the first `limit` of them.

    Args:
        timed: Whether they are timed; compiled code is the same for any number of programs.
        limit: How many. None: all.

    Raises:
        InvalidArgument: The limit is below 1.
    """
    if limit is not None and limit < 1:
        raise InvalidArgument(f"limit {limit}: at least 1 configuration must be tried")
    default = CopyConfig()
    counts = PROGRAMS_PER_SM if timed else (default.programs_per_sm,)
    found = [
        CopyConfig(entries, lanes, warps, programs)
        for programs, entries, warps, lanes in product(counts, ENTRIES, WARPS, LANES)
    ]
    return [default, *(config for config in found if config != default)][:limit]


def layout_of(model: str) -> StateLayout:
    """Returns the layout of a preset.

    Raises:
        InvalidArgument: Names the presets there are.
    """
    if model not in CHECKPOINTS:
        raise InvalidArgument(f"model {model!r}: expected one of {', '.join(CHECKPOINTS)}")
    return from_config(CHECKPOINTS[model])


def toy(layout: StateLayout) -> StateLayout:
    """Returns the planes over at most two layers, cut to a tile and a bit each: what an interpreter can copy."""
    planes = [
        Plane(plane.name, (min(plane.elements, TOY_BYTES // plane.dtype.itemsize),), plane.dtype)
        for plane in layout.planes
    ]
    return replace(layout, planes=tuple(planes), layers=min(layout.layers, 2))


def key_of(layout: StateLayout) -> str:
    """Returns the key under which planes of memstate's own, laid out so, find a configuration."""
    tiles = sum(-(-run.nbytes // TILE_BYTES) for run in layout.runs(slots=1))
    return copy_key(MOVE_BYTES, tiles)
