"""Device tensors as numpy arrays for the references: in place on a CPU, copied there and back elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

Ints = NDArray[np.int32]


@contextmanager
def on_host(*tensors: Tensor) -> Iterator[tuple[Ints, ...]]:
    """Arrays that stand for the tensors; what is written to them is in the tensors at the end. Syncs: off the CPU."""
    arrays = tuple(t.numpy() if t.device.type == "cpu" else t.cpu().numpy() for t in tensors)
    yield arrays
    for tensor, array in zip(tensors, arrays, strict=True):
        if tensor.device.type != "cpu":
            tensor.copy_(from_numpy(array))
