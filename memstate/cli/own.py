"""Imports a class or function of the user by its name on the command line, module:name."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from memstate.errors import InvalidArgument


def own(what: str, name: str, expected: str) -> Callable[[], Any]:
    """Imports a class or a function.

    Args:
        what: Kind of object that the function makes, for messages.
        name: module:name. The module can be in the current folder.
        expected: Other names that the option takes, for the message.

    Returns:
        The class or function.

    Raises:
        InvalidArgument: The name is not module:name, the import fails, or the object cannot be called.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise InvalidArgument(f"{what} {name!r}: expected {expected}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(import_module(module), attribute)
    except Exception as error:
        raise InvalidArgument(f"{what} {name!r}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise InvalidArgument(f"{what} {name!r}: {factory!r} cannot be called; expected what returns a new {what}")
    return factory  # type: ignore[no-any-return]
