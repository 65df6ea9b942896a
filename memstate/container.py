"""How much memory the container of this process has: the least limit of its cgroups, version 1 and 2."""

import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")
PROC = "proc/self"
FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}  # by the type of the file system


def limit(root: Path = ROOT) -> int:
    """Returns the bytes that the kernel lets this process and its group have; `sys.maxsize` without a limit.

    The limits of the groups around its own count too. What cannot be read is no limit.

    Args:
        root: the folder that has "proc" and "sys".

    Syncs: no.
    """
    try:
        own = dict(_own(root))
        found = [
            _number(folder / name)
            for kind, name in FILES.items()
            if kind in own
            for inside, at in _mounts(root, kind)
            for folder in _between(root / at.relative_to("/"), inside, own[kind])
        ]
    except (OSError, ValueError, IndexError):  # another system, or a file of another form
        return sys.maxsize
    return min(found, default=sys.maxsize)


def _own(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """The group of this process in each file system that counts memory."""
    for line in (root / PROC / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            yield ("cgroup" if controllers else "cgroup2"), PurePosixPath(path)


def _mounts(root: Path, kind: str) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
    """Where a file system of groups is mounted: the group that is its top, and the folder."""
    for line in (root / PROC / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        found, options = after.split()[0], after.split()[-1].split(",")
        if found == kind and (kind == "cgroup2" or "memory" in options):
            _, _, _, inside, at, *_ = before.split()
            yield PurePosixPath(inside), PurePosixPath(at)


def _between(top: Path, inside: PurePosixPath, own: PurePosixPath) -> Iterator[Path]:
    """The folders from the top of a file system down to the group; a group that it does not show has the top alone."""
    yield top
    if own.is_relative_to(inside) and ".." not in own.parts:
        for part in own.relative_to(inside).parts:
            yield (top := top / part)


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # the top has none, and "max" is none
        return sys.maxsize
