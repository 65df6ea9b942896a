"""A plugin of pytest with which any machine can collect the tests marked `gpu`, but not run them.

torch then reports a device. Packages are hidden unless `packages.txt` names them or a named package needs them.
"""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import torch

PACKAGES = Path(__file__).with_name("packages.txt")
NAME = re.compile(r"[\w.-]+")
VERSION = re.compile(r"^transformers==(.*)$", re.MULTILINE)


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


def hidden(listed: str) -> set[str]:
    """Returns the installed modules that a machine with only the listed packages lacks."""
    kept = needed(listed) | {"memstate", "pip", "setuptools"}
    return {
        module for module, packages in packages_distributions().items()
        if kept.isdisjoint(map(plain, packages)) and module not in sys.stdlib_module_names
    }  # fmt: skip


def seem() -> None:
    """Makes this process believe that its machine has a GPU, and only the packages of `packages.txt`."""
    listed = PACKAGES.read_text(encoding="utf-8")
    sys.modules.update(dict.fromkeys(hidden(listed)))  # type: ignore[arg-type]  # None: an import raises
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda device=None: "seeming"
    import transformers

    # On the class, because some files of Transformers create the module again.
    type(transformers).__version__ = property(lambda _: VERSION.findall(listed)[0])  # type: ignore[attr-defined]


seem()
