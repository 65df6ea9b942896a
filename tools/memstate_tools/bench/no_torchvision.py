"""Replaces torchvision by empty modules, so that SGLang can be imported without it.

SGLang's models import torchvision for images. Slots, pools and trees do not use it, and a wheel of torchvision fits
only the build of torch that it was made with.
"""

import sys
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Anything(type):
    """A metaclass whose classes have every attribute; each attribute is again such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *given: Any, **named: Any) -> Any:
        """Makes an object without attributes."""
        return super().__call__()


class StandIn(ModuleType):
    """An empty module in place of one of torchvision. Every name in it is a class of `Anything`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Finds and loads torchvision and its submodules as empty modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the spec of a module of torchvision; None for other modules."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Makes an empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: an empty module has no code."""


def leave_out_torchvision() -> None:
    """Puts empty modules in place of torchvision, unless it is installed. Call it before SGLang is imported."""
    with suppress(ValueError):
        if find_spec("torchvision") is None:
            from transformers.utils.import_utils import is_torchvision_available

            assert not is_torchvision_available()  # transformers remembers this answer
            sys.meta_path.append(Finder())
            import transformers

            try:
                _ = transformers.AutoImageProcessor.register
            except ImportError:  # an older transformers refuses this class without torchvision
                vars(transformers)["AutoImageProcessor"] = Anything("AutoImageProcessor", (), {})
