"""A store in a dictionary, for tests: `ms.Tiers(store=MemoryStore())`."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from memstate.tiers.stores.base import Bytes, Outcome


class MemoryStore:
    """Keeps records in a dictionary, notes all calls, and fails as a test asks.

    Attributes:
        records: bytes of each record by its name.
        faults: fault of a record by name: "vanished" (exists, but a read misses it), "half" (a read gets half of it),
            "garbage" (a read gets wrong bytes), "denied" (reads and writes fail) or "raises" (a read raises).
        broken: whether every call raises OSError.
        forgetful: whether `exists` returns one answer too few.
        calls: (method, names) of each call, in order.

    Example:
        >>> store = MemoryStore()
        >>> store.exists(["a"])
        [False]
    """

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.faults: dict[str, str] = {}
        self.broken = False
        self.forgetful = False
        self.calls: list[tuple[str, list[str]]] = []

    def register(self, memory: Tensor) -> None:
        """See `Store.register`."""

    def close(self) -> None:
        """See `Store.close`."""

    def discard(self, names: Sequence[str]) -> None:
        """Notes the call, and keeps the records."""
        self.calls.append(("discard", list(names)))

    def asked(self, call: str) -> list[str]:
        """Returns the names of all calls of one method, in order.

        Args:
            call: name of the method.
        """
        return [name for called, names in self.calls if called == call for name in names]

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See `Store.exists`."""
        self._note("exists", names)
        return [name in self.records for name in names][int(self.forgetful) :]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """See `Store.get`."""
        self._note("get", names)
        if any(self.faults.get(name) == "raises" for name in names):
            raise ConnectionResetError("storage went away")
        return [self._read(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """See `Store.put`."""
        self._note("put", names)
        allowed = [self.faults.get(name) != "denied" for name in names]
        self.records.update((n, b.tobytes()) for n, b, well in zip(names, buffers, allowed, strict=True) if well)
        return [Outcome.DONE if well else Outcome.FAILED for well in allowed]

    def _note(self, call: str, names: Sequence[str]) -> None:
        self.calls.append((call, list(names)))
        if self.broken:
            raise OSError("storage is not there")

    def _read(self, name: str, buffer: Bytes) -> Outcome:
        fault, record = self.faults.get(name, ""), self.records.get(name)
        if fault == "denied":
            return Outcome.FAILED
        if fault == "vanished" or record is None:
            return Outcome.MISSING
        if fault == "half" or len(record) != buffer.size:
            half = min(len(record), buffer.size) // 2
            buffer[:half] = np.frombuffer(record[:half], np.uint8)
            return Outcome.DAMAGED
        buffer[:] = np.frombuffer(record, np.uint8)
        if fault == "garbage":
            buffer[-1] ^= 0x5A
        return Outcome.DONE
