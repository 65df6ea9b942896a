"""What a scheduler does with the tiers, and what happens to them meanwhile: threads, time, faults of storage."""

from collections.abc import Hashable
from typing import Any

import pytest

import memstate as ms
from tests.proof.stateful.cache import Text
from tests.proof.stateful.machine import REFUSED, Faults
from tests.proof.stateful.prompting import NO_TOKENS, SALTS, STEMS, spelled
from tests.proof.stateful.remembering import Remembering
from tests.proof.stateful.settings import Digits
from tests.support.fetches import Fetched

FAULTS = ("gone", "vanished", "half", "garbage", "denied", "raises", "", "")


class Tiering(Remembering):
    """Prefetches from beginning to end, polls, and everything that goes wrong below."""

    def poll(self, d: Digits) -> None:
        if self.attempt(set(), self.mem.poll) is not REFUSED:
            self.model.expire()
            if self.model.below:
                self.model.below.poll()

    def prefetch(self, d: Digits) -> None:
        idle = [session for session, talk in self.talks.items() if not talk.row]
        session: Any = d.pick(*idle) if idle and d(3) == 1 else None
        talk = self.talks.get(session)
        prompt, salt = self.draw_prompt(d, talk), self.draw_salt(d)
        self.prefetch_for(d, prompt, talk.salt if talk else salt, session)

    def prefetch_for(self, d: Digits, prompt: Text, salt: Hashable, session: Any = None) -> ms.tiers.Fetch | None:
        model, below, s = self.model, self.model.below, self.settings
        given, faults = spelled(d, prompt), set[type[ms.MemstateError]]()
        if not below or not s.storing:
            faults.add(ms.ConfigurationError)
        wrong = d(40)
        if wrong == 1 and below:
            given, prompt = d.pick(*NO_TOKENS[1:]), ()
            faults = {ms.InvalidArgument}
        elif wrong == 2 and below and self.closed:
            session, prompt = self.closed[0], ()
            faults = {ms.StaleHandle}
        covered, keys, found = 0, [], None
        if below and prompt and not self.asleep:
            found, talk = model.find(prompt, salt), self.talks.get(session)
            serving = model.serving(talk, prompt, salt) if talk else []
            covered = max(found.length, serving[0].length if serving else 0)
            hit = below.worth(below.find(prompt, salt, found), covered)
            covered, keys = max(covered, hit.length if hit else 0), below.keys(prompt[:-1], salt)
        fetch = self.attempt(faults, lambda: self.mem.prefetch(given, salt, session))
        if fetch is REFUSED:
            return None
        assert below and found
        self.fetches[fetch] = below.start(keys, covered, found.kv // s.page_size)
        return fetch

    def _open(self) -> list[ms.tiers.Fetch]:
        return [fetch for fetch, told in self.fetches.items() if not told.done]

    def ready(self, d: Digits) -> None:
        """Asked by whoever might admit its request."""
        below = self.model.below
        if below and (fetches := list(self.fetches)):
            self.ready_for(d.pick(*(self._open() or fetches), *fetches[-1:]))

    def ready_for(self, fetch: ms.tiers.Fetch) -> None:
        assert self.mem.tiers and self.model.below
        self._same("ready", self.mem.tiers.ready(fetch), self.model.below.ready(self.fetches[fetch]))
        self.look()

    def unfetch(self, d: Digits) -> None:
        """At any moment."""
        below, tiers = self.model.below, self.mem.tiers
        if below and tiers and self.fetches:
            fetch = d.pick(*(self._open() or self.fetches), *list(self.fetches)[-1:])
            tiers.cancel(fetch)
            below.cancel(self.fetches[fetch])

    def work(self, d: Digits) -> None:
        """Threads: some jobs, whichever."""
        for _ in range(1 + d(4)):
            if not (self.lower and (jobs := self.lower.open_jobs)):
                return
            self.lower.work(d.pick(*jobs[:6]), finish=d(4) > 0)

    def tick(self, d: Digits) -> None:
        if self.lower:
            self.lower.advance(d.pick(0.5, 1.0, 0.25, 2.0, 0.0))

    def spoil(self, d: Digits) -> None:
        """Storage, from now on."""
        below, lower = self.model.below, self.lower
        if below and lower and self.settings.storing:
            how = d(12)
            if how < 10:
                records = sorted(below.storage.records, key=str)
                wanted = [(kind, key) for fetch in below.fetches for key in fetch.keys for kind in ("state", "kv")]
                items = [(shelf.kind, item.key) for shelf in below.shelves for item in shelf.items[-2:]]
                there = [one for one in wanted if one in below.storage.records] if d(2) else []
                if there or records or items:
                    lower.spoil(*d.pick(*(there or [*records, *items])), d.pick(*FAULTS))
            else:
                lower.break_all(how == 10 and d(2) == 1, how == 11 and d(2) == 1)

    def stock(self, d: Digits) -> None:
        """Storage has more, of what nobody here may have computed."""
        if self.lower and self.settings.storing:
            salt, stem = d.pick(*SALTS), STEMS[d(3)]
            there = [item.key for item in self.lower.below.states.items]
            if there and d(2):
                salt, stem = d.pick(*there)
            else:
                stem = stem[: d.pick(14, 8, 5)]
            text = (stem + tuple(d(3) for _ in range(d(8))))[: self.longest]
            ends = {1 + d(max(1, len(text) // self.settings.page_size)) for _ in range(1 + d(4))}
            self.lower.stock(text, salt, ends, d.pick(-1, -1, -1, -1, d(12)))

    def thin(self, d: Digits) -> None:
        """Host memory is needed for something else."""
        below, tiers = self.model.below, self.mem.tiers
        if below and tiers:
            at, n = d(len(below.shelves)), d.pick(1, 2, 3, 99)
            tiers._caches[-1 - at].evict(n)
            below.shelves[-1 - at].evict(n)

    def hurt(self, d: Digits, fetch: Fetched) -> None:
        """Something is wrong with what a prefetch is after."""
        assert self.lower and self.model.below
        there = [(kind, key) for key in fetch.keys for kind in ("state", "kv")
                 if (kind, key) in self.model.below.storage.records]  # fmt: skip
        if there:
            self.lower.spoil(*d.pick(*there[::-1]), d.pick(*FAULTS[:6]))

    def flush(self, d: Digits) -> None:
        if self.lower and self.model.below and self.mem.tiers:
            with self.lower.waiting():
                flushed = self.attempt(self._waiting_faults(), self.mem.tiers.flush)
            if flushed is not REFUSED:
                self.model.below.flush()

    def empty_host(self, d: Digits) -> None:
        if self.lower and self.model.below and self.mem.tiers and d(2):
            faults = self._waiting_faults()
            if faults:
                with pytest.raises(ms.InvalidArgument):
                    self.mem.tiers.clear()
                return
            with self.lower.waiting():
                self.mem.tiers.clear()
            self.model.below.clear()

    def _waiting_faults(self) -> Faults:
        """Host memory is not emptied, and nothing is brought down whole, while records wait for a forward."""
        return {ms.InvalidArgument} if self.model.waits else set()

    def push_down(self, d: Digits) -> None:
        """Leaves the device, or host memory as well, without some of what they have."""
        how = d(12)
        if how < 4:
            self.forget_states(d)
        elif how < 7:
            self.forget_pages(d)
        elif how < 9:
            for move in (self.flush, self.forget_all, self.empty_host)[: how % 3 + 1]:
                move(Digits(1))
                self.look()
        self.look()

    def fetch_first(self, d: Digits, prompt: Text, salt: Hashable) -> None:
        """What a scheduler does while a request waits."""
        if not (self.model.below and self.settings.storing and d(4)):
            return
        if d(4) == 1:
            self.thin(Digits(3 * len(self.model.below.shelves)))  # of KV, where there is any, all
        fetch = self.prefetch_for(d, prompt, salt)
        for _ in range(1 + d(6)):
            if fetch is None or fetch.done:
                break
            self.work(d)
            if d(4) == 1:
                self.hurt(d, self.fetches[fetch])
            self.poll(d)
            self.look()
            if d(6) == 1:
                self.ready_for(fetch)
        if fetch and d(3):
            self.ready_for(fetch)
