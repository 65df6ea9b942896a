"""The work of the background threads: ask storage what it has, and read records into host memory. Knows no cache."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome, Store, answered, faults_of, faults_since

Over = Callable[[], bool]  # whether what the work is for is over


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
        why: Why the store could not say it of some, "" for nothing.
    """

    found: int = 0
    ends: Sequence[int] = ()
    why: str = ""


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
    """What came of reading records.

    Attributes:
        arrived: Sound records, from the first on.
        flaw: What is wrong with the next record, "" for nothing.
        why: Why the store could not read it, "" where it does not say so.
    """

    arrived: int
    flaw: str
    why: str = ""


def ask(store: Store, kv: RecordFormat, states: RecordFormat, question: Question, chunk: int, over: Over) -> Answer:
    """Asks storage what it has of a prompt, as far as its KV has no gap; runs in a thread.

    Args:
        store: The storage.
        kv: Format of KV pages.
        states: Format of states.
        question: What to ask.
        chunk: Records a call of the store.
        over: Tells whether the prefetch is over, which ends the work early.

    Raises:
        OSError: The store failed.
    """
    keys, found, before = question.keys, 0, faults_of(store)
    for pages in _parts(question.pages, chunk):
        there = answered(store.exists([kv.name(keys[page]) for page in pages]), len(pages))
        found += [*there, False].index(False)
        if over() or not all(there):
            break
    reach = question.pages[found] if found < len(question.pages) else len(keys)
    ends: list[int] = []
    for part in _parts([end for end in question.ends if end <= reach], chunk):
        if over():
            break
        there = answered(store.exists([states.name(keys[end - 1]) for end in part]), len(part))
        ends += [end for end, has in zip(part, there, strict=True) if has]
    return Answer(found, ends, faults_since(store, before))


def read(store: Store, form: RecordFormat, buffer: Callable[[int], Bytes], pieces: Sequence[Chunk], over: Over) -> Read:
    """Reads records into host memory and checks them, up to the first flawed one, which is discarded; runs in a thread.

    Args:
        store: The storage.
        form: Format of the records.
        buffer: Returns the bytes of a host record.
        pieces: The records, and where they go.
        over: Tells whether the prefetch is over, which ends the work early.

    Raises:
        OSError: The store failed.
    """
    if over():
        return Read(0, "unwanted")
    buffers, before = [buffer(piece.record) for piece in pieces], faults_of(store)
    outcomes = answered(store.get([form.name(piece.key) for piece in pieces], buffers), len(pieces))
    for arrived, (outcome, piece) in enumerate(zip(outcomes, pieces, strict=True)):
        flaw = outcome.name.lower()
        if outcome == Outcome.DONE:
            flaw = form.flaw(buffers[arrived], piece.key, piece.length)
            if flaw:
                store.discard([form.name(piece.key)])
        if flaw:
            return Read(arrived, flaw, faults_since(store, before) if flaw == "failed" else "")
    return Read(len(pieces), "")


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (items[at : at + size] for at in range(0, len(items), size))
