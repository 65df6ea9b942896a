"""Models prefetches, which read the records of a prompt from a store into host memory, with sets and lists.

One object models one rank. It calls nothing of the library. An *end* is a number of pages after which a prefetch may
end, because a state lies there.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from tests.support.fetches import Fetched, Job
from tests.support.shelves import Key, Shelf

ENDS = (
    "complete", "partial", "short", "limited", "missed", "no_room", "stopped", "failed", "disagreed", "cancelled",
    "lost",
)  # fmt: skip
COUNTS = (
    *ENDS, "started", "truncated", "truncated_tokens", "tokens", "read", "pages", "states", "failures", "rounds",
)  # fmt: skip
FLAWS = {
    "vanished": "missing", "denied": "failed", "half": "damaged", "garbage": "checksum", "foreign": "foreign",
}  # fmt: skip
DISCARDED = ("garbage", "foreign")  # faults of records that a reader tells the store to discard

Said = tuple[Fetched, str, set[int] | None, bool]  # what a rank sends: a prefetch, its phase, its vote, whether to stop


class Storage(Protocol):
    """A store: its records, and their faults. broken: all calls fail. forgetful: only `exists` calls fail."""

    broken: bool
    forgetful: bool

    def has(self, kind: str, key: Key) -> bool: ...
    def fault(self, kind: str, key: Key) -> str: ...


class Prefetches:
    """The prefetches of one rank. pages, states: records in host memory; pages is None if the caller keeps the KV."""

    def __init__(
        self, page_size: int, rules: Any, pages: Shelf | None, states: Shelf, storage: Storage, ranks: int = 1
    ) -> None:
        self.page_size, self.rules, self.ranks = page_size, rules, ranks
        self.pages, self.states, self.storage = pages, states, storage
        self.now = 0.0
        self.fetches: list[Fetched] = []  # prefetches in flight
        self.jobs: list[Job] = []  # all jobs that threads got
        self.ended: list[Job] = []  # ended jobs that `_collect` has not seen yet
        self.rounds: list[list[Said]] = []
        self.pending = False
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.flaws: Counter[str] = Counter()
        self.calls: list[tuple[str, list[tuple[str, Key]]]] = []  # (method, records) of each call of the store

    @property
    def in_flight_tokens(self) -> int:
        return sum(fetch.reserved for fetch in self.fetches)

    # Calls

    def start(self, keys: Sequence[Key], covered: int, kv_pages: int) -> Fetched:
        """Starts a prefetch.

        keys: keys of the whole pages of the prompt. covered: tokens whose state the prefix cache has. kv_pages: number
        of first pages whose KV the device has.
        """
        limit, gain = self.rules.limit, max(self.rules.threshold, 1)
        fits = len(keys)
        while limit is not None and fits * self.page_size - covered > max(0, limit - self.in_flight_tokens):
            fits -= 1
        cut = len(keys) - fits
        if fits * self.page_size - covered >= gain:
            keys = keys[:fits]
        fetch = Fetched(list(keys), covered, min(kv_pages, len(keys)), self.now, self.page_size)
        self.counts["started"] += 1
        if fetch.missing < max(self.rules.threshold, 1):
            self._end(fetch, "short")
        elif fits * self.page_size - covered < gain:
            self._end(fetch, "limited")
        else:
            self.counts["truncated"] += cut > 0
            self.counts["truncated_tokens"] += cut * self.page_size
            fetch.reserved = fetch.missing
            self.fetches.append(fetch)
            self._ask(fetch)
        return fetch

    def ready(self, fetch: Fetched) -> bool:
        rules, pages = self.rules, math.ceil(fetch.missing / self.page_size)
        late = rules.stop == "timeout" and self.now - fetch.began >= rules.timeout + pages * rules.timeout_per_page
        if not fetch.done:
            fetch.stop |= late or rules.stop == "best_effort"
            if self.ranks == 1:
                self.poll_fetches()
        return fetch.done

    def cancel(self, fetch: Fetched) -> None:
        if not fetch.done:
            self._end(fetch, "cancelled")
            self._collect()

    def poll_fetches(self, everyone: "Sequence[Prefetches]" = ()) -> None:
        """Advances all prefetches. everyone: with several ranks, all ranks that vote together, also this one."""
        self._collect()
        if self.pending:
            self.pending = False
            number = len(self.rounds) - 1  # other ranks may have sent their next votes already
            self._conclude(self.rounds[number], [rank.rounds[number] for rank in everyone])
        self._think()
        if self.ranks > 1 and self.fetches:
            self.counts["rounds"] += 1
            self.rounds.append(self._said(self.fetches))
            self.pending = True
        while self.ranks == 1 and (asked := [fetch for fetch in self.fetches if fetch.vote is not None or fetch.stop]):
            own = self._said(asked)
            self._conclude(own, [own])
            self._think()

    # Jobs of threads

    def submit(self, job: Job) -> Job:
        if job.shelf:
            job.shelf.use(job.records)
        self.jobs.append(job)
        return job

    def finish(self, job: Job) -> None:
        """Runs a thread's job to its end, with the records that the store has now. `_collect` uses the result later."""
        job.begun = job.ended = True
        try:
            job.result = job.run()
        except OSError:
            job.failed = True
        if job.fetch:
            self.ended.append(job)

    def _hand_out(self, fetch: Fetched, job: Job) -> None:
        fetch.jobs.append(self.submit(job))

    # Records in the store

    def _first(self, fetch: Fetched, least: int) -> int:
        """Returns the smallest end, in pages, with at least `least` tokens more than the prefix cache has."""
        return math.ceil((fetch.covered + max(least, 1)) / self.page_size)

    def _ask(self, fetch: Fetched) -> None:
        size, shelf, states = len(fetch.keys), self.pages, self.states
        fetch.asked = [page for page in range(fetch.kv_pages, size) if shelf and not shelf.get(fetch.keys[page])]
        first = self._first(fetch, self.rules.threshold)
        ends = [end for end in range(first, size + 1) if not states.get(fetch.keys[end - 1])]
        if not fetch.asked and not ends:
            fetch.answer = 0, ()
            return
        self._hand_out(fetch, Job(lambda: self._asked(fetch, fetch.keys, fetch.asked, ends), fetch))

    def _asked(
        self, fetch: Fetched, keys: Sequence[Key], pages: Sequence[int], ends: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        chunk, held = self.rules.chunk, 0
        while held < len(pages) and held % chunk == 0 and (held == 0 or not fetch.over):
            there = self._exist("kv", [keys[page] for page in pages[held : held + chunk]])
            held += [*there, False].index(False)
            if not all(there):
                break
        reach = pages[held] if held < len(pages) else len(keys)
        asked, stored_ends = [end for end in ends if end <= reach], list[int]()
        while asked and not fetch.over:
            there = self._exist("state", [keys[end - 1] for end in asked[:chunk]])
            stored_ends += [end for end, has in zip(asked, there, strict=False) if has]
            asked = asked[chunk:]
        return held, stored_ends

    def _exist(self, kind: str, keys: Sequence[Key]) -> list[bool]:
        self.calls.append(("exists", [(kind, key) for key in keys]))
        if self.storage.broken or self.storage.forgetful:
            raise OSError
        return [self.storage.has(kind, key) for key in keys]

    def _read(self, fetch: Fetched, kind: str, keys: Sequence[Key]) -> tuple[int, str]:
        """Returns how many records are good before the first bad one, and the fault of the bad one."""
        if fetch.over:
            return 0, ""
        self.calls.append(("get", [(kind, key) for key in keys]))
        faults = [self.storage.fault(kind, key) for key in keys]
        if self.storage.broken or "raises" in faults:
            raise OSError
        for at, (key, fault) in enumerate(zip(keys, faults, strict=True)):
            if fault != "denied" and not self.storage.has(kind, key):
                fault = "vanished"
            if fault in DISCARDED:
                self.calls.append(("discard", [(kind, key)]))
            if fault:
                return at, FLAWS[fault]
        return len(keys), ""

    def _collect(self) -> None:
        ended, self.ended = self.ended, []
        for job in ended:
            fetch = job.fetch
            assert fetch
            fetch.jobs.remove(job)
            if job.shelf:
                job.shelf.unuse(job.records)
            if fetch.over:
                continue
            if job.failed:
                self.counts["failures"] += 1
                fetch.blame("failed")
            if not job.shelf:
                fetch.answer = (0, ()) if job.failed else job.result
                continue
            arrived, flaw = (0, "") if job.failed else job.result
            self.counts["read"] += arrived
            if flaw:
                self.flaws[flaw] += 1
                fetch.blame("failed" if flaw == "failed" else "missed")
            if job.pages:
                fetch.arrived |= set(job.pages[:arrived])
                fetch.bad = min([fetch.bad, *job.pages[arrived:]])
            else:
                fetch.come = arrived == 1

    # Room in host memory

    def _propose(self, fetch: Fetched) -> None:
        pages, states, size = self.pages, self.states, len(fetch.keys)
        assert fetch.answer
        stored_pages, ends = fetch.answer
        fetch.here = {at for at, key in enumerate(fetch.keys) if at < fetch.kv_pages or not pages or pages.get(key)}
        fetch.stated = {end for end in range(1, size + 1) if states.get(fetch.keys[end - 1])}
        reached = fetch.here | set(fetch.asked[:stored_pages])
        reach = min(set(range(size)) - reached, default=size)
        fetch.able = {end for end in {*fetch.stated, *ends} if self._first(fetch, 1) <= end <= reach}
        wanted = {end for end in fetch.able if end >= self._first(fetch, self.rules.threshold)}
        most = max(wanted, default=0)
        had = self._claim(fetch, wanted, most) if most else wanted
        end = max(had, default=0)
        if not end:
            self._give_back(fetch, 0, False)
            fetch.blame("no_room" if most else "missed")
        else:
            self.counts["truncated"] += end < most
            self.counts["truncated_tokens"] += (most - end) * self.page_size
        fetch.phase, fetch.vote = "proposed", had

    def _claim(self, fetch: Fetched, wanted: set[int], most: int) -> set[int]:
        """Claims host records for the largest of the `wanted` ends for which there are enough. Returns all such ends.

        Several ranks then agree on one of these ends. A single rank takes the largest.
        """
        pages, states = self.pages, self.states
        here = [(page + 1, pages.get(fetch.keys[page])) for page in range(fetch.kv_pages, most) if pages]
        here += [(end, states.get(fetch.keys[end - 1])) for end in fetch.able & fetch.stated if end <= most]
        fetch.pinned += [(end, item) for end, item in here if item]
        Shelf.pin(item for _, item in fetch.pinned)

        ends = {end for end in wanted if len(fetch.missing_up_to(end)) <= (pages.room() if pages else 0)}
        ends = ends if states.room() else ends & fetch.stated
        end = max(ends, default=0)
        reads_state = bool((ends if self.ranks > 1 else {end} - {0}) - fetch.stated)
        if missing := fetch.missing_up_to(end):
            assert pages
            fetch.pages = dict(zip(missing, pages.take(len(missing)), strict=True))
        if reads_state:
            (fetch.state,) = states.take(1)
        self._give_back(fetch, end, reads_state)
        return ends

    def _give_back(self, fetch: Fetched, end: int, state: bool) -> None:
        """Gives back records and pins beyond an end. state: whether to keep the record for the state."""
        for page in [page for page in fetch.pages if page >= end]:
            assert self.pages
            self.pages.give(fetch.pages.pop(page))
        if fetch.state is not None and not state:
            self.states.give(fetch.state)
            fetch.state = None
        beyond = [pair for pair in fetch.pinned if pair[0] > end]
        Shelf.pin((item for _, item in beyond), -1)
        fetch.pinned = [pair for pair in fetch.pinned if pair not in beyond]

    # Agreement, reads and the end

    @staticmethod
    def _said(fetches: Sequence[Fetched]) -> list[Said]:
        return [(fetch, fetch.phase, fetch.vote, fetch.stop) for fetch in fetches]

    def _think(self) -> None:
        for fetch in self.fetches:
            if fetch.phase == "asking" and fetch.answer is not None:
                self._propose(fetch)
            if fetch.phase == "reading" and fetch.hopeless:
                self._arrive(fetch)

    def _conclude(self, own: list[Said], sent: list[list[Said]]) -> None:
        """Acts on the agreement of the ranks. own: what this rank has sent. sent: what each rank has sent."""
        for at, (fetch, phase, _, _) in enumerate(own):
            votes = [each[at][2] for each in sent]
            stop = any(each[at][3] for each in sent)
            known = [vote for vote in votes if vote is not None]
            agreed = set.intersection(*known) if len(known) == len(votes) else None
            if fetch.done:
                continue
            fetch.stop |= stop
            if phase == "arrived" and agreed is not None:
                self._file(fetch, max(agreed, default=0))
            elif stop and phase in ("asking", "proposed"):
                self._end(fetch, fetch.reason or "stopped")
            elif stop and fetch.phase == "reading":
                self._arrive(fetch)
            elif phase == "proposed" and agreed:
                self._go(fetch, max(agreed))
            elif phase == "proposed" and agreed is not None:
                self._end(fetch, fetch.reason or "disagreed")

    def _go(self, fetch: Fetched, end: int) -> None:
        chunk, fetch.keys = self.rules.chunk, fetch.keys[:end]
        self._give_back(fetch, end, end not in fetch.stated)
        assert (fetch.state is None) == (end in fetch.stated), "a state that nobody reads"
        fetch.reserved = fetch.tokens - fetch.covered
        fetch.phase, fetch.vote = "reading", None
        fetch.arrived, fetch.bad = set(fetch.here), end
        fetch.come = True if fetch.state is None else None
        if fetch.state is not None:
            self._read_in(fetch, self.states, fetch.keys[-1:], [fetch.state], [])
        pages = list(fetch.pages)
        for at in range(0, len(pages), chunk):
            part = pages[at : at + chunk]
            keys, records = [fetch.keys[page] for page in part], [fetch.pages[page] for page in part]
            self._read_in(fetch, self.pages, keys, records, part)

    def _read_in(
        self, fetch: Fetched, shelf: Shelf | None, keys: Sequence[Key], records: Sequence[int], pages: Sequence[int]
    ) -> None:
        assert shelf
        self._hand_out(fetch, Job(lambda: self._read(fetch, shelf.kind, keys), fetch, shelf, records, pages))

    def _arrive(self, fetch: Fetched) -> None:
        self._drop(fetch)
        fetch.phase, fetch.vote = "arrived", fetch.reachable(fetch.run, fetch.come is True)

    def _drop(self, fetch: Fetched) -> None:
        """Ends those jobs of a prefetch that no thread has begun."""
        fetch.over = True
        for job in fetch.jobs:
            if not job.begun and not job.ended:
                job.ended = True
                self.ended.append(job)

    def _file(self, fetch: Fetched, end: int) -> None:
        whole = end == fetch.end
        self._give_back(fetch, end, whole)
        self.counts["pages"] += len(fetch.pages)
        self.counts["states"] += fetch.state is not None
        self.counts["tokens"] += max(0, end * self.page_size - fetch.covered)
        if self.pages:
            for page, record in fetch.pages.items():
                self.pages.add(fetch.keys[page], record, fetched=True)
            self.pages.touch(fetch.keys[:end])
        if end:
            if fetch.state is not None:
                self.states.add(fetch.keys[end - 1], fetch.state, fetched=True)
            self.states.touch(fetch.keys[end - 1 : end])
        fetch.pages, fetch.state = {}, None
        fetch.length = max(fetch.covered, end * self.page_size)
        ended = "complete" if whole else "partial"
        self._end(fetch, ended if end else fetch.reason or ("stopped" if fetch.stop else "disagreed"))

    def _end(self, fetch: Fetched, outcome: str) -> None:
        self._drop(fetch)
        self._give_back(fetch, 0, False)
        fetch.reserved, fetch.vote = 0, None
        fetch.phase, fetch.outcome = "done", outcome
        self.counts[outcome] += 1
        if fetch in self.fetches:
            self.fetches.remove(fetch)
