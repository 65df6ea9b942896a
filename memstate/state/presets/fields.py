"""Reads the fields of a configuration, and refuses fields that contradict each other. Knows no model.

A configuration is an object with attributes, a config.json as a dict, or the path of a config.json.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from math import inf
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

import torch

from memstate.checks import is_whole, shown
from memstate.errors import InvalidArgument

NESTED: Final = 4  # limit of the levels of nested text models; real configurations have one or two
TEXT: Final = ("text_config", "llm_config", "language_config", "thinker_config")  # fields that hold a nested text model


class Fields:
    """The fields of a configuration, an object with attributes or a dict. The name "a.b" means field b of field a.

    Args:
        config: the configuration object, or dict.

    Raises:
        InvalidArgument: the configuration is neither object nor dict, for example the name of a model.
    """

    def __init__(self, config: object) -> None:
        if config is None or isinstance(config, str | bytes | int | float | list | tuple | PathLike | type):
            raise InvalidArgument(f"{config!r}: expected a configuration object or a dict")
        self.config = config

    @classmethod
    def of(cls, config: object) -> "Fields":
        """Returns the fields of a configuration, which may be the path of a config.json or of its folder.

        Args:
            config: the configuration: an object, a dict or a path.

        Raises:
            InvalidArgument: there is no such file, the file is no JSON object, or the configuration cannot be read.
        """
        return cls(_loaded(fspath(config)) if isinstance(config, str | PathLike) else config)

    def levels(self) -> "Iterator[Fields]":
        """Yields the configuration, and then each text model nested in it; the last one is the model."""
        fields = self
        for _ in range(NESTED):
            yield fields
            if (text := next((text for name in TEXT if (text := fields.get(name)) is not None), None)) is None:
                return
            fields = Fields(text)
        yield fields

    def get(self, path: str) -> Any:
        """Returns a field, None if the configuration lacks it."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return value

    def has(self, name: str) -> bool:
        """Returns whether the configuration has a field, even with the value None."""
        return name in self.config if isinstance(self.config, Mapping) else hasattr(self.config, name)

    def number(self, *paths: str, least: int = 1) -> int:
        """Returns the first of these fields that is a number of `least` or more. Raises: InvalidArgument."""
        for path in paths:
            value = self.get(path)
            if is_whole(value) and value >= least:
                return int(value)
        raise self.refused(*paths, expected=f"a number of {least} or more")

    def scaled(self, size: int, factor: str) -> int:
        """Returns a size times a field that may be a fraction, such as expand_v = 1.5. Raises: InvalidArgument."""
        value = self.get(factor)
        total = size * value if isinstance(value, int | float) and not isinstance(value, bool) else 0
        if not 1 <= total < inf or total % 1:
            raise self.refused(factor, expected=f"a number that makes {size} another whole number")
        return round(total)

    def dtype(self, *names: str, among: Collection[torch.dtype] = ()) -> torch.dtype | None:
        """Returns the dtype in the first of these fields that exists, None without one.

        Args:
            names: names of the fields.
            among: dtypes that are allowed; empty for all that are floating-point.

        Raises:
            InvalidArgument: the field has another dtype, or none.
        """
        name = next(filter(self.has, names), names[-1])
        value = self.get(name)
        if value is None or value == "auto":
            return None
        named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        return require_dtype(f"{self.get('model_type')} with {name} = {value!r}", named, among)

    def numbers(self, path: str, known: range) -> list[int]:
        """Returns a field that lists some of the numbers `known`, each once. Raises: InvalidArgument."""
        values = self.get(path)
        if not isinstance(values, list | tuple) or not all(is_whole(value) and int(value) in known for value in values):
            raise self.refused(path, expected=f"a list of numbers from {known.start} to {known.stop - 1}")
        if len(set(values)) != len(values):
            raise self.refused(path, expected="each number once")
        return [int(value) for value in values]

    def require_multiple(self, many: str, few: str) -> None:
        """Refuses a field that is no multiple of another field. Raises: InvalidArgument."""
        if self.number(many) % self.number(few):
            raise self.refused(many, few, expected="the first to be a multiple of the second")

    def refused(self, *paths: str, expected: str) -> InvalidArgument:
        """Returns the error that shows these fields, and says what was expected."""
        given = ", ".join(f"{path} = {shown(self.get(path))}" for path in paths)
        return InvalidArgument(f"{self.get('model_type')} with {given}: expected {expected}")


def require_dtype(what: str, dtype: object, among: Collection[torch.dtype] = ()) -> torch.dtype:
    """Returns a dtype that is one of `among` or, without them, any floating-point dtype.

    Raises:
        InvalidArgument: it is something else. The error starts with `what`.
    """
    if isinstance(dtype, torch.dtype) and (dtype in among if among else dtype.is_floating_point):
        return dtype
    expected = f"one of {', '.join(map(str, among))}" if among else "a floating-point dtype, such as bfloat16"
    raise InvalidArgument(f"{what}: expected {expected}")


def _loaded(path: str | bytes) -> object:
    """Returns the content of a config.json. Raises: InvalidArgument."""
    try:
        file = Path(str(path))
        text = (file / "config.json" if file.is_dir() else file).read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # not JSON, nested too deeply, or no name of a file
        why = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"{path!r}: {why}: expected the path of a config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path!r}: {type(config).__name__}: expected a config.json with an object in it")
    return config
