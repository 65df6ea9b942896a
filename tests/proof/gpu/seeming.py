"""A plugin of pytest with which any machine can collect the tests marked `gpu`; they cannot run.

torch reports a device, and packages that `packages.txt` neither names nor needs are hidden.
"""

import re
import sys
from importlib.metadata import packages_distributions

import torch

from tests.proof.gpu.needs import PACKAGES, needed, plain

VERSION = re.compile(r"^transformers==(.*)$", re.MULTILINE)


def hidden(listed: str) -> set[str]:
    """Returns the installed modules that a machine with the listed packages would not have."""
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

    # A property of the class, because some files of Transformers make the module again.
    type(transformers).__version__ = property(lambda _: VERSION.findall(listed)[0])  # type: ignore[attr-defined]


seem()
