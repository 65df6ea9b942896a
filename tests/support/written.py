"""Registers an operation of one's own; writes its file anew, with edits, and imports what was written."""

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from memstate.kernels.configs import CONFIGS
from memstate.kernels.dispatch import Backend
from memstate.kernels.own import KERNELS
from tests.support.running_mean import running_mean

OWN = Path(__file__).with_name("running_mean.py")
NAME = "written_kernel"
HELPERS = """
@triton.jit
def rate():
    return RATE


def blocks(size, block):
    return triton.cdiv(size, block)


def unused(size):
    return size


def rounded(number):
    return number


def of_partial(given, plus, twice=1):
    return {"size": twice * given["state"].shape[1] + plus}


"""
HELPED = {  # the kernel with helpers, which it uses in several ways
    "@triton.jit\n": HELPERS.lstrip() + "@triton.jit\n",
    "* RATE\n": "* rate()\n",
    "(size, BLOCK)\n": "(size, BLOCK)\n    grid = lambda meta: (batch, blocks(size, meta['BLOCK']))\n",
    "RATE.value": "next(rounded(RATE.value) for _ in range(1))",
    "SIZE)\n    return": "SIZE)\n    x.copy_(x.to(DTYPE))\n    return",
    "SIZE, TOKENS =": "DTYPE = torch.float32\nSIZE, TOKENS =",
    "lambda given: {": "partial(of_partial, plus=0), nbytes=lambda given: 9 if {",
    "shape[1]},": "shape[1]} else 0,",
    "import torch\n": "from functools import partial\n\nimport torch\n",
}


@contextmanager
def registered() -> Iterator[None]:
    """Registers the operation in the block."""
    running_mean.register()
    try:
        yield
    finally:
        delattr(Backend, running_mean.name)
        del CONFIGS[running_mean.name], KERNELS[running_mean.name]


def source(edits: Mapping[str, str] = {}) -> str:
    """Returns the text of the operation. Each edit replaces the first place of a text, which must be there."""
    text = OWN.read_text(encoding="utf-8")
    for old, new in edits.items():
        assert old in text, f"{OWN} has no {old!r}"
        text = text.replace(old, new, 1)
    return text


def imported(folder: Path, text: str) -> ModuleType:
    """Writes a module into a folder, and imports it as a process would that sees it for the first time."""
    path = folder / f"{NAME}.py"
    path.write_text(text, encoding="utf-8")
    linecache.clearcache()  # to Python, a file of the same size and second is the old one
    spec = spec_from_file_location(NAME, path)
    assert spec and spec.loader
    sys.modules[NAME] = module = module_from_spec(spec)
    exec(compile(text, path, "exec"), vars(module))  # bytecode that is kept may be of the old file, too
    return module
