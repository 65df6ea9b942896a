"""Loads and stores states of whole numbers with one scale for each row, inside kernels. Knows no op and no slot.

`memstate.kernels.reference.scaled` defines what is stored. A tile is split into pieces that say which elements a lane
has: tensors `lane row`, whose sums run over the pieces and the lanes.
"""

import triton
import triton.language as tl

from memstate.kernels.reference.scaled import SHARED, SMALLEST

SMALLEST_SCALE = tl.constexpr(SMALLEST)
NEIGHBOURS = tl.constexpr(SHARED)
SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it is a whole number
SHIFT_BITS = tl.constexpr(0x4B400000)  # SHIFT as an integer, so the low 16 bits are 0
INFINITE = tl.constexpr(float("inf"))


@triton.jit
def floats(numbers):
    """Returns whole numbers of up to 16 bits in fp32. Two additions are faster than a conversion."""
    return (numbers.to(tl.int32) + SHIFT_BITS).to(tl.float32, bitcast=True) - SHIFT


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(tiles, TOP: tl.constexpr, COUNT: tl.constexpr):
    """Returns of each row its scale, and the factor TOP / peak (0 if the row is stored as zeros)."""
    peak = tl.abs(tiles[0])
    for piece in tl.static_range(1, COUNT):
        peak = _larger(peak, tl.abs(tiles[piece]))
    peak = tl.reduce(peak, 0, _larger)
    usable = (peak >= TOP * SMALLEST_SCALE) & (peak < INFINITE)
    inverse = tl.where(usable, tl.div_rn(tl.full(peak.shape, TOP, tl.float32), peak), 0.0)
    scale = tl.where(usable, tl.div_rn(peak, tl.full(peak.shape, TOP, tl.float32)), 0.0)
    return tl.where(peak < INFINITE, scale, float("nan")), inverse
