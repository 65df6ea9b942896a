"""Opens folders and files so that no other user can replace them: relative to a descriptor, without following links.

    path given by the user ─▶ folder ─▶ records-7f ─▶ a record          each arrow is one `open` that follows no link

Only the parents in the user's path may be links, not its last part. Knows no names of records and no outcomes.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from memstate.errors import UnsafeFolder

PRIVATE, FILE_MODE = 0o700, 0o600
SHARED = "say shared=True, and who writes there can make up states"
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
DESCRIPTORS = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW") and hasattr(os, "geteuid")

# No link is followed, no pipe is waited for, no child process inherits the file. A flag that the system lacks is 0.
FLAGS: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
FOLDER: int = os.O_RDONLY | FLAGS | getattr(os, "O_DIRECTORY", 0)
READ = os.O_RDONLY | FLAGS
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS  # fails if the file exists


def open_folder(path: str, shared: bool, at: int | None = None) -> int:
    """Opens a folder.

    Args:
        path: The folder, relative to `at`.
        shared: Whether the folder may belong to another user, and other users may write to it.
        at: Descriptor of its parent folder. None: `path` is relative to the working directory, or absolute.

    Returns:
        The descriptor of the folder.

    Raises:
        OSError: The folder cannot be opened. errno is EPERM if the folder is not safe, see `flaw`.
    """
    descriptor = os.open(path, FOLDER, dir_fd=at)
    try:
        if flaw(os.fstat(descriptor), shared):
            raise OSError(errno.EPERM, f"{path}: a folder of another user, or one that others may write to")
    except BaseException:
        shut(descriptor)
        raise
    return descriptor


def make_folder(path: str, shared: bool, at: int | None = None) -> int:
    """Makes a folder that only this user can use, with any umask; opens the folder if it exists already.

    Returns:
        The descriptor of the folder.
    """
    made = False
    with suppress(FileExistsError):
        os.mkdir(path, PRIVATE, dir_fd=at)
        made = True
    descriptor = open_folder(path, shared, at)
    if made and stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE:  # the umask or a group bit has changed it
        with suppress(OSError):
            os.fchmod(descriptor, PRIVATE)
    return descriptor


@contextmanager
def explained(path: str, shared: bool, at: int | None = None, inside: str = "") -> Iterator[None]:
    """If a block raises OSError because a folder is not safe, raises `UnsafeFolder` instead.

    Args:
        path: The folder, relative to `at`.
        shared: Whether other users may own and write to it.
        at: Descriptor of its parent folder, as for `open_folder`.
        inside: The path of the parent folder, for the text of the error.

    Raises:
        UnsafeFolder: The path is a link or no folder, or the folder is not safe.
    """
    try:
        yield
    except OSError as error:
        status = None
        with suppress(OSError):
            status = os.stat(path, dir_fd=at, follow_symlinks=False)
        if status is None or not (why := flaw(status, shared)):
            raise
        raise UnsafeFolder(os.path.join(inside, path), why, stat.S_IMODE(status.st_mode), status.st_uid) from error


def flaw(status: os.stat_result, shared: bool) -> str:
    """Returns why a folder is not safe for records, and what to do about it; "" if it is safe."""
    if stat.S_ISLNK(status.st_mode):
        return "a link, which is not followed: name the folder that it leads to, or take the link away"
    if not stat.S_ISDIR(status.st_mode):
        return "no folder: name another, or take it away"
    if not shared and status.st_uid != os.geteuid():
        return f"another user's than this process's, {os.geteuid()}: name a folder of your own, chown it, or {SHARED}"
    if not shared and status.st_mode & WRITABLE_BY_OTHERS:
        return f"a folder that others may write to: chmod go-w, name another, or {SHARED}"
    return ""


def is_record(status: os.stat_result, shared: bool) -> bool:
    """Returns whether a file, by its status, is a regular file of this user, or of any user if `shared`."""
    return stat.S_ISREG(status.st_mode) and (shared or status.st_uid == os.geteuid())


def require_record(status: os.stat_result, shared: bool) -> None:
    """Raises an error unless `is_record` is true for a status.

    Raises:
        OSError: The file is a pipe, a device, a folder or another user's file.
    """
    if not is_record(status, shared):
        kinds = {stat.S_IFREG: errno.EPERM, stat.S_IFDIR: errno.EISDIR}
        raise OSError(kinds.get(stat.S_IFMT(status.st_mode), errno.ENXIO), "no record of this user")


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of a block, by `shut`. Only for descriptors to which nothing is written.

    Args:
        descriptor: The descriptor that `open_folder`, `make_folder` or `os.open` has just returned.
    """
    try:
        yield descriptor
    finally:
        shut(descriptor)


def shut(descriptor: int) -> None:
    """Closes a descriptor to which nothing was written. So an error of `close` does not matter and is ignored."""
    with suppress(OSError):
        os.close(descriptor)
