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
HALVES = tl.constexpr(0x80808080)  # four draws of a half
RECIPROCAL = tl.constexpr(-0x10CEE39)  # minus the bits of -x as an integer: about the bits of 1 / x


@triton.jit
def scaled(tiles, scale, COUNT: tl.constexpr):
    """Returns a tile in fp32. To convert numbers of up to 16 bits, two additions are faster than a conversion."""
    EIGHT: tl.constexpr = tiles[0].dtype.primitive_bitwidth == 8
    HALF: tl.constexpr = 1 << (7 if EIGHT else 15)
    found = ()
    for piece in tl.static_range(COUNT):
        number = tiles[piece].to(tl.uint8 if EIGHT else tl.uint16, bitcast=True).to(tl.int32) ^ (SHIFT_BITS | HALF)
        number = number.to(tl.float32, bitcast=True) - (SHIFT + HALF)
        found += (number * scale[None, :],)
    return found


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def draws(chance, length, real, first, like, COUNT: tl.constexpr):
    """Returns the draws of COUNT neighbouring keys of each lane: COUNT tensors `lane row`, of 8 bits each.

    Args:
        chance: (seed, number of the layer, for each row its number in the layer times KEYS // 16).
        length: tokens of the state.
        real: whether to draw. Otherwise numbers are rounded to the nearest, which keeps a state that was rounded.
        first: `lane`, the lane's first key, a multiple of COUNT.
        like: `lane row` of the tile, whose layout the draws have.
        COUNT: keys, a power of two.
    """
    zero = tl.minimum(tl.abs(like), 0.0).to(tl.int32, bitcast=True)
    drawn = ()
    for part in tl.static_range((COUNT + NEIGHBOURS - 1) // NEIGHBOURS):
        counter = (chance[2][None, :] + (first // NEIGHBOURS + part)[:, None] + zero).to(tl.uint32)
        none = tl.zeros_like(counter)
        words = tl.philox(chance[0], counter, none + length.to(tl.uint32), none + chance[1].to(tl.uint32), none)
        if COUNT < NEIGHBOURS:  # the lane uses some of the bytes
            at = (first % NEIGHBOURS // 4)[:, None]
            used = ()
            for word in tl.static_range((COUNT + 3) // 4):
                low = tl.where(at + word == 0, words[0], words[1])
                used += (tl.where(at + word < 2, low, tl.where(at + word == 2, words[2], words[3])),)
            words = (used[0] >> (first % 4 * 8)[:, None].to(tl.uint32),) if COUNT < 4 else used  # type: ignore[misc]
        for key in tl.static_range(min(COUNT, NEIGHBOURS)):
            four = tl.where(real, words[key // 4], HALVES)
            drawn += (((four >> (8 * (key % 4))) & 255).to(tl.int32),)
    return drawn


@triton.jit
def whole(tiles, drawn, dtype: tl.constexpr, COUNT: tl.constexpr):
    """Returns a tile in whole numbers of `dtype`, and the scale of each row.

    `drawn` are the draws of the tile, or None to round to the nearest number.
    """
    EIGHT: tl.constexpr = dtype.primitive_bitwidth == 8
    TOP: tl.constexpr = 127.0 if EIGHT else 32767.0
    UNITS: tl.constexpr = 49152.0 if EIGHT else 98304.0  # 1.5 * 2**15, 1.5 * 2**16: sums are multiples of 2**-8, 2**-7
    peak = tl.abs(tiles[0])
    for piece in tl.static_range(1, COUNT):
        peak = _larger(peak, tl.abs(tiles[piece]))
    peak = tl.reduce(peak, 0, _larger)
    # Both quotients are rounded as those of a division, which takes more instructions: a remainder mends each guess.
    # This was tried for all 2**23 fractions of a peak.
    guess = peak * (1 / TOP)
    scale = tl.fma(tl.fma(guess, -TOP, peak), 1 / TOP, guess)
    minus = peak * -0.25  # the reciprocal of a quarter has all digits
    near = (-minus.to(tl.int32, bitcast=True) + RECIPROCAL).to(tl.float32, bitcast=True)
    for _ in tl.static_range(3):
        near = tl.fma(tl.fma(minus, near, 1.0), near, near)
    guess = near * (TOP / 4)
    inverse = tl.fma(tl.fma(minus, guess, TOP / 4), near, guess)[None, :]
    usable = (peak >= TOP * SMALLEST_SCALE) & (peak < float("inf"))
    keep = tl.where(usable, -1, 0).to(dtype)[None, :]  # zeros also for NaN
    found = ()
    for piece in tl.static_range(COUNT):
        number = tl.fma(tiles[piece], inverse, SHIFT if drawn is None else UNITS).to(tl.int32, bitcast=True)
        if drawn is not None:  # in units of 2**-8; the low 16 bits of UNITS in these units and of the last term are 0
            number = (number * (1 if EIGHT else 2) + drawn[piece] + 0x800000) >> 8
        found += (number.to(dtype) & keep,)
    return found, tl.where(peak < float("inf"), tl.where(usable, scale, 0.0), float("nan"))
