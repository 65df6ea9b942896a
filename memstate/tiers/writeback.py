"""Writes host records to storage in the background. Knows no slot and no prompt.

arrived in host memory -> waits, unpinned -> pinned while a thread seals and writes it -> stored
                             `-> evicted meanwhile: left out, and counted
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

BATCH = 32  # records a write
SHARE = 0.25  # of a cache's records that may be pinned here, so that a slow storage never makes it unevictable

LOG = logs.logger("tiers")


def write(store: Store, cache: RecordCache, entries: Sequence[CachedRecord]) -> tuple[list[Outcome], str]:
    """Seals records and writes them; runs in a thread.

    Returns:
        What became of each, and the reasons that the store counted meanwhile, "" for none.

    Raises:
        OSError: The store failed; nothing is known of the records then.
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
        store: Where the records go.
        workers: Their threads write.
        clock: Seconds, for the log.

    Attributes:
        written: Records that were stored.
        failed: Records that storage did not take.
        missed: Records that were evicted before their turn.
        raised: Writes that raised, by reason; what a store without `faults` refuses is `refused`.
    """

    def __init__(self, store: Store, workers: Workers, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._workers, self._told = store, workers, logs.Repeats(LOG, clock, ("records", "of"))
        self._waiting: deque[tuple[RecordCache, CachedRecord]] = deque()
        self._writing: list[tuple[RecordCache, list[CachedRecord], Job]] = []
        self.written = self.failed = self.missed = 0
        self.raised: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Records that wait or are being written."""
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
        """Waits for the writes that are handed in, and forgets all records. Host memory is emptied right after.

        Syncs: yes.
        """
        self._waiting.clear()
        self._workers.wait(self.jobs)
        for _, entries, job in self._writing:
            self._count(entries, job)
        self._writing = []

    def add(self, cache: RecordCache, entries: Sequence[CachedRecord]) -> None:
        """Queues records of a cache whose bytes have arrived in host memory."""
        for entry in entries:
            if not entry.stored:
                entry.stored = True
                self._waiting.append((cache, entry))

    def advance(self) -> None:
        """Finishes writes that are done, and begins others. Never waits."""
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
        """Writes what is left to say into the log."""
        self._told.write_due(math.inf)

    def _next(self) -> tuple[RecordCache, list[CachedRecord]] | None:
        """Returns the next records of one cache that may be pinned."""
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
