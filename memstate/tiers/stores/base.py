"""Defines `Store`, the protocol of a storage backend that keeps records of bytes under names.

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
RECORD = re.compile(r"(?:state|kv|row)-[0-9a-f]{64}")  # names of records, see `RecordFormat.name`


def require_names(names: Sequence[str]) -> None:
    """Raises an error if a name is not that of a record, see `RecordFormat.name`, but a path or a temporary file, say.

    Raises:
        InvalidArgument: A name is not that of a record.
    """
    for name in names:
        if not isinstance(name, str) or not RECORD.fullmatch(name):
            raise InvalidArgument(f"record {name!r}: expected state- or kv- and 64 hexadecimal digits")


def require_buffers(names: Sequence[str], buffers: Sequence[Bytes], written: bool) -> None:
    """Raises an error unless all names are those of records, and each has a buffer of contiguous bytes.

    Args:
        names: Names of records.
        buffers: A buffer for each name, uint8 `byte`.
        written: Whether the call will write to the buffers.

    Raises:
        InvalidArgument: A name is not that of a record, or a buffer is missing or is not contiguous bytes.
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
    """What a call did for one name of its batch."""

    MISSING = 0  # no such record
    DONE = 1  # the whole record was read or written
    DAMAGED = 2  # there is a record, but its size is not that of the buffer
    FAILED = 3  # the store could not do it: no permission, no space, no connection


@runtime_checkable
class Store(Protocol):
    """Keeps records by name.

    Several threads may call the methods at the same time. A call may take long. If it raises OSError, it is unknown
    what it did for any name of the batch. What it does for one name does not depend on the other names.

    Names are those of `RecordFormat.name`: `state-` or `kv-` and 64 hexadecimal digits. A record is written whole or
    not at all: no reader sees half a record. A write under an existing name may keep the old record or replace it,
    because equal names mean equal bytes. Records may be deleted at any time.

    A store may have two more attributes, which the log and the metrics show: `faults`, a `Counter` of failures by
    reason, such as ENOSPC; and `evicted`, the number of records that it deleted to make room.
    """

    def register(self, memory: Tensor) -> None:
        """Announces the host memory in which the buffers of later calls will lie.

        Args:
            memory: uint8, contiguous.
        """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Returns for each name whether the store has its record."""

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Reads each record into its buffer. If the outcome is not DONE, the buffer may have any bytes.

        Args:
            names: Names of records.
            buffers: A buffer for each name, of exactly the size of its record; uint8 `byte`, contiguous.
        """

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        """Writes each record. DONE means that readers now find it. The call never returns MISSING.

        Args:
            names: Names of records.
            buffers: The record of each name; uint8 `byte`, contiguous.
        """

    def discard(self, names: Sequence[str]) -> None:
        """Removes records that were read whole but have a flaw, so that they can be written again."""

    def close(self) -> None:
        """Closes the store. Afterwards no other method is called."""


def faults_of(store: Store | None) -> Counter[str]:
    """Returns the number of failures of a store so far, by reason; empty for a store that does not count them."""
    faults = getattr(store, "faults", None)
    return Counter(faults if isinstance(faults, Counter) else ())


def faults_since(store: Store, before: Counter[str]) -> str:
    """Returns the reasons of failures that a store has counted since an earlier `faults_of`, "" for none."""
    return ", ".join(sorted(faults_of(store) - before))


def answered(answers: list[T], asked: int) -> list[T]:
    """Returns the answers of a store unchanged.

    Raises:
        OSError: The number of answers is not that of the records.
    """
    if len(answers) != asked:
        raise OSError(f"storage was asked for {asked} records and answered for {len(answers)}")
    return answers


def evicted_of(store: Store | None) -> int:
    """Returns how many records a store has deleted to make room; 0 for a store that does not count them."""
    evicted = getattr(store, "evicted", 0)
    return int(evicted) if is_whole(evicted) else 0


def reason_of(error: BaseException) -> str:
    """Returns the reason of an error in one word: the name of its errno, or else of its class."""
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number or 0, type(error).__name__)


def why_of(error: BaseException) -> str:
    """Returns the text of an error for the log: its reason and its `repr`."""
    reason = reason_of(error)
    return repr(error) if reason == type(error).__name__ else f"{reason}: {error!r}"


class NoStore:
    """A `Store` without records, for several ranks without storage: they still agree on what is in host memory."""

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
