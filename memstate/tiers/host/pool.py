"""Allocates records of equal size in host memory. Knows no key and no device.

A record:  free -> claimed -> released -> free
                                  `-> if a thread still writes to it, it first waits for the thread
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import finalize

import torch

from memstate import lasting
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.sizes import format_bytes, memory
from memstate.tiers.stores.base import Bytes


class RecordPool:
    """Allocates records 0..records-1.

    Args:
        records: Number of records.
        nbytes: Bytes of a record.
        pinned: Whether to page-lock the memory, so that a device can copy from and to it without the CPU.

    Raises:
        ConfigurationError: There is not enough memory, or it cannot be page-locked.
        InvalidArgument: A number is out of range.

    Example:
        >>> pool = RecordPool(records=4, nbytes=256)
        >>> records = pool.claim(2)
        >>> pool.use(records)
        >>> pool.release(records)
        >>> pool.free, pool.claimed  # two records wait
        (2, 0)
        >>> pool.unuse(records)
        >>> pool
        RecordPool(4 of 4 records free, 256 bytes each)
    """

    def __init__(self, records: int, nbytes: int, pinned: bool = False) -> None:
        if records < 0 or nbytes < 1:
            raise InvalidArgument(f"records={records} of {nbytes} bytes: expected 0 or more of at least 1 byte")
        self.records, self.nbytes = records, nbytes
        too_large = (
            f"{records} records of {nbytes} bytes are {format_bytes(records * nbytes)}, which cpu has not: "
            "ask for less with host_slots, host_pages, host_blocks or host_bytes"
        )
        if records * nbytes > memory(torch.device("cpu")):
            raise ConfigurationError(too_large)
        try:
            self.memory = lasting.zeros((records, nbytes), torch.uint8)
        except RuntimeError as error:  # torch raises this if memory is short
            raise ConfigurationError(too_large) from error
        if pinned and self.memory.numel():
            self._lock()
        self._bytes: Bytes = self.memory.numpy()
        self.reset()

    def reset(self) -> None:
        """Makes every record free. Call it only while nothing reads or writes records."""
        self._free = list(range(self.records))
        self._claimed: set[int] = set()
        self._written: set[int] = set()  # records that threads write to

    def _lock(self) -> None:
        """Page-locks the memory for the life of this pool.

        It does not use torch's pinned memory, whose size is rounded up to a power of two.
        """
        runtime: Any = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.nbytes, 0)):
            raise ConfigurationError(
                f"{format_bytes(self.memory.nbytes)} of host memory cannot be page-locked (CUDA error {code}): ask for "
                "less"
            )
        finalize(self, runtime.cudaHostUnregister, self.memory.data_ptr())

    def __repr__(self) -> str:
        return f"RecordPool({self.free} of {self.records} records free, {self.nbytes} bytes each)"

    @property
    def free(self) -> int:
        """Number of records that can be claimed now."""
        return len(self._free)

    @property
    def claimed(self) -> int:
        """Number of records that are claimed and not released. A record that is neither free nor claimed waits."""
        return len(self._claimed)

    def buffer(self, record: int) -> Bytes:
        """Returns the bytes of a record in host memory, uint8 `byte`."""
        buffer: Bytes = self._bytes[record]
        return buffer

    def claim(self, n: int) -> list[int]:
        """Claims the n lowest free records.

        Raises:
            InvalidArgument: Fewer than n are free; nothing changed.
        """
        if not 0 <= n <= self.free:
            raise InvalidArgument(f"claim of {n} host records, {self.free} of {self.records} are free")
        records = [heapq.heappop(self._free) for _ in range(n)]
        self._claimed.update(records)
        return records

    def release(self, records: Sequence[int]) -> None:
        """Releases records. A record to which a thread writes becomes free when `unuse` says that the thread is done.

        Raises:
            InvalidArgument: A record is not claimed, or is named twice; nothing changed.
        """
        if len(set(records)) != len(records) or not self._claimed.issuperset(records):
            raise InvalidArgument(f"release of host records {list(records)}: not claimed, or named twice")
        self._claimed.difference_update(records)
        for record in records:
            if record not in self._written:
                heapq.heappush(self._free, record)

    def use(self, records: Iterable[int]) -> None:
        """Notes that a thread writes to claimed records, until `unuse`."""
        self._written.update(records)

    def unuse(self, records: Iterable[int]) -> None:
        """Notes that the thread no longer writes to the records. Those released meanwhile become free."""
        for record in records:
            self._written.remove(record)
            if record not in self._claimed:
                heapq.heappush(self._free, record)
