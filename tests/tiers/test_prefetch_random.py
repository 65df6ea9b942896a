"""Random prefetches compared with a model of the rules: outcomes, host memory and figures after every operation."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.model_prefetch import COUNTS, Prefetches
from tests.support.prefetch_rig import KV, STATE, Rig, digests, record
from tests.support.sampling import PROOF
from tests.support.shelves import Item, Shelf
from tests.support.virtual import ByHand, MemoryStore, Together

PAGE, MOST = 4, 12  # tokens per page, most pages of a prompt
NAMES = {"kv": KV.name, "state": STATE.name}
FAULTS = ("vanished", "half", "garbage", "denied", "raises")


class Names:
    """Tells the model which records a store has, and which of them fail. The model names a record by kind and key."""

    forgetful = False

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    @property
    def broken(self) -> bool:
        return self._store.broken

    def has(self, kind: str, key: bytes) -> bool:
        return NAMES[kind](key) in self._store.records

    def fault(self, kind: str, key: bytes) -> str:
        return self._store.faults.get(NAMES[kind](key), "")


class Program:
    """Ranks, a model of each, and operations drawn from a seed. Each operation runs in the library and in the model."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        choices = {"threshold": [0, 4, 8, 12], "limit": [None, None, 40, 100], "timeout": [0.0, 3.0]}
        choices |= {"stop": ["best_effort", "wait_complete", "timeout"], "timeout_per_page": [0.0, 1.0]}
        choices |= {"chunk": [1, 2, 3, 32]}
        self.settings = Prefetch(**{name: rng.choice(of) for name, of in choices.items()})
        ranks, keeps_kv = rng.choice([1, 1, 2, 3]), rng.random() < 0.8
        root, trunk = digests("root", MOST), digests("trunk", MOST)
        self.prompts = [root, root[:5] + trunk[5:], *[root[:n] + digests(f"leaf {n}", MOST)[n:] for n in (3, 6, 9)]]
        self.prompts += [digests("other", MOST)]
        self.lengths = {key: (at + 1) * PAGE for keys in self.prompts for at, key in enumerate(keys)}
        self.ranks: list[tuple[Rig, Prefetches]] = []
        together = Together(ranks)
        for rank in range(ranks):
            sizes = [rng.choice([0, 5, 10, 20, 40]), rng.choice([0, 1, 2, 4, 8])]
            reserves = [rng.choice([0, 0, 2]), rng.choice([0, 0, 1])]
            rig = Rig(
                self.settings, sizes[0] if keeps_kv else None, sizes[1], reserve=reserves[0],
                state_reserve=reserves[1], page=PAGE, executor=ByHand(), ranks=together.of(rank) if ranks > 1 else None,
            )  # fmt: skip
            kv, states = Shelf("kv", sizes[0], reserves[0]) if keeps_kv else None, Shelf("state", sizes[1], reserves[1])
            self.ranks.append((rig, Prefetches(PAGE, self.settings, kv, states, Names(rig.store), ranks)))
            for keys in self.prompts:
                ends = [n * PAGE for n in range(1, MOST + 1) if rng.random() < 0.4]
                rig.stock(keys, range(rng.choice([0, 7, MOST, MOST])), ends)
        self.fetches: list[list[tuple[Any, Any]]] = []
        self.writing: list[tuple[RecordCache, CachedRecord, Item]] = []

    def of_ranks(self, fetch: list[tuple[Any, Any]]) -> Iterator[tuple[Rig, Prefetches, Any, Any]]:
        for (rig, rank), (real, model) in zip(self.ranks, fetch, strict=True):
            yield rig, rank, real, model

    def caches(self, rig: Rig, rank: Prefetches) -> list[tuple[RecordCache, Shelf]]:
        return [(real, told) for real, told in ((rig.kv, rank.pages), (rig.states, rank.states)) if told]

    def any_cache(self) -> tuple[RecordCache, Shelf]:
        return self.rng.choice(self.caches(*self.rng.choice(self.ranks)))

    def start(self) -> None:
        rng, keys = self.rng, self.rng.choice(self.prompts)
        tokens = rng.choice([rng.randrange(2, MOST * PAGE), MOST * PAGE + 3, MOST * PAGE - 4])
        covered = rng.choice([0, 0, 4, 8, 9, 20])
        kv_pages = rng.choice([0, 0, covered // PAGE, rng.randrange(MOST)])
        reals = [rig.start(tokens, keys, covered, kv_pages) for rig, _ in self.ranks]
        models = [rank.start(keys[: tokens // PAGE], covered, kv_pages) for _, rank in self.ranks]
        self.fetches.append(list(zip(reals, models, strict=True)))

    def poll(self) -> None:
        for rig, rank in self.ranks:
            rig.prefetcher.poll()
            rank.poll_fetches([model for _, model in self.ranks])

    def ready(self) -> None:
        for rig, rank, fetch, wish in self.of_ranks(self.rng.choice(self.fetches[-5:])):
            assert rig.prefetcher.ready(fetch) == rank.ready(wish)

    def cancel(self, at: int | None = None) -> None:
        for rig, rank, fetch, wish in self.of_ranks(
            self.fetches[at or self.rng.randrange(-min(5, len(self.fetches)), 0)]
        ):
            rig.prefetcher.cancel(fetch)
            rank.cancel(wish)

    def job(self) -> None:
        """Begins a job, or ends one that runs."""
        rig, rank = self.rng.choice(self.ranks)
        if live := [at for at, job in enumerate(rank.jobs) if not job.ended]:
            at = self.rng.choice(live[:4])
            job, work = rank.jobs[at], rig.prefetcher._workers.executor.jobs[at]  # type: ignore[attr-defined]
            if job.begun:
                work.finish()
                rank.finish(job)
            else:
                assert work.begin()
                job.begun = True

    def time(self) -> None:
        (rig, rank), seconds = self.rng.choice(self.ranks), self.rng.choice([0.5, 2.0, 7.0])
        rig.clock.advance(seconds)
        rank.now += seconds

    def host(self) -> None:
        """Adds a record to host memory, or evicts some."""
        real, model = self.any_cache()
        if self.rng.random() < 0.3:
            n = self.rng.randrange(4)
            real.evict(n)
            model.evict(n)
            return
        keys, page = self.rng.choice(self.prompts), self.rng.randrange(MOST)
        rows = real.claim(1)
        assert rows == model.take(1)
        if rows:
            bytes_of = record(real.form, keys[page], (page + 1) * PAGE)
            real.pool.buffer(rows[0])[:] = np.frombuffer(bytes_of, np.uint8)
            real.add(keys[page], rows[0], (page + 1) * PAGE)
            model.add(keys[page], rows[0])

    def write(self) -> None:
        """Begins to write a record of host memory to storage, or ends such a write."""
        real, model = self.any_cache()
        if self.writing and self.rng.random() < 0.5:
            self.written()
        elif model.items:
            item = self.rng.choice(model.items)
            entry = real.get(item.key)
            assert entry
            real.pin(entry)
            model.pin([item])
            self.writing.append((real, entry, item))

    def written(self) -> None:
        real, entry, item = self.writing.pop(self.rng.randrange(len(self.writing)))
        real.unpin(entry)
        Shelf.pin([item], -1)

    def storage(self) -> None:
        """Adds or removes records of the store, or makes its calls fail."""
        rng, (rig, _) = self.rng, self.rng.choice(self.ranks)
        keys, page = rng.choice(self.prompts), rng.randrange(MOST)
        what = rng.choice(["put", "put", "put", "lose", "fault", "mend", "mend", "break"])
        name = NAMES[rng.choice(["kv", "state"])](keys[page])
        if what == "put":
            rig.stock(keys, range(page + 1), [rng.randrange(1, MOST + 1) * PAGE])
        elif what == "lose":
            rig.store.records.pop(name, None)
        elif what == "fault":
            rig.store.faults[name] = rng.choice(FAULTS)
        elif what == "mend":
            rig.store.faults.clear()
            rig.store.broken = False
        else:
            rig.store.broken = rng.random() < 0.3

    def run(self, length: int) -> None:
        operations: list[Callable[[], None]] = [
            *[self.job] * 12, *[self.poll] * 6, self.start, self.start, self.host, self.write, self.storage, self.time,
            self.ready, self.cancel,
        ]  # fmt: skip
        for operation in [self.start, *self.rng.choices(operations, k=length)]:
            operation()
            self.compare()
        while self.writing:
            self.written()
        for last in (
            lambda: [self.poll() for _ in range(3)],
            lambda: [self.cancel(at) for at in range(-len(self.fetches), 0)],
        ):
            while not all(job.ended for _, rank in self.ranks for job in rank.jobs):
                self.job()
            last()
            self.compare()
        while not all(job.ended for _, rank in self.ranks for job in rank.jobs):
            self.job()
        self.poll()
        for rig, _ in self.ranks:
            rig.check()
            assert all(cache.pool.free + cache.pool.claimed == cache.pool.records for cache in rig.caches)

    def compare(self) -> None:
        for rig, rank in self.ranks:
            for real, model in self.caches(rig, rank):
                assert [(e.key, e.record, e.length, e.pins, e.fetched) for e in real.entries()] == [
                    (e.key, e.record, self.lengths[e.key], e.pins, e.fetched) for e in model.items
                ]
                claimed = model.records - len(model.free) - len(model.waiting)
                assert (real.pool.free, real.pool.claimed, real.evicted) == (len(model.free), claimed, model.evicted)
            stats = rig.prefetcher.stats()
            assert {name: getattr(stats, name) for name in COUNTS} == dict(rank.counts)
            assert (dict(stats.flaws), stats.waits) == (dict(rank.flaws), 0)
            assert (stats.in_flight, stats.in_flight_tokens) == (len(rank.fetches), rank.in_flight_tokens)
            held = [fetch.state is not None for fetch in rank.fetches], [len(fetch.pages) for fetch in rank.fetches]
            assert rig.prefetcher.held == tuple(map(sum, held))
            jobs = rig.prefetcher._workers.executor.jobs  # type: ignore[attr-defined]
            fates = ["cancelled" if job.future.cancelled() else "ended" if job.future.done() else "running"
                     if job.future.running() else "queued" for job in jobs[-30:]]  # fmt: skip
            assert fates == [job.fate for job in rank.jobs[-30:]]
            rig.check(idle=False)
        for fetch in self.fetches[-6:]:
            for real, wish in fetch:
                said = (real.phase.name.lower(), real.outcome, real.length, real.tokens, real.end)
                assert said == (wish.phase, wish.outcome, wish.length, wish.tokens, wish.end)
            assert len({(real.done, real.length) for real, _ in fetch}) == 1, "ranks that differ"


@pytest.mark.parametrize("lot", range(4))
def test_random_prefetches_follow_the_rules(lot: int) -> None:
    programs = 150 if PROOF else 15
    first = int(os.environ.get("MEMSTATE_SEED", random.randrange(2**31)))
    seen = Counter[str]()
    for seed in range(first + programs * lot, first + programs * (lot + 1)):
        print(f"MEMSTATE_SEED={seed}")
        program = Program(seed)
        program.run(150)
        for _, rank in program.ranks:
            seen.update(rank.counts)
    assert seen["complete"] and seen["cancelled"] and seen["missed"]
