"""Storage in files: records are written whole under another name first. Knows no record's contents: who reads checks.

A crash loses at most the records that were being written.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from memstate.layout import format_bytes
from memstate.tiers.stores.base import Bytes, Outcome, require_buffers
from memstate.tiers.stores.folder import CREATE, FLAGS, Folder

FRESH_S = 60.0  # a use is noted at most once in this time, so that reading writes next to nothing


class FileStore:
    """A `Store` in a folder, which is made where it is missing; any number of processes may share it.

    path: of the folder; a leading `~` is the user's home. capacity: bytes of records, None is no limit; beyond it the
    least recently used go. Each further process that writes at the same time may exceed it by a sixteenth. durable:
    what was put survives a power cut, for two flushes a record; without, the last records may be missing after one, or
    damaged, which a reader notices. A process that dies loses nothing that was put, either way. Raises:
    ConfigurationError where the folder cannot be made or written; InvalidArgument.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int | None = None, durable: bool = False) -> None:
        self.folder, self.durable = Folder(path, capacity), durable

    def __repr__(self) -> str:
        size = self.folder.capacity
        limit = "no limit" if size is None else f"at most {format_bytes(size)}"
        return f"FileStore({str(self.folder.path)!r}, {limit}, {self.faults.total()} faults)"

    @property
    def faults(self) -> Counter[str]:
        """What the system refused, by the name of errno; EFBIG is a record larger than the capacity."""
        return self.folder.faults

    @property
    def evicted(self) -> int:
        """Records that this process deleted to make room."""
        return self.folder.evicted

    def register(self, memory: Tensor) -> None:
        """Nothing to prepare: files are read into any memory."""

    def close(self) -> None:
        """Nothing is kept open between calls."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each record is there; False where that cannot be said, which `faults` counts."""
        return [self._guarded(self._exists, path) is Outcome.DONE for path in self.folder.paths(names)]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer; one of another size is deleted, because it can never become right.

        Raises: InvalidArgument; nothing was read.
        """
        require_buffers(names, buffers, written=True)
        pairs = zip(self.folder.paths(names), (buffer.data for buffer in buffers), strict=True)
        return [self._guarded(self._get, path, view) for path, view in pairs]

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record that is not there yet; one of another size is replaced.

        Raises: InvalidArgument; nothing was written.
        """
        require_buffers(names, buffers, written=False)
        pairs = zip(self.folder.paths(names), (buffer.data for buffer in buffers), strict=True)
        return [self._guarded(self._put, path, view) for path, view in pairs]

    def discard(self, names: Sequence[str]) -> None:
        """Deletes records whose contents turned out to be wrong, so that they can be written again."""
        for path in self.folder.paths(names):
            self._guarded(self._discard, path)

    def clean(self) -> None:
        """Deletes what dead processes left, and the least recently used records beyond the capacity.

        Writing does it by itself: with the first record, and whenever the capacity asks for it.
        """
        self.folder.clean()

    def _guarded(self, work: Callable[..., Outcome], *what: object) -> Outcome:
        """What becomes of one name; what the system refuses is counted, and the next name has its turn."""
        try:
            return work(*what)
        except OSError as error:
            self.folder.fault(error)
            return Outcome.FAILED

    def _exists(self, path: str) -> Outcome:
        with suppress(FileNotFoundError):
            if stat.S_ISREG(os.lstat(path).st_mode):
                return Outcome.DONE
        return Outcome.MISSING

    def _discard(self, path: str) -> Outcome:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return Outcome.DONE

    def _get(self, path: str, view: memoryview) -> Outcome:
        try:
            file = open(path, "rb", buffering=0, opener=_no_link)  # noqa: SIM115
        except FileNotFoundError:
            return Outcome.MISSING
        with file:
            found = os.fstat(file.fileno())
            whole = found.st_size == len(view)
            while whole and view:
                count = file.readinto(view)
                whole, view = bool(count), view[count:]  # nothing more: it has been cut since its size was asked
        if not whole:
            with suppress(OSError):  # gone, or a folder; or replaced just now, and then a sound record is lost
                os.unlink(path)
            return Outcome.DAMAGED
        self._note_use(path, found)
        return Outcome.DONE

    def _note_use(self, path: str, found: os.stat_result) -> None:
        if abs(time.time() - found.st_mtime) > FRESH_S:
            with suppress(OSError):  # evicted meanwhile, or not ours to change: it has been found all the same
                os.utime(path, follow_symlinks=False)

    def _put(self, path: str, view: memoryview) -> Outcome:
        with suppress(FileNotFoundError):
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode) and found.st_size == len(view):
                self._note_use(path, found)
                return Outcome.DONE
        self.folder.take(len(view))
        self._write(path, view)
        return Outcome.DONE

    def _write(self, path: str, view: memoryview) -> None:
        shard = os.path.dirname(path)
        temporary = self.folder.temporary(shard)
        try:
            descriptor = os.open(temporary, CREATE, 0o600)
        except FileNotFoundError:
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(shard, 0o700)  # not its parents: where a disk is no longer mounted nothing is to be written
            if self.durable:
                _sync(os.path.dirname(shard))
            descriptor = os.open(temporary, CREATE, 0o600)
        try:
            try:
                while view:
                    view = view[os.write(descriptor, view) :]
                if self.durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        if self.durable:
            _sync(shard)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | FLAGS)


def _sync(folder: str) -> None:
    """Makes the names in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
