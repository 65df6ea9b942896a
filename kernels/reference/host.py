"""Device tensors as numpy arrays for the references: in place on a CPU, copied there and back elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

Ints = NDArray[np.int32]


@contextmanager
def on_host(*tensors: Tensor) -> Iterator[tuple[Ints, ...]]:
    """Arrays that stand for the tensors; what is written to them is in the tensors at the end. Syncs: off the CPU.

    Args:
        tensors: all on one device.
    """
    if tensors[0].is_cpu:
        yield _same_memory(tensors)
        return
    arrays = tuple(tensor.cpu().numpy() for tensor in tensors)
    yield arrays
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.copy_(from_numpy(array))


@lru_cache(maxsize=4)
def _same_memory(tensors: tuple[Tensor, ...]) -> tuple[Ints, ...]:
    """Arrays over the memory of tensors on the CPU; a decode loop gives the same tensors in every step."""
    return tuple(tensor.numpy() for tensor in tensors)
