"""The work of the background threads: ask storage what it has, and read records into host memory. Knows no cache."""

from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import NamedTuple, TypeVar

from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome, Store

T = TypeVar("T")


class Question(NamedTuple):
    """What a prefetch asks of storage.

    Attributes:
        keys: Digests of whole pages.
        pages: Pages whose KV is nowhere else, ascending.
        ends: Page ends, from 1 on, whose state is not in host memory, ascending.
    """

    keys: Sequence[bytes]
    pages: Sequence[int]
    ends: Sequence[int]


class Answer(NamedTuple):
    """What storage has.

    Attributes:
        found: How many of the pages asked for are there, from the first on.
        ends: Page ends with a state.
    """

    found: int = 0
    ends: Sequence[int] = ()


class Chunk(NamedTuple):
    """A record to read.

    Attributes:
        key: Its digest.
        length: Tokens that it stands for.
        record: The host record to read it into.
    """

    key: bytes
    length: int
    record: int


class Read(NamedTuple):
    """arrived: good records from the first on. flaw: what is wrong with the next one."""

    arrived: int
    flaw: str


def ask(
    store: Store, kv: RecordFormat | None, states: RecordFormat | None, question: Question, chunk: int, over: Event
) -> Answer:
    """What storage has, as far as KV reaches without a gap. over: nobody wants to know any more. Raises: OSError."""
    keys, found = question.keys, 0
    for pages in _parts(question.pages, chunk):
        there = _exist(store, kv, [keys[page] for page in pages])
        found += [*there, False].index(False)
        if over.is_set() or not all(there):
            break
    reach = question.pages[found] if found < len(question.pages) else len(keys)
    ends: list[int] = []
    for part in _parts([end for end in question.ends if end <= reach], chunk):
        if over.is_set():
            break
        there = _exist(store, states, [keys[end - 1] for end in part])
        ends += [end for end, has in zip(part, there, strict=True) if has]
    return Answer(found, ends)


def _exist(store: Store, form: RecordFormat | None, keys: Sequence[bytes]) -> list[bool]:
    assert form is not None, "only what has a format is asked for"
    return _answered(store.exists([form.name(key) for key in keys]), len(keys))


def read(
    store: Store, form: RecordFormat, buffer: Callable[[int], Bytes], pieces: Sequence[Chunk], over: Event
) -> Read:
    """Reads records into host memory and checks them, up to the first that is not what was asked for; that one is
    discarded.

    buffer: the bytes of a host record. Raises: OSError.
    """
    if over.is_set():
        return Read(0, "unwanted")
    buffers = [buffer(piece.record) for piece in pieces]
    outcomes = _answered(store.get([form.name(piece.key) for piece in pieces], buffers), len(pieces))
    for arrived, (outcome, piece) in enumerate(zip(outcomes, pieces, strict=True)):
        flaw = outcome.name.lower()
        if outcome == Outcome.DONE:
            flaw = form.flaw(buffers[arrived], piece.key, piece.length)
            if flaw:
                store.discard([form.name(piece.key)])
        if flaw:
            return Read(arrived, flaw)
    return Read(len(pieces), "")


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _answered(answers: list[T], asked: int) -> list[T]:
    if len(answers) != asked:
        raise OSError(f"storage was asked for {asked} records and answered for {len(answers)}")
    return answers
