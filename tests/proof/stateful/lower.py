"""What lies below a manager's device: an engine's KV pages, host memory, storage with faults, threads and a clock that
programs turn by hand; and the comparison of all of it with the model, every byte.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.tiers.host import transfers
from memstate.tiers.keys import Keys
from memstate.tiers.stores.base import Bytes
from memstate.tiers.workers import Job, Workers
from memstate.tokens import Prompt
from tests.proof.stateful.cache import Text
from tests.proof.stateful.history import EMPTY, fold
from tests.proof.stateful.kv import ELEMENTS, EngineKv, elements
from tests.proof.stateful.memory import Memory, raw, same
from tests.proof.stateful.rows import Row
from tests.proof.stateful.settings import Digits, Settings
from tests.support.fetches import Fetched
from tests.support.shelves import Key
from tests.support.tiered_late import wait_for_staging
from tests.support.virtual import ByHand, Clock, MemoryStore


class Lower:
    """One manager's. jobs are in the order in which they were handed out, here as in the model."""

    def __init__(self, settings: Settings, backend: Backend) -> None:
        s = self.settings = settings
        self.clock, self.threads, self.store = Clock(), ByHand(), MemoryStore()
        self.kv = EngineKv(settings, backend) if s.pages else None
        self.tiers = s.tiers(self.kv.storage if self.kv else None, self.store, self.threads, self.clock)
        self._digests: dict[Key, bytes] = {}
        self._names: dict[str, tuple[str, Key]] = {}
        self._bodies: dict[tuple[str, Key], Bytes] = {}
        self._shown: list[dict[int, Key]] = []

    def attach(self, mem: ms.StateManager, model: Any, memory: Memory) -> None:
        assert mem.tiers and model.below
        if memory.device.type == "cuda":  # transfers are over whenever somebody looks, as the model has it
            transfers.Ticket.done = property(lambda ticket: ticket.synchronize() is None)  # type: ignore[assignment,method-assign]
            wait_for_staging(mem)
        self.mem, self.model, self.memory = mem, model, memory
        self.real, self.below = mem.tiers, model.below
        if self.kv:
            self.kv.attach(model)
        self.keys = Keys(self.real._caches[0].form.fingerprint, self.settings.page_size)
        forms = [cache.form for cache in self.real._caches]
        self.forms = dict(zip(("state", "kv"), forms, strict=False))
        self.payload = {kind: self._payload(kind) for kind in self.forms}
        s = self.settings
        staged = s.host_pages if s.pages else 0  # all of so few, because tiny states do not set the size
        self.staging_bytes = 2 * s.staging * self.forms["state"].nbytes  # rows with room for a header
        self.staging_bytes += 2 * staged * self.forms["kv"].nbytes if staged else 0
        self.host_bytes = s.host_slots * self.forms["state"].nbytes
        self.host_bytes += s.host_pages * self.forms["kv"].nbytes if s.pages else 0

    # What programs do

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Whoever waits for threads inside lets them run."""
        with mock.patch.object(Workers, "wait", self._wait):
            yield

    def _wait(self, jobs: Iterable[Job]) -> None:
        wanted = set(jobs)
        for job in self.threads.jobs:
            if job.handed in wanted and not job.future.done() and (job.future.running() or job.begin()):
                job.finish()

    def work(self, at: int, finish: bool) -> None:
        """A thread begins with a job, or ends it."""
        job, told = self.threads.jobs[at], self.below.jobs[at]
        assert not job.future.done()
        assert job.future.running() == told.begun
        if not told.begun:
            assert job.begin()
            told.begun = True
        if finish:
            job.finish()
            self.below.finish(told)

    @property
    def open_jobs(self) -> list[int]:
        return [at for at, job in enumerate(self.below.jobs) if not job.ended]

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.below.now += seconds

    def spoil(self, kind: str, key: Key, fault: str) -> None:
        """Something goes wrong with a record from now on; "" for nothing any more, "gone" where it goes for good."""
        name = self.name(kind, key)
        if fault == "gone":
            self.store.records.pop(name, None)
            self.below.storage.records.discard((kind, key))
        elif fault:
            self.store.faults[name] = self.below.storage.faults[kind, key] = fault
        else:
            self.store.faults.pop(name, None)
            self.below.storage.faults.pop((kind, key), None)

    def break_all(self, broken: bool, forgetful: bool) -> None:
        self.store.broken = self.below.storage.broken = broken
        self.store.forgetful = self.below.storage.forgetful = forgetful

    def stock(self, tokens: Text, salt: Hashable, ends: Collection[int], gap: int) -> None:
        """Another process of the same model writes states at these ends of pages, and KV but for one page."""
        keys = self.below.keys(tokens, salt)
        wanted = [("state", keys[end - 1]) for end in ends if end <= len(keys)]
        wanted += [("kv", key) for page, key in enumerate(keys) if page != gap and self.settings.pages]
        for kind, key in wanted:
            form = self.forms[kind]
            record = np.concatenate([np.zeros(form.header_bytes, np.uint8), self.body(kind, key)])
            form.seal(record, self.digest(key), len(key[1]))
            self.store.records[self.name(kind, key)] = record.tobytes()
            self.below.storage.records.add((kind, key))

    def texts(self, d: Digits) -> list[Key]:
        """What there is below and not on the device."""
        stored = sorted((key for kind, key in self.below.storage.records if kind == "state"), key=str)
        there = [item.key for item in self.below.states.items[-3:]]
        there += [d.pick(*stored) for _ in range(min(3, len(stored)))]
        above = [(entry.salt, entry.tokens) for entry in self.model.stated]
        return [key for key in there if key not in above]

    def forward(self, rows: Sequence[tuple[Row, int, int]]) -> None:
        """Writes and reads KV. rows: (row, tokens before, tokens of the step) each."""
        if self.kv:
            self.kv.forward(rows)

    # The comparison

    def digest(self, key: Key) -> bytes:
        if key not in self._digests:
            salt, tokens = key
            found = self.keys.of(Prompt(np.array(tokens, np.int64).tobytes(), salt))
            for end, digest in enumerate(found, 1):
                self._digests[salt, tokens[: end * self.settings.page_size]] = digest
        return self._digests[key]

    def name(self, kind: str, key: Key) -> str:
        return f"{kind}-{self.digest(key).hex()}"

    def look(self, fetches: Mapping[ms.tiers.Fetch, Fetched]) -> None:
        real, below = self.real, self.below
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize()
        assert len(self.threads.jobs) == len(below.jobs), f"{len(self.threads.jobs)} jobs, expected {len(below.jobs)}"
        states = [job.future.done() for job in self.threads.jobs]
        assert states == [job.ended for job in below.jobs], "jobs that have ended"
        shelves = [(cache, cache.form.header_bytes, cache.form.kind) for cache in real._caches]
        for (cache, header, kind), shelf in zip(shelves, below.shelves, strict=True):
            seen = [(e.key, e.record, e.length, e.pins, e.fetched, e.stored) for e in cache.entries()]
            told = [(self.digest(i.key), i.record, len(i.key[1]), i.pins, i.fetched, i.stored) for i in shelf.items]
            if seen != told:
                texts = {digest: key for key, digest in self._digests.items()}
                raise AssertionError(f"{shelf.kind} in host memory, least recently used first: "
                                     f"{[(texts.get(k, k), *rest) for k, *rest in seen]}, expected "
                                     f"{[(texts.get(k, k), *rest) for k, *rest in told]}")  # fmt: skip
            pool = cache.pool
            users = {record: n for record, n in pool._users.items() if n}
            same(f"free {shelf.kind} records", sorted(pool._free), sorted(shelf.free))
            same(f"waiting {shelf.kind} records", pool._waiting, shelf.waiting)
            same(f"{shelf.kind} records in use", users, {record: n for record, n in shelf.users.items() if n})
            same("evictable", cache.evictable, len(shelf.loose))
            self._look_at_bytes(kind, pool, {item.record: item.key for item in shelf.items if item.filled}, header)
        if self.kv:
            self.kv.look()
        self._look_at_storage()
        self._look_at_figures()
        if real.prefetcher:
            held = [fetch.state is not None for fetch in below.fetches], [len(fetch.pages) for fetch in below.fetches]
            same("records of prefetches", real.prefetcher.held, tuple(map(sum, held)))
            same("tokens in flight", real.prefetcher.in_flight_tokens, below.in_flight_tokens)
        for fetch, told in fetches.items():
            seen = fetch.phase.name.lower(), fetch.outcome and fetch.outcome.value, fetch.length, fetch.tokens
            same("prefetch", seen, (told.phase, told.outcome, told.length, told.tokens))

    def _payload(self, kind: str) -> np.ndarray:
        """Which bytes of a body mean something."""
        return self._body(kind, None) == 1

    def _body(self, kind: str, histories: Any) -> Bytes:
        """The bytes of a body; of ones, where None is asked for."""
        s, parts = self.settings, []
        for layer in range(s.layers):
            if kind == "kv":
                size = s.page_size * ELEMENTS * 4
                rows = [elements(s, number)[layer] for number in histories or ()]
                parts.append(np.concatenate(rows).view(np.uint8) if rows else np.ones(size, np.uint8))
                parts.append(np.zeros(-size % 16, np.uint8))
            else:
                for part in s.parts:
                    size = s.block_bytes(part)
                    plane = self.memory.kinds[part].expected(layer, histories) if histories else None
                    parts.append(plane.view(np.uint8).reshape(-1) if plane is not None else np.ones(size, np.uint8))
                    parts.append(np.zeros(-size % 16, np.uint8))
        return np.concatenate(parts)

    def body(self, kind: str, key: Key) -> Bytes:
        if (kind, key) not in self._bodies:
            tokens, size = key[1], self.settings.page_size
            page = [self.below.number(tokens[: len(tokens) - size + at + 1]) for at in range(size)]
            self._bodies[kind, key] = self._body(kind, page if kind == "kv" else [fold(EMPTY, tokens)])
        return self._bodies[kind, key]

    def _look_at_bytes(self, kind: str, pool: Any, keys: Mapping[int, Key], header: int) -> None:
        mask = self.payload[kind]
        for record, key in keys.items():
            seen = raw(pool.memory[record])[header:]
            assert np.array_equal(seen[mask], self.body(kind, key)[mask]), (
                f"{kind} record {record} is not that of {key}"
            )

    def _look_at_storage(self) -> None:
        told = {self.name(*record): record for record in self.below.storage.records}
        same("records in storage", sorted(self.store.records), sorted(told))
        for name in told.keys() - self._names.keys():
            kind, key = told[name]
            record = np.frombuffer(self.store.records[name], np.uint8)
            form = self.forms[kind]
            assert not form.flaw(record, self.digest(key), len(key[1])), f"{name} in storage is damaged"
            assert np.array_equal(record[form.header_bytes :], self.body(kind, key)), f"{name} is not that of {key}"
        self._names = told

    def _look_at_figures(self) -> None:
        stats, below = self.mem.stats().tiers, self.below
        assert stats and stats.leaked_records == 0, f"{stats and stats.leaked_records} host records have leaked"
        f, states, kv = below.figures, below.states, below.pages
        seen = [
            stats.host_states, stats.host_state_records, stats.host_pages, stats.host_page_records, stats.host_bytes,
            stats.staging_bytes, stats.host_hit_tokens, stats.storage_hit_tokens,
            stats.states_out, stats.states_in,
            stats.pages_out, stats.pages_in, stats.refused, stats.evicted_states, stats.evicted_pages, stats.written,
            stats.write_failed, stats.write_missed,
        ]  # fmt: skip
        told = [
            len(states.items), states.records, len(kv.items) if kv else 0, kv.records if kv else 0, self.host_bytes,
            self.staging_bytes, f["host hit"], f["storage hit"], f["state out"], f["state in"],
            f["kv out"], f["kv in"], f["refused"], states.evicted, kv.evicted if kv else 0, f["written"],
            f["write_failed"], f["write_missed"],
        ]  # fmt: skip
        same("stats of the tiers", seen, told)
        if stats.prefetch is None:
            return
        names = vars(stats.prefetch).keys() - {"flaws", "in_flight", "in_flight_tokens", "late"}
        same("stats of prefetches", {name: n for name in names if (n := getattr(stats.prefetch, name))},
              {name: n for name, n in below.counts.items() if n})  # fmt: skip
        same("flaws", dict(stats.prefetch.flaws), dict(below.flaws))
        same("prefetches", (stats.prefetch.in_flight, stats.prefetch.in_flight_tokens),
              (len(below.fetches), below.in_flight_tokens))  # fmt: skip
