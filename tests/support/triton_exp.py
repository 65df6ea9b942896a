"""The exponential as a function of Triton.

Some libraries give `tl.exp` a name of their own, `exp = tl.exp`. Triton's interpreter does not find it there.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """Of each element."""
    return tl.exp(x)
