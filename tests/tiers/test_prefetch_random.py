"""Random programs of prefetches beside a model of the rules: after every operation the same outcomes, the same host
memory, the same figures.
"""

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memstate.tiers.host.cache import RecordCache
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.model_prefetch import COUNTS, Prefetches
from tests.support.prefetch_rig import KV, STATE, Rig, digests, record
from tests.support.sampling import PROOF
from tests.support.shelves import Shelf
from tests.support.virtual import ByHand, MemoryStore, Together

PAGE, MOST = 4, 12  # tokens; pages of a prompt
NAMES = {"kv": KV.name, "state": STATE.name}
FAULTS = ("vanished", "half", "garbage", "denied", "raises")


class Names:
    """A store as the model asks it, by kind and key."""

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
    """Ranks with their models, and operations drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        choices = {"threshold": [0, 4, 8, 12], "limit": [None, None, 40, 100], "timeout": [0.0, 3.0]}
        choices |= {"stop": ["best_effort", "wait_complete", "timeout"], "timeout_per_page": [0.0, 1.0]}
        self.settings = Prefetch(
            **{name: rng.choice(of) for name, of in choices.items()}, chunk=rng.choice([1, 2, 3, 32])
        )
        self.ranks = rng.choice([1, 1, 2, 3])
        kinds = rng.choice(["both", "both", "both", "kv", "kv", "states"])
        root, trunk = digests("root", MOST), digests("trunk", MOST)
        self.prompts = [root, root[:5] + trunk[5:], *[root[:n] + digests(f"leaf {n}", MOST)[n:] for n in (3, 6, 9)]]
        self.prompts += [digests("other", MOST)]
        self.rigs: list[Rig] = []
        self.models: list[Prefetches] = []
        self.lengths = {key: (at + 1) * PAGE for keys in self.prompts for at, key in enumerate(keys)}
        together = Together(self.ranks)
        for rank in range(self.ranks):
            sizes = [rng.choice([0, 5, 10, 20, 40]), rng.choice([0, 1, 2, 4, 8])]
            reserves = [rng.choice([0, 0, 2]), rng.choice([0, 0, 1])]
            rig = Rig(
                self.settings, sizes[0] if kinds != "states" else None, sizes[1] if kinds != "kv" else None,
                reserve=reserves[0], state_reserve=reserves[1], page=PAGE, executor=ByHand(),
                agreement=together.of(rank) if self.ranks > 1 else None,
            )  # fmt: skip
            kv = Shelf("kv", sizes[0], reserves[0]) if kinds != "states" else None
            states = Shelf("state", sizes[1], reserves[1]) if kinds != "kv" else None
            self.rigs.append(rig)
            self.models.append(Prefetches(PAGE, self.settings, kv, states, Names(rig.store), self.ranks))
        self.fetches: list[tuple[list[Any], list[Any]]] = []
        self.writing: list[tuple[RecordCache, Shelf, int]] = []
        self.steps: list[str] = []
        for rig in self.rigs:
            for keys in self.prompts:
                pages = rng.choice([0, 7, MOST, MOST])
                self.put(rig, keys, pages, [n for n in range(1, MOST + 1) if rng.random() < 0.4])

    def put(self, rig: Rig, keys: list[bytes], pages: int, ends: list[int]) -> None:
        rig.stock(keys, range(pages), [end * PAGE for end in ends])

    # -- operations: every one is done to the library and to the model -----------------------------------

    def pairs(self) -> list[tuple[Rig, Prefetches]]:
        return list(zip(self.rigs, self.models, strict=True))

    def caches(self, number: int) -> list[tuple[RecordCache, Shelf]]:
        rig, rank = self.pairs()[number]
        return [(real, told) for real, told in ((rig.kv, rank.pages), (rig.states, rank.states)) if real and told]

    def start(self) -> str:
        rng, keys = self.rng, self.rng.choice(self.prompts)
        tokens = rng.choice([rng.randrange(2, MOST * PAGE), MOST * PAGE + 3, MOST * PAGE - 4])
        covered = rng.choice([0, 0, 4, 8, 9, 20])
        kv_pages = rng.choice([0, 0, covered // PAGE, rng.randrange(MOST)])
        real = [rig.start(tokens, keys, covered, kv_pages) for rig in self.rigs]
        model = [rank.start(keys[: tokens // PAGE], covered, kv_pages) for rank in self.models]
        self.fetches.append((real, model))
        return f"start {tokens} tokens of prompt {self.prompts.index(keys)}, {covered} covered, {kv_pages} KV pages"

    def poll(self) -> str:
        for rig, rank in self.pairs():
            rig.prefetcher.poll()
            rank.poll_fetches(self.models)
        return "poll"

    def recent(self) -> tuple[int, tuple[list[Any], list[Any]]]:
        at = self.rng.randrange(max(0, len(self.fetches) - 5), len(self.fetches))
        return at, self.fetches[at]

    def ready(self) -> str:
        at, (real, model) = self.recent()
        for (rig, rank), fetch, wish in zip(self.pairs(), real, model, strict=True):
            assert rig.prefetcher.ready(fetch) == rank.ready(wish)
        return f"ready {at}"

    def cancel(self) -> str:
        at, (real, model) = self.recent()
        for (rig, rank), fetch, wish in zip(self.pairs(), real, model, strict=True):
            rig.prefetcher.cancel(fetch)
            rank.cancel(wish)
        return f"cancel {at}"

    def job(self) -> str:
        """Begins a job, or ends one that runs."""
        number = self.rng.randrange(self.ranks)
        rig, rank = self.pairs()[number]
        live = [at for at, job in enumerate(rank.jobs) if not job.ended]
        if not live:
            return "no job"
        at = self.rng.choice(live[:4])
        job, work = rank.jobs[at], rig.prefetcher._workers.executor.jobs[at]  # type: ignore[attr-defined]
        if not job.begun:
            assert work.begin()
            job.begun = True
            return f"begin job {at} of rank {number}"
        work.finish()
        rank.finish(job)
        return f"end job {at} of rank {number}"

    def time(self) -> str:
        number, seconds = self.rng.randrange(self.ranks), self.rng.choice([0.5, 2.0, 7.0])
        self.rigs[number].clock.advance(seconds)
        self.models[number].now += seconds
        return f"{seconds} seconds on rank {number}"

    def host(self) -> str:
        """The device gives something to host memory, or host memory gives something up."""
        number = self.rng.randrange(self.ranks)
        real, model = self.rng.choice(self.caches(number))
        if self.rng.random() < 0.3:
            n = self.rng.randrange(4)
            real.evict(n)
            model.evict(n)
            return f"rank {number} evicts {n} of {model.kind}"
        keys, page = self.rng.choice(self.prompts), self.rng.randrange(MOST)
        rows = real.claim(1)
        assert rows == model.take(1)
        if rows:
            bytes_of = record(real.form, keys[page], (page + 1) * PAGE)
            real.pool.buffer(rows[0])[:] = np.frombuffer(bytes_of, np.uint8)
            real.add(keys[page], rows[0], (page + 1) * PAGE)
            model.add(keys[page], rows[0])
        return f"rank {number} keeps page {page} of prompt {self.prompts.index(keys)} in {model.kind}"

    def write(self) -> str:
        """A record in host memory is being written to storage, or that ends."""
        if self.writing and self.rng.random() < 0.5:
            return self.written()
        number = self.rng.randrange(self.ranks)
        real, model = self.rng.choice(self.caches(number))
        if not model.items:
            return "nothing to write"
        row = self.rng.choice(model.items).record
        real.pool.use([row])
        model.use([row])
        self.writing.append((real, model, row))
        return f"rank {number} writes one of {model.kind}"

    def written(self) -> str:
        real, model, row = self.writing.pop(self.rng.randrange(len(self.writing)))
        real.pool.unuse([row])
        model.unuse([row])
        return f"one of {model.kind} is written"

    def storage(self) -> str:
        """Records come and go; calls fail."""
        rng, number = self.rng, self.rng.randrange(self.ranks)
        rig, keys, page = self.rigs[number], rng.choice(self.prompts), rng.randrange(MOST)
        what = rng.choice(["put", "put", "put", "lose", "fault", "mend", "mend", "break"])
        name = NAMES[rng.choice(["kv", "state"])](keys[page])
        if what == "put":
            self.put(rig, keys, page + 1, [rng.randrange(1, MOST + 1)])
        elif what == "lose":
            rig.store.records.pop(name, None)
        elif what == "fault":
            rig.store.faults[name] = rng.choice(FAULTS)
        elif what == "mend":
            rig.store.faults.clear()
            rig.store.broken = False
        else:
            rig.store.broken = rng.random() < 0.3
        return f"{what} in the storage of rank {number}"

    def run(self, length: int) -> None:
        operations: list[Callable[[], str]] = [
            *[self.job] * 12, *[self.poll] * 6, self.start, self.start, self.host, self.write, self.storage, self.time,
            self.ready, self.cancel,
        ]  # fmt: skip
        self.step(self.start)
        for _ in range(length):
            self.step(self.rng.choice(operations))
        while self.writing:
            self.step(self.written)
        while not all(job.ended for rank in self.models for job in rank.jobs):
            self.step(self.job)
        for _ in range(3):
            self.step(self.poll)
        for at, (real, model) in enumerate(self.fetches):
            for (rig, rank), fetch, wish in zip(self.pairs(), real, model, strict=True):
                rig.prefetcher.cancel(fetch)
                rank.cancel(wish)
            self.steps.append(f"cancel {at} at last")
        while not all(job.ended for rank in self.models for job in rank.jobs):
            self.step(self.job)
        for rig, rank in self.pairs():
            rig.prefetcher.poll()
            rank.poll_fetches(self.models)
        for rig in self.rigs:
            rig.check()
            assert all(cache.pool.waiting == 0 for cache in rig.caches)

    def step(self, operation: Callable[[], str]) -> None:
        self.steps.append(f"({operation.__name__})")
        self.steps[-1] = operation()
        self.compare()

    def compare(self) -> None:
        for number, (rig, rank) in enumerate(self.pairs()):
            for real, model in self.caches(number):
                found = [
                    (e.key, e.record, e.length, e.pins, e.fetched, real.pool.in_use(e.record)) for e in real.entries()
                ]
                assert found == [
                    (
                        item.key,
                        item.record,
                        self.lengths[item.key],
                        item.pins,
                        item.fetched,
                        model.users[item.record] > 0,
                    )
                    for item in model.items
                ]
                said = (real.pool.free, real.pool.waiting, real.evicted)
                assert said == (len(model.free), len(model.waiting), model.evicted)
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
        for real, model in self.fetches[-6:]:
            for fetch, wish in zip(real, model, strict=True):
                said = (fetch.phase.name.lower(), fetch.outcome, fetch.length)
                assert said == (wish.phase, wish.outcome, wish.length)
                assert (fetch.tokens, fetch.end) == (wish.tokens, wish.end)
            assert len({(fetch.done, fetch.length) for fetch in real}) == 1, "ranks that differ"


def play(seed: int, length: int) -> Program:
    program = Program(seed)
    try:
        program.run(length)
    except BaseException:
        print(f"seed {seed}, {program.ranks} ranks, {program.settings}")
        print("\n".join(f"{at} {step}" for at, step in list(enumerate(program.steps))[-25:]))
        raise
    return program


@pytest.mark.parametrize("lot", range(4))
def test_random_prefetches_follow_the_rules(lot: int) -> None:
    programs = 150 if PROOF else 15
    first = int(os.environ.get("MEMSTATE_SEED", random.randrange(2**31)))
    print(f"MEMSTATE_SEED={first}")
    seen = Counter[str]()
    for seed in range(first + programs * lot, first + programs * (lot + 1)):
        for rank in play(seed, 150).models:
            seen.update(rank.counts)
    print(seen)
    assert seen["complete"] and seen["cancelled"] and seen["missed"]
