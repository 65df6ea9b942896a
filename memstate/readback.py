"""Slot ids on their way to the host, for those who need them there. Knows no owner."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.kernels.dispatch import Backend


class Readback:
    """A small device tensor that is being copied to pinned host memory behind everything submitted so far.

    ids: int32 `n` on the device.
    """

    def __init__(self, ids: Tensor, backend: Backend) -> None:
        self._backend = backend
        on_gpu = ids.device.type == "cuda"
        self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=on_gpu)
        self._host.copy_(ids, non_blocking=True)
        self._source = ids  # may not be reused before the copy has been made
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether the copy has arrived. Syncs: no."""
        return self._copied is None or self._copied.query()

    def wait(self) -> NDArray[np.int32]:
        """The ids, int32 `n`, in the order they were asked for. Syncs: yes, unless `ready`."""
        if not self.ready and self._copied is not None:
            self._backend.counts.syncs += 1
            self._copied.synchronize()
        return self._host.numpy().copy()

    def __repr__(self) -> str:
        return f"Readback({self._host.numel()} slots, {'ready' if self.ready else 'on its way'})"
