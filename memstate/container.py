"""Reads how much memory the container of this process may use: the least limit of its cgroups, version 1 or 2."""

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
PROC = "proc/self"
FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}  # type of file system -> file with the limit


def limit(root: Path = ROOT) -> int:
    """Returns the bytes that the cgroup of this process may use; `sys.maxsize` without a limit.

    The limits of enclosing groups count too. A file that cannot be read counts as no limit.

    Args:
        root: the folder that has "proc" and "sys".

    Syncs: no.
    """
    try:
        own = dict(_own(root))
        limits = [
            _number(folder / name)
            for kind, name in FILES.items()
            if kind in own
            for inside, at in _mounts(root, kind)
            for folder in _between(root / at.relative_to("/"), inside, own[kind])
        ]
    except (OSError, ValueError, IndexError):  # not Linux, or a file of unknown form
        return sys.maxsize
    return min(limits, default=sys.maxsize)


def _own(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Yields pairs (type of cgroup file system, group of this process in it), for file systems that count memory."""
    for line in (root / PROC / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield ("cgroup" if controllers else "cgroup2"), PurePosixPath(path)


def _mounts(root: Path, kind: str) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Yields pairs (group at the top of a mount, folder of the mount), for mounts of a type of file system."""
    for line in (root / PROC / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        type_, options = after.split()[0], after.split()[-1].split(",")
        if type_ == kind and (kind == "cgroup2" or "memory" in options):
            _, _, _, inside, at, *_ = before.split()
            yield PurePosixPath(inside), PurePosixPath(at)


def _between(top: Path, inside: PurePosixPath, own: PurePosixPath) -> Iterator[Path]:
    """Yields the folders from the top of a mount down to a group; only the top if the mount does not show the group."""
    yield top
    if own.is_relative_to(inside) and ".." not in own.parts:
        for part in own.relative_to(inside).parts:
            yield (top := top / part)


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no limit: the top group has no such file, and other files may say "max"
        return sys.maxsize
