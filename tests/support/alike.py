"""Checks the arguments of kept kernels on every backend: int32 tensors on 16-byte boundaries.

`memstate.kernels.kept` launches the compiled kernel of the first launch again, without a check of the arguments. Such a
kernel may be compiled for 16-byte boundaries. On a GPU, it uses wrong places of tensors that begin elsewhere, or fails.
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
    """Yields a line for each tensor, at any depth of tuples, that does not suit a kept kernel."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from misfits(argument)
        elif isinstance(argument, torch.Tensor) and argument.numel():
            beyond = argument.data_ptr() % BOUNDARY
            if beyond or argument.dtype != torch.int32:
                yield f"{argument.dtype} of {tuple(argument.shape)}, {beyond} bytes behind a boundary"


def hold(patch: pytest.MonkeyPatch) -> None:
    """Makes the calls of register files fail if a tensor does not suit a kept kernel."""

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def checked(file: RegisterFile, *args: Any) -> Any:
            misfit = list(misfits((*file.table, *args)))
            assert not misfit, f"{call.__name__} of a kept kernel: expected int32 on {BOUNDARY} bytes, got {misfit}"
            return call(file, *args)

        return checked

    for name in KEPT:
        patch.setattr(RegisterFile, name, held(getattr(RegisterFile, name)))
