"""Gives the references device tensors as numpy arrays: the same memory on a CPU, otherwise copies."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

Ints = NDArray[np.int32]


def on_host(*tensors: Tensor) -> AbstractContextManager[tuple[Ints, ...]]:
    """Yields arrays of the tensors; changes of the arrays are in the tensors afterwards. Syncs: off the CPU.

    Args:
        tensors: tensors of one device.
    """
    return nullcontext(_same_memory(tensors)) if tensors[0].is_cpu else _copies(tensors)


@contextmanager
def _copies(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Ints, ...]]:
    arrays = tuple(tensor.cpu().numpy() for tensor in tensors)
    yield arrays
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.copy_(from_numpy(array))


@lru_cache(maxsize=4)
def _same_memory(tensors: tuple[Tensor, ...]) -> tuple[Ints, ...]:
    """Returns arrays over the memory of CPU tensors; cached, because a decode loop passes the same ones every step."""
    return tuple(tensor.numpy() for tensor in tensors)
