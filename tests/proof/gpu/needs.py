"""Lists the packages of a machine with a GPU: those of `packages.txt`, and their requirements."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

PACKAGES = Path(__file__).with_name("packages.txt")
NAME = re.compile(r"[\w.-]+")


def plain(requirement: str) -> str:
    """Returns the normalised name of the package that a requirement names."""
    match = NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else ""


def needed(listed: str) -> set[str]:
    """Returns the listed packages and all their requirements."""
    packages: set[str] = set()
    left = [plain(line) for line in listed.splitlines()]
    while left:
        package = left.pop()
        if package and package not in packages:
            packages.add(package)
            left += _needs(package)
    return packages


def _needs(package: str) -> Iterator[str]:
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return
    yield from (plain(line) for line in lines if "extra ==" not in line)
