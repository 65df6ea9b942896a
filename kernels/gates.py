"""The gates of recurrences, as kernels compute them from what a model projects. Knows no op."""

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)  # under the root of a norm
# log(1 + e) / e for e from 0 to 1, the highest power first: of all polynomials of this degree about the one that errs
# least, by 0.7 of 2^-24 at most. Evaluated in fp32 it errs by 2.5 of them.
LOG = tl.constexpr(
    (
        -0.00324398093, 0.0198512636, -0.0569591597, 0.106036171, -0.153055698,
        0.196759313, -0.249541327, 0.333299637, -0.499999017, 1.0,
    )
)  # fmt: skip


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to the last places, also where it is small: max(x, 0) + log(1 + exp(-|x|)). Above 20 it is x."""
    e = tl.exp(-tl.abs(x))
    found = tl.fma(e, LOG[0], LOG[1])
    for power in tl.static_range(2, 10):
        found = tl.fma(found, e, LOG[power])
    return tl.fma(found, e, tl.maximum(x, 0.0))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1 / (1 + tl.exp(-x))
