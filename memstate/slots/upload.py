"""Sends small integer packets to the device without waiting. This module does not know their contents.

host ring    [ 0 | 1 | 2 | 3 ]   pinned; a buffer is reused only after the CUDA event that follows its last copy
                     |
device       [    packet     ]   one buffer; all sends come on one stream, so a packet is read before the next is copied
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.kernels.dispatch import Backend, on
from memstate.streams import mark

RING = 16
INTS = 4096  # of a buffer at first; it grows with the largest packet


class UploadRing:
    """A ring of pinned host buffers and one device buffer. They grow if a packet does not fit."""

    def __init__(self, backend: Backend, ints: int = INTS) -> None:
        self.waits = 0  # times that the host waited because the ring was full
        self._backend = backend
        self._turn = 0
        self._grow(ints)

    def _grow(self, ints: int) -> None:
        device = self._backend.device
        with on(device):
            self._host = [torch.empty(ints, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(RING)]
        self._arrays = [buffer.numpy() for buffer in self._host]
        self._sent: list[torch.cuda.Event | None] = [None] * RING
        self._device = torch.empty(ints, dtype=torch.int32, device=device)

    def send(self, packet: NDArray[np.int32], to: Tensor | None = None) -> Tensor:
        """Copies a packet to the device asynchronously.

        Args:
            packet: int32 array, axis `n`.
            to: int32 tensor for the packet, as long or longer. None: the ring's own, valid until the next `send`.

        Returns:
            The packet on the device: int32 tensor, axis `n`.

        Syncs: only if the ring is full; `waits` counts this.
        """
        if packet.size > self._host[0].numel():
            if self._backend.device.type == "cuda":  # launches of this stream may still read it
                self._device.record_stream(torch.cuda.current_stream(self._backend.device))
            self._grow(2 * packet.size)
        turn = self._turn = (self._turn + 1) % RING
        event = self._sent[turn]
        if event is not None and not event.query():
            event.synchronize()
            self.waits += 1
            self._backend.counts.syncs += 1
        self._arrays[turn][: packet.size] = packet
        buffer = self._host[turn][: packet.size]
        target = (self._device if to is None else to)[: packet.size]
        target.copy_(buffer, non_blocking=True)
        if self._backend.device.type == "cuda":
            self._sent[turn] = mark(self._backend.device)
        self._backend.counts.uploads += 1
        self._backend.counts.upload_bytes += 4 * packet.size
        return target
