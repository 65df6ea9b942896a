"""Whether kernels are interpreted in this process, and a loop that one version of the interpreter cannot run."""

from functools import wraps
from importlib.util import find_spec
from typing import Any


def interpreted() -> bool | None:
    """Returns whether kernels of this process are interpreted; None without Triton."""
    if find_spec("triton") is None:
        return None
    from triton import knobs  # imported late: Triton is optional

    return bool(knobs.runtime.interpret)


def mend_bounds() -> None:
    """Lets Triton 3.6 interpret a loop whose bound is an argument of the kernel.

    There the interpreter holds the argument in an array of one element and takes `int` of that array, which numpy 2.4
    and later refuse. Triton 3.7 and later take `int` of the element. Other versions are left as they are.
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
