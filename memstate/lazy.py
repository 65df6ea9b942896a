"""Loads the names of a package when they are first used. The package lists them in its `if TYPE_CHECKING` block."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def exports(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Returns a `__getattr__` for a package, and the names that its `if TYPE_CHECKING` block imports.

    Submodules are attributes, too, and are imported when they are first used.

    Args:
        package: the name of the package that is being imported.

    Returns:
        The function, which takes a name and returns its value, and the names in alphabetical order.

    Raises:
        ImportError: the source of the package is missing. Triton needs the source as well.

    Example:
        >>> load, names = exports("memstate")
        >>> load("Redirect").__name__, "Redirect" in names
        ('Redirect', True)
    """
    home = sys.modules[package]  # a reloader can remove it from `sys.modules`
    spec = home.__spec__
    read = getattr(spec.loader, "get_source", None) if spec else None
    text = read(package) if read else None
    if text is None:
        raise ImportError(f"{package} reads its own source, and there is none; install it with its .py files")
    (block,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    source = {
        name.name: str(node.module) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names
    }

    def load(name: str) -> Any:
        if module := source.get(name):
            # A name that `module` does not have is a submodule.
            value = getattr(import_module(module), name, None) or import_module(f"{module}.{name}")
            setattr(home, name, value)
            return value
        if not name.startswith("_") and name.isidentifier() and find_spec(f"{package}.{name}"):
            return import_module(f"{package}.{name}")  # other submodules, such as memstate.errors
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load, sorted(source)
