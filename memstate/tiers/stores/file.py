"""Stores records in files. A file gets its name when it is complete, so a crash loses only records being written.

This module does not check the contents of records: the reader does.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from memstate.sizes import format_bytes
from memstate.tiers.stores.base import Bytes, Outcome, require_buffers, require_names
from memstate.tiers.stores.folder import Folder
from memstate.tiers.stores.opening import CREATE, FILE_MODE, READ, closing, is_record, require_record, shut

FRESH_S = 60.0  # least seconds between two notes of a record's use, so that reads cause few writes


class FileStore:
    """A `Store` in a folder, which is made if it is missing. Any number of processes of one user may use the folder.

    If a process forks while it uses the store, the child must make its own store. Names are those of
    `RecordFormat.name`; other files in the folder are not touched.

    Args:
        path: The folder. A leading `~` is the user's home. The last part of the path must not be a link.
        capacity: Limit of the bytes of all records, None for no limit. When it is reached, the least recently used
            records are deleted. If several processes write at the same time, each but the first may exceed it by a
            sixteenth.
        durable: Whether records survive a power cut. This costs two flushes per record, and flushes of the folders.
            Without it, the newest records may be missing or damaged after a power cut; readers notice this. If only
            the process dies, no record is lost in either case.
        shared: Whether to accept a folder and records that other users own or may write to. These users can then read,
            delete and forge states, and memstate cannot notice it.

    Attributes:
        faults: For each name of an errno, the number of system calls that failed with it. EFBIG: a record is larger
            than the capacity. ETIME: a record being written was deleted, by a clean-up that took another clock for the
            folder's, as older releases do.

    Raises:
        UnsafeFolder: Other users could write to the folder.
        ConfigurationError: The folder cannot be made or written.
        InvalidArgument: The path or the capacity is not valid.

    Example:
        >>> import tempfile, numpy as np
        >>> name, record = "state-" + "0" * 64, np.arange(8, dtype=np.uint8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = FileStore(folder)
        ...     store.put([name], [record]), store.exists([name, "state-" + "1" * 64])
        ([<Outcome.DONE: 1>], [True, False])
    """

    def __init__(
        self, path: str | os.PathLike[str], capacity: int | None = None, durable: bool = False, shared: bool = False
    ) -> None:
        self.folder = Folder(path, capacity, shared, durable)
        self.faults = self.folder.faults

    def __repr__(self) -> str:
        size = self.folder.capacity
        limit = "no limit" if size is None else f"at most {format_bytes(size)}"
        return f"FileStore({str(self.folder.path)!r}, {limit}, {self.faults.total()} faults)"

    @property
    def evicted(self) -> int:
        """Number of records that this process deleted to make room."""
        return self.folder.evicted

    def register(self, memory: Tensor) -> None:
        """Does nothing, because files can be read into any memory."""

    def close(self) -> None:
        """Does nothing, because no file stays open between calls."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name whether its record is there. If a system call fails: False, and `faults` counts it."""
        require_names(names)
        return [outcome is Outcome.DONE for outcome in self._each(self._exists, zip(names))]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer. If its size is wrong, the record is deleted, because it is damaged.

        Raises:
            InvalidArgument: Names or buffers are not valid; nothing was read.
        """
        require_buffers(names, buffers, written=True)
        return self._each(self._get, zip(names, buffers, strict=True))

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record that is not there yet. Replaces a record of a wrong size, or a file that is no record.

        Raises:
            InvalidArgument: Names or buffers are not valid; nothing was written.
        """
        require_buffers(names, buffers, written=False)
        return self._each(self._put, zip(names, buffers, strict=True), make=True)

    def discard(self, names: Sequence[str]) -> None:
        """Deletes records whose contents are wrong, so that they can be written again."""
        require_names(names)
        self._each(self._discard, zip(names))

    def clean(self) -> None:
        """Deletes temporary files of dead processes, and the least recently used records beyond the capacity.

        `put` does the same by itself: with the first record, and whenever the capacity requires it.
        """
        self.folder.clean()

    def _each(
        self, work: Callable[..., Outcome], items: Iterable[tuple[Any, ...]], *, make: bool = False
    ) -> list[Outcome]:
        """Calls a function for each name. Counts a system call that fails, and goes on with the next name.

        Args:
            work: The function. Its arguments: the descriptor of the name's shard, then those in `items`.
            items: For each name: further arguments of the function. The first one is the name.
            make: Whether to make the shard if it is missing. Then a missing file or folder is counted as a failure.

        Returns:
            The outcome of each name.
        """
        outcomes: list[Outcome] = []
        root: int | None = None
        try:
            for what in items:
                try:
                    root = self.folder.root() if root is None else root
                    with closing(self.folder.shard(root, what[0], make=make)) as opened:
                        outcomes.append(work(opened, *what))
                except OSError as error:
                    missing = isinstance(error, FileNotFoundError) and not make
                    outcomes.append(Outcome.MISSING if missing else Outcome.FAILED)
                    if not missing:
                        self.folder.fault(error)
        finally:
            if root is not None:
                shut(root)
        return outcomes

    def _exists(self, shard: int, name: str) -> Outcome:
        status = os.stat(name, dir_fd=shard, follow_symlinks=False)
        return Outcome.DONE if is_record(status, self.folder.shared) else Outcome.MISSING

    def _discard(self, shard: int, name: str) -> Outcome:
        os.unlink(name, dir_fd=shard)
        return Outcome.DONE

    def _get(self, shard: int, name: str, buffer: Bytes) -> Outcome:
        view = buffer.data
        with closing(os.open(name, READ, dir_fd=shard)) as file:
            status = os.fstat(file)
            require_record(status, self.folder.shared)
            whole = status.st_size == len(view)
            while whole and view:
                count = os.readv(file, [view])
                whole, view = bool(count), view[count:]  # 0 bytes: the file became shorter after `fstat`
            if whole:
                _note_use(file, status)
                return Outcome.DONE
        with suppress(OSError):  # it may be deleted already; if it was just replaced, the new record is lost
            os.unlink(name, dir_fd=shard)
        return Outcome.DAMAGED

    def _put(self, shard: int, name: str, buffer: Bytes) -> Outcome:
        if not self._is_there(shard, name, len(buffer)):
            try:
                self.folder.reserve(name, len(buffer))
                self._write(shard, name, buffer.data)
            finally:
                self.folder.written(name)
        return Outcome.DONE

    def _is_there(self, shard: int, name: str, size: int) -> bool:
        try:
            status = os.stat(name, dir_fd=shard, follow_symlinks=False)
        except FileNotFoundError:
            return False
        there = is_record(status, self.folder.shared) and status.st_size == size
        if there:
            _note_use(name, status, dir_fd=shard, follow_symlinks=False)
        return there

    def _write(self, shard: int, name: str, view: memoryview) -> None:
        temporary = self.folder.temporary()
        file = os.open(temporary, CREATE, FILE_MODE, dir_fd=shard)
        try:
            try:
                while view:
                    view = view[os.write(file, view) :]
                if self.folder.durable:
                    os.fsync(file)
            finally:
                os.close(file)
            try:
                os.replace(temporary, name, src_dir_fd=shard, dst_dir_fd=shard)
            except FileNotFoundError as error:
                raise OSError(errno.ETIME, "another clock's clean-up has deleted the record being written") from error
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=shard)
            raise
        if self.folder.durable:
            os.fsync(shard)


def _note_use(file: int | str, status: os.stat_result, **where: Any) -> None:
    """Sets a file's time of use. Skips a file with a second name (hard link): it may belong to another user."""
    if abs(time.time() - status.st_mtime) > FRESH_S and status.st_nlink == 1:
        with suppress(OSError):  # the record was deleted or is another user's: the read was good all the same
            os.utime(file, **where)
