"""Makes memory that outlives the call in which it is made, whatever device, dtype and mode the process is in then.

A factory of torch takes what it is not told from the process: the default device, the default dtype, inference mode. A
tensor that is made in inference mode, or seen there as another dtype, cannot be changed outside that mode any more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def empty(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device = CPU, pinned: bool = False) -> Tensor:
    """Returns memory without contents.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: where the memory is.
        pinned: whether it is page-locked, so that a device copies from and to it by itself.

    Syncs: no.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Returns memory with zeros; see `empty`. Syncs: no."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def tensor(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor with values: numbers, or sequences or an array of them. Syncs: off the CPU."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def view(
    of: Tensor, dtype: torch.dtype, start: int | torch.SymInt, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Returns a view of the memory in which a tensor lies, which can be changed in every mode, whatever the tensor is.

    Args:
        of: the tensor.
        dtype: of the view.
        start: first byte of the view in the tensor's storage, a multiple of an element.
        shape: of the view.
        strides: of the view, in elements.

    Syncs: no.
    """
    with torch.inference_mode(False):
        found = torch.empty(0, dtype=dtype, device=of.device)
        return found.set_(of.untyped_storage(), start // dtype.itemsize, tuple(shape), tuple(strides))
