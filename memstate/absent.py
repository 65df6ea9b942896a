"""Base of records for missing parts of a manager: they are falsy, and reading a figure raises `ConfigurationError`."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from memstate.errors import ConfigurationError
from memstate.sheet import Sheet, Shown, sheet


@dataclass(frozen=True)
class Absent(Shown):
    """Stands for the record of a missing part. It is falsy and has no fields. All instances of a class are equal.

    Attributes:
        _record: The class of the record that is missing.
        _why: The text of the error: what is missing, and how to get it.
    """

    _record: ClassVar[Any]
    _why: ClassVar[str]

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """Raises an error for every name.

        Raises:
            ConfigurationError: The missing record has an attribute of this name.
            AttributeError: The record has no such attribute. Notebooks and `copy` ask for many such names.
        """
        if not name.startswith("_") and (
            hasattr(self._record, name) or name in (each.name for each in fields(self._record))
        ):
            raise ConfigurationError(f"{name}: {self._why}")
        raise AttributeError(f"{self._record.__name__} has no {name!r}")

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        return sheet(self._why)
