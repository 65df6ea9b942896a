"""Copies slot ids from the device to the host without waiting. This module does not know owners."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate import lasting
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend, on
from memstate.streams import mark


class Readback:
    """Slot ids on their way from the device to pinned host memory, after all changes that were recorded before.

    Args:
        n: number of slot ids.
        backend: the backend of the device.

    Example:
        >>> import torch
        >>> from memstate import Backend
        >>> from memstate.slots.readback import Readback
        >>> ids = Readback(2, Backend("reference"))
        >>> ids.begin(torch.tensor([3, 5], dtype=torch.int32))
        >>> ids.wait().tolist()
        [3, 5]
    """

    def __init__(self, n: int, backend: Backend) -> None:
        self._backend = backend
        with on(backend.device):
            self._host = lasting.empty(n, torch.int32, pinned=backend.device.type == "cuda")
        # a reference to the source tensor, so that its memory is not reused before the copy is done
        self._source: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def begin(self, ids: Tensor) -> None:
        """Starts the copy to the host.

        Args:
            ids: int32 tensor on the device, axis `n`.

        Syncs: no.
        """
        self._source = ids
        self._host.copy_(ids, non_blocking=True)
        if ids.device.type == "cuda":
            self._copied = mark(ids.device)

    @property
    def ready(self) -> bool:
        """Whether the copy has arrived. Syncs: no."""
        return self._source is not None and (self._copied is None or self._copied.query())

    def wait(self) -> NDArray[np.int32]:
        """Waits until the ids have arrived, and returns them in the order that they have in `begin`: int32, axis `n`.

        Raises:
            InvalidArgument: the copy has not started, because it waits for a forward.

        Syncs: yes, unless `ready`.
        """
        if self._source is None:
            raise InvalidArgument(
                f"{self._host.numel()} slot ids wait for the newest step's forward, as the changes before them do: "
                "launch it, then say so with submit(step), settle it, or plan the next step (none come after recover())"
            )
        if not self.ready and self._copied is not None:
            self._backend.counts.syncs += 1
            self._copied.synchronize()
        return self._host.numpy().copy()

    def __repr__(self) -> str:
        state = "ready" if self.ready else "on its way" if self._source is not None else "behind a forward"
        return f"Readback({self._host.numel()} slots, {state})"
