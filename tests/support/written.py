"""Registers an operation of one's own; writes its file anew, with edits, and imports what was written."""

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
    spec = spec_from_file_location(NAME, path)
    assert spec and spec.loader
    sys.modules[NAME] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
