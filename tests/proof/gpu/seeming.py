"""A plugin of pytest that lets any machine seem one with a GPU, so that tests marked `gpu` are collected: none can run.

torch says that there is a device. Packages that `packages.txt` neither names nor needs are hidden.
"""

import re
import sys
from importlib.metadata import packages_distributions

import torch

from tests.proof.gpu.needs import PACKAGES, needed, plain

VERSION = re.compile(r"^transformers==(.*)$", re.MULTILINE)


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
