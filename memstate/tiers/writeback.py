"""Writes host records to storage in the background. Knows no slot and no prompt.

A record:  arrived in host memory -> waits without a pin -> pinned while a thread seals and writes it -> stored
                                        `-> evicted while it waits: not written, counted in `missed`
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError

from memstate import logs
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.stores.base import Outcome, Store, answered, faults_of, faults_since, reason_of, why_of
from memstate.tiers.workers import Job, Workers

BATCH = 32  # limit of the records of one write
SHARE = 0.25  # share of a cache's records that writes may pin; the others can be evicted, however slow storage is

LOG = logs.logger("tiers")


def write(store: Store, cache: RecordCache, entries: Sequence[CachedRecord]) -> tuple[list[Outcome], str]:
    """Seals records and writes them. Runs in a thread.

    Returns:
        The outcome of each record, and the reasons of the failures that the store counted in this time, "" for none.

    Raises:
        OSError: The store failed, and the outcome of each record is unknown.
    """
    buffers = [cache.pool.buffer(entry.record) for entry in entries]
    for buffer, entry in zip(buffers, entries, strict=True):
        cache.form.seal(buffer, entry.key, entry.length)
    before = faults_of(store)
    outcomes = list(store.put([cache.form.name(entry.key) for entry in entries], buffers))
    return answered(outcomes, len(entries)), faults_since(store, before)


class WriteBack:
    """Writes host records to storage in the background.

    Args:
        store: The store to write to.
        workers: Threads that write.
        clock: Function that returns the time in seconds, for the log.

    Attributes:
        written: Number of records that were stored.
        failed: Number of records that storage did not take.
        missed: Number of records that were evicted before they were written.
        raised: For each reason, the number of writes that raised an error for it. `refused` counts writes in which
            records failed, but for which neither an error nor the store's `faults` give a reason.
    """

    def __init__(self, store: Store, workers: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._workers, self._told = store, workers, logs.Repeats(LOG, clock, ("records", "of"))
        self._waiting: deque[tuple[RecordCache, CachedRecord]] = deque()
        self._writing: list[tuple[RecordCache, list[CachedRecord], Job]] = []
        self.written = self.failed = self.missed = 0
        self.raised: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Number of records that wait for a write or are being written."""
        return len(self._waiting) + sum(len(entries) for _, entries, _ in self._writing)

    @property
    def idle(self) -> bool:
        """Whether `advance` has nothing to do."""
        return not (self._waiting or self._writing) and self._told.idle

    @property
    def jobs(self) -> list[Job]:
        """The writes that are under way."""
        return [job for _, _, job in self._writing]

    @property
    def writing(self) -> list[CachedRecord]:
        """The records that are being written; each is pinned once."""
        return [entry for _, entries, _ in self._writing for entry in entries]

    def reset(self) -> None:
        """Waits for the writes under way, and forgets all records. The caller must empty host memory right after.

        Syncs: yes.
        """
        self._waiting.clear()
        self._workers.wait(self.jobs)
        for _, entries, job in self._writing:
            self._count(entries, job)
        self._writing = []

    def add(self, cache: RecordCache, entries: Sequence[CachedRecord]) -> None:
        """Queues records of a cache for storage. Their bytes must have arrived in host memory."""
        for entry in entries:
            if not entry.stored:
                entry.stored = True
                self._waiting.append((cache, entry))

    def advance(self) -> None:
        """Handles writes that are done, and begins others. Never waits."""
        for cache, entries, job in [each for each in self._writing if each[2].done]:
            self._writing.remove((cache, entries, job))
            cache.unpin(*entries)
            self._count(entries, job)
        while self._waiting and (batch := self._next()):
            cache, entries = batch
            cache.pin(*entries)
            self._writing.append((cache, entries, self._workers.submit(write, self._store, cache, entries)))
        self._told.write_due()

    def close(self) -> None:
        """Writes lines of the log that were held back."""
        self._told.write_due(math.inf)

    def _next(self) -> tuple[RecordCache, list[CachedRecord]] | None:
        """Returns the next batch: a cache, and as many of its waiting records as may be pinned; or None."""
        cache = self._waiting[0][0]
        pinned = sum(len(entries) for other, entries, _ in self._writing if other is cache)
        room = min(BATCH, max(1, int(cache.pool.records * SHARE)) - pinned)
        entries: list[CachedRecord] = []
        while self._waiting and len(entries) < room and self._waiting[0][0] is cache:
            _, entry = self._waiting.popleft()
            if cache.get(entry.key) is entry:
                entries.append(entry)
            else:
                self.missed += 1
        return (cache, entries) if entries else None

    def _count(self, entries: Sequence[CachedRecord], job: Job) -> None:
        error = job.error or (CancelledError() if job.cancelled else None)
        outcomes, why = job.result if error is None else ([Outcome.FAILED] * len(entries), why_of(error))
        if lost := sum(outcome is not Outcome.DONE for outcome in outcomes):
            if error is not None or not why:
                self.raised[reason_of(error) if error is not None else "refused"] += 1
            self._told.event(logging.WARNING, "write failed", records=lost, of=len(entries), why=why or "refused")
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.stored = outcome is Outcome.DONE
            self.written += entry.stored
            self.failed += not entry.stored
