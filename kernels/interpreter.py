"""Says whether this process interprets kernels, and mends the interpreter."""

import os
import sys
from functools import wraps
from importlib.util import find_spec
from typing import Any


def interpreted() -> bool | None:
    """Returns whether this process interprets kernels; None without Triton."""
    if find_spec("triton") is None:
        return None
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False  # Triton would say so, too, after a long import
    from triton import knobs  # imported late: Triton is optional

    return bool(knobs.runtime.interpret)


def mend() -> None:
    """Lets the interpreter round `fma` once, as a GPU does, and Triton 3.6 interpret a loop whose bound is an argument.

    The interpreter of Triton 3.6 calls `int` on an array of one element, which numpy 2.4 and later refuse. Triton 3.7
    and later call `int` on the element, so the bounds of no other version change.
    """
    import numpy as np
    import triton
    from triton.runtime import interpreter

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            product = x.data.astype("float64") * y.data  # exact
            wide = product + z.data
            back = wide - product
            rest = (product - (wide - back)) + (z.data - back)  # what the sum has lost
            odd = (wide.view("int64") & 1).astype(bool) | (rest == 0) | ~np.isfinite(rest)
            wide = np.where(odd, wide, np.nextafter(wide, np.copysign(np.inf, rest)))  # so fp32 rounds the exact sum
            return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
    patch = interpreter._patch_lang_tensor if triton.__version__.startswith("3.6.") else None
    if patch is None or hasattr(patch, "__wrapped__"):
        return

    @wraps(patch)
    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
