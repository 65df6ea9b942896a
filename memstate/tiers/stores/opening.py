"""Opens folders and files that no other user can swap: relative to a descriptor, and without following links.

    path given by the user ─▶ folder ─▶ records-7f ─▶ a record          every arrow is one open without links

Links are allowed in front of the last part of the user's path only. Knows no name of a record and no outcome.
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

# Where the system has them: no link is followed, no pipe waited for, no child process inherits the file.
FLAGS: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))
FOLDER: int = os.O_RDONLY | FLAGS | getattr(os, "O_DIRECTORY", 0)
READ = os.O_RDONLY | FLAGS
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS  # never a file that is there already


def open_folder(path: str, shared: bool, at: int | None = None) -> int:
    """Opens a folder.

    Args:
        path: The folder, relative to `at`.
        shared: Whether others may own and write it.
        at: Descriptor of the folder that it lies in.

    Returns:
        A descriptor.

    Raises:
        OSError: It cannot be opened; EPERM where it is not safe.
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
    """Makes a folder for this user alone, whatever the umask, or opens the one that is there.

    Returns:
        A descriptor.
    """
    made = False
    with suppress(FileExistsError):
        os.mkdir(path, PRIVATE, dir_fd=at)
        made = True
    descriptor = open_folder(path, shared, at)
    if made and stat.S_IMODE(os.fstat(descriptor).st_mode) != PRIVATE:  # the umask took something, or a group came
        with suppress(OSError):
            os.fchmod(descriptor, PRIVATE)
    return descriptor


@contextmanager
def explained(path: str, shared: bool, at: int | None = None, inside: str = "") -> Iterator[None]:
    """Turns a refused folder into a named error.

    Args:
        path: The folder, relative to `at`.
        shared: Whether others may own and write it.
        at: Descriptor of the folder that it lies in.
        inside: The path of `at`.

    Raises:
        UnsafeFolder: The folder is a link, no folder, or not safe.
    """
    try:
        yield
    except OSError as error:
        found = None
        with suppress(OSError):
            found = os.stat(path, dir_fd=at, follow_symlinks=False)
        if found is None or not (why := flaw(found, shared)):
            raise
        raise UnsafeFolder(os.path.join(inside, path), why, stat.S_IMODE(found.st_mode), found.st_uid) from error


def flaw(found: os.stat_result, shared: bool) -> str:
    """Tells why a folder is not safe for records, and what to do; "" where it is."""
    if stat.S_ISLNK(found.st_mode):
        return "a link, which is not followed: name the folder that it leads to, or take the link away"
    if not stat.S_ISDIR(found.st_mode):
        return "no folder: name another, or take it away"
    if not shared and found.st_uid != os.geteuid():
        return f"another user's than this process's, {os.geteuid()}: name a folder of your own, chown it, or {SHARED}"
    if not shared and found.st_mode & WRITABLE_BY_OTHERS:
        return f"a folder that others may write to: chmod go-w, name another, or {SHARED}"
    return ""


def is_record(found: os.stat_result, shared: bool) -> bool:
    """Tells whether this is a regular file of this user."""
    return stat.S_ISREG(found.st_mode) and (shared or found.st_uid == os.geteuid())


def require_record(found: os.stat_result, shared: bool) -> None:
    """Checks that this is a regular file of this user.

    Raises:
        OSError: It is a pipe, a device, a folder or another user's file.
    """
    if not is_record(found, shared):
        kinds = {stat.S_IFREG: errno.EPERM, stat.S_IFDIR: errno.EISDIR}
        raise OSError(kinds.get(stat.S_IFMT(found.st_mode), errno.ENXIO), "no record of this user")


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Keeps a descriptor that is only read from open for a block.

    Args:
        descriptor: What `open_folder`, `make_folder` or `os.open` has just returned.
    """
    try:
        yield descriptor
    finally:
        shut(descriptor)


def shut(descriptor: int) -> None:
    """Closes a descriptor that was only read from; a refusal means nothing then."""
    with suppress(OSError):
        os.close(descriptor)
