"""The planes that hold a state in fewer bits: values, scales, and what rounding left. Knows no slot and no kernel."""

from dataclasses import replace
from typing import Final, Literal, get_args

import torch

from memstate.errors import InvalidArgument
from memstate.kernels.tables import BITS_BLOCK
from memstate.state.layout import Plane

Bits = Literal["int16", "e4m3", "int8", "int8+residual"]
VALUES: Final = {"int16": torch.int16, "e4m3": torch.float8_e4m3fn}  # the others: int8


def fewer_bits(plane: Plane, bits: Bits) -> tuple[Plane, ...]:
    """The planes that hold a plane of floats in fewer bits, for the ops `load_bits` and `store_bits`.

    They are planes like others. The values have the name of the plane; `_scales` has a byte for each 32 neighbours of
    the last axis, `_residual` one for each two. So an element takes 8.25 bits as "e4m3" or "int8", 12.25 as
    "int8+residual" and 16.25 as "int16".

    Args:
        plane: the plane, in whose stead they are.
        bits: how elements are held.

    Raises:
        InvalidArgument: no such format; no floats; a plane with a fill; or a block of 32 would lie across the end of
            the last axis, or across two units of what tensor parallelism cuts.

    Example:
        >>> import torch
        >>> from memstate import Plane
        >>> from memstate.state.bits import fewer_bits
        >>> for held in fewer_bits(Plane("ssm", (32, 128, 128), torch.float32), "int8+residual"):
        ...     print(held)
        Plane(ssm[32,128,128] int8, 512.00 KiB per layer)
        Plane(ssm_scales[32,128,4] uint8, 16.00 KiB per layer)
        Plane(ssm_residual[32,128,64] uint8, 256.00 KiB per layer)
    """
    if bits not in get_args(Bits):
        raise InvalidArgument(f"plane {plane.name}: bits {bits!r}, expected one of {', '.join(get_args(Bits))}")
    if not plane.dtype.is_floating_point:
        raise InvalidArgument(f"plane {plane.name}: {plane.dtype}, expected floats")
    if plane.fill:
        raise InvalidArgument(f"plane {plane.name}: fill {plane.fill}, but a fresh slot of fewer bits is zeros")
    last = len(plane.shape) - 1
    runs = {"the last axis": plane.shape[last] if plane.shape else 1}
    if plane.axis == last:
        runs |= {f"a unit of part {part.name}": part.size for part in plane.parts}
    for what, size in runs.items():
        if size % BITS_BLOCK:
            raise InvalidArgument(
                f"plane {plane.name} {plane.shape}: {what} has {size} elements, expected a multiple of {BITS_BLOCK}, "
                "which share a scale"
            )
    held = (replace(plane, dtype=VALUES.get(bits, torch.int8)), _packed(plane, "scales", BITS_BLOCK))
    return (*held, _packed(plane, "residual", 2)) if bits == "int8+residual" else held


def _packed(plane: Plane, what: str, each: int) -> Plane:
    """A plane of bytes, of which each belongs to so many neighbours of another plane."""
    parts = plane.parts
    if plane.axis == len(plane.shape) - 1:
        parts = tuple(replace(part, size=part.size // each) for part in parts)
    shape = (*plane.shape[:-1], plane.shape[-1] // each)
    return replace(plane, name=f"{plane.name}_{what}", shape=shape, dtype=torch.uint8, parts=parts)
