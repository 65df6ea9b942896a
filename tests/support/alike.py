"""Holds what launches of kept kernels are promised, on every backend: int32 tensors on 16-byte boundaries.

`memstate.kernels.kept` launches the kernel of the first such launch again, and looks at no argument. A kernel that was
compiled for vectors on 16-byte boundaries would read and write others in the wrong places, or fault, on a GPU alone.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
import torch

from memstate.slots.registers import RegisterFile

BOUNDARY = 16  # bytes
KEPT = ("ownership", "plan")  # operations whose kernels are kept


def misfits(arguments: Any) -> Iterator[str]:
    """Tensors among arguments, and in tuples of these, that a kept kernel may not be launched with."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from misfits(argument)
        elif isinstance(argument, torch.Tensor) and argument.numel():
            beyond = argument.data_ptr() % BOUNDARY
            if beyond or argument.dtype != torch.int32:
                yield f"{argument.dtype} of {tuple(argument.shape)}, {beyond} bytes behind a boundary"


def hold(patch: pytest.MonkeyPatch) -> None:
    """From now on calls of register files with other vectors fail."""

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def checked(file: RegisterFile, *args: Any) -> Any:
            found = list(misfits((*file.table, *args)))
            assert not found, f"{call.__name__} of a kept kernel: expected int32 on {BOUNDARY} bytes, got {found}"
            return call(file, *args)

        return checked

    for name in KEPT:
        patch.setattr(RegisterFile, name, held(getattr(RegisterFile, name)))
