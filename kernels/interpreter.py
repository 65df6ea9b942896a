"""Says whether this process interprets kernels, and mends loops of one version of the interpreter."""

from functools import wraps
from importlib.util import find_spec
from typing import Any


def interpreted() -> bool | None:
    """Returns whether this process interprets kernels; None without Triton."""
    if find_spec("triton") is None:
        return None
    from triton import knobs  # imported late: Triton is optional

    return bool(knobs.runtime.interpret)


def mend_bounds() -> None:
    """Lets Triton 3.6 interpret a loop whose bound is an argument of the kernel.

    The interpreter of Triton 3.6 calls `int` on an array of one element, which numpy 2.4 and later refuse. Triton 3.7
    and later call `int` on the element, so this function changes no other version.
    """
    import triton
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor if triton.__version__.startswith("3.6.") else None
    if patch is None or hasattr(patch, "__wrapped__"):
        return

    @wraps(patch)
    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
