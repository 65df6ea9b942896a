"""Writes host records to storage in the background. Knows no slot and no prompt.

arrived in host memory -> waits, unpinned -> pinned while a thread seals and writes it -> stored
                             `-> evicted meanwhile: left out, and counted
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait

from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Outcome, Store

Source = tuple[RecordCache, RecordFormat]
BATCH = 32  # records a write


def write(store: Store, form: RecordFormat, cache: RecordCache, entries: Sequence[CachedRecord]) -> list[Outcome]:
    """Seals records and writes them; in a thread. Raises: whatever the store does; none is written then."""
    buffers = [cache.pool.buffer(entry.record) for entry in entries]
    for buffer, entry in zip(buffers, entries, strict=True):
        form.seal(buffer, entry.key, entry.length)
    outcomes = list(store.put([form.name(entry.key) for entry in entries], buffers))
    if len(outcomes) != len(entries):
        raise OSError(f"storage was given {len(entries)} records and answered for {len(outcomes)}")
    return outcomes


class WriteBack:
    """Entries on their way to storage.

    share: of a cache's records that may be pinned here at a time, so that a slow storage never makes it unevictable.
    written, failed, missed: records; missed: evicted before their turn.
    """

    def __init__(self, store: Store, executor: Executor, share: float = 0.25) -> None:
        self._store, self._executor, self._share = store, executor, share
        self._waiting: deque[tuple[Source, CachedRecord]] = deque()
        self._writing: list[tuple[Source, list[CachedRecord], Future[list[Outcome]]]] = []
        self.written = self.failed = self.missed = 0

    @property
    def pending(self) -> int:
        """Records that are neither written nor given up."""
        return len(self._waiting) + sum(len(entries) for _, entries, _ in self._writing)

    @property
    def futures(self) -> list["Future[list[Outcome]]"]:
        """The writes that threads are at."""
        return [future for _, _, future in self._writing]

    def forget(self) -> None:
        """Leaves out what no thread is at yet, and waits for the rest. Syncs: yes."""
        for _, entry in self._waiting:
            entry.stored = False
        self._waiting.clear()
        wait(self.futures)
        self.advance()

    def add(self, source: Source, entries: Sequence[CachedRecord]) -> None:
        """Notes records whose bytes have arrived in host memory."""
        for entry in entries:
            if not entry.stored:
                entry.stored = True
                self._waiting.append((source, entry))

    def advance(self) -> None:
        """Looks after writes that are done, and begins others. Never waits."""
        for job in [job for job in self._writing if job[2].done()]:
            self._writing.remove(job)
            self._end(*job)
        while self._waiting and (batch := self._next()):
            source, entries = batch
            for entry in entries:
                source[0].pin(entry)
            source[0].pool.use(entry.record for entry in entries)
            try:
                future = self._executor.submit(write, self._store, source[1], source[0], entries)
            except RuntimeError as error:  # the executor has been shut down
                future = Future()
                future.set_exception(error)
            self._writing.append((source, entries, future))

    def _next(self) -> tuple[Source, list[CachedRecord]] | None:
        """The next entries of one kind that may be pinned."""
        source = self._waiting[0][0]
        cache = source[0]
        pinned = sum(len(entries) for other, entries, _ in self._writing if other[0] is cache)
        room = min(BATCH, max(1, int(cache.pool.records * self._share)) - pinned)
        entries: list[CachedRecord] = []
        while self._waiting and len(entries) < room and self._waiting[0][0][0] is cache:
            _, entry = self._waiting.popleft()
            if cache.get(entry.key) is entry:
                entries.append(entry)
            else:
                self.missed += 1
        return (source, entries) if entries else None

    def _end(self, source: Source, entries: Sequence[CachedRecord], future: "Future[list[Outcome]]") -> None:
        cache = source[0]
        cache.pool.unuse(entry.record for entry in entries)
        failed = future.cancelled() or future.exception() is not None
        outcomes = [Outcome.FAILED] * len(entries) if failed else future.result()
        for entry, outcome in zip(entries, outcomes, strict=True):
            cache.unpin(entry)
            entry.stored = outcome is Outcome.DONE
            self.written += entry.stored
            self.failed += not entry.stored
