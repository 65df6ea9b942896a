"""Computes gates of recurrences, inside kernels, from the projections of a model. Knows no op."""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)  # added to the sum of squares under the root of a norm
# Coefficients of a polynomial for log(1 + e) / e, e from 0 to 1, highest power first. Its error is at most 0.7 * 2^-24,
# close to the best of any polynomial of this degree, and 2.5 * 2^-24 if it is evaluated in fp32.
LOG = tl.constexpr(
    (
        -0.00324398093, 0.0198512636, -0.0569591597, 0.106036171, -0.153055698,
        0.196759313, -0.249541327, 0.333299637, -0.499999017, 1.0,
    )
)  # fmt: skip


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)), as max(x, 0) + log(1 + exp(-|x|)), so that small results are precise, too."""
    e = tl.exp(-tl.abs(x))
    series = tl.fma(e, LOG[0], LOG[1])
    for power in tl.static_range(2, 10):
        series = tl.fma(series, e, LOG[power])
    return tl.fma(series, e, tl.maximum(x, 0.0))


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))


HALF_PI = tl.constexpr((1.57079637, -4.37113883e-08))  # pi / 2 in fp32, and the rest that fp32 rounds away
# Coefficients of polynomials in r^2 for (sin r - r) / r^3 and (cos r - 1 + r^2 / 2) / r^4: up to pi / 4, their error is
# 2^-28.
SINE = tl.constexpr((-1.95172337e-4, 8.33217800e-3, -1.66666552e-1))
COSINE = tl.constexpr((2.44383800e-5, -1.38873671e-3, 4.16666456e-2))


@triton.jit
def cosine_sine(angle):
    """Returns (cosine, sine) of an angle of up to a few turns, each with an error of at most 2^-23.

    The library functions of compilers also take large angles, but need an array in memory for each thread.
    """
    quarters = tl.floor(tl.fma(angle, 1 / HALF_PI[0], 0.5))
    rest = tl.fma(quarters, -HALF_PI[1], tl.fma(quarters, -HALF_PI[0], angle))
    square = rest * rest
    sine = tl.fma(rest * square, tl.fma(square, tl.fma(square, SINE[0], SINE[1]), SINE[2]), rest)
    bend = tl.fma(square, tl.fma(square, COSINE[0], COSINE[1]), COSINE[2])
    cosine = tl.fma(square * square, bend, tl.fma(square, -0.5, 1.0))
    quarter = quarters.to(tl.int32)
    along, across = tl.where(quarter % 2 != 0, sine, cosine), tl.where(quarter % 2 != 0, cosine, sine)
    return tl.where((quarter + 1) & 2 != 0, -along, along), tl.where(quarter & 2 != 0, -across, across)
