"""The record of a part that is not there: it is falsy, and reading a figure of it raises a named error."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from memstate.errors import ConfigurationError
from memstate.sheet import Sheet, Shown, sheet


@dataclass(frozen=True)
class Absent(Shown):
    """A record that is not there. It is falsy, has no fields of its own, and equals each other one of its kind.

    Attributes:
        _record: The class of what would be there.
        _why: What is missing, and how to have it.
    """

    _record: ClassVar[Any]
    _why: ClassVar[str]

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        """Never returns.

        Raises:
            ConfigurationError: The record would have it.
            AttributeError: It would not; notebooks and copies ask for much that no record has.
        """
        if not name.startswith("_") and (
            hasattr(self._record, name) or name in (each.name for each in fields(self._record))
        ):
            raise ConfigurationError(f"{name}: {self._why}")
        raise AttributeError(f"{self._record.__name__} has no {name!r}")

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        return sheet(self._why)
