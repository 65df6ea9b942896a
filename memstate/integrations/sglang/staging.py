"""Host memory, registered with a store, through which records pass on their way to and from the store."""

from collections.abc import Iterator, Sequence
from threading import Lock

import torch

from memstate import lasting
from memstate.tiers.stores.base import Bytes, Store

MOST = 2**26  # limit of the bytes of the memory, unless one record is larger


class Staging:
    """Memory that is registered with a store and grows when calls need more.

    Args:
        store: the store.

    Attributes:
        lock: lock that callers must hold while they use the memory.
    """

    def __init__(self, store: Store) -> None:
        self._store, self.lock = store, Lock()
        self._memory = lasting.empty(0, torch.uint8)
        self._before: list[torch.Tensor] = []  # earlier, smaller memory: it stays registered, so it must not be freed

    def parts(self, sizes: Sequence[int]) -> Iterator[tuple[int, list[Bytes]]]:
        """Divides records into parts that fit the memory.

        Args:
            sizes: bytes of each record, 1 or more.

        Returns:
            For each part: (index of its first record, buffers of its records). All parts use the same memory.
        """
        need = min(sum(sizes), max(MOST, *sizes)) if sizes else 0
        if need > self._memory.numel():
            memory = lasting.empty(1 << (need - 1).bit_length(), torch.uint8)
            self._store.register(memory)
            self._before.append(self._memory)
            self._memory = memory
        whole: Bytes = self._memory.numpy()
        first = used = 0
        buffers: list[Bytes] = []
        for at, size in enumerate(sizes):
            if used + size > len(whole):
                yield first, buffers
                first, used, buffers = at, 0, []
            buffers.append(whole[used : used + size])
            used += size
        if buffers:
            yield first, buffers
