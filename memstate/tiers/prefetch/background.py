"""Runs the work of prefetches in threads, and marks the host records that they write to as in use. Decides nothing."""

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

from memstate.tiers.host.cache import RecordCache
from memstate.tiers.prefetch.fetch import Fetch, Op
from memstate.tiers.prefetch.reading import Answer, Chunk, Question, ask, read
from memstate.tiers.stores.base import Store
from memstate.tiers.workers import Workers


class Background:
    """Hands work to threads and collects the results. One thread calls it.

    Args:
        workers: Their threads call the store.
        store: The storage.
        kv: Host cache of KV pages.
        states: Host cache of states.
        chunk: Records that the store is asked for at a time.
        page_size: Tokens of a page.
    """

    def __init__(
        self, workers: Workers, store: Store, kv: RecordCache | None, states: RecordCache | None, chunk: int,
        page_size: int,
    ) -> None:  # fmt: skip
        self._workers, self._store, self._kv, self._states = workers, store, kv, states
        self._chunk, self._page_size = chunk, page_size
        self._forget()

    @property
    def idle(self) -> bool:
        """Whether no operation has begun whose end `collect` has not found."""
        return not self._running

    def ask(self, fetch: Fetch, question: Question) -> None:
        """Begins to ask storage, unless there is nothing to ask."""
        if question.pages or question.ends:
            forms = [cache.form if cache else None for cache in (self._kv, self._states)]
            self._submit(Op(fetch), ask, self._store, *forms, question, self._chunk, lambda: fetch.over)
        else:
            fetch.answer = Answer()

    def read(self, fetch: Fetch) -> None:
        """Begins to read the records that a prefetch has reserved host memory for."""
        if fetch.reservation.state is not None:  # first: without it the pages are of no use
            self._read(fetch, self._states, [(fetch.end - 1, fetch.reservation.state)], [])
        pages = list(fetch.reservation.records.items())
        for at in range(0, len(pages), self._chunk):
            part = pages[at : at + self._chunk]
            self._read(fetch, self._kv, part, [page for page, _ in part])

    def _read(
        self, fetch: Fetch, cache: RecordCache | None, wanted: Sequence[tuple[int, int]], pages: list[int]
    ) -> None:
        assert cache is not None, "records were claimed from it"
        pieces = [Chunk(fetch.keys[page], (page + 1) * self._page_size, record) for page, record in wanted]
        op = Op(fetch, pool=cache.pool, records=[record for _, record in wanted], pages=pages)
        self._submit(op, read, self._store, cache.form, cache.pool.buffer, pieces, lambda: fetch.over)

    def _submit(self, op: Op, work: Callable[..., Any], *arguments: Any) -> None:
        """Starts an operation; its records are in use until `collect` finds its end."""
        if op.pool:
            op.pool.use(op.records)
        op.fetch.ops.add(op)
        self._running.add(op)
        op.job = self._workers.submit(work, *arguments, ended=partial(self._ended.put, op))

    def collect(self) -> Iterator[tuple[Op, Any, BaseException | None]]:
        """Yields the operations that have ended, with result or error, as long as their prefetch is not over."""
        while not self._ended.empty():
            op = self._ended.get()
            self._running.remove(op)
            op.fetch.ops.remove(op)
            if op.pool:
                op.pool.unuse(op.records)
            if op.fetch.over:
                continue
            error = op.job.error or (CancelledError() if op.job.cancelled else None)
            yield op, None if error else op.job.result, error

    def drop(self, fetch: Fetch) -> None:
        """Cancels what has not begun for a prefetch; results of the rest are ignored."""
        fetch.over = True
        for op in list(fetch.ops):
            self._workers.cancel(op.job)

    def reset(self) -> None:
        """Cancels what has not begun, waits until the rest has ended, and forgets it.

        Syncs: waits for the store's calls.
        """
        self._workers.wait([op.job for op in self._running if not self._workers.cancel(op.job)])
        self._forget()

    def _forget(self) -> None:
        self._running: set[Op] = set()
        self._ended: queue.SimpleQueue[Op] = queue.SimpleQueue()  # filled by any thread
