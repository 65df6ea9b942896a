"""The protocol of a storage backend, which keeps records of bytes under names.

Knows no state, no token and no host memory.
"""

import errno
import re
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memstate.checks import is_whole
from memstate.errors import InvalidArgument

T = TypeVar("T")
Bytes = NDArray[np.uint8]
RECORD = re.compile(r"(?:state|kv)-[0-9a-f]{64}")  # what records are called, see `RecordFormat.name`


def require_names(names: Sequence[str]) -> None:
    """Checks that names are those of `RecordFormat.name`. They are never paths, and never names of temporary files.

    Raises:
        InvalidArgument: One is another name.
    """
    for name in names:
        if not isinstance(name, str) or not RECORD.fullmatch(name):
            raise InvalidArgument(f"record {name!r}: expected state- or kv- and 64 hexadecimal digits")


def require_buffers(names: Sequence[str], buffers: Sequence[Bytes], written: bool) -> None:
    """Checks that there is a buffer of contiguous bytes for each name.

    Args:
        names: Names of records.
        buffers: uint8 `byte`.
        written: Whether the buffers are written to.

    Raises:
        InvalidArgument: A buffer is missing or is not contiguous bytes.
    """
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
    """The outcome of one name of a batch."""

    MISSING = 0  # no such record
    DONE = 1  # read whole, or written whole
    DAMAGED = 2  # a record is there, of another size than was asked for
    FAILED = 3  # it cannot be said: no permission, no space, no connection


@runtime_checkable
class Store(Protocol):
    """Keeps records by name.

    Several threads call every method at once. A call may take long, and may raise OSError: then nothing is known of the
    whole batch. What a batch does for one name does not depend on the others.

    Names are those of `RecordFormat.name`: `state-` or `kv-` and 64 hexadecimal digits. A record is written whole or
    not at all: no reader sees half of one. Writing a name that is there may keep the old record or the new one, because
    equal names mean equal bytes. Records may go at any time.

    A store may also have `faults`, a `Counter` of what it could not do by reason, such as ENOSPC, and `evicted`, the
    records that it deleted to make room. Log and metrics show both.
    """

    def register(self, memory: Tensor) -> None:
        """Announces host memory that buffers of later calls lie in.

        Args:
            memory: uint8, contiguous.
        """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Tells whether each record is there."""

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer. A buffer whose outcome is not DONE may hold anything.

        Args:
            names: Names of records.
            buffers: uint8 `byte`, contiguous, each of exactly the record's size.
        """

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record. DONE means that it will be found from now on; MISSING is never returned.

        Args:
            names: Names of records.
            buffers: uint8 `byte`, contiguous.
        """

    def discard(self, names: Sequence[str]) -> None:
        """Removes records that were read whole and are flawed, so that they can be written again."""

    def close(self) -> None:
        """Ends what the backend has begun. Nothing is called after it."""


def faults_of(store: Store | None) -> Counter[str]:
    """Returns what a store could not do so far, by reason; nothing for a store that does not count."""
    faults = getattr(store, "faults", None)
    return Counter(faults if isinstance(faults, Counter) else ())


def faults_since(store: Store, before: Counter[str]) -> str:
    """Returns the reasons that a store has counted since then, "" for none."""
    return ", ".join(sorted(faults_of(store) - before))


def answered(answers: list[T], asked: int) -> list[T]:
    """Returns what a store has answered.

    Raises:
        OSError: It is not one answer for each record.
    """
    if len(answers) != asked:
        raise OSError(f"storage was asked for {asked} records and answered for {len(answers)}")
    return answers


def evicted_of(store: Store | None) -> int:
    """Returns the records that a store deleted to make room; 0 for a store that does not count."""
    evicted = getattr(store, "evicted", 0)
    return int(evicted) if is_whole(evicted) else 0


def reason_of(error: BaseException) -> str:
    """Returns the reason of an error in a word: the name of its errno, else of its kind."""
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number or 0, type(error).__name__)


def why_of(error: BaseException) -> str:
    """Returns what the log says of an error: its reason, and its own words."""
    reason = reason_of(error)
    return repr(error) if reason == type(error).__name__ else f"{reason}: {error!r}"


class NoStore:
    """Stores nothing. For ranks that agree on host memory alone."""

    def register(self, memory: Tensor) -> None:
        """Does nothing."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns False for each name."""
        return [False] * len(names)

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Returns MISSING for each name."""
        return [Outcome.MISSING] * len(names)

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Returns FAILED for each name."""
        return [Outcome.FAILED] * len(names)

    def discard(self, names: Sequence[str]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
