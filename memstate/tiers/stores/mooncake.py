"""Stores records in the host memory of many machines, through the client of a Mooncake store.

It does not look into records: the reader checks their contents. Several threads may call the client at once. The client
transfers without Python's lock, and watches its master from its own thread. After a restart of the master, the client
joins again with its segment and registered memory, so this module never reconnects.
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

    If the master does not answer, each call in progress takes at most 3 x (timeout + 5 s). After that, calls end at
    once until the master answers again: `get` and `put` with FAILED, and `exists` raises. If another machine falls
    silent during a transfer, the call takes at most 60 s.

    Args:
        settings: Settings: where the store is, and what this process adds to it.

    Attributes:
        faults: Mooncake's name of a fault -> number of records with it. NO_MASTER and CLOSED: the client was not
            called.

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
        """Registers host memory, so that records are transferred without a copy. The memory stays alive until `close`.

        Args:
            memory: uint8, contiguous, on the host.

        Raises:
            InvalidArgument: The tensor is no such memory.
            OSError: The client refuses the memory.
        """
        if memory.dtype != torch.uint8 or not memory.is_contiguous() or memory.device.type != "cpu":
            raise InvalidArgument(f"memory {memory.dtype} on {memory.device}: expected contiguous bytes on the host")
        with self._using() as fault, self._registering:  # one by one: the client refuses memory that it has already
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
        """Takes this process's segment out of the store, once the calls in progress have ended.

        The records in the segment are lost. If the master does not answer, this takes as long as several calls, and the
        client holds Python's lock meanwhile. So close stores before the master ends.
        """
        with self._idle:
            first, self._closed = not self._closed, True
            self._idle.wait_for(lambda: not self._calls)
        if first:
            self._client.close()
            self._memory = ()

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name whether its record is there. False if the client fails for it, which `faults` counts.

        Raises:
            InvalidArgument: A name is not valid.
            OSError: The client fails for all names. The text has the faults.
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
        """Reads each record into its buffer. A record of another size is removed, because it will never be right.

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
        if read == INVALID:  # also the client's code for a record that is larger than its buffer
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
        """Keeps the client open during a block. Yields the fault for which the client must not be called, or "".

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
    """Returns the places of names, split into turns without a repeated name.

    Of two buffers with the same name in one call, the client would fill only one and report both as done.
    """
    turns: list[list[int]] = []
    met: Counter[str] = Counter()
    for place, name in enumerate(names):
        if met[name] == len(turns):
            turns.append([])
        turns[met[name]].append(place)
        met[name] += 1
    return turns
