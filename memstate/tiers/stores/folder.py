"""Manages the folder of a file store: finds the places of records, and deletes records when the folder is full.

    folder / records-7f / kv-<digest>              a record: it got this name when it was complete
                        / .<process>-<random>.tmp  a record being written, or left by a dead process

The folders `records-..` are the shards. Other files are not counted, read or deleted. Threads, processes and machines
share the folder without file locks, which a dying process could leave behind. No file stays open between calls. Knows
no contents of records and no outcome.
"""

import errno
import os
import re
import threading
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from memstate.checks import require_switch, whole
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.tiers.stores.base import RECORD
from memstate.tiers.stores.opening import (
    CREATE,
    DESCRIPTORS,
    FILE_MODE,
    PRIVATE,
    closing,
    explained,
    is_record,
    make_folder,
    open_folder,
    shut,
)

SHARDS = tuple(f"records-{number:02x}" for number in range(256))
PART = 16  # capacity / PART: new bytes after which files are counted again, and bytes that a clean-up frees
STALE_S = 600.0  # seconds without a write after which the writer of a temporary file counts as dead
TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{16}\.tmp")


class Folder:
    """Keeps records as files, up to a capacity.

    Args:
        path: The folder; a leading `~` is the user's home.
        capacity: Limit of the bytes of all records, None for no limit.
        shared: Whether other users may own and write to the folder.
        durable: Whether new folders and file names survive a power cut.

    Attributes:
        faults: For each name of an errno, the number of system calls that failed with it.
        evicted: Number of records that this process deleted to make room.

    Raises:
        UnsafeFolder: Other users could write to the folder.
        ConfigurationError: The folder cannot be made or written.
        InvalidArgument: The path or the capacity is not valid.
    """

    def __init__(
        self, path: str | os.PathLike[str], capacity: int | None, shared: bool = False, durable: bool = False
    ) -> None:
        if not DESCRIPTORS:
            raise ConfigurationError(
                "file store: this system cannot open files relative to a folder, Linux and macOS can"
            )
        require_switch("shared", shared)
        self.path = _expanded(path).absolute()  # absolute, because the working directory may change
        self._text = str(self.path)
        self.capacity = None if capacity is None else whole("capacity", capacity)
        self.shared, self.durable = shared, durable
        self.faults: Counter[str] = Counter()
        self.evicted = 0
        self._used: int | None = None  # approximate bytes of all records; None: not counted yet
        self._new = 0  # bytes reserved since the last clean-up began
        self._room, self._count = threading.Condition(threading.Lock()), threading.Lock()
        # _room guards the attributes below. No thread holds it during a system call.
        self._cleaning = False
        self._writing: dict[str, int] = {}  # bytes of each record with reserved room that is not written
        self._fresh: dict[str, int] = {}  # during a clean-up: `_writing` at its start, plus later reservations
        self._leaving = ""  # the record that is being deleted; a write of the same record waits
        try:
            self._prepare()
        except OSError as error:
            raise ConfigurationError(
                f"file store in {self.path}: {error.strerror}; name a folder that can be made and written"
            ) from error

    def _prepare(self) -> None:
        """Makes the folder, checks the shards that exist, and tries to write a file.

        A new name is on the disk only after its parent folder has been flushed. So the parents are flushed even if the
        store's folder exists already: another process may have made it just before.
        """
        made = [parent for parent in self.path.parents if not parent.exists()]
        for missing in reversed(made):
            missing.mkdir(PRIVATE, exist_ok=True)
        with explained(self._text, self.shared):
            opened = make_folder(self._text, self.shared)
        with closing(opened) as root:
            for shard in SHARDS:
                with explained(shard, self.shared, root, self._text), suppress(FileNotFoundError):
                    shut(open_folder(shard, self.shared, root))
            with closing(make_folder(SHARDS[0], self.shared, root)) as first:
                self._now(first)
            if self.durable:
                os.fsync(root)
                for new in (self.path, *made):
                    with (
                        suppress(PermissionError),  # this process made nothing in a parent that it cannot read
                        closing(os.open(new.parent, os.O_RDONLY)) as parent,  # the parent may be a link
                    ):
                        os.fsync(parent)

    def root(self) -> int:
        """Opens the folder for one call of the store, and returns its descriptor.

        Raises:
            OSError: The folder cannot be opened, or is not safe.
        """
        return open_folder(self._text, self.shared)

    def shard(self, root: int, name: str, *, make: bool = False) -> int:
        """Opens the shard of a record, and returns its descriptor.

        Args:
            root: Descriptor of the folder.
            name: Name of the record.
            make: Whether to make the shard if it is missing. The folder itself is never made here: if its disk is no
                longer mounted, nothing is written.

        Raises:
            OSError: The shard cannot be opened, or is not safe.
        """
        try:
            return open_folder(shard_of(name), self.shared, root)
        except FileNotFoundError:
            if not make:
                raise
        with closing(make_folder(shard_of(name), self.shared, root)):
            if self.durable:
                os.fsync(root)
        return open_folder(shard_of(name), self.shared, root)

    @staticmethod
    def temporary() -> str:
        """Returns a name for a temporary file that no other thread, process or machine chooses."""
        return f".{os.getpid()}-{os.urandom(8).hex()}.tmp"

    def _now(self, shard: int) -> float:
        """Returns the time of a file just written to a shard: the folder's clock, which all its machines share."""
        probe = self.temporary()
        with closing(os.open(probe, CREATE, FILE_MODE, dir_fd=shard)) as file:
            os.unlink(probe, dir_fd=shard)
            return os.fstat(file).st_mtime

    def fault(self, error: OSError) -> None:
        """Counts a system call that failed."""
        with self._count:
            self.faults[errno.errorcode.get(error.errno or 0, "unknown")] += 1

    def reserve(self, name: str, nbytes: int) -> None:
        """Reserves room for a record that will be written, and deletes others if there is too little room.

        Other processes write as well. So the files are counted at the first call, and again whenever a sixteenth of the
        capacity has been reserved.

        Raises:
            OSError: The record is larger than the capacity.
        """
        if self.capacity is not None and nbytes > self.capacity:
            raise OSError(errno.EFBIG, f"a record of {nbytes} bytes, capacity {self.capacity}")
        with self._room:  # during a clean-up, only records for which there is no room wait
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
        """Notes that the write of a reserved record has ended, whether it succeeded or not."""
        with self._room:
            self._writing.pop(name, None)

    def clean(self) -> None:
        """Deletes temporary files of dead processes, and the least recently used records beyond the capacity."""
        with self._room:
            self._room.wait_for(lambda: not self._cleaning)
            self._begin()
        self._clean()

    def _has_room(self, nbytes: int) -> bool:
        return self.capacity is None or (self._used is not None and self._used + nbytes <= self.capacity)

    def _long_ago(self) -> bool:
        return self.capacity is not None and self._new > self.capacity // PART

    def _begin(self) -> None:
        """Begins a clean-up. `_fresh` counts files that are being written: the clean-up may or may not see these."""
        self._cleaning, self._new, self._fresh = True, 0, dict(self._writing)

    def _clean(self) -> None:
        """Counts all files, then deletes records in a second pass. Keeps only a time and a size of each record."""
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
        """Returns the times of use and the sizes of records not in `_fresh`. Deletes dead temporary files."""
        times, sizes = array("q"), array("q")
        for shard, entry, record in self._files():
            if record and (self.capacity is None or entry.name in self._fresh):
                continue
            with suppress(OSError):  # another process has deleted the file meanwhile
                status = entry.stat(follow_symlinks=False)
                if not is_record(status, self.shared):
                    continue
                if record:
                    times.append(status.st_mtime_ns)
                    sizes.append(status.st_size)
                elif self._now(shard) - status.st_mtime > STALE_S:
                    os.unlink(entry.name, dir_fd=shard)
        return times, sizes

    def _evict(self, until_ns: int, excess: int) -> None:
        """Deletes records whose last use was not later than `until_ns`, until `excess` bytes are free.

        If another process cleans up at the same time, the records that it has deleted are skipped.
        """
        for shard, entry, record in self._files():
            if excess <= 0:
                return
            with suppress(FileNotFoundError):
                if record and entry.stat(follow_symlinks=False).st_mtime_ns <= until_ns:
                    excess -= self._delete(shard, entry.name, until_ns)

    def _delete(self, shard: int, name: str, until_ns: int) -> int:
        """Deletes a record, unless it was used or written since it was counted. Returns the bytes that became free.

        A record in `_fresh` stays. During the deletion, `reserve` of the same name waits.
        """
        with self._room:
            if name in self._fresh:
                return 0
            self._leaving = name
        gone = freed = 0
        try:
            with self._counted():
                status = os.stat(name, dir_fd=shard, follow_symlinks=False)
                if is_record(status, self.shared) and status.st_mtime_ns <= until_ns:
                    os.unlink(name, dir_fd=shard)
                    gone, freed = 1, status.st_size
        finally:
            with self._room:
                self._leaving = ""
                self.evicted, self._used = self.evicted + gone, (self._used or 0) - freed
                self._room.notify_all()
        return freed

    def _files(self) -> Iterator[tuple[int, os.DirEntry[str], bool]]:
        """Yields records and temporary files in any order: (descriptor of the shard, entry, whether it is a record)."""
        with self._counted(), closing(self.root()) as root:
            for shard in SHARDS:
                with (
                    self._counted(),
                    closing(open_folder(shard, self.shared, root)) as descriptor,
                    os.scandir(descriptor) as entries,
                ):
                    for entry in entries:
                        record = RECORD.fullmatch(entry.name) and shard_of(entry.name) == shard
                        if record or TEMPORARY.fullmatch(entry.name):
                            yield descriptor, entry, bool(record)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Ends a block when a system call fails, and counts the failure, unless a file was missing."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self.fault(error)


def shard_of(name: str) -> str:
    """Returns the name of the shard of a record."""
    return SHARDS[zlib.crc32(name.encode()) % len(SHARDS)]


def _expanded(path: str | os.PathLike[str]) -> Path:
    """Returns a path with `~` replaced. Raises InvalidArgument, or ConfigurationError if `~` names no known home."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise InvalidArgument(f"path {path!r}: expected the folder of a file store, '.' for the current one")
    if "\0" in text:
        raise InvalidArgument(f"path {path!r}: the name of a folder has no null byte")
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigurationError(f"file store in {path}: there is no such home; write ./{path} for a folder here")
    return Path(expanded)
