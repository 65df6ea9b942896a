"""The rules of prefetches: what storage has of a prompt comes to host memory. Sets of numbers; one rank."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.proof.stateful.fetches import Fetched
from tests.proof.stateful.hosting import Hosting, Job
from tests.proof.stateful.shelves import Key, Shelf

if TYPE_CHECKING:
    from tests.proof.stateful.model import Model

FLAWS = {"vanished": "missing", "denied": "failed", "half": "damaged", "garbage": "checksum"}


class Below(Hosting):
    """What lies below the device."""

    def __init__(self, model: "Model") -> None:
        super().__init__(model)
        self.now = 0.0
        self.fetches: list[Fetched] = []  # in flight
        self.ended: list[Job] = []  # not looked at yet
        self.counts: Counter[str] = Counter()
        self.flaws: Counter[str] = Counter()

    def finish(self, job: Job) -> None:
        super().finish(job)
        if job.fetch:
            self.ended.append(job)

    @property
    def in_flight_tokens(self) -> int:
        return sum(fetch.reserved for fetch in self.fetches)

    # What a caller does

    def start(self, keys: list[Key], covered: int, kv: int) -> Fetched:
        s = self.settings
        tokens = len(keys) * s.page_size
        fetch = Fetched(list(keys), covered, min(kv // s.page_size, len(keys)), self.now, tokens, s.page_size)
        self.counts["started"] += 1
        if fetch.missing < max(s.fetch_threshold, 1):
            self._end(fetch, "short")
        elif s.fetch_limit is not None and self.in_flight_tokens + fetch.missing > s.fetch_limit:
            self._end(fetch, "limited")
        else:
            fetch.reserved = fetch.missing
            self.fetches.append(fetch)
            self._ask(fetch)
        return fetch

    def poll(self) -> None:
        """All that moves by itself."""
        self.write_due()
        self.advance()
        if self.settings.storing:
            self.write()
            self.poll_fetches()

    def ready(self, fetch: Fetched) -> bool:
        s = self.settings
        pages = math.ceil(fetch.missing / s.page_size)
        late = s.stop == "timeout" and self.now - fetch.began >= s.timeout + pages * s.timeout_per_page
        if not fetch.done:
            fetch.stop |= late or s.stop == "best_effort"
            self.poll_fetches()
        return fetch.done

    def cancel(self, fetch: Fetched) -> None:
        if not fetch.done:
            self._end(fetch, "cancelled")
            self._collect()

    def flush(self) -> None:
        model = self.model
        model.submit()
        self.due = []
        for shelf in reversed(self.shelves):
            self.enqueue(shelf, shelf.items)  # what failed before, once more
        self._write_all()
        entries, room = list(model.stated), max(1, self.states.records // 2)
        for at in range(0, len(entries), room):
            chosen = entries[at : at + room]
            self.keep(chosen)
            self._write_all()
            for entry in chosen:
                keys = self.keys(entry.tokens, entry.salt)
                there = self.states.get(keys[-1]) and (not self.pages or all(self.pages.get(key) for key in keys))
                if not there:
                    self.keep([entry])
                    self._write_all()

    def _write_all(self) -> None:
        self.settle()
        while self.settings.storing and (self.queue or self.writing):
            self.write()
            self.wait(self.writing)
            self.write()

    def clear(self) -> None:
        self.due, self.off = [], True
        self.settle()
        self.off = False
        for fetch in list(self.fetches):
            self._end(fetch, "cancelled")
        self.wait([job for job in self.jobs if job.fetch and job.begun])
        self._collect()
        for _, item in self.queue:
            item.stored = False
        self.queue.clear()
        self.wait(self.writing)
        self.write()
        for shelf in [*self.shelves, *([self.dense] if self.dense else [])]:
            shelf.evict(len(shelf.items))

    # What storage has

    def _first(self, fetch: Fetched, least: int) -> int:
        """The first end that gains so many tokens."""
        return math.ceil((fetch.covered + max(least, 1)) / self.settings.page_size)

    def _ask(self, fetch: Fetched) -> None:
        size, shelf = len(fetch.keys), self.pages
        fetch.asked = [page for page in range(fetch.kv_pages, size) if shelf and not shelf.get(fetch.keys[page])]
        first = self._first(fetch, self.settings.fetch_threshold)
        ends = [end for end in range(first, size + 1) if not self.states.get(fetch.keys[end - 1])]
        if not fetch.asked and not ends:
            fetch.answer = 0, ()
            return
        self._hand_out(fetch, Job(lambda: self._asked(fetch.keys, fetch.asked, ends), fetch))

    def _hand_out(self, fetch: Fetched, job: Job) -> None:
        fetch.jobs.append(self.submit(job))

    def _asked(self, keys: Sequence[Key], pages: Sequence[int], ends: Sequence[int]) -> tuple[int, Sequence[int]]:
        there = self.storage.records
        if self.storage.broken or self.storage.forgetful:
            raise OSError
        gaps = [page for page in pages if ("kv", keys[page]) not in there]
        reach = gaps[0] if gaps else len(keys)
        found = [end for end in ends if end <= reach and ("state", keys[end - 1]) in there]
        return sum(page < reach for page in pages), found

    def _read(self, fetch: Fetched, kind: str, keys: Sequence[Key]) -> tuple[int, str]:
        """How many records are good from the first on, and what is wrong with the next."""
        storage = self.storage
        if fetch.over:
            return 0, ""
        faults = [storage.faults.get((kind, key), "") for key in keys]
        if storage.broken or "raises" in faults:
            raise OSError
        for at, (key, fault) in enumerate(zip(keys, faults, strict=True)):
            if fault != "denied" and (kind, key) not in storage.records:
                fault = "vanished"
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

    # What there is room for

    def _propose(self, fetch: Fetched) -> None:
        s, states, size = self.settings, self.states, len(fetch.keys)
        assert fetch.answer
        found, ends = fetch.answer
        fetch.here = {at for at, key in enumerate(fetch.keys)
                      if at < fetch.kv_pages or not self.pages or self.pages.get(key)}  # fmt: skip
        fetch.stated = {end for end in range(1, size + 1) if states.get(fetch.keys[end - 1])}
        reached = fetch.here | set(fetch.asked[:found])
        reach = min(set(range(size)) - reached, default=size)
        fetch.able = {end for end in {*fetch.stated, *ends} if self._first(fetch, 1) <= end <= reach}
        wanted = {end for end in fetch.able if end >= self._first(fetch, s.fetch_threshold)}
        most = max(wanted, default=0)
        had = self._claim(fetch, wanted, most) if most else wanted
        end = max(had, default=0)
        if not end:
            self._give_back(fetch, 0, False)
            fetch.blame("no_room" if most else "missed")
        else:
            self.counts["truncated"] += end < most
            self.counts["truncated_tokens"] += (most - end) * s.page_size
        fetch.phase, fetch.vote = "PROPOSED", had

    def _claim(self, fetch: Fetched, wanted: set[int], most: int) -> set[int]:
        for page in range(fetch.kv_pages, most):
            if self.pages and (item := self.pages.get(fetch.keys[page])):
                fetch.pinned.append((page + 1, item))
        fetch.pinned += [(end, item) for end in fetch.able & fetch.stated if end <= most and (
            item := self.states.get(fetch.keys[end - 1]))]  # fmt: skip
        Shelf.pin(item for _, item in fetch.pinned)
        ends = {end for end in wanted if len(fetch.missing_up_to(end)) <= (self.pages.room() if self.pages else 0)}
        if not self.states.room():
            ends &= fetch.stated
        if ends and max(ends) not in fetch.stated:
            fetch.state = next(iter(self.states.take(1)), None)
            if fetch.state is None:
                ends &= fetch.stated
        if not self._take(fetch, ends) and self.pages:
            left = max(0, len(self.pages.free) - self.pages.reserve)
            ends = {end for end in ends if len(fetch.missing_up_to(end)) <= left}
            self._take(fetch, ends)
            if ends and max(ends) not in fetch.stated and fetch.state is None:
                fetch.state = next(iter(self.states.take(1)), None)
                if fetch.state is None:
                    ends &= fetch.stated
        end = max(ends, default=0)
        self._give_back(fetch, end, bool(end) and end not in fetch.stated)
        return ends

    def _take(self, fetch: Fetched, ends: set[int]) -> bool:
        missing = fetch.missing_up_to(max(ends, default=0))
        if not missing or not self.pages:
            return not missing
        fetch.pages = dict(zip(missing, self.pages.take(len(missing)), strict=False))
        return bool(fetch.pages)

    def _give_back(self, fetch: Fetched, end: int, state: bool) -> None:
        """What is beyond an end, and the state's record unless it is for that."""
        for page in [page for page in fetch.pages if page >= end]:
            assert self.pages
            self.pages.give(fetch.pages.pop(page))
        if fetch.state is not None and not state:
            self.states.give(fetch.state)
            fetch.state = None
        beyond = [pair for pair in fetch.pinned if pair[0] > end]
        Shelf.pin((item for _, item in beyond), -1)
        fetch.pinned = [pair for pair in fetch.pinned if pair not in beyond]

    # From there on

    def poll_fetches(self) -> None:
        self._collect()
        self._think()
        while asked := [fetch for fetch in self.fetches if fetch.vote is not None or fetch.stop]:
            for fetch in asked:
                self._decide(fetch)
            self._think()

    def _think(self) -> None:
        for fetch in self.fetches:
            if fetch.phase == "ASKING" and fetch.answer is not None:
                self._propose(fetch)
            if fetch.phase == "READING" and fetch.hopeless:
                self._arrive(fetch)

    def _decide(self, fetch: Fetched) -> None:
        if fetch.phase == "ARRIVED":
            assert fetch.vote is not None
            self._file(fetch, max(fetch.vote, default=0))
        elif fetch.stop and fetch.phase != "READING":
            self._end(fetch, fetch.reason or "stopped")
        elif fetch.stop:
            self._arrive(fetch)
        elif fetch.vote:
            self._go(fetch)
        else:
            self._end(fetch, fetch.reason or "disagreed")

    def _go(self, fetch: Fetched) -> None:
        chunk = self.settings.chunk
        assert fetch.vote
        fetch.narrow(max(fetch.vote))
        assert (fetch.state is None) == (fetch.end in fetch.stated), "a state that nobody reads"
        fetch.reserved = fetch.tokens - fetch.covered
        fetch.phase, fetch.vote = "READING", None
        fetch.arrived, fetch.bad = set(fetch.here), fetch.end
        fetch.come = True if fetch.state is None else None
        if fetch.state is not None:
            self._read_in(fetch, self.states, fetch.keys[-1:], [fetch.state], [])
        pages = list(fetch.pages)
        for at in range(0, len(pages), chunk):
            part = pages[at : at + chunk]
            assert self.pages
            keys, records = [fetch.keys[page] for page in part], [fetch.pages[page] for page in part]
            self._read_in(fetch, self.pages, keys, records, part)

    def _read_in(
        self, fetch: Fetched, shelf: Shelf, keys: Sequence[Key], records: Sequence[int], pages: Sequence[int]
    ) -> None:
        self._hand_out(fetch, Job(lambda: self._read(fetch, shelf.kind, keys), fetch, shelf, records, pages))

    def _arrive(self, fetch: Fetched) -> None:
        self._drop(fetch)
        fetch.phase, fetch.vote = "ARRIVED", fetch.reachable(fetch.run, fetch.come is True)

    def _drop(self, fetch: Fetched) -> None:
        """What has not begun never will."""
        fetch.over = True
        for job in fetch.jobs:
            if not job.begun and not job.ended:
                job.ended = True
                self.ended.append(job)

    def _file(self, fetch: Fetched, end: int) -> None:
        s, whole = self.settings, end == fetch.end
        self._give_back(fetch, end, whole)
        self.counts["pages"] += len(fetch.pages)
        self.counts["states"] += fetch.state is not None
        self.counts["tokens"] += max(0, end * s.page_size - fetch.covered)
        if self.pages:
            for page, record in fetch.pages.items():
                self.pages.add(fetch.keys[page], record, fetched=True)
            self.pages.touch(fetch.keys[:end])
        if fetch.state is not None:
            self.states.add(fetch.keys[-1], fetch.state, fetched=True)
        if end:
            self.states.touch(fetch.keys[end - 1 : end])
        fetch.pages, fetch.state = {}, None
        fetch.length = max(fetch.covered, end * s.page_size)
        ended = "complete" if whole else "partial"
        self._end(fetch, ended if end else fetch.reason or ("stopped" if fetch.stop else "disagreed"))

    def _end(self, fetch: Fetched, outcome: str) -> None:
        self._drop(fetch)
        self._give_back(fetch, 0, False)
        fetch.reserved, fetch.vote = 0, None
        fetch.phase, fetch.outcome = "DONE", outcome
        self.counts[outcome] += 1
        if fetch in self.fetches:
            self.fetches.remove(fetch)
