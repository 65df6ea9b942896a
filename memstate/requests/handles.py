"""Defines requests, which callers pass in, and the handles that they get back. This file knows no register file."""

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
from memstate.tokens import Keys, SaltedTokens, Tokens

_TABLES = count(1)
ONE, LARGEST = np.int32(1), np.int32(2**31 - 1)


def first_generation() -> int:
    """Returns the first generation of a new table.

    Each table starts at another number, so that a table refuses the handles of another manager as stale.
    """
    return next(_TABLES) * 1_000_003 % 2**30


def risen(generation: Ints) -> Ints:
    """Returns each generation plus 1; the largest int32 becomes 0."""
    return (generation + ONE) & LARGEST  # the sum can overflow to a negative number


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Snapshot:
    """A handle to a published state. Until the handle is dropped, it keeps the state and the KV pages of the state.

    Attributes:
        register: number of the register that has the state.
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


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Parked:
    """A handle to a parked request: it does not run, and its state and its KV are in host memory.

    It is valid until `Request(resume=)` goes on from it, or until `drop`. Until then its records stay, also if nobody
    keeps the handle.

    Attributes:
        length: number of tokens that are computed.
        pending: number of the last of these tokens that are in the tail of the request instead of its state.
        prompt: the tokens that are known, with their salt. They can be more than `length`, or fewer.
        user: bytes of the caller, such as the state of a sampler.
        memory: whether it has the memory of its row, too: its tail, and planes that start with a value.

    Example:
        >>> from memstate.tokens import encode
        >>> Parked(41, 0, SaltedTokens(encode(range(40)), "tenant"), b"sampler").prompt.tokens
        40
    """

    length: int
    pending: int
    prompt: SaltedTokens = field(repr=False)
    user: bytes = field(default=b"", repr=False)
    memory: bool = False


class Source(NamedTuple):
    """Where the state of a new row comes from: zeros, a state that the row reads, or states that move to the row.

    Attributes:
        length: tokens that the state stands for; 0 for zeros.
        states: states in holders, the longest first. Empty for zeros, and for a state that must first be loaded.
        pages: ids of the KV pages of these tokens, which the row shares; 0 for a page that must first be loaded.
        of: owner of the states: a session, a node of the prefix cache, or `PUBLISHED` if the caller has the handle.
            The parked request that goes on. None for zeros, and for a state that must first be loaded.
        takes: whether the states move to the row. If not, the row reads or copies the first of them.

    Example:
        >>> ZEROS.length, Source(16).takes
        (0, False)
    """

    length: int = 0
    states: Sequence[Snapshot] = ()
    pages: Sequence[int] = ()
    of: object = None
    takes: bool = False


ZEROS = Source()  # source of a row that starts at its first token


@dataclass(frozen=True)
class Session:
    """A handle to a conversation. Its states stay between its turns, until the session is closed.

    Attributes:
        id: name of the session, shown by audits.
        serial: number that tells sessions of the same name apart.

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
        length: number of tokens that the admission takes KV pages for. Default: all of `tokens`.
        resume: a snapshot to continue from, or a parked request. A snapshot has a length, but no tokens: a caller that
            gives `resume` and `tokens` must make sure that they agree. The tokens of a parked request must come first
            in `tokens`; with `session`, it is the next turn of that session.
        snapshot_at: additional lengths at which states are kept, in tokens, such as the ends of messages: a sequence of
            whole numbers, or an array of numpy. Each is rounded down to whole pages, and to the grid of all planes.
            Lengths beyond the prompt are ignored; without `tokens` the prompt has no known end.
        tokens: the whole prompt: any sequence of whole numbers, of one dimension. By these tokens, the prefix cache or
            the session finds what is computed already. Without a cache and a session, only their number counts.
        salt: None, str, bytes, int or a tuple of these. Equal tokens under different salts never match.
        session: the session that this request is the next turn of.
        fetch: the result of `prefetch` for this request. Several ranks start from the length that they agreed on.
        keys: with `Prefix(keyed=True)`, in place of `tokens`: the keys of the whole blocks of the prompt, from the
            first on, and `length`, the number of all its tokens. A key is a hash of everything up to the end of
            its block: tokens, adapter and tenant. It is a whole number from 0 on, or bytes. The id of a block is no
            key: it comes back with other tokens.
        reach: for engines that keep their KV: the tokens from the start whose KV the engine has. The request does
            not start from a longer state. Default: all of `tokens`, or of the blocks in `keys`.
        kind: kind of the request, a text of at most 64 characters such as "chat", "tool" or "retrieval", or None. The
            default policy for states learns how often states of each kind are used again. It tells only the first 8
            kinds apart.

    Example:
        >>> Request("a", tokens=[1, 2, 3], snapshot_at=[2]).snapshot_at
        [2]
    """

    id: Hashable
    length: int | None = None
    resume: Snapshot | Parked | None = None
    snapshot_at: Sequence[int] | NDArray[np.integer] = ()
    tokens: Tokens | None = field(default=None, repr=False, compare=False)
    salt: Hashable = None
    session: Session | None = None
    fetch: Any = field(default=None, repr=False, compare=False)
    kind: str | None = None
    keys: Keys | None = field(default=None, repr=False, compare=False)
    reach: int | None = None


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Row:
    """A handle to one running request: a row of the request table. It is valid until the row is released.

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
        return known and type(self.index) is type(other.index)  # True == 1.0 == 1, but True and 1.0 are no rows

    def __hash__(self) -> int:
        return hash((self.index, self.generation))


class RowInfo(NamedTuple):
    """What the host knows of a row.

    Attributes:
        length: tokens of the row. All planned steps count. Drafts count after `accept` of their step; a step that was
            planned before this `accept` counts from then on, too.
        confirmed: tokens that the row is certain to reach, unless a step is cancelled. A planned step counts as soon as
            all earlier steps of the row are settled. Drafts count after `accept` of their step.
        next_boundary: the next length at which a chunk should end, so that a state can be kept there: the next multiple
            of `every` after the prompt, or the next mark. Marks do not count if the forward has a grid that counts from
            the start of the row's chunk. If a chunk goes further, the state is kept at a shorter length, or not at all.
            For a prompt, `StateManager.chunk` is simpler.
        slots: number of slots that the row holds, with those of the states at its marks.
        pending: number of the row's last tokens that are real, and in its tail instead of its state.
        missed: why no more of the prompt was cached at the admission. "evicted": more was cached once, states or KV.
            "no_snapshot": there was KV, but no state. "no_sharing": nobody had computed more of the prompt. "": all
            whole pages were cached, or there is no prefix cache.
    """

    length: int
    confirmed: int
    next_boundary: int
    slots: int
    pending: int = 0
    missed: str = ""


class Rows(Sequence[Row]):
    """The rows of a batch: a sequence of handles. Every call that takes a list of rows takes `Rows`.

    A part, `rows[2:5]` or `rows[mask]`, is `Rows`, too, and so is the sum of two. One entry, `rows[2]`, is a `Row`.

    Args:
        rows: handles of the rows, in order.
        table: the request table that made the handles.
        distinct: whether no row comes twice. None: the constructor finds out.

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
        """The number of each row, int64 `batch`."""
        return np.frombuffer(array("q", [row.index for row in self._rows]).tobytes(), np.int64)

    @cached_property
    def generations(self) -> Ints:
        """The generation of each handle, int32 `batch`."""
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
