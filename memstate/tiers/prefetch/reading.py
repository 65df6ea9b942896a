"""Calls a store in background threads: asks which records it has, and reads records into host memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome, Store, answered, faults_of, faults_since

Over = Callable[[], bool]  # returns whether the prefetch is over; the work can then end early


class Question(NamedTuple):
    """The question of a prefetch to storage: which of these records does it have?

    Attributes:
        keys: Digests of the whole pages of the prompt.
        pages: Pages whose KV is neither on the device nor in host memory, ascending.
        ends: Page ends, from 1 on, whose state is not in host memory, ascending.
    """

    keys: Sequence[bytes]
    pages: Sequence[int]
    ends: Sequence[int]


class StorageAnswer(NamedTuple):
    """The answer of storage to a question.

    Attributes:
        held: Number of first pages of the question that storage has without a gap.
        ends: Page ends whose state storage has.
        why: Why the store could not tell for some records, "" if it could for all.
    """

    held: int = 0
    ends: Sequence[int] = ()
    why: str = ""


class Chunk(NamedTuple):
    """One record to read.

    Attributes:
        key: Digest of the record.
        length: Tokens that the record stands for.
        record: Number of the host record to fill.
    """

    key: bytes
    length: int
    record: int


class Read(NamedTuple):
    """The result of a read.

    Attributes:
        arrived: Number of sound records before the first one with a flaw.
        flaw: Flaw of the record after these, "" if all are sound.
        why: Why the store could not read the record with the flaw, "" if it gave no reason.
    """

    arrived: int
    flaw: str
    why: str = ""


def ask(
    store: Store, kv: RecordFormat, states: RecordFormat, question: Question, chunk: int, over: Over
) -> StorageAnswer:
    """Asks storage which pages and states of a prompt it has, up to the first gap of KV. Runs in a thread.

    Args:
        store: The storage.
        kv: Format of KV pages.
        states: Format of states.
        question: The question.
        chunk: Number of records in one call of the store.
        over: Function that returns whether the prefetch is over; then the work ends early.

    Raises:
        OSError: The store failed.
    """
    keys, held, before = question.keys, 0, faults_of(store)
    for pages in _parts(question.pages, chunk):
        there = answered(store.exists([kv.name(keys[page]) for page in pages]), len(pages))
        held += [*there, False].index(False)
        if over() or not all(there):
            break
    reach = question.pages[held] if held < len(question.pages) else len(keys)
    ends: list[int] = []
    for part in _parts([end for end in question.ends if end <= reach], chunk):
        if over():
            break
        there = answered(store.exists([states.name(keys[end - 1]) for end in part]), len(part))
        ends += [end for end, has in zip(part, there, strict=True) if has]
    return StorageAnswer(held, ends, faults_since(store, before))


def read(store: Store, form: RecordFormat, buffer: Callable[[int], Bytes], pieces: Sequence[Chunk], over: Over) -> Read:
    """Reads records into host memory and checks them, until one has a flaw. Runs in a thread.

    If the contents of a record have a flaw, it tells the store to discard the record.

    Args:
        store: The storage.
        form: Format of the records.
        buffer: Function that returns the bytes of a host record.
        pieces: The records to read.
        over: Function that returns whether the prefetch is over; then nothing more is read.

    Raises:
        OSError: The store failed.
    """
    if over():
        return Read(0, "unwanted")
    buffers, before = [buffer(piece.record) for piece in pieces], faults_of(store)
    outcomes = answered(store.get([form.name(piece.key) for piece in pieces], buffers), len(pieces))
    for arrived, (outcome, piece) in enumerate(zip(outcomes, pieces, strict=True)):
        flaw = outcome.name.lower()
        if outcome == Outcome.DONE and (flaw := form.flaw(buffers[arrived], piece.key, piece.length)):
            store.discard([form.name(piece.key)])
        if flaw:
            return Read(arrived, flaw, faults_since(store, before) if flaw == "failed" else "")
    return Read(len(pieces), "")


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[at : at + size] for at in range(0, len(items), size))
