"""The folder of a file store: where a record lies, and who goes when it is full. Knows no contents and no outcome.

    folder / records-7f / kv-<digest>              a record: it got its name when it was complete
                        / .<process>-<random>.tmp  one being written, or what a dead process left

Whatever else lies there is foreign: not counted, not read, not deleted. Any number of threads, processes and machines
share the folder without a lock that one of them could take to its grave; nothing is kept open between calls.
"""

import errno
import os
import re
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.state import sharding as split
from memstate.tiers.stores.base import RECORD
from memstate.tiers.stores.opening import (
    CREATE,
    FILE_MODE,
    PRIVATE,
    explained,
    is_record,
    make_folder,
    open_folder,
    require_descriptors,
    shut,
)

SHARDS = tuple(f"records-{number:02x}" for number in range(256))
PART = 16  # the folder is looked through once per capacity / PART of new bytes, and that much room is made at a time
STALE_S = 600.0  # a temporary file that nobody has written to for so long has no writer any more
TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{16}\.tmp")


class Folder:
    """Records as files of `path`, where `~` is the user's home; at most `capacity` bytes of them, None is no limit.

    shared: others may own and write the folder. faults: what the system refused, by the name of errno. Raises:
    UnsafeFolder; ConfigurationError where the folder cannot be made or written; InvalidArgument.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int | None, shared: bool = False) -> None:
        require_descriptors()
        if not isinstance(shared, bool):
            raise ConfigurationError(f"shared={shared!r}: expected True or False")
        self.path = _expanded(path).absolute()  # whatever becomes of the working directory
        self._text = str(self.path)
        self.capacity = None if capacity is None else split.whole("capacity", capacity)
        self.shared = shared
        self.faults: Counter[str] = Counter()
        self.evicted = 0
        self._used: int | None = None  # bytes of records as far as known; None: not looked yet
        self._new = 0  # bytes taken since the last look
        self._room, self._count = threading.Condition(threading.Lock()), threading.Lock()
        # Under _room, which nobody keeps while the system works:
        self._cleaning = False
        self._writing: dict[str, int] = {}  # records that have room and, as far as known, no name yet
        self._fresh: dict[str, int] = {}  # those, and all that came since the clean-up under way began: they stay
        self._leaving = ""  # the record that is being deleted; who writes the same one waits
        try:
            self._prepare()
        except OSError as error:
            raise ConfigurationError(
                f"file store in {self.path}: {error.strerror}; name a folder that can be made and written"
            ) from error

    def _prepare(self) -> None:
        """Makes the folder, looks at what is there already, and tries to write. Raises: OSError; UnsafeFolder."""
        for missing in reversed([parent for parent in self.path.parents if not parent.exists()]):
            missing.mkdir(PRIVATE, exist_ok=True)
        with explained(self._text, self.shared):
            root = make_folder(self._text, self.shared)
        try:
            for shard in SHARDS:
                with explained(shard, self.shared, root, self._text), suppress(FileNotFoundError):
                    shut(open_folder(shard, self.shared, root))
            first, probe = make_folder(SHARDS[0], self.shared, root), self.temporary()
            try:
                os.close(os.open(probe, CREATE, FILE_MODE, dir_fd=first))
                os.unlink(probe, dir_fd=first)
            finally:
                shut(first)
        finally:
            shut(root)

    def root(self) -> int:
        """A descriptor of the folder, for one call. Raises: OSError."""
        return open_folder(self._text, self.shared)

    def shard(self, root: int, name: str) -> int:
        """A descriptor of the folder that a record lies in. Raises: OSError."""
        return open_folder(shard_of(name), self.shared, root)

    def make_shard(self, root: int, name: str) -> int:
        """The same, made; not its parent: where a disk is no longer mounted nothing is to be written."""
        return make_folder(shard_of(name), self.shared, root)

    @staticmethod
    def temporary() -> str:
        """A name that no other thread, process or machine chooses."""
        return f".{os.getpid()}-{os.urandom(8).hex()}.tmp"

    def fault(self, error: OSError) -> None:
        """Counts what the system refused."""
        with self._count:
            self.faults[errno.errorcode.get(error.errno or 0, "unknown")] += 1

    def reserve(self, name: str, nbytes: int) -> None:
        """Counts in a record that will be written; looks through the folder with the first one, where it would not fit,
        and now and then for what others wrote. A look corrects the count. Raises: OSError for what can never fit.
        """
        if self.capacity is not None and nbytes > self.capacity:
            raise OSError(errno.EFBIG, f"a record of {nbytes} bytes, capacity {self.capacity}")
        with self._room:  # who has no room waits for who makes it; everybody else writes on
            self._room.wait_for(lambda: name != self._leaving and (not self._cleaning or self._has_room(nbytes)))
            self._new += nbytes
            due = not self._cleaning and (self._used is None or not self._has_room(nbytes) or self._long_ago())
            self._writing[name] = nbytes
            if self._cleaning:
                self._fresh[name] = nbytes
            if self._used is not None:
                self._used += nbytes
            if due:
                self._begin()
        if due:
            self._clean()

    def written(self, name: str) -> None:
        """Says that a record that was taken has its name now, or never gets it."""
        with self._room:
            self._writing.pop(name, None)

    def clean(self) -> None:
        """Deletes what dead processes left, and the least recently used records beyond the capacity."""
        with self._room:
            self._room.wait_for(lambda: not self._cleaning)
            self._begin()
        self._clean()

    def _has_room(self, nbytes: int) -> bool:
        return self.capacity is None or (self._used is not None and self._used + nbytes <= self.capacity)

    def _long_ago(self) -> bool:
        return self.capacity is not None and self._new > self.capacity // PART

    def _begin(self) -> None:
        """One at a time; what is being written now may be met or not, so it is counted from here on by its name."""
        self._cleaning, self._new, self._fresh = True, 0, dict(self._writing)

    def _clean(self) -> None:
        """One look at every file, and a second that evicts: between them a record is a time and a size, no more."""
        try:
            times, sizes = self._look()
            met = sum(sizes)
            with self._room:
                self._used = used = met + sum(self._fresh.values())
                self._room.notify_all()
            if self.capacity is not None and used > self.capacity and times:
                excess = used - (self.capacity - self.capacity // PART)
                oldest = np.argsort(np.asarray(times), kind="stable")
                freed = np.cumsum(np.asarray(sizes)[oldest])
                self._evict(times[oldest[min(int(np.searchsorted(freed, excess)), len(freed) - 1)]], excess)
        finally:
            with self._room:
                self._cleaning, self._fresh = False, {}
                self._room.notify_all()

    def _look(self) -> tuple["array[int]", "array[int]"]:
        """Times of use and sizes of the records that are not fresh; deletes what dead processes left."""
        times, sizes = array("q"), array("q")
        for shard, entry, record in self._files():
            if record and (self.capacity is None or entry.name in self._fresh):
                continue
            with suppress(OSError):  # gone meanwhile
                found = entry.stat(follow_symlinks=False)
                if not is_record(found, self.shared):
                    continue
                if record:
                    times.append(found.st_mtime_ns)
                    sizes.append(found.st_size)
                elif time.time() - found.st_mtime > STALE_S:
                    os.unlink(entry.name, dir_fd=shard)
        return times, sizes

    def _evict(self, until_ns: int, excess: int) -> None:
        """Deletes records last used up to a time. A second process that does the same finds nothing left to delete."""
        for shard, entry, record in self._files():
            if excess <= 0:
                return
            with suppress(FileNotFoundError):
                if record and entry.stat(follow_symlinks=False).st_mtime_ns <= until_ns:
                    excess -= self._delete(shard, entry.name, until_ns)

    def _delete(self, shard: int, name: str, until_ns: int) -> int:
        """Deletes a record that nobody has used or written meanwhile; the bytes that are free now.

        While it leaves, nobody writes it; who came before has made it fresh: a new record never goes for an old one.
        """
        with self._room:
            if name in self._fresh:
                return 0
            self._leaving = name
        gone = freed = 0
        try:
            found = os.stat(name, dir_fd=shard, follow_symlinks=False)
            if is_record(found, self.shared) and found.st_mtime_ns <= until_ns:
                os.unlink(name, dir_fd=shard)
                gone, freed = 1, found.st_size
        except FileNotFoundError:
            pass
        except OSError as error:
            self.fault(error)
        finally:
            with self._room:
                self._leaving = ""
                self.evicted, self._used = self.evicted + gone, (self._used or 0) - freed
                self._room.notify_all()
        return freed

    def _files(self) -> Iterator[tuple[int, os.DirEntry[str], bool]]:
        """Files with names of ours, in no order: the shard that they lie in, and whether they are records."""
        try:
            root = self.root()
        except FileNotFoundError:
            return
        except OSError as error:
            self.fault(error)
            return
        try:
            for shard in SHARDS:
                try:
                    descriptor = open_folder(shard, self.shared, root)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.fault(error)
                    continue
                try:
                    with os.scandir(descriptor) as entries:
                        for entry in entries:
                            record = RECORD.fullmatch(entry.name) and shard_of(entry.name) == shard
                            if record or TEMPORARY.fullmatch(entry.name):
                                yield descriptor, entry, bool(record)
                except OSError as error:
                    self.fault(error)
                finally:
                    shut(descriptor)
        finally:
            shut(root)


def shard_of(name: str) -> str:
    """The folder that a record lies in."""
    return SHARDS[zlib.crc32(name.encode()) % len(SHARDS)]


def _expanded(path: str | os.PathLike[str]) -> Path:
    """Raises: InvalidArgument; ConfigurationError where `~` stands for no home."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InvalidArgument(f"path {path!r}: expected the folder of a file store, '.' for the current one")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigurationError(f"file store in {path}: there is no such home; write ./{path} for a folder here")
    return Path(expanded)
