"""Storage in files. A record is written whole under a temporary name first; a crash loses at most records in progress.

Knows no record's contents: the reader checks them.
"""

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

FRESH_S = 60.0  # a use is noted at most once in this time, so that reading writes next to nothing


class FileStore:
    """A `Store` in a folder, which is made where it is missing. Any number of processes of one user may use it.

    A process that was forked from one that used the store makes a store of its own. Names are those of
    `RecordFormat.name`; other files in the folder are left alone.

    Args:
        path: The folder. A leading `~` is the user's home; the last part must not be a link.
        capacity: Bytes of records, None for no limit. Beyond it the least recently used go. Each further process that
            writes at the same time may exceed it by a sixteenth.
        durable: Whether records survive a power cut, for two flushes a record, and flushes of the folders that they lie
            in. Without it the last records may be missing or damaged after one, which a reader notices. A process that
            dies loses nothing either way.
        shared: Whether to take a folder and records that others own or may write. They can then read, delete and make
            up states, and nothing notices.

    Attributes:
        faults: Refusals of the system by the name of errno. EFBIG: a record is larger than the capacity.

    Raises:
        UnsafeFolder: Others could write to the folder.
        ConfigurationError: The folder cannot be made or written.
        InvalidArgument: A path or a capacity cannot be meant.

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
        """Records that this process deleted to make room."""
        return self.folder.evicted

    def register(self, memory: Tensor) -> None:
        """Does nothing: files are read into any memory."""

    def close(self) -> None:
        """Does nothing: no file stays open between calls."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Tells whether each record is there; False where that is not known, which `faults` counts."""
        require_names(names)
        return [outcome is Outcome.DONE for outcome in self._each(self._exists, zip(names))]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer. One of another size is deleted, because it can never become right.

        Raises:
            InvalidArgument: Names or buffers cannot be meant; nothing was read.
        """
        require_buffers(names, buffers, written=True)
        return self._each(self._get, zip(names, buffers, strict=True))

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record that is not there yet. One of another size, or another file in its place, is replaced.

        Raises:
            InvalidArgument: Names or buffers cannot be meant; nothing was written.
        """
        require_buffers(names, buffers, written=False)
        return self._each(self._put, zip(names, buffers, strict=True), make=True)

    def discard(self, names: Sequence[str]) -> None:
        """Deletes records whose contents turned out to be wrong, so that they can be written again."""
        require_names(names)
        self._each(self._discard, zip(names))

    def clean(self) -> None:
        """Deletes what dead processes left, and the least recently used records beyond the capacity.

        Writing does it by itself: with the first record, and whenever the capacity asks for it.
        """
        self.folder.clean()

    def _each(
        self, work: Callable[..., Outcome], items: Iterable[tuple[Any, ...]], *, make: bool = False
    ) -> list[Outcome]:
        """Does the work for each name. A refusal of the system is counted, and the next name follows.

        Args:
            work: Called with the descriptor of the name's shard and the item.
            items: Arguments of each name.
            make: Whether to make shards that are missing. What is not there is a fault then.
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
        found = os.stat(name, dir_fd=shard, follow_symlinks=False)
        return Outcome.DONE if is_record(found, self.folder.shared) else Outcome.MISSING

    def _discard(self, shard: int, name: str) -> Outcome:
        os.unlink(name, dir_fd=shard)
        return Outcome.DONE

    def _get(self, shard: int, name: str, buffer: Bytes) -> Outcome:
        view = buffer.data
        with closing(os.open(name, READ, dir_fd=shard)) as file:
            found = os.fstat(file)
            require_record(found, self.folder.shared)
            whole = found.st_size == len(view)
            while whole and view:
                count = os.readv(file, [view])
                whole, view = bool(count), view[count:]  # nothing more: it has been cut since its size was asked
            if whole:
                _note_use(file, found)
                return Outcome.DONE
        with suppress(OSError):  # gone; or replaced just now, and then a sound record is lost
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
            found = os.stat(name, dir_fd=shard, follow_symlinks=False)
        except FileNotFoundError:
            return False
        there = is_record(found, self.folder.shared) and found.st_size == size
        if there:
            _note_use(name, found, dir_fd=shard, follow_symlinks=False)
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
            os.replace(temporary, name, src_dir_fd=shard, dst_dir_fd=shard)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=shard)
            raise
        if self.folder.durable:
            os.fsync(shard)


def _note_use(file: int | str, found: os.stat_result, **where: Any) -> None:
    """Sets the time of use. A file with a second name, which may be another user's, is not changed."""
    if abs(time.time() - found.st_mtime) > FRESH_S and found.st_nlink == 1:
        with suppress(OSError):  # evicted meanwhile, or not ours to change: it has been found all the same
            os.utime(file, **where)
