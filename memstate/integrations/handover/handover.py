"""Builds the records of a prompt for a rank of another tensor-parallel split, and writes them, from store to store.

Uses no device and no host cache.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeVar

import torch

from memstate.checks import whole
from memstate.errors import InvalidArgument
from memstate.integrations.handover.resplit import Resplit
from memstate.state.layout import StateLayout
from memstate.tiers.keys import Keys, fingerprint
from memstate.tiers.records import FLAWS, Kind, RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome, Store
from memstate.tokens import SaltedTokens, Tokens, encode

T = TypeVar("T")
ASKED = 256  # limit of the records about which one call asks a store


@dataclass
class Handed:
    """The result of a hand-over.

    Attributes:
        length: Tokens of the state or KV from which the target rank can start now, 0 for none.
        written: Number of records that were written.
        present: Number of records that the target had already.
        faults: Kind of fault -> number of records with it. `missing`: the record is absent, although other ranks or
            later pages have records. `damaged` and `failed`: outcomes of stores. Other kinds: flaws of
            `memstate.tiers.records`.
    """

    length: int = 0
    written: int = 0
    present: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class PromptDigests(NamedTuple):
    """Digests of a prompt's pages: those of the target rank, and those of each source rank."""

    own: list[bytes]
    theirs: Mapping[int, list[bytes]]


class HandOver:
    """Builds the records that one target rank needs from the source ranks' records, and writes them to a store.

    Only one thread at a time may call it. Calls wait for the stores.

    Args:
        model: Name of the weights: the `model` of the `Tiers` by which the source was written and the target is read.
        state: Layout of the whole model's states in records; None if there are no states.
        kv: Layout of the whole model's KV pages; None if there is no KV.
        page_tokens: Tokens of a page, equal on both sides.
        source: The store to read from.
        ranks: Number of source ranks.
        target: The store to write to; it may be the same as `source`.
        to_ranks: Number of target ranks.
        rank: The target rank.
        batch: Number of KV pages that one call of a store reads or writes.

    Raises:
        InvalidArgument: For the reasons of `Resplit`, or there is neither `state` nor `kv`.
        LayoutMismatch: For the reasons of `Resplit`.
        OSError: A store refuses memory.

    Example:
        >>> import tempfile
        >>> from memstate.state.layout import Part, Plane
        >>> from memstate.tiers.stores import FileStore
        >>> layout = StateLayout((Plane("ssm", (4, 8), torch.float32, parts=(Part("heads", 4),)),), layers=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = FileStore(folder)
        ...     one = HandOver("m", layout, None, 16, source=store, ranks=2, target=store, to_ranks=1, rank=0)
        ...     one.run(list(range(40)))  # nothing is stored yet
        Handed(length=0, written=0, present=0, faults=Counter())
    """

    def __init__(
        self, model: str, state: StateLayout | None, kv: StateLayout | None, page_tokens: int, *,
        source: Store, ranks: int, target: Store, to_ranks: int, rank: int, batch: int = 8,
    ) -> None:  # fmt: skip
        splits = {kind: Resplit(layout, ranks, to_ranks) for kind, layout in (("state", state), ("kv", kv)) if layout}
        if not splits:
            raise InvalidArgument("state=None, kv=None: there is nothing to hand over")

        def keys(of: int, count: int) -> Keys:
            cut = [layout.shard(count) if layout else None for layout in (state, kv)]
            return Keys(fingerprint(model, cut[0], cut[1], page_tokens, of, count), page_tokens)

        self.page_tokens = whole("page_tokens", page_tokens)
        self._theirs = {of: keys(of, ranks) for each in splits.values() for of in each.sources(rank)}
        self._own = keys(rank, to_ranks)
        stores, batch = (source, target), whole("batch", batch)
        kv_split, state_split = splits.get("kv"), splits.get("state")
        self._state = _Carrier("state", state_split, rank, self._own, self._theirs, *stores, 1) if state_split else None
        self._kv = _Carrier("kv", kv_split, rank, self._own, self._theirs, *stores, batch) if kv_split else None

    def run(self, tokens: Tokens, salt: Hashable = None, most: int | None = None) -> Handed:
        """Hands over the deepest state of a prompt and all KV before it; only KV if there are no states.

        A record is not written if a source rank lacks a record from which it is built. A state is not written without
        its KV. If target ranks must start at the same length, let each of them run again with the smallest of their
        lengths as `most`, until all lengths are equal.

        Args:
            tokens: The prompt; only its whole pages are handed over.
            salt: The prompt's salt.
            most: Limit of the tokens that are handed over. Default: all but the last, which every request computes.
                Give the number of all tokens if longer prompts will continue this one.

        Raises:
            InvalidArgument: The tokens, the salt or `most` are not valid.
        """
        given = SaltedTokens(encode(tokens), salt)
        given = given.head(max(0, given.tokens - 1) if most is None else whole("most", most, least=0))
        prompt = PromptDigests(self._own.of(given), {of: keys.of(given) for of, keys in self._theirs.items()})
        handed, state, done = Handed(), None, 0
        reach = len(prompt.own) if self._kv is None else self._kv.reach(prompt, handed)
        for end in self._ends(prompt, reach, handed):
            if end > reach:  # a page before this end could not be written: try an earlier end
                continue
            if self._state and not (state := self._state.prepare(prompt, [end - 1], handed)).usable:
                continue
            done = reach = self._bring(prompt, done, end, handed)
            if done < end:
                continue
            if self._state is None or (state and self._state.finish(prompt, state, handed)):
                handed.length = end * self.page_tokens
            break  # if the target refuses this state, it will refuse earlier ones as well
        return handed

    def _ends(self, prompt: PromptDigests, reach: int, handed: Handed) -> Sequence[int]:
        """Returns the page ends at which a request could start, the deepest first."""
        if self._state is None:
            return range(reach, 0, -1)
        lacking = self._state.lacking(prompt, range(reach))
        handed.faults.update(["missing"] * sum(count for count in lacking if count < self._state.ranks))
        return [page + 1 for page in range(reach)[::-1] if not lacking[page]]

    def _bring(self, prompt: PromptDigests, done: int, end: int, handed: Handed) -> int:
        """Writes the KV of pages `done` to `end - 1` in order. Returns how many first pages the target then has."""
        while self._kv is not None and done < end:
            pages = range(done, min(end, done + self._kv.room))
            came = self._kv.finish(prompt, self._kv.prepare(prompt, pages, handed), handed)
            done += came
            if came < len(pages):
                return done
        return max(done, end)


class Ready(NamedTuple):
    """Pages of one batch: those that the target has, and those whose records are built but not written yet."""

    pages: Sequence[int]
    here: set[int]
    built: list[int]

    @property
    def usable(self) -> bool:
        """Whether there is any page that the target has or whose record is built."""
        return bool(self.here or self.built)


class _Carrier:
    """Moves records of one kind, at most `room` at a time. Each record is built from `ranks` source records."""

    def __init__(
        self, kind: Kind, resplit: Resplit, rank: int, own: Keys, theirs: Mapping[int, Keys], source: Store,
        target: Store, room: int,
    ) -> None:  # fmt: skip
        self._resplit, self._rank, self._page_tokens, self.room = resplit, rank, own.page_tokens, room
        self._source, self._target, self._sources = source, target, resplit.sources(rank)
        self._form = RecordFormat(kind, resplit.layout.shard(resplit.to_ranks), own.fingerprint)
        layout = resplit.layout.shard(resplit.ranks)
        self._forms = [RecordFormat(kind, layout, theirs[of].fingerprint) for of in self._sources]
        self.ranks = len(self._sources)
        self._read = [_memory(source, room, form.nbytes) for form in self._forms]
        self._out = _memory(target, room, self._form.nbytes)

    def lacking(self, prompt: PromptDigests, pages: Sequence[int]) -> list[int]:
        """Returns for each page how many source ranks lack its record; 0 if the target has the record already."""
        there = self._exist(self._target, self._form, prompt.own, pages)
        rest = [page for page, has in zip(pages, there, strict=True) if not has]
        answers = [self._exist(self._source, *each, rest) for each in self._of_sources(prompt)]
        lack = {page: self.ranks - sum(has) for page, *has in zip(rest, *answers, strict=True)}
        return [lack.get(page, 0) for page in pages]

    def reach(self, prompt: PromptDigests, handed: Handed) -> int:
        """Returns the number of first pages of which every source rank has a record."""
        pages = range(len(prompt.own))
        for at in range(0, len(pages), ASKED):
            for page, lack in zip(pages[at:], self.lacking(prompt, pages[at : at + ASKED]), strict=False):
                if lack:
                    handed.faults.update(["missing"] * lack)
                    return page
        return len(pages)

    def prepare(self, prompt: PromptDigests, pages: Sequence[int], handed: Handed) -> Ready:
        """Builds the records of up to `room` pages in order, until one cannot be built."""
        faults = self._present(prompt, pages, handed)
        here = {page for page, flaw in faults.items() if not flaw}
        # after "failed", nobody knows what the target has: do not write the record again
        sure = takewhile(lambda page: faults.get(page) != "failed", pages)
        rest = [page for page in sure if page not in here]
        return Ready(pages, here, rest[: self._build(prompt, rest, handed)])

    def finish(self, prompt: PromptDigests, ready: Ready, handed: Handed) -> int:
        """Writes the records that were built. Returns how many first pages of the batch the target then has."""
        names = self._names(self._form, prompt.own, ready.built)
        outcomes = _asked(self._target.put, Outcome.FAILED, names, self._out[: len(names)])
        done = {page for page, outcome in zip(ready.built, outcomes, strict=True) if outcome == Outcome.DONE}
        handed.written += len(done)
        handed.present += len(ready.here)
        handed.faults.update(["failed"] * (len(names) - len(done)))
        return len(list(takewhile((done | ready.here).__contains__, ready.pages)))

    def _present(self, prompt: PromptDigests, pages: Sequence[int], handed: Handed) -> dict[int, str]:
        """Returns page -> flaw, "" for none, of each record that the target has. Deletes records with a flaw."""
        there = self._exist(self._target, self._form, prompt.own, pages)
        pages = [page for page, has in zip(pages, there, strict=True) if has]
        flaws = self._get(self._target, self._form, prompt.own, pages, self._out)
        # "missing": the record was deleted after `exists`; this is no fault
        handed.faults.update(flaw for flaw in flaws if flaw not in ("", "missing"))
        faults = dict(zip(pages, flaws, strict=True))
        wrong = [page for page, flaw in faults.items() if flaw not in ("", "missing", "failed")]
        if read := [page for page in wrong if faults[page] in FLAWS]:
            with suppress(OSError):
                self._target.discard(self._names(self._form, prompt.own, read))
        still = self._exist(self._target, self._form, prompt.own, wrong)
        faults |= {page: "failed" for page, has in zip(wrong, still, strict=True) if has}
        return faults

    def _build(self, prompt: PromptDigests, pages: Sequence[int], handed: Handed) -> int:
        """Builds target records in `_out`. Returns how many of the first pages could be built."""
        good = len(pages)
        for (form, keys), rows in zip(self._of_sources(prompt), self._read, strict=True):
            flaws = self._get(self._source, form, keys, pages[:good], rows)
            handed.faults.update(filter(None, flaws))
            good = [*map(bool, flaws), True].index(True)
        header = self._forms[0].header_bytes
        for row, page in enumerate(pages[:good]):
            bodies = {of: rows[row][header:] for of, rows in zip(self._sources, self._read, strict=True)}
            self._resplit.body(self._rank, bodies, self._out[row][self._form.header_bytes :])
            self._form.seal(self._out[row], prompt.own[page], (page + 1) * self._page_tokens)
        return good

    def _of_sources(self, prompt: PromptDigests) -> list[tuple[RecordFormat, list[bytes]]]:
        return [(form, prompt.theirs[of]) for form, of in zip(self._forms, self._sources, strict=True)]

    def _names(self, form: RecordFormat, keys: Sequence[bytes], pages: Sequence[int]) -> list[str]:
        return [form.name(keys[page]) for page in pages]

    def _exist(self, store: Store, form: RecordFormat, keys: Sequence[bytes], pages: Sequence[int]) -> list[bool]:
        parts = (pages[at : at + ASKED] for at in range(0, len(pages), ASKED))
        return [has for part in parts for has in _asked(store.exists, False, self._names(form, keys, part))]

    def _get(
        self, store: Store, form: RecordFormat, keys: Sequence[bytes], pages: Sequence[int], rows: Sequence[Bytes]
    ) -> list[str]:
        """Reads records into rows. Returns the flaw of each record, "" if it is sound."""
        outcomes = _asked(store.get, Outcome.FAILED, self._names(form, keys, pages), rows[: len(pages)])
        return [
            form.flaw(row, keys[page], (page + 1) * self._page_tokens)
            if outcome == Outcome.DONE
            else outcome.name.lower()
            for page, row, outcome in zip(pages, rows, outcomes, strict=False)
        ]


def _asked(call: Callable[..., list[T]], unknown: T, names: Sequence[str], *buffers: Sequence[Bytes]) -> list[T]:
    """Returns a store's answer for each name, or `unknown` for all names if the store fails."""
    if not names:
        return []
    try:
        answers = call(names, *buffers)
    except OSError:
        answers = []
    return answers if len(answers) == len(names) else [unknown] * len(names)


def _memory(store: Store, records: int, nbytes: int) -> list[Bytes]:
    """Returns memory for records, announced to the store so that it can read and write there."""
    memory = torch.zeros((records, nbytes), dtype=torch.uint8, device="cpu")
    store.register(memory)
    return list(memory.numpy())
