"""The worker's side: moves blocks between vLLM's memory, host memory and the store. Knows requests only by name.

    save    a forward's blocks are packed after it, on its stream, if staging has room; then the copy engine copies them
            to host memory
    load    records are read from the store if necessary, then copied to their blocks, on another stream. If the store
            lacks a record, the worker reports it and copies nothing; records that have arrived stay in host memory
    write   threads seal records and write them

The scheduler's side assigns records to blocks, so a worker claims and evicts nothing. vLLM does not keep a block for a
save:

    plan t       blocks 1 to 9 complete              forward t    pack 1 to 4    the others wait
    plan t + 1   vLLM gives block 7 to another: gone              pack 5, 6, 8   forward t + 1    pack 9

A packed block may get another owner at once, because the next forward runs on the same stream. The bytes of a waiting
block are right until a plan says that it is gone: vLLM gives a block of a prefix to another request before it writes
there.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from memstate.integrations.vllm.blocks import blocks_of
from memstate.integrations.vllm.messages import Load, Plan, Record, Report, Write
from memstate.integrations.vllm.naming import record_key
from memstate.integrations.vllm.settings import Settings
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.transfers import Ticket, Transfers
from memstate.tiers.prefetch.reading import Chunk, read
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Store
from memstate.tiers.workers import Executor, Job, Threads, Workers
from memstate.tiers.writeback import BATCH, write


class Waiting(NamedTuple):
    """A block that is to be saved and is not packed yet."""

    job: int
    block: int
    number: int


class Packed(NamedTuple):
    """Blocks on their way to host memory. `jobs`: save -> number of its blocks among them."""

    jobs: Counter[int]
    ticket: Ticket


class Loading(NamedTuple):
    """A load whose copy to its blocks has begun."""

    load: Load
    ticket: Ticket


class WorkerSide:
    """Carries out the plans of the scheduler's side on one rank.

    Args:
        settings: Sizes of host memory and staging.
        rank: This worker's rank, from 0 on.
        store: The store below host memory; None if there is none.
        executor: Executor that replaces the threads, for tests.
    """

    def __init__(
        self, settings: Settings, rank: int, store: Store | None = None, executor: Executor | None = None
    ) -> None:
        self.settings, self._rank, self._store = settings, rank, store
        self._threads = executor or Threads(settings.threads)
        self._workers = Workers(self._threads)
        self._over = False
        self._digest = b""
        self._waiting: deque[Waiting] = deque()  # oldest first
        self._packed: list[Packed] = []
        self._left: Counter[int] = Counter()  # save -> number of its blocks neither gone nor in host memory
        self._reading: list[tuple[Load, list[Job]]] = []
        self._loading: list[Loading] = []
        self._writing: list[tuple[int, list[Job]]] = []
        self._failed: set[str] = set()
        self._report = Report()

    def register(
        self, kv_cache_config: Any, kv_caches: Mapping[str, Any], backends: Mapping[str, str] | None = None
    ) -> None:
        """Begins to use vLLM's memory, and allocates host memory for its blocks.

        Args:
            kv_cache_config: vLLM's configuration of this worker's KV cache.
            kv_caches: Layer name -> its tensor or tensors.
            backends: Layer name -> the backend that reads and writes the layer's tensors; None if unknown.

        Raises:
            LayoutMismatch: The tensors do not fit the configuration.
            ConfigurationError: There is too little host memory, or staging has no room for two blocks.

        Syncs: no.
        """
        self._planes, geometry = blocks_of(kv_cache_config, kv_caches, backends)
        form = RecordFormat("kv", Packing(self._planes).layout, geometry)
        self._inward, self._outward = self.settings.staged(form.nbytes)
        pool = RecordPool(
            self.settings.records(kv_cache_config), form.nbytes, pinned=self._planes.device.type == "cuda"
        )
        pool.claim(pool.records)  # all of them, because the scheduler's side decides which are free
        self._cache = RecordCache(pool, form)
        self.restore()
        if self._store is not None:
            self._store.register(pool.memory)

    def suspend(self) -> None:
        """Gives up blocks that are not packed, because vLLM is about to release their memory.

        Syncs: no.
        """
        self._give_up({waiting.number for waiting in self._waiting})

    def restore(self) -> None:
        """Makes the staging buffers, or makes them again after vLLM has released their memory.

        Syncs: no.
        """
        pool = self._cache.pool
        self._transfers = Transfers(Packing(self._planes), pool, self._outward, inward=self._inward)
        self._transfers.warm_up()

    def begin(self, plan: Plan) -> None:
        """Begins the loads and writes of a step, and packs waiting blocks.

        Args:
            plan: The plan of this step.

        Syncs: no.
        """
        self._digest = plan.digest or self._digest
        if plan.gone:
            self._give_up(plan.gone)
        self._pack()
        self._failed.update(plan.lost)
        for load in plan.loads:
            jobs = [self._submit_read(load.fetched[at : at + BATCH]) for at in range(0, len(load.fetched), BATCH)]
            self._reading.append((load, jobs))
        for each in plan.writes:
            self._writing.append((each.job, self._submit_write(each)))
        self._advance_loads()

    def save(self, plan: Plan) -> None:
        """Packs waiting blocks, and those that this step has completed. Call it after the forward, on its stream.

        Args:
            plan: The plan of this step.

        Syncs: no.
        """
        if (save := plan.save) is not None:
            self._left[save.job] = len(save.blocks)
            for block, record in zip(save.blocks, save.records, strict=True):
                self._waiting.append(Waiting(save.job, block, record.number))
        self._pack()

    def _pack(self) -> None:
        room = min(self._transfers.room, len(self._waiting)) if self._waiting else 0
        if not room:
            return
        taken = [self._waiting.popleft() for _ in range(room)]
        ticket = self._transfers.out([each.block for each in taken], [each.number for each in taken])
        self._packed.append(Packed(Counter(each.job for each in taken), ticket))

    def _give_up(self, gone: Collection[int]) -> None:
        lost = [waiting for waiting in self._waiting if waiting.number in gone]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.number not in gone)
        for job, _, number in lost:
            self._report.gone.setdefault(job, set()).add(number)
        self._settle(Counter(waiting.job for waiting in lost))

    def _settle(self, jobs: Counter[int]) -> None:
        """Subtracts blocks that are gone or in host memory from their saves. Reports saves without blocks left."""
        for job, blocks in jobs.items():
            self._left[job] -= blocks
            if not self._left[job]:
                del self._left[job]
                self._report.saved[job] = 1

    def finished(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose load has ended, and those of them for which blocks are missing.

        Syncs: no.
        """
        self._advance_loads()
        done = [each for each in self._loading if each.ticket.done]
        self._loading = [each for each in self._loading if each not in done]
        failed, self._failed = self._failed, set()
        return {load.request for load, _ in done} | failed, failed

    def report(self) -> Report:
        """Returns the work that was finished since the last report.

        Syncs: no.
        """
        for each in [each for each in self._packed if each.ticket.done]:
            self._packed.remove(each)
            self._settle(each.jobs)
        for entry in [entry for entry in self._writing if all(job.done for job in entry[1])]:
            self._writing.remove(entry)
            self._report.written[entry[0]] = 1
        report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        """Waits for running copies and calls of the store, and ends the threads.

        Syncs: yes.
        """
        self._over = True
        for ticket in [each.ticket for each in self._packed] + [each.ticket for each in self._loading]:
            ticket.synchronize()
        self._workers.drain()
        self._threads.shutdown()
        if self._store is not None:
            self._store.close()

    def _advance_loads(self) -> None:
        """Copies a load to its blocks if all its records are in host memory. Gives up a load that misses a record."""
        for entry in [entry for entry in self._reading if all(job.done for job in entry[1])]:
            self._reading.remove(entry)
            load, jobs = entry
            came = [job.result.arrived if job.result is not None else 0 for job in jobs]
            lost = {
                record.number
                for at, arrived in enumerate(came)
                for record in load.fetched[at * BATCH + arrived : (at + 1) * BATCH]
            }
            if lost:
                self._failed.add(load.request)
                self._report.lost[load.request] = lost
            else:
                ticket = self._transfers.into(load.blocks, [record.number for record in load.records])
                self._loading.append(Loading(load, ticket))

    def _submit_read(self, records: Sequence[Record]) -> Job:
        chunks = [Chunk(self._key(record), record.length, record.number) for record in records]
        form, buffer = self._cache.form, self._cache.pool.buffer
        return self._workers.submit(read, self._store, form, buffer, chunks, lambda: self._over)

    def _submit_write(self, each: Write) -> list[Job]:
        entries = [CachedRecord(self._key(record), record.number, record.length) for record in each.records]
        parts = [entries[at : at + BATCH] for at in range(0, len(entries), BATCH)]
        return [self._workers.submit(write, self._store, self._cache, part) for part in parts]

    def _key(self, record: Record) -> bytes:
        return record_key(self._digest, self._rank, record.key)
