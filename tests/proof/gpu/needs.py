"""Which packages a machine with a GPU has: those of `packages.txt`, and what they need."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")
NAME = re.compile(r"[\w.-]+")


def plain(requirement: str) -> str:
    """The name of a package, as all spellings of it have it."""
    found = NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def needed(listed: str) -> set[str]:
    """The packages of a list, and what they need in turn."""
    found: set[str] = set()
    left = [plain(line) for line in listed.splitlines()]
    while left:
        package = left.pop()
        if package and package not in found:
            found.add(package)
            left += _needs(package)
    return found


def _needs(package: str) -> Iterator[str]:
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return
    yield from (plain(line) for line in lines if "extra ==" not in line)
