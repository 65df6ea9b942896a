"""Makes tensors that outlive the call, whatever default device, default dtype and inference mode the process has.

torch's own factories take these three from the process. A tensor that is made in inference mode, or viewed there as
another dtype, cannot be changed outside that mode any more.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def empty(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device = CPU, pinned: bool = False) -> Tensor:
    """Returns a tensor whose memory is not initialized.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        device: where the memory is.
        pinned: whether the memory is page-locked, so that a device can copy from and to it by itself.

    Syncs: no.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Returns a tensor of zeros; see `empty`. Syncs: no."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device=device)


def tensor(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor with values: a number, or a sequence or array of numbers. Syncs: if the device is no CPU."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def view(
    of: Tensor, dtype: torch.dtype, start: int | torch.SymInt, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """Returns a view of a tensor's storage. The view can be changed in every mode, whatever the mode of the tensor.

    Args:
        of: the tensor whose storage is viewed.
        dtype: dtype of the view.
        start: first byte of the view in the tensor's storage, a multiple of the size of an element.
        shape: shape of the view.
        strides: strides of the view, in elements.

    Syncs: no.
    """
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=dtype, device=of.device)
        return empty.set_(of.untyped_storage(), start // dtype.itemsize, tuple(shape), tuple(strides))
