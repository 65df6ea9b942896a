"""Builds a prefetcher over tiny records, fills its store and host memory, and checks that no record is lost."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import torch

from memstate.state.layout import Plane, StateLayout
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.prefetch.agreement import Ranks
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.prefetcher import Prefetcher
from memstate.tiers.prefetch.settings import Prefetch
from memstate.tiers.records import RecordFormat
from memstate.tiers.workers import Workers as Threads
from tests.support.virtual import Clock, MemoryStore, Workers

PAGE = 16
KV = RecordFormat("kv", StateLayout((Plane("k", (5,), torch.int8),), layers=1), b"k" * 32)
STATE = RecordFormat("state", StateLayout((Plane("s", (7,), torch.float32),), layers=1), b"s" * 32)
PLENTY = 200


def digests(name: str, pages: int) -> list[bytes]:
    """Returns the keys of a prompt. Each name gives other keys."""
    return [hashlib.blake2b(f"{name} {page}".encode(), digest_size=32).digest() for page in range(pages)]


def record(form: RecordFormat, key: bytes, length: int) -> bytes:
    """Returns the record of a key. Its body repeats the key."""
    buffer = np.resize(np.frombuffer(key, np.uint8), form.nbytes).copy()
    form.seal(buffer, key, length)
    return buffer.tobytes()


def any_number(settings: Prefetch) -> Prefetch:
    """Returns settings without a `limit` that is a share of host memory: a rig has no manager that could resolve it."""
    return replace(settings, limit=None) if isinstance(settings.limit, float) else settings


class Rig:
    """One rank. kv, states: number of host records for each; kv None: the caller keeps KV. ranks: how ranks agree."""

    def __init__(
        self, settings: Prefetch | None = None, kv: int | None = PLENTY, states: int = 4, *, reserve: int = 0,
        state_reserve: int = 0, page: int = PAGE, ranks: Ranks | None = None,
        executor: Executor | None = None, latency: Callable[[], float] = lambda: 1.0, workers: int = 4,
        clock: Clock | None = None, store: MemoryStore | None = None,
    ) -> None:  # fmt: skip
        self.page, self.clock, self.store = page, clock or Clock(), store or MemoryStore()
        self.workers = Workers(self.clock, latency, workers)
        self.keeps_kv = kv is not None
        self.kv = RecordCache(RecordPool(kv or 0, KV.nbytes), KV, reserve)
        self.states = RecordCache(RecordPool(states, STATE.nbytes), STATE, state_reserve)
        self.caches = self.kv, self.states
        self.prefetcher = Prefetcher(
            self.kv, self.states, self.store, any_number(settings or Prefetch()), page, ranks,
            Threads(executor or self.workers), self.clock, lambda fetch: None,
        )  # fmt: skip

    def stock(self, keys: Sequence[bytes], kv: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """Puts records into the store. kv: numbers of pages, from 0. states: lengths of states, in tokens."""
        for page in kv:
            self.store.records[KV.name(keys[page])] = record(KV, keys[page], (page + 1) * self.page)
        for length in states:
            key = keys[length // self.page - 1]
            self.store.records[STATE.name(key)] = record(STATE, key, length)

    def host(self, keys: Sequence[bytes], kv: Iterable[int] = (), states: Iterable[int] = ()) -> list[CachedRecord]:
        """Puts records into host memory, and returns their entries. kv, states: as for `stock`."""
        wanted = [(self.kv, KV, keys[page], (page + 1) * self.page) for page in kv]
        wanted += [(self.states, STATE, keys[length // self.page - 1], length) for length in states]
        entries = []
        for cache, form, key, length in wanted:
            (row,) = cache.claim(1)
            cache.pool.buffer(row)[:] = np.frombuffer(record(form, key, length), np.uint8)
            entries.append(cache.add(key, row, length))
        return entries

    def start(self, tokens: int, keys: Sequence[bytes], covered: int = 0, kv_pages: int = 0) -> Fetch:
        return self.prefetcher.start(tokens, keys, covered=covered, kv_pages=kv_pages if self.keeps_kv else len(keys))

    def run(self, polls: int = 40, seconds: float = 1.0) -> None:
        """Polls `polls` times, `seconds` apart on the fake clock."""
        for _ in range(polls):
            self.prefetcher.poll()
            self.clock.advance(seconds)
        self.prefetcher.poll()

    def available(self, keys: Sequence[bytes], kv_pages: int = 0) -> int:
        """Returns the largest length from which a request could start with the records in host memory."""
        reach = kv_pages if self.keeps_kv else len(keys)
        while reach < len(keys) and keys[reach] in self.kv:
            reach += 1
        while reach and keys[reach - 1] not in self.states:
            reach -= 1
        return reach * self.page

    def close(self) -> None:
        """Cancels all prefetches and empties host memory, as the tiers of a manager do."""
        self.prefetcher.reset()
        for cache in self.caches:
            cache.reset()

    def check(self, idle: bool = True) -> None:
        """Checks that a cache or prefetch holds each claimed record, and that each entry has the bytes of its key."""
        held = self.prefetcher.held
        for cache, form, taken in ((self.kv, KV, held[1]), (self.states, STATE, held[0])):
            pool, entries = cache.pool, list(cache.entries())
            assert len(entries) + taken == pool.claimed
            rows = [entry.record for entry in entries]
            assert len(set(rows)) == len(rows) and not set(rows) & set(pool._free)
            for entry in entries:
                assert pool.buffer(entry.record).tobytes() == record(form, entry.key, entry.length)
            if idle:
                assert taken == 0 and sum(entry.pins for entry in entries) == cache._pinned == 0
        stats = self.prefetcher.stats()
        ends = (
            stats.complete, stats.partial, stats.short, stats.limited, stats.missed, stats.no_room, stats.stopped,
            stats.failed, stats.disagreed, stats.cancelled, stats.lost,
        )  # fmt: skip
        assert sum(ends) + stats.in_flight == stats.started
        if idle:
            assert (stats.in_flight, stats.in_flight_tokens) == (0, 0)
