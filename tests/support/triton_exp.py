"""Defines the exponential as a Triton function, for kernels of libraries that write `exp = tl.exp`.

Triton's interpreter replaces only `tl.exp` itself.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """Returns the exponential of each element."""
    return tl.exp(x)
