"""The folder of a file store: where a record lies, and who goes when it is full. Knows no contents and no outcome.

    folder / records-7f / kv-<hex>                     a record: it got its name when it was complete
                        / .<process>-<random>.tmp      one being written, or what a dead process left

Any number of threads, processes and machines share it without a lock that one of them could take to its grave.
"""

import errno
import os
import re
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from memstate import split
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.tiers.stores.base import NAME, require_names

SHARDS = 256
PART = 16  # the folder is looked through once per capacity / PART of new bytes, and that much room is made at a time
STALE_S = 600.0  # a temporary file that nobody has written to for so long has no writer any more
TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{16}\.tmp")

# Where the system has them: no link is followed, no pipe waited for, no child process inherits the file.
FLAGS: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS


class Folder:
    """Records as files of `path`, where `~` is the user's home; at most `capacity` bytes of them, None is no limit.

    faults: what the system refused, by the name of errno. Raises: ConfigurationError where the folder cannot be made or
    written; InvalidArgument.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int | None) -> None:
        self.path = _expanded(path)
        self.capacity = None if capacity is None else split.whole("capacity", capacity)
        self.faults: Counter[str] = Counter()
        self.evicted = 0
        self._used: int | None = None  # bytes of records as far as known; None: not looked yet
        self._new = 0  # bytes written since the last look
        self._room, self._count = threading.Lock(), threading.Lock()
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            Path(self._shard(0)).mkdir(0o700, exist_ok=True)
            probe = self.temporary(self._shard(0))
            os.close(os.open(probe, CREATE, 0o600))
            os.unlink(probe)
        except OSError as error:
            raise ConfigurationError(
                f"file store in {self.path}: {error.strerror}; name a folder that can be made and written"
            ) from error

    def paths(self, names: Sequence[str]) -> list[str]:
        """Where records lie. Raises: InvalidArgument."""
        require_names(names)
        return [os.path.join(self._shard(zlib.crc32(name.encode()) % SHARDS), name) for name in names]

    def _shard(self, number: int) -> str:
        return f"{self.path}{os.sep}records-{number:02x}"

    @staticmethod
    def temporary(shard: str) -> str:
        """A path that no other thread, process or machine chooses."""
        return os.path.join(shard, f".{os.getpid()}-{os.urandom(8).hex()}.tmp")

    def fault(self, error: OSError) -> None:
        """Counts what the system refused."""
        with self._count:
            self.faults[errno.errorcode.get(error.errno or 0, "unknown")] += 1

    def take(self, nbytes: int) -> None:
        """Counts in a record that will be written; looks through the folder with the first one, where it would not fit,
        and now and then for what others wrote. A look corrects the count. Raises: OSError for what can never fit.
        """
        if self.capacity is not None and nbytes > self.capacity:
            raise OSError(errno.EFBIG, f"a record of {nbytes} bytes, capacity {self.capacity}")
        with self._room:  # who finds somebody cleaning waits, since writing on would exceed the capacity
            self._new += nbytes
            over = self.capacity is not None and (
                self._new > self.capacity // PART or (self._used or 0) + nbytes > self.capacity
            )
            if over or self._used is None:
                self._clean(nbytes)
            self._used = (self._used or 0) + nbytes

    def clean(self) -> None:
        """Deletes what dead processes left, and the least recently used records beyond the capacity."""
        with self._room:
            self._clean(0)

    def _clean(self, wanted: int) -> None:
        """One look at every file, and a second that evicts: between them a record is a time and a size, no more."""
        times, sizes = array("q"), array("q")
        for entry in self._files():
            record = NAME.fullmatch(entry.name) is not None
            if record and self.capacity is None:
                continue
            with suppress(OSError):  # gone meanwhile
                found = entry.stat(follow_symlinks=False)
                if record:
                    times.append(found.st_mtime_ns)
                    sizes.append(found.st_size)
                elif TEMPORARY.fullmatch(entry.name) and time.time() - found.st_mtime > STALE_S:
                    os.unlink(entry.path)
        self._new, self._used = 0, sum(sizes)
        if self.capacity is not None and self._used + wanted > self.capacity:
            excess = self._used + wanted - (self.capacity - self.capacity // PART)
            oldest = np.argsort(np.asarray(times), kind="stable")
            freed = np.cumsum(np.asarray(sizes)[oldest])
            self._evict(times[oldest[min(int(np.searchsorted(freed, excess)), len(freed) - 1)]], excess)

    def _evict(self, until_ns: int, excess: int) -> None:
        """Deletes records last used up to a time. A second process that does the same finds nothing left to delete."""
        for entry in self._files():
            if excess <= 0:
                return
            try:
                found = entry.stat(follow_symlinks=False)
                if NAME.fullmatch(entry.name) and found.st_mtime_ns <= until_ns:
                    os.unlink(entry.path)
                    self.evicted += 1
                    self._used, excess = (self._used or 0) - found.st_size, excess - found.st_size
            except FileNotFoundError:
                continue
            except OSError as error:
                self.fault(error)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Every file of the store, in no order; whatever else lies in the folder is not the store's."""
        for shard in map(self._shard, range(SHARDS)):
            try:
                with os.scandir(shard) as entries:
                    yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))
            except FileNotFoundError:
                continue
            except OSError as error:
                self.fault(error)


def _expanded(path: str | os.PathLike[str]) -> Path:
    """Raises: InvalidArgument; ConfigurationError where `~` stands for no home."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgument(f"path {path!r}: expected the folder of a file store, '.' for the current one")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigurationError(f"file store in {path}: there is no such home; write ./{path} for a folder here")
    return Path(expanded)
