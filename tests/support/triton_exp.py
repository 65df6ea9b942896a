"""The exponential as a Triton function, for kernels of libraries that bind `exp = tl.exp`.

Triton's interpreter does not replace `tl.exp` under such a name.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """Returns the exponential of each element."""
    return tl.exp(x)
