"""Stores records in the host memory of many machines, through the client of a Mooncake store.

This module does not check the contents of records: the reader does. Several threads may call the client at the same
time. The client releases Python's lock during transfers, and watches its master from its own thread. After a restart of
the master, the client itself connects again with its segment and its registered memory.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.sizes import format_bytes
from memstate.tiers.stores.base import Bytes, Outcome, require_buffers, require_names
from memstate.tiers.stores.mooncake_client import ABSENT, EXISTS, INVALID, Mooncake, connect, name_of

__all__ = ["Mooncake", "MooncakeStore"]

NO_MASTER, CLOSED = "NO_MASTER", "CLOSED"  # faults of calls that never reached the client


class MooncakeStore:
    """A `Store` in a Mooncake store. Any number of processes and machines share it.

    If the master stops answering, each call in progress takes at most 3 x (timeout + 5 s). Later calls end at once
    until the master answers again: `get` and `put` return FAILED, and `exists` raises. If another machine stops
    answering during a transfer, the call takes at most 60 s.

    Args:
        settings: Where the store is, and what this process adds to it.

    Attributes:
        faults: For each fault, by its name in Mooncake, the number of records that failed so. NO_MASTER and CLOSED:
            the master did not answer or the store was closed, so the client was not called.

    Raises:
        ConfigurationError: The client is not installed, or cannot be set up with these settings.
    """

    def __init__(self, settings: Mooncake) -> None:
        self.settings = settings
        self.faults: Counter[str] = Counter()
        self._calls = 0
        self._closed = False
        self._idle = threading.Condition()  # tells `close` that no call runs; also guards `faults`
        self._registering = threading.Lock()
        self._memory: tuple[Tensor, ...] = ()
        self._client, self._config = connect(settings)

    def __repr__(self) -> str:
        at, size = self.settings.master, format_bytes(self.settings.segment_bytes)
        return f"MooncakeStore({at!r}, {self.settings.protocol}, gives {size}, {self.faults.total()} faults)"

    def register(self, memory: Tensor) -> None:
        """Registers host memory, so that transfers need no copy of a record. The store keeps the memory until `close`.

        Args:
            memory: uint8, contiguous, on the host.

        Raises:
            InvalidArgument: The tensor is not contiguous uint8 on the host.
            OSError: The client refuses the memory.
        """
        if memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.device.type != "cpu":
            raise InvalidArgument(f"memory {memory.dtype} on {memory.device}: expected contiguous bytes on the host")
        with self._using() as fault, self._registering:  # one by one: the client refuses memory that it has
            start, nbytes = memory.data_ptr(), memory.nbytes
            if not nbytes or self._covers(start, nbytes):
                return
            code = 0 if fault == CLOSED else self._client.register_buffer(start, nbytes)
            if fault == CLOSED or code:
                raise OSError(
                    f"register {format_bytes(nbytes)} with {self!r}: {name_of(code) if code else CLOSED}; memory "
                    "must not overlap what is registered, a metadata server must answer, rdma needs as much lockable "
                    "memory (ulimit -l)"
                )
            self._memory += (memory,)

    def close(self) -> None:
        """Removes this process's segment from the store, after the calls in progress have ended.

        The records in the segment are lost. If the master does not answer, this takes as long as several calls, and all
        this time the client holds Python's lock. So close stores before the master ends.
        """
        with self._idle:
            first, self._closed = not self._closed, True
            self._idle.wait_for(lambda: not self._calls)
        if first:
            self._client.close()
            self._memory = ()

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name whether its record is there. If the client fails for it: False, and `faults` counts it.

        Raises:
            InvalidArgument: A name is not valid.
            OSError: The client fails for all names. The text names the faults.
        """
        require_names(names)
        with self._using() as fault:
            codes = [] if fault or not names else self._client.batch_is_exist(list(names))
            wrong = [name_of(code) for code in codes if code < 0 and code not in ABSENT]
            wrong = [fault] * len(names) if fault else wrong
            self._count(wrong)
        if names and len(wrong) == len(names):
            raise OSError(f"exists of {len(names)} records with {self!r}: {', '.join(sorted(set(wrong)))}")
        return [code == 1 for code in codes]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer. If its size is wrong, the record is removed, because it is damaged.

        Raises:
            InvalidArgument: Names or buffers are not valid, or memory was not registered; nothing was read.
        """
        require_buffers(names, buffers, written=True)
        return self._transfer(names, buffers, self._get)

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record that is not there yet.

        Raises:
            InvalidArgument: Names or buffers are not valid, or memory was not registered; nothing was written.
        """
        require_buffers(names, buffers, written=False)
        return self._transfer(names, buffers, self._put)

    def discard(self, names: Sequence[str]) -> None:
        """Removes records whose contents are wrong, so that they can be written again."""
        require_names(names)
        with self._using() as fault:
            if not fault and names:
                self._client.batch_remove(list(names), True)

    def _transfer(
        self, names: Sequence[str], buffers: Sequence[Bytes], move: Callable[..., list[Outcome]]
    ) -> list[Outcome]:
        addresses = [buffer.ctypes.data for buffer in buffers]
        outcomes = [Outcome.FAILED] * len(names)
        with self._using() as fault:
            if fault:
                self._count([fault] * len(names))
                return outcomes
            for address, buffer in zip(addresses, buffers, strict=True):
                if not self._covers(address, len(buffer)):
                    raise InvalidArgument(f"buffer of {len(buffer)} bytes outside registered memory: register() it")
            for places in _turns(names):
                done = move(*([column[place] for place in places] for column in (names, addresses, buffers)))
                for place, outcome in zip(places, done, strict=True):
                    outcomes[place] = outcome
        return outcomes

    def _get(self, names: list[str], addresses: list[int], buffers: list[Bytes]) -> list[Outcome]:
        sizes = [len(buffer) for buffer in buffers]
        read = self._client.batch_get_into(names, addresses, sizes)
        return [self._of_read(*record) for record in zip(names, read, sizes, strict=True)]

    def _of_read(self, name: str, read: int, size: int) -> Outcome:
        if read == INVALID:  # the client also returns this code if a record is larger than its buffer
            there = self._client.get_size(name)
            read = INVALID if there == size else there
        if read == size:
            return Outcome.DONE
        if read >= 0:
            self._client.batch_remove([name], True)
            return Outcome.DAMAGED
        if read in ABSENT:
            return Outcome.MISSING
        self._count([name_of(read)])
        return Outcome.FAILED

    def _put(self, names: list[str], addresses: list[int], buffers: list[Bytes]) -> list[Outcome]:
        codes = self._client.batch_put_from(names, addresses, [len(buffer) for buffer in buffers], self._config)
        self._count([name_of(code) for code in codes if code not in (0, EXISTS)])
        return [Outcome.DONE if code in (0, EXISTS) else Outcome.FAILED for code in codes]

    @contextmanager
    def _using(self) -> Iterator[str]:
        """Keeps the client open during a block. Yields "", or the fault because of which it must not be called.

        The client watches the master in its own thread, so `health_check` does not wait.
        """
        with self._idle:
            closed = self._closed
            self._calls += 1
        try:
            yield CLOSED if closed else NO_MASTER if self._client.health_check() else ""
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _covers(self, start: int, nbytes: int) -> bool:
        """Returns whether a range of bytes lies in registered memory."""
        return any(m.data_ptr() <= start and start + nbytes <= m.data_ptr() + m.nbytes for m in self._memory)

    def _count(self, faults: Sequence[str]) -> None:
        if any(faults):
            with self._idle:
                self.faults.update(faults)


def _turns(names: Sequence[str]) -> list[list[int]]:
    """Returns groups of indices into `names`; no group has a name twice.

    If one call had two buffers with the same name, the client would fill only one and report both as done.
    """
    turns: list[list[int]] = []
    met: Counter[str] = Counter()
    for place, name in enumerate(names):
        if met[name] == len(turns):
            turns.append([])
        turns[met[name]].append(place)
        met[name] += 1
    return turns
