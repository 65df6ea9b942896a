"""A plugin of pytest with which any machine can collect the tests marked `gpu`, but not run them.

torch then reports a device. Packages are hidden unless `packages.txt` names them or a named package needs them.
"""

import re
import sys
from importlib.metadata import packages_distributions

import torch

from tests.proof.gpu.needs import PACKAGES, needed, plain

VERSION = re.compile(r"^transformers==(.*)$", re.MULTILINE)


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
