"""What a storage backend must do: keep records of bytes under names. Knows no state, no token, no host memory but what
it is handed.
"""

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memstate.errors import InvalidArgument

Bytes = NDArray[np.uint8]
NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")  # neither a dot nor a slash: never a path, never a temporary file
RECORD = re.compile(r"(?:state|kv)-[0-9a-f]{64}")  # what records are called, see `RecordFormat.name`


def require_names(names: Sequence[str]) -> None:
    """Raises: InvalidArgument for what is no name of a record."""
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidArgument(f"record {name!r}: expected a name of 1 to 100 letters, digits, - and _")


def require_records(names: Sequence[str]) -> None:
    """Raises: InvalidArgument for what is no name that a record gets."""
    for name in names:
        if not isinstance(name, str) or not RECORD.fullmatch(name):
            raise InvalidArgument(f"record {name!r}: expected a name of state- or kv- and 64 hexadecimal digits")


def require_buffers(names: Sequence[str], buffers: Sequence[Bytes], written: bool) -> None:
    """Raises: InvalidArgument unless there is a buffer for each name. written: they are read into."""
    require_names(names)
    if len(names) != len(buffers):
        raise InvalidArgument(f"{len(names)} names with {len(buffers)} buffers: expected one for each")
    for buffer in buffers:
        flags = buffer.flags
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not flags.c_contiguous or (written and not flags.writeable):
            raise InvalidArgument(
                f"buffer of {buffer.dtype} {buffer.shape}: expected contiguous bytes in one dimension, writable to read"
            )


class Outcome(IntEnum):
    """What became of one name of a batch."""

    MISSING = 0  # no such record
    DONE = 1  # read whole, or written whole
    DAMAGED = 2  # a record is there, of another size than was asked for
    FAILED = 3  # it cannot be said: no permission, no space, no connection


@runtime_checkable
class Store(Protocol):
    """Records by name. Every method is called by several threads at once, may take long and may raise OSError: then
    nothing is known of the whole batch. What a batch does for one name it does whatever becomes of the others.

    Names are ASCII letters, digits, `-` and `_`, at most 100 of them; those of `RecordFormat.name`, `state-` or `kv-`
    and 64 hexadecimal digits, are all that a store has to take. A record is written whole or not at all: no
    reader ever sees half of one under its name. Writing a name that is there may keep the old record or the new one:
    equal names mean equal bytes. Records may go at any time.
    """

    def register(self, memory: Tensor) -> None:
        """Says that buffers of later calls lie in this host memory, before any of them: uint8, contiguous."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each record is there."""

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer, uint8 `byte`, contiguous, of exactly the record's size. A buffer whose
        outcome is not DONE may hold anything.
        """

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record; DONE where it will be found from now on. Never MISSING."""

    def discard(self, names: Sequence[str]) -> None:
        """Removes records that were read whole and are not what they should be, so that they can be written again."""

    def close(self) -> None:
        """Ends whatever the backend has begun; nothing is called after it."""


class NoStore:
    """Keeps nothing: for ranks that agree on what they have in host memory alone."""

    def register(self, memory: Tensor) -> None:
        """Nothing to prepare."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Never."""
        return [False] * len(names)

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Never."""
        return [Outcome.MISSING] * len(names)

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Never."""
        return [Outcome.FAILED] * len(names)

    def discard(self, names: Sequence[str]) -> None:
        """There is nothing."""

    def close(self) -> None:
        """Nothing was begun."""
