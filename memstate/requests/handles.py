"""Defines handles and requests: what callers pass in and get back. This file knows no register file."""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from memstate.errors import InvalidArgument
from memstate.slots.registers import Ints, Longs
from memstate.tokens import Tokens

_TABLES = count(1)
ONE, LARGEST = np.int32(1), np.int32(2**31 - 1)


def first_generation() -> int:
    """Returns where the generations of a table start.

    Each table starts elsewhere, so that another manager's handles are stale here.
    """
    return next(_TABLES) * 1_000_003 % 2**30


def risen(generation: Ints) -> Ints:
    """Returns the generations after these; after the largest int32 comes 0."""
    return (generation + ONE) & LARGEST  # the sum may wrap to a negative number


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Snapshot:
    """A handle to a published state, which it keeps until it is dropped. It keeps the state's KV pages as well.

    Attributes:
        register: the register that has the state.
        generation: counts the uses of this register.
        length: tokens that the state stands for.
        pages: KV pages of these tokens, in order.

    Example:
        >>> Snapshot(register=12, generation=1, length=64).length
        64
    """

    register: int
    generation: int
    length: int
    pages: tuple[int, ...] = ()


class Source(NamedTuple):
    """Where the state of a new row comes from: zeros, a state that it reads, or states that become its own.

    Attributes:
        length: tokens that the state stands for; 0 for zeros.
        states: states in holders, the longest first. None for zeros, and for a state that is still below the device.
        pages: ids of the KV pages of these tokens, which the row shares. For what is still below the device, zeros.
        of: who has the states: a session, a node of the prefix cache, or None: the caller, or nobody on the device.
        takes: whether the states move to the row. If not, the row reads or copies the first.

    Example:
        >>> ZEROS.length, Source(16).takes
        (0, False)
    """

    length: int = 0
    states: Sequence[Snapshot] = ()
    pages: Sequence[int] = ()
    of: object = None
    takes: bool = False


ZEROS = Source()  # from the first token on


@dataclass(frozen=True)
class Session:
    """A handle to a conversation whose states stay between its turns, until it is closed.

    Attributes:
        id: its name, shown by audits.
        serial: tells sessions of one name apart.

    Example:
        >>> Session("chat 7", serial=1).id
        'chat 7'
    """

    id: Hashable
    serial: int


@dataclass(frozen=True)
class Request:
    """What a request needs to be admitted.

    Args:
        id: a name, shown by audits. Two live requests may have the same one.
        length: tokens that KV pages are taken for at once. Default: all of `tokens`.
        resume: a snapshot to continue from. It says what length it stands for, but not of which tokens. A caller that
            gives `resume` and `tokens` must make sure that they agree.
        snapshot_at: lengths in tokens at which states are kept as well, such as the ends of messages: a sequence of
            whole numbers, or an array of numpy. Each is rounded down to whole pages, and to the grid of all planes.
            Those beyond the prompt are ignored; without `tokens` the prompt has no known end.
        tokens: the whole prompt, for the prefix cache or a session to find what is computed already. One dimension, any
            sequence of whole numbers. Without a prefix cache and without a session they only say the length.
        salt: equal tokens under different salts never match. None, str, bytes, int or a tuple of these.
        session: the session that this request is the next turn of.
        fetch: the prefetch that was started for it. Several ranks start from what they agreed on.
        kind: what the request is, a text of at most 64 characters such as "chat", "tool" or "retrieval", or None. The
            default policy for states learns how the states of each kind come back. Only the first 8 kinds count.

    Example:
        >>> Request("a", tokens=[1, 2, 3], snapshot_at=[2]).snapshot_at
        [2]
    """

    id: Hashable
    length: int | None = None
    resume: Snapshot | None = None
    snapshot_at: Sequence[int] | NDArray[np.integer] = ()
    tokens: Tokens | None = field(default=None, repr=False, compare=False)
    salt: Hashable = None
    session: Session | None = None
    fetch: Any = field(default=None, repr=False, compare=False)
    kind: str | None = None


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Row:
    """A handle to one running request: a row of the request table, until it is released.

    Attributes:
        index: number of the row.
        generation: counts the uses of this row.

    Example:
        >>> Row(index=3, generation=17).index
        3
    """

    index: int
    generation: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        known = self.index == other.index and self.generation == other.generation
        return known and type(self.index) is type(other.index)  # True and 1.0 are no rows

    def __hash__(self) -> int:
        return hash((self.index, self.generation))


class RowInfo(NamedTuple):
    """What the host knows of a row.

    Attributes:
        length: tokens of the row. All planned steps count; drafts count after their `accept`, and so does a step that
            was planned before it.
        confirmed: tokens that the row is certain to reach, unless a step is cancelled. A planned step counts as soon as
            all earlier steps of the row are settled, drafts after their `accept`.
        next_boundary: the next length at which a chunk should end, so that a state can be kept there: the next multiple
            of `every` after the prompt, or the next mark, unless the forward has a grid that counts from the start of
            the row's chunk. A chunk can go further; the state there is then kept at a shorter length, or not at all.
            `StateManager.chunk` is simpler for a prompt.
        slots: slots that the row holds, the states at its marks included.
        pending: number of its last tokens that are real, and in its tail instead of its state.
        missed: why no more of its prompt was cached when it was admitted. "evicted": more was there, states or KV too.
            "no_snapshot": KV was there, and no state. "no_sharing": nobody had computed it. "": all whole pages were
            cached, or there is no prefix cache.
    """

    length: int
    confirmed: int
    next_boundary: int
    slots: int
    pending: int = 0
    missed: str = ""


class Rows(Sequence[Row]):
    """The rows of a batch: handles, and two numpy vectors on demand. Every call that takes a list of rows takes them.

    A part of it, `rows[2:5]` or `rows[mask]`, and the sum of two are `Rows` too. One entry is a `Row`.

    Args:
        rows: the handles.
        table: the request table that made the handles.
        distinct: whether no row comes twice. None: it is looked up.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=4)
        >>> rows = mem.admit([ms.Request("a"), ms.Request("b")])
        >>> rows.indices.tolist(), rows[1] == list(rows)[1], len(rows[:1] + rows[1:])
        ([1, 2], True, 2)
    """

    def __init__(self, rows: Iterable[Row], table: object, distinct: bool | None = None) -> None:
        self._rows, self.table = list(rows), table
        self.distinct = len({row.index for row in self._rows}) == len(self._rows) if distinct is None else distinct

    @cached_property
    def indices(self) -> Longs:
        """Rows of the request table, int64 `batch`."""
        return np.frombuffer(array("q", [row.index for row in self._rows]).tobytes(), np.int64)

    @cached_property
    def generations(self) -> Ints:
        """Generation of each handle, int32 `batch`."""
        return np.frombuffer(array("i", [row.generation for row in self._rows]).tobytes(), np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> "Rows": ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Rows(self._rows[at], self.table, self.distinct or None)
        which = np.asarray(at)
        if which.ndim == 0 and which.dtype.kind in "iu":
            return self._rows[int(which)]
        if which.ndim != 1 or (which.size and which.dtype.kind not in "biu"):
            raise InvalidArgument(f"rows[{at!r}]: expected a number, a slice, a list of numbers or a mask")
        chosen = np.arange(len(self))[which] if which.size else ()
        return Rows([self._rows[entry] for entry in chosen], self.table)

    def __reduce__(self) -> Any:
        raise TypeError("rows belong to a manager of this process: send rows.indices and rows.generations instead")

    def __copy__(self) -> "Rows":
        return self

    def __deepcopy__(self, memo: Any) -> "Rows":
        return self

    def __add__(self, other: Iterable[Row]) -> Any:
        if isinstance(other, Rows) and other.table is self.table:
            return Rows([*self, *other], self.table)
        return [*self, *other]

    def __radd__(self, other: Iterable[Row]) -> list[Row]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Rows({self.indices.tolist()})"
