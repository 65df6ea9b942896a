"""Modules that stand in for torchvision, so that SGLang can be imported without it.

SGLang's models import torchvision for images. Slots, pools and trees do not use it, and its wheels fit only the build
of torch that they were made with.
"""

import sys
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Anything(type):
    """A class that has every attribute: another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __call__(cls, *given: Any, **named: Any) -> Any:
        """Makes an object of no attributes."""
        return super().__call__()


class StandIn(ModuleType):
    """A module of torchvision where that is left out: every name in it is such a class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Finds torchvision and what is in it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Finds any module of torchvision."""
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Makes the module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def leave_out_torchvision() -> None:
    """Puts stand-ins in the place of torchvision, where it is not installed. Call it before SGLang is imported."""
    with suppress(ValueError):
        if find_spec("torchvision") is None:
            from transformers.utils.import_utils import is_torchvision_available

            assert not is_torchvision_available()  # it remembers the answer
            sys.meta_path.append(Finder())
            import transformers

            try:
                _ = transformers.AutoImageProcessor.register
            except ImportError:  # older ones refuse without torchvision
                vars(transformers)["AutoImageProcessor"] = Anything("AutoImageProcessor", (), {})
