"""Sends small integer packets to the device without waiting. This module does not know their contents.

host ring    [ 0 | 1 | 2 | .. ]   pinned; a buffer is used again only after the CUDA event that follows its last copy
                     |
device       [    packet      ]   one buffer; all sends are on one stream, so launches read a packet before the next
                                  copy
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate import lasting
from memstate.kernels.dispatch import Backend, on
from memstate.streams import mark

RING = 16  # number of host buffers
VIEWS = 256  # limit of the slices of a tensor that are kept for reuse
INTS = 4096  # initial size of a buffer, in int32; buffers grow with the largest packet


class Views(dict[int, Tensor]):
    """Slices of a tensor from its start, by their length. Each is made once: slicing takes longer than sending.

    Args:
        whole: the tensor that is sliced.
    """

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def __missing__(self, length: int) -> Tensor:
        if len(self) == VIEWS:
            self.clear()
        view = self[length] = self.whole[:length]
        return view


class UploadRing:
    """A ring of pinned host buffers and one device buffer. They grow if a packet does not fit."""

    def __init__(self, backend: Backend, ints: int = INTS) -> None:
        self.waits = 0  # times that the host waited because the ring was full
        self._backend = backend
        self._cuda = backend.device.type == "cuda"
        self._turn = 0  # number of the buffer that is filled next
        self._grow(ints)

    def _grow(self, ints: int) -> None:
        device = self._backend.device
        with on(device):
            host = [Views(lasting.empty(ints, torch.int32, pinned=self._cuda)) for _ in range(RING)]
        self._device = Views(lasting.empty(ints, torch.int32, device))
        self._host, self._arrays = host, [buffer.whole.numpy() for buffer in host]
        self._sent: list[torch.cuda.Event | None] = [None] * RING
        self._ints = ints  # set last, because the allocations above can fail

    def room(self, ints: int) -> NDArray[np.int32]:
        """Returns the host memory of the next packet, for the caller to fill before `push`: int32 `ints`.

        Syncs: only if the ring is full; `waits` counts this.
        """
        if ints > self._ints:
            if self._cuda:  # launches on this stream may still read the old buffer
                self._device.whole.record_stream(torch.cuda.current_stream(self._backend.device))
            self._grow(2 * ints)
        event = self._sent[self._turn]
        if event is not None and not event.query():
            event.synchronize()
            self.waits += 1
            self._backend.counts.syncs += 1
        return self._arrays[self._turn][:ints]

    def push(self, ints: int, to: Views | None = None) -> Tensor:
        """Copies the packet that the caller has put into `room` to the device asynchronously.

        Args:
            ints: number of int32 of the packet.
            to: where the packet goes, int32. None: the ring's own memory, valid until the next packet.

        Returns:
            The packet on the device: int32 tensor, axis `n`.

        Syncs: no.
        """
        turn = self._turn
        target = (self._device if to is None else to)[ints]
        target.copy_(self._host[turn][ints], non_blocking=True)
        if self._cuda:
            self._sent[turn] = mark(self._backend.device)
        self._turn = (turn + 1) % RING
        counts = self._backend.counts
        counts.uploads += 1
        counts.upload_bytes += 4 * ints
        return target

    def send(self, packet: NDArray[np.int32], to: Views | None = None) -> Tensor:
        """Copies a packet to the device asynchronously; see `room` and `push`."""
        self.room(packet.size)[:] = packet
        return self.push(packet.size, to)
