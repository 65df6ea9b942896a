"""Drives prefetches: they read records of a prompt from storage into host memory while its request waits.

The thread of the decode loop drives the prefetcher and never waits for storage. Other threads call the store, and
`poll` handles their results. A prefetch guarantees nothing: it fills host memory, and a request starts from the records
that are there when it is admitted. If two prefetches want one prefix, both read it, and the second result is discarded.
Knows no device.
"""

import logging
import math
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import numpy as np

from memstate import logs
from memstate.errors import AgreementLost
from memstate.stats import PrefetchStats
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.prefetch.agreement import Ranks
from memstate.tiers.prefetch.fetch import Bits, End, Fetch, FetchJob, Hits, Phase, deepest
from memstate.tiers.prefetch.reading import Chunk, Question, Read, StorageAnswer, ask, read
from memstate.tiers.prefetch.reservation import Reservation
from memstate.tiers.prefetch.settings import Prefetch
from memstate.tiers.prefetch.votes import MOST_PAGES, Votes
from memstate.tiers.stores.base import Store, reason_of, why_of
from memstate.tiers.workers import Job, Workers

LOG = logs.logger("tiers")
FAULTY = (End.FAILED, End.LOST)  # ends of prefetches that the log shows as warnings


class Prefetcher:
    """Drives the prefetches in flight.

    With several ranks, all ranks must call `start`, `poll`, `ready` and `cancel` in the same order.

    Args:
        kv: Host cache of KV pages. Not used for pages whose KV is on the device, or if the caller manages KV.
        states: Host cache of states.
        store: The storage.
        settings: Settings that say which prefetches are worth their cost, and when they stop.
        page_size: Tokens of a page.
        ranks: The ranks that agree, None for a single rank.
        workers: Threads that call the store. Each thread works for one prefetch at a time.
        clock: Function that returns the time in seconds.
        ended: Function that is called with each prefetch that ends.

    Attributes:
        raised: For each reason, the number of calls of the store that raised an error for it.
    """

    def __init__(
        self, kv: RecordCache, states: RecordCache, store: Store, settings: Prefetch, page_size: int,
        ranks: Ranks | None, workers: Workers, clock: Callable[[], float], ended: Callable[[Fetch], None],
    ) -> None:  # fmt: skip
        self._kv, self._states, self._settings, self._page_size = kv, states, settings, page_size
        self._ranks, self._clock, self._ended = ranks, clock, ended
        self._told = logs.Repeats(LOG, clock, ("tokens", "usable", "seconds"))
        self._workers, self._store = workers, store
        self._forget()
        self._fetches: list[Fetch] = []  # prefetches that are not over, in the order in which they started
        self._votes: Votes | None = None
        self._lost = False
        self._count: Counter[str] = Counter()
        self._flaws: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"Prefetcher({len(self._fetches)} in flight, {self.in_flight_tokens} tokens)"

    @property
    def in_flight_tokens(self) -> int:
        """Number of tokens that all prefetches in flight together fetch."""
        return sum(fetch.tokens - fetch.covered for fetch in self._fetches)

    @property
    def held(self) -> tuple[int, int]:
        """Numbers of host records that prefetches have claimed, without those added to caches: (states, KV pages)."""
        reserved = [fetch.reservation for fetch in self._fetches]
        return sum(each.state is not None for each in reserved), sum(len(each.records) for each in reserved)

    @property
    def pinned(self) -> list[CachedRecord]:
        """Entries that prefetches pin, one item for each pin."""
        return [entry for fetch in self._fetches for entry in fetch.reservation.pinned]

    def stats(self) -> PrefetchStats:
        """Returns the figures of prefetches.

        Syncs: no.
        """
        return PrefetchStats(
            in_flight=len(self._fetches), in_flight_tokens=self.in_flight_tokens, flaws=dict(self._flaws), **self._count
        )

    def start(self, tokens: int, keys: Sequence[bytes], *, covered: int, kv_pages: int) -> Fetch:
        """Starts a prefetch: begins to ask storage which records of a prompt it has.

        Args:
            tokens: Tokens that a hit may cover.
            keys: Digests of the prompt's whole pages.
            covered: Tokens of the state from which the request could start now, equal on all ranks. The threshold and
                the limit count only the tokens beyond it.
            kv_pages: Number of first pages whose KV is on the device; all pages if the caller manages KV.

        Syncs: no.
        """
        pages = min(len(keys), tokens // self._page_size, len(keys) if self._ranks is None else MOST_PAGES)
        fits = self._within_limit(pages, covered)
        own = list(keys[: fits or pages])
        fetch = Fetch(
            self._count["started"], len(own) * self._page_size, own, covered, min(kv_pages, len(own)),
            Reservation(self._kv, self._states, own), self._clock(),
        )  # fmt: skip
        self._count["started"] += 1
        if fetch.missing < max(self._settings.threshold, 1):
            fetch.why = f"{fetch.missing} tokens missing, and threshold={self._settings.threshold}"
            self._end(fetch, End.SHORT)
        elif not fits:
            self._end(fetch, End.LIMITED)
        elif self._lost:
            self._end(fetch, End.LOST)
        else:
            self._count["truncated"] += fits < pages
            self._count["truncated_tokens"] += (pages - fits) * self._page_size
            self._fetches.append(fetch)
            self._ask(fetch)
        return fetch

    def _within_limit(self, pages: int, covered: int) -> int:
        """Returns how many first pages of a prompt the limit allows; 0 if they save less than the threshold.

        Args:
            pages: Number of whole pages of the prompt.
            covered: Tokens of the state from which the request could start now.
        """
        limit = self._settings.limit
        if limit is None:
            return pages
        fits = min(pages, int(covered + limit - self.in_flight_tokens) // self._page_size)
        return fits if fits * self._page_size - covered >= max(self._settings.threshold, 1) else 0

    @property
    def idle(self) -> bool:
        """Whether `poll` has nothing to do. With several ranks, it has the same value on all of them."""
        return not self._fetches and self._votes is None and not self._running and self._told.idle

    def poll(self) -> None:
        """Advances every prefetch as far as possible. Call it once per iteration of the scheduler.

        Raises:
            AgreementLost: A rank does not answer, or has other prefetches. Raised once; every prefetch is over then.

        Syncs: only if another rank has not called `poll` as often as this one.
        """
        try:
            self._told.write_due()
            self._collect()
            if self._votes is not None:
                self._conclude(self._votes)
            self._advance()
            if self._ranks is None:
                while asked := [fetch for fetch in self._fetches if fetch.vote is not None or fetch.stop]:
                    for fetch in asked:
                        self._decide(fetch, fetch.phase, fetch.vote, fetch.stop)
                    self._advance()
            elif self._fetches:
                self._count["rounds"] += 1
                self._votes = Votes(self._ranks, self._fetches, self._count["rounds"])
        except AgreementLost:
            self._lost, self._votes = True, None
            for fetch in list(self._fetches):
                self._end(fetch, End.LOST)
            raise

    def ready(self, fetch: Fetch) -> bool:
        """Returns whether a prefetch is over, and stops it if the settings say so.

        With several ranks, the prefetch is over one or two calls of `poll` after the stop.

        Raises:
            AgreementLost: See `poll`.

        Syncs: no.
        """
        policy, seconds = self._settings.stop, self._clock() - fetch.began
        late = seconds >= self._settings.patience(-(-fetch.missing // self._page_size))
        if not (fetch.stop or fetch.done) and (policy == "best_effort" or (policy == "timeout" and late)):
            fetch.stop, fetch.why = True, fetch.why or f"stopped by {policy} after {seconds:.3f} s"
        if self._ranks is None and not fetch.done:
            self.poll()
        return fetch.done

    def cancel(self, fetch: Fetch) -> None:
        """Ends a prefetch at once. Records that threads are filling become free when these reads end.

        Syncs: no.
        """
        if not fetch.done:
            self._end(fetch, End.CANCELLED)
            self._collect()

    def note_late(self, fetch: Fetch) -> None:
        """Counts a prefetch that is not over when its request is admitted. The prefetch goes on.

        Args:
            fetch: The prefetch.
        """
        self._count["late"] += 1
        logs.event(LOG, logging.INFO, "prefetch late", tokens=fetch.tokens, seconds=self._clock() - fetch.began)

    def reset(self) -> None:
        """Cancels every prefetch, on this rank only. The caller must empty host memory right after.

        Syncs: waits for the calls of the store that have begun.
        """
        for fetch in self._fetches:
            self._drop(fetch)
            fetch.phase, fetch.outcome = Phase.DONE, End.CANCELLED
        self._count[End.CANCELLED.value] += len(self._fetches)
        self._fetches, self._votes = [], None
        self._workers.wait([op.job for op in self._running if not self._workers.cancel(op.job)])
        self._forget()

    def _forget(self) -> None:
        self._running: set[FetchJob] = set()
        # operations that have ended; any thread puts them here
        self._over: queue.SimpleQueue[FetchJob] = queue.SimpleQueue()

    def close(self) -> None:
        """Writes lines of the log that were held back."""
        self._told.write_due(math.inf)

    # -- work for threads ------------------------------------------------------------------------------

    def _ask(self, fetch: Fetch) -> None:
        """Asks storage which of the pages and states it has that are neither on the device nor in host memory."""
        keys, gaining = fetch.keys, range(self._first(fetch, self._settings.threshold), fetch.pages + 1)
        pages = [page for page in range(fetch.kv_pages, fetch.pages) if keys[page] not in self._kv]
        ends = [end for end in gaining if keys[end - 1] not in self._states]
        question = fetch.question = Question(keys, pages, ends)
        if question.pages or question.ends:
            forms = self._kv.form, self._states.form
            self._submit(FetchJob(fetch), ask, self._store, *forms, question, self._settings.chunk, lambda: fetch.over)
        else:
            fetch.answer = StorageAnswer()

    def _read_chunk(
        self, fetch: Fetch, cache: RecordCache, wanted: Sequence[tuple[int, int]], pages: list[int]
    ) -> None:
        pieces = [Chunk(fetch.keys[page], (page + 1) * self._page_size, record) for page, record in wanted]
        op = FetchJob(fetch, pool=cache.pool, records=[record for _, record in wanted], pages=pages)
        self._submit(op, read, self._store, cache.form, cache.pool.buffer, pieces, lambda: fetch.over)

    def _submit(self, op: FetchJob, work: Callable[..., Any], *arguments: Any) -> None:
        """Hands an operation to a thread. Its records count as written to until `_collect` handles its end."""
        if op.pool:
            op.pool.use(op.records)
        self._running.add(op)
        op.job = self._workers.submit(work, *arguments, ended=partial(self._over.put, op))

    def _drop(self, fetch: Fetch) -> None:
        """Cancels the jobs of a prefetch that have not begun. The results of jobs that have begun will be ignored."""
        fetch.over = True
        for job in self.jobs(fetch):
            self._workers.cancel(job)

    def jobs(self, fetch: Fetch) -> list[Job]:
        """Returns the jobs of a prefetch that have not ended."""
        return [op.job for op in self._running if op.fetch is fetch]

    # -- results of threads ---------------------------------------------------------------------------

    def _collect(self) -> None:
        """Handles the operations that have ended. Results for prefetches that are over are ignored."""
        while not self._over.empty():
            op = self._over.get()
            fetch, job = op.fetch, op.job
            self._running.remove(op)
            if op.pool:
                op.pool.unuse(op.records)
            if fetch.over:
                continue
            if error := job.error or (CancelledError() if job.cancelled else None):
                self._count["failures"] += 1
                self.raised[reason_of(error)] += 1
                fetch.blame(End.FAILED, why_of(error))
            if not op.pool:
                fetch.answer = job.result or StorageAnswer()
                fetch.why = fetch.why or fetch.answer.why
                continue
            result = job.result or Read(0, "")
            self._count["read"] += result.arrived
            if result.flaw:
                self._flaws[result.flaw] += 1
                fetch.blame(End.FAILED if result.flaw == "failed" else End.MISSED, result.why or result.flaw)
            fetch.note(op.pages, result.arrived)

    # -- page ends at which this rank could start a request --------------------------------------------

    def _propose(self, fetch: Fetch, answer: StorageAnswer) -> None:
        """Claims host memory up to the deepest page end that fits, and votes for the ends that this rank could use."""
        hits = fetch.hits = self._hits(fetch, answer)
        most = deepest(hits.ends)
        ends = self._claim(fetch, hits, most) if most else hits.ends
        if end := deepest(ends):
            self._count["truncated"] += end < most
            self._count["truncated_tokens"] += (most - end) * self._page_size
        else:
            fetch.reservation.release()
            fetch.blame(End.NO_ROOM if most else End.MISSED, "")
        fetch.phase, fetch.vote = Phase.PROPOSED, ends

    def _hits(self, fetch: Fetch, answer: StorageAnswer) -> Hits:
        keys, pages = fetch.keys, np.arange(fetch.pages)
        here = (pages < fetch.kv_pages) | np.array([key in self._kv for key in keys])
        stated = np.array([key in self._states for key in keys])
        reached, able = here.copy(), stated.copy()
        reached[list(fetch.question.pages[: answer.held])] = True
        able[[end - 1 for end in answer.ends]] = True
        able &= np.logical_and.accumulate(reached) & (pages + 1 >= self._first(fetch, 1))
        return Hits(here, stated, able & (pages + 1 >= self._first(fetch, self._settings.threshold)), able)

    def _first(self, fetch: Fetch, least: int) -> int:
        """Returns the first page end at which a request saves at least `least` tokens, and at least one token."""
        return -(-(fetch.covered + max(least, 1)) // self._page_size)

    def _claim(self, fetch: Fetch, hits: Hits, most: int) -> Bits:
        kv, states, reservation = self._kv, self._states, fetch.reservation
        stated = np.flatnonzero(hits.able & hits.states) + 1
        reservation.pin(range(fetch.kv_pages, most), stated[stated <= most].tolist())
        ends = hits.cut(kv.room(), states.room() > 0)
        end = deepest(ends)
        # Several ranks may agree on an earlier end than the last: then the state of that end must be read.
        reads_state = bool((ends & ~hits.states)[end - 1 if self._ranks is None else 0 :].any())
        reservation.claim(hits.missing(end), reads_state)
        reservation.trim(end, reads_state)
        return ends

    # -- reading --------------------------------------------------------------------------------------

    def _read(self, fetch: Fetch, end: int) -> None:
        """Begins to read up to a page end on which all ranks agree, and releases the host memory for later pages."""
        fetch.tokens, fetch.keys = end * self._page_size, fetch.keys[:end]
        fetch.reservation.trim(end, not fetch.hits.states[end - 1])
        fetch.begin()
        if fetch.reservation.state is not None:  # the state first: pages without it are useless
            self._read_chunk(fetch, self._states, [(end - 1, fetch.reservation.state)], [])
        pages = list(fetch.reservation.records.items())
        for at in range(0, len(pages), self._settings.chunk):
            part = pages[at : at + self._settings.chunk]
            self._read_chunk(fetch, self._kv, part, [page for page, _ in part])

    def _arrive(self, fetch: Fetch) -> None:
        """Votes for the page ends that are usable with the records so far. Records that arrive later are ignored."""
        self._drop(fetch)
        fetch.phase, fetch.vote = Phase.ARRIVED, fetch.usable()

    # -- decisions ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Advances prefetches as far as this rank can without the others."""
        for fetch in self._fetches:
            if fetch.phase is Phase.ASKING and fetch.answer is not None:
                self._propose(fetch, fetch.answer)
            if fetch.phase is Phase.READING and fetch.hopeless:
                self._arrive(fetch)

    def _conclude(self, agreed: Votes) -> None:
        """Advances prefetches by the votes of all ranks together."""
        self._votes = None
        self._count["waits"] += not agreed.done
        for fetch, phase, ends, stop in agreed.verdicts():
            if not fetch.done:  # it may have been cancelled since the exchange began
                self._decide(fetch, phase, ends, stop)

    def _decide(self, fetch: Fetch, phase: Phase, ends: Bits | None, stop: bool) -> None:
        """Advances a prefetch by the votes of all ranks together.

        Args:
            fetch: The prefetch.
            phase: Its phase when the exchange began.
            ends: The page ends that all ranks could use, bool `page`; None if a rank has not voted yet.
            stop: Whether any rank wants to stop it.
        """
        fetch.stop = fetch.stop or stop
        if phase is Phase.ARRIVED and ends is not None:
            self._commit(fetch, deepest(ends))
        elif stop and phase < Phase.READING:
            self._end(fetch, fetch.reason or End.STOPPED)
        elif stop and fetch.phase is Phase.READING:
            self._arrive(fetch)
        elif phase is Phase.PROPOSED and ends is not None:
            if end := deepest(ends):
                self._read(fetch, end)
            else:
                self._end(fetch, fetch.reason or End.DISAGREED)

    def _commit(self, fetch: Fetch, end: int) -> None:
        """Adds to the caches the records that all ranks have, and releases the others, so that ranks stay equal."""
        whole = end == fetch.end
        read_pages = sum(page < end for page in fetch.reservation.records)
        read_state = int(whole and fetch.reservation.state is not None)
        self._count.update(tokens=max(0, end * self._page_size - fetch.covered), pages=read_pages, states=read_state)
        fetch.reservation.commit(end, self._page_size, state=whole)
        fetch.length = max(fetch.covered, end * self._page_size)
        if end:
            self._end(fetch, End.COMPLETE if whole else End.PARTIAL)
        else:
            self._end(fetch, fetch.reason or (End.STOPPED if fetch.stop else End.DISAGREED))

    def _end(self, fetch: Fetch, outcome: End) -> None:
        """Ends a prefetch, and releases its records and pins. Records that were added to a cache stay."""
        self._drop(fetch)
        fetch.reservation.release()
        fetch.phase, fetch.outcome = Phase.DONE, outcome
        self._count[outcome.value] += 1
        slow = self._settings.stop == "timeout" and fetch.stop and outcome is not End.COMPLETE
        if LOG.isEnabledFor(level := logging.WARNING if slow or outcome in FAULTY else logging.INFO):
            seconds = self._clock() - fetch.began
            fields = {"outcome": outcome.value, "tokens": fetch.tokens, "usable": fetch.length, "why": fetch.why}
            told = self._told.event if outcome in FAULTY else partial(logs.event, LOG)
            told(level, "prefetch ended", seconds=seconds, **fields)
        if fetch in self._fetches:
            self._fetches.remove(fetch)
        self._ended(fetch)
