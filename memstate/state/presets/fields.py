"""The fields of a configuration: reading them, and refusing what contradicts itself. Knows no model.

A configuration is an object with attributes, a config.json as a dict, or the path of one.
"""

import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from memstate.checks import is_whole
from memstate.errors import InvalidArgument


class Fields:
    """The fields of a configuration, which is an object with attributes or a dict; a dot leads into a nested one.

    Args:
        config: the configuration.

    Raises:
        InvalidArgument: it is neither, such as the name of a model.
    """

    def __init__(self, config: object) -> None:
        if config is None or isinstance(config, str | bytes | int | float | list | tuple | PathLike | type):
            raise InvalidArgument(f"{config!r}: expected a configuration object or a dict")
        self.config = config

    @classmethod
    def of(cls, config: object) -> "Fields":
        """The fields of a configuration, which may be the path of a config.json, or of the folder that has one.

        Args:
            config: the configuration.

        Raises:
            InvalidArgument: there is no such file, it is not a JSON object, or the configuration cannot be read.
        """
        return cls(_loaded(fspath(config)) if isinstance(config, str | PathLike) else config)

    def get(self, path: str) -> Any:
        """A field, None if it is not there."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value

    def has(self, name: str) -> bool:
        """Whether there is such a field, even one that says None."""
        return name in self.config if isinstance(self.config, Mapping) else hasattr(self.config, name)

    def number(self, *paths: str, least: int = 1) -> int:
        """The first of these fields that is a number of `least` or more. Raises: InvalidArgument."""
        for path in paths:
            value = self.get(path)
            if is_whole(value) and value >= least:
                return int(value)
        raise self.refused(*paths, expected=f"a number of {least} or more")

    def dtype(self, *names: str) -> torch.dtype | None:
        """The dtype that the first of these fields names that is there, None if none does. Raises: InvalidArgument."""
        name = next(filter(self.has, names), names[-1])
        value = self.get(name)
        if value is None or value == "auto":
            return None
        found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise self.refused(name, expected="a floating-point dtype, such as bfloat16")
        return found

    def numbers(self, path: str, known: range) -> list[int]:
        """A field that lists some of the numbers `known`, each once. Raises: InvalidArgument."""
        values = self.get(path)
        if not isinstance(values, list | tuple) or not all(is_whole(value) and int(value) in known for value in values):
            raise self.refused(path, expected=f"a list of numbers from {known.start} to {known.stop - 1}")
        if len(set(values)) != len(values):
            raise self.refused(path, expected="each number once")
        return [int(value) for value in values]

    def require_multiple(self, many: str, few: str) -> None:
        """Refuses a number that is no multiple of another. Raises: InvalidArgument."""
        if self.number(many) % self.number(few):
            raise self.refused(many, few, expected="the first to be a multiple of the second")

    def refused(self, *paths: str, expected: str) -> InvalidArgument:
        """The error that shows these fields and says what was expected of them."""
        found = ", ".join(f"{path} = {self.get(path)!r}" for path in paths)
        return InvalidArgument(f"{self.get('model_type')} with {found}: expected {expected}")


def _loaded(path: str | bytes) -> object:
    """Reads a config.json. Raises: InvalidArgument."""
    try:
        file = Path(str(path))
        text = (file / "config.json" if file.is_dir() else file).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # not JSON, lists in lists in lists, or no name of a file
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{path!r}: {why}: expected the path of a config.json") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path!r}: {type(found).__name__}: expected a config.json with an object in it")
    return found
