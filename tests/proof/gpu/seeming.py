"""A plugin of pytest that lets any machine seem one with a GPU, so that tests marked `gpu` are collected: none can run.

torch says that there is a device. Packages that `packages.txt` neither names nor needs are hidden.
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


def hidden(listed: str) -> set[str]:
    """Modules that are here and would not be there."""
    kept = needed(listed) | {"memstate", "pip", "setuptools"}
    return {
        module for module, packages in packages_distributions().items()
        if kept.isdisjoint(map(plain, packages)) and module not in sys.stdlib_module_names
    }  # fmt: skip


def seem() -> None:
    """From now on this process takes its machine for such a one."""
    listed = PACKAGES.read_text(encoding="utf-8")
    sys.modules.update(dict.fromkeys(hidden(listed)))  # type: ignore[arg-type]  # None: neither found nor imported
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda device=None: "seeming"
    import transformers

    # Of the class, because some files of Transformers make the module anew.
    type(transformers).__version__ = property(lambda _: VERSION.findall(listed)[0])  # type: ignore[attr-defined]


seem()
