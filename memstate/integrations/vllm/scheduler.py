"""The scheduler's side: knows by content what host memory has; decides what a prompt loads and what a step saves.

    question   how much of this prompt can be loaded? Host memory answers at once, the store in a thread
    load       vLLM has claimed blocks: choose the records that fill them
    plan       give records to the blocks that this step completes; saved records may be written to the store

vLLM does not keep a block for a save. If vLLM gives such a block to another request, the next plan names it, and a rank
that has not packed it yet reports it.

The key of a record is vLLM's own hash of a block, which stands for all tokens up to the block's end. So states are
found only at ends of blocks, where vLLM's block-aligned mode keeps states. Nothing is saved for null blocks.

If a load fails, the records that have arrived stay. Then the request asks again: it loads the blocks before the first
missing record, or computes all.

A record:  claimed by a save ─▶ filled on each rank ─▶ found by prompts until it is evicted; pinned while it is written
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from memstate import logs
from memstate.integrations.vllm.messages import Load, Plan, Record, Report, Save, Write
from memstate.integrations.vllm.naming import record_key
from memstate.integrations.vllm.settings import Settings
from memstate.state.layout import Plane, StateLayout
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.records import DIGEST_BYTES, RecordFormat
from memstate.tiers.stores.base import Store
from memstate.tiers.workers import Executor, Job, Threads, Workers
from memstate.tiers.writeback import SHARE

LOG = logs.logger("vllm")
GROUP = 4  # bytes of the group's number that follows a hash in a key


@dataclass
class ConnectorCounts:
    """Counts of the connector's work since the start.

    Attributes:
        saved: Number of blocks that reached host memory.
        refused: Number of blocks that were not saved: host memory had no room, or vLLM gave them to others too early.
        loaded: Number of blocks that were loaded to the device, including `fetched`.
        fetched: Number of blocks that were loaded from the store.
        lost: Number of loads that failed. Their requests load the blocks before the first missing record, and compute
            the rest.
        written: Number of blocks that were given to the store.
    """

    saved: int = 0
    refused: int = 0
    loaded: int = 0
    fetched: int = 0
    lost: int = 0
    written: int = 0


@dataclass
class Ongoing:
    """A save or a write that not all ranks have reported yet.

    Attributes:
        records: The records that it saves or writes.
        left: Number of ranks that have not reported it yet.
        entries: Cache entries that a write has pinned.
        blocks: Record number of a save -> (vLLM's block, the block's name when the save was planned).
        gone: Numbers of records that are missing on some rank.
        dropped: Whether the cache was reset since; then the records will be released.
    """

    records: list[Record]
    left: int
    entries: list[CachedRecord] = field(default_factory=list)
    blocks: dict[int, tuple[Any, bytes]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    dropped: bool = False


class Fetching(NamedTuple):
    """A load that not all ranks have reported yet.

    Attributes:
        load: The load.
        pinned: Cache entries that the load has pinned.
        lost: Numbers of records that are missing on some rank.
    """

    load: Load
    pinned: list[CachedRecord]
    lost: set[int]


@dataclass
class Known:
    """What the scheduler's side knows of a request.

    Attributes:
        adapter: Bytes that name its LoRA adapter, empty for none.
        gone: Keys of blocks that it could not load. It does not ask the store for them again.
        start: Number of tokens that vLLM had at the last call of `matched`.
        question: Job that asks the store by `has_all`, or None.
        cursors: For each group, how many blocks were considered for a save; empty before the first time.
    """

    adapter: bytes
    gone: set[bytes] = field(default_factory=set)
    start: int = 0
    question: Job | None = None
    cursors: list[int] = field(default_factory=list)


def has_all(store: Store, names: Mapping[bytes, Sequence[str]]) -> set[bytes]:
    """Returns the keys of those blocks of which the store has the records of all ranks. Runs in a thread.

    Args:
        store: The store.
        names: Key of a block -> its names, one for each rank.

    Raises:
        OSError: The store failed.
    """
    there = iter(store.exists([name for of_block in names.values() for name in of_block]))
    return {key for key, of_block in names.items() if sum(next(there, False) for _ in of_block) == len(of_block)}


class SchedulerSide:
    """Decides what to save, load and write.

    Args:
        settings: Settings of the connector. This side uses `store_tokens`.
        records: Number of blocks for which host memory has room, on each rank.
        ranks: Number of workers; each holds a part of every block.
        align: vLLM's scheduler block size in tokens; hits are multiples of it.
        hashes: Function of a request and a block size in tokens; returns the hashes of the request's blocks of this
            size.
        digest: Function that returns the digest of the configuration; called when the first name is needed.
        drop: Whether the last block of a hit is computed again. Drafters of the EAGLE family need this.
        store: The store below host memory; None if there is none.
        executor: Executor that replaces the thread, for tests.
        adapter: Function that returns bytes that name a request's LoRA adapter; empty if it has none.
    """

    def __init__(
        self, settings: Settings, records: int, ranks: int, align: int, hashes: Callable[[Any, int], Sequence[bytes]],
        digest: Callable[[], bytes], drop: bool = False, store: Store | None = None, executor: Executor | None = None,
        adapter: Callable[[Any], bytes] = lambda request: b"",
    ) -> None:  # fmt: skip
        self.settings, self._ranks, self._align, self._hashes = settings, ranks, align, hashes
        self._drop, self._store, self._adapter, self._make_digest, self._digest = drop, store, adapter, digest, b""
        # This cache only counts records. The workers have the bytes, and know their layout.
        form = RecordFormat("kv", StateLayout((Plane("block", (1,), torch.uint8),), layers=1), bytes(DIGEST_BYTES))
        self.cache = RecordCache(RecordPool(records, nbytes=1), form)
        self._threads = executor or Threads(1)
        self._workers = Workers(self._threads)
        self._groups: list[Any] = []
        self._known: dict[str, Known] = {}
        self._saves: dict[int, Ongoing] = {}
        self._saving: set[bytes] = set()
        self._writes: dict[int, Ongoing] = {}
        self._to_write: deque[CachedRecord] = deque()
        self._loads: dict[str, Fetching] = {}
        self._next = Plan()
        self._jobs = 0
        self.counts = ConnectorCounts()

    def bind(self, manager: Any, groups: Sequence[int]) -> None:
        """Keeps a reference to vLLM's cache manager.

        Args:
            manager: vLLM's `KVCacheManager`.
            groups: Numbers of the groups whose blocks have content hashes.
        """
        managers = manager.coordinator.single_type_managers
        self._groups = [managers[group] for group in groups]

    def arrived(self, request: Any) -> Known:
        """Notes a request. Call it before the first step that computes tokens of the request.

        Args:
            request: vLLM's request.

        Returns:
            What is known of the request.
        """
        if (name := request.request_id) not in self._known:
            self._known[name] = Known(self._adapter(request))
        return self._known[name]

    def matched(self, request: Any, computed: int) -> int | None:
        """Returns how many tokens of a prompt can be loaded, in addition to those that vLLM has.

        Changes nothing in host memory.

        Args:
            request: vLLM's request.
            computed: Tokens that vLLM has already.

        Returns:
            The number of tokens. None while the store is being asked: call again in the next step.
        """
        known = self.arrived(request)
        known.start, gone = computed, known.gone
        limit = (request.num_tokens - 1) // self._align * self._align
        if limit <= computed:
            return 0
        keys = self._keys(request)
        if known.question is None:
            reach = self._reach(keys, computed, limit, lambda key: False)
            most = self._reach(keys, computed, limit, lambda key: key not in gone) if gone else limit
            if self._store is None or most - reach < self.settings.store_tokens:
                return reach - computed
            known.question = self._ask(keys, computed, limit, gone)
        if not known.question.done:
            return None
        return self._reach(keys, computed, limit, (known.question.result or set()).__contains__) - computed

    def _keys(self, request: Any) -> Callable[[int, int], bytes]:
        """Returns a function (index of a group, number of a block) -> key of the block."""
        adapter = self.arrived(request).adapter
        hashes = [self._hashes(request, group.block_size) for group in self._groups]
        numbers = [group.kv_cache_group_id.to_bytes(GROUP, "big") for group in self._groups]
        return lambda at, block: hashes[at][block] + numbers[at] + adapter

    def _reach(
        self, keys: Callable[[int, int], bytes], computed: int, limit: int, below: Callable[[bytes], bool]
    ) -> int:
        """Returns the largest length, up to `limit`, for which every group has all blocks that it still needs."""

        def has(at: int, block: int) -> bool:
            key = keys(at, block)
            return key in self.cache or below(key)

        for at, group in enumerate(self._groups):
            size = group.block_size
            first, last = self._needed(group, computed, limit)
            if first == computed // size:  # such as full attention: nothing can be loaded beyond a missing block
                held = next((block for block in range(first, last) if not has(at, block)), last)
                limit = min(limit, held * size // self._align * self._align)
        if self._drop:
            limit -= self._align
        for length in range(limit, computed, -self._align):
            if all(
                has(at, block) for at, group in enumerate(self._groups)
                for block in range(*self._needed(group, computed, length))
            ):  # fmt: skip
                return length
        return computed

    @staticmethod
    def _needed(group: Any, computed: int, length: int) -> tuple[int, int]:
        """Returns the range (first, end) of a group's blocks that a request of `length` tokens needs from memstate.

        Full attention needs all blocks, a sliding window the last few, a recurrent layer the last one.
        """
        size = group.block_size
        return max(computed, group.get_num_skipped_tokens(length)) // size, length // size

    def _ask(self, keys: Callable[[int, int], bytes], computed: int, limit: int, gone: set[bytes]) -> Job:
        wanted = [
            key for at, group in enumerate(self._groups)
            for block in range(computed // group.block_size, limit // group.block_size)
            if (key := keys(at, block)) not in self.cache and key not in gone
        ]  # fmt: skip
        digest, name, ranks = self._digested(), self.cache.form.name, range(self._ranks)
        names = {key: [name(record_key(digest, rank, key)) for rank in ranks] for key in wanted}
        return self._workers.submit(has_all, self._store, names)

    def _digested(self) -> bytes:
        self._digest = self._digest or self._make_digest()
        return self._digest

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], tokens: int) -> None:
        """Chooses the records from which the blocks are filled that vLLM has claimed for a load.

        Args:
            request: vLLM's request.
            blocks: Block ids of each of vLLM's groups.
            tokens: Number of tokens to load; 0 for no load.
        """
        name, known = request.request_id, self.arrived(request)
        start, known.start, known.question = known.start, 0, None
        if not tokens:
            return
        load, pinned = Load(name, [], [], []), list[CachedRecord]()
        keys, wanted = self._keys(request), list[tuple[int, int, int, bytes]]()
        for at, group in enumerate(self._groups):
            size, ids = group.block_size, blocks[group.kv_cache_group_id]
            for block in range(start // size, (start + tokens) // size):
                if ids[block]:  # no layer reads the null block
                    wanted.append(((block + 1) * size, at, ids[block], keys(at, block)))
        wanted.sort()  # shortest length first, so that records before a missing one can still be used
        for place, (length, _, block_id, key) in enumerate(wanted):
            if entry := self.cache.get(key):
                self.cache.pin(entry)
                pinned.append(entry)
                load.records.append(Record(key, entry.record, entry.length))
            elif self._store is not None and (number := self.cache.claim(1)):
                load.records.append(Record(key, number[0], length))
                load.fetched.append(load.records[-1])
            else:
                for entry in pinned:
                    self.cache.unpin(entry)
                self.cache.pool.release([record.number for record in load.fetched])
                known.gone.update(key for *_, key in wanted[place:])
                self._next.lost.append(name)
                self._loads[name] = Fetching(Load(name, [], [], []), [], set())
                return
            load.blocks.append(block_id)
        self._loads[name] = Fetching(load, pinned, set())
        self._next.loads.append(load)
        self.cache.touch([record.key for record in load.records])

    def stored(self, name: str, tokens: int) -> int:
        """Returns how many tokens of a new load come from the store: in proportion to the blocks from there.

        Args:
            name: The request's id.
            tokens: Number of tokens of the load.
        """
        load = self._loads[name].load
        return tokens * len(load.fetched) // max(1, len(load.records))

    def plan(self, scheduled: Iterable[str], ended: Iterable[str]) -> Plan:
        """Returns the plan of this step, and begins the next plan.

        Args:
            scheduled: Requests whose tokens this step's forward computes.
            ended: Requests that have ended since the last step.
        """
        for name in ended:
            self.ended(name)
        plan, self._next = self._next, Plan()
        plan.gone = self._gone()
        plan.save = self._save(scheduled)
        plan.writes = self._write()
        if plan.writes or any(load.fetched for load in plan.loads):
            plan.digest = self._digested()
        return plan

    def _save(self, scheduled: Iterable[str]) -> Save | None:
        """Claims records for the blocks that this step completes, as long as host memory has room."""
        save, blocks = Save(self._jobs, [], []), dict[int, tuple[Any, bytes]]()
        for name in scheduled:
            if (known := self._known.get(name)) is None:
                known = self._known[name] = Known(b"")
            cursors = known.cursors = known.cursors or [0] * len(self._groups)
            for at, group in enumerate(self._groups):
                seen, now = cursors[at], group.num_cached_block.get(name, 0)
                if seen == now:
                    continue
                cursors[at] = now
                for block in range(seen if seen < now else 0, now):
                    length = (block + 1) * group.block_size
                    self._save_block(save, blocks, group.req_to_blocks[name][block], length, known.adapter)
        if not save.blocks:
            return None
        self._jobs += 1
        self._saves[save.job] = Ongoing(save.records, self._ranks, blocks=blocks)
        return save

    def _gone(self) -> set[int]:
        """Returns records of earlier saves whose blocks have a new name now: vLLM may write to them in this step.

        vLLM makes a new object each time it names a block. So the test compares objects: an equal name may be a new
        one.
        """
        gone = set[int]()
        for save in self._saves.values():
            lost = [number for number, (block, name) in save.blocks.items() if block.block_hash is not name]
            for number in lost:
                del save.blocks[number]
            gone.update(lost)
        return gone

    def _save_block(
        self, save: Save, blocks: dict[int, tuple[Any, bytes]], block: Any, length: int, adapter: bytes
    ) -> None:
        if block.is_null or block.block_hash is None or block.block_hash_num_tokens != length:
            return
        if (key := block.block_hash + adapter) in self._saving:
            return
        if key in self.cache:
            self.cache.touch([key])
            return
        if not (number := self.cache.claim(1)):
            self.counts.refused += 1
            return
        self._saving.add(key)
        blocks[number[0]] = (block, block.block_hash)
        save.blocks.append(block.block_id)
        save.records.append(Record(key, number[0], length))

    def _write(self) -> list[Write]:
        """Pins records that wait for the store, as many as writes may pin, and returns the jobs that write them."""
        pinned = sum(len(write.entries) for write in self._writes.values())
        room = max(1, int(self.cache.pool.records * SHARE)) - pinned
        entries: list[CachedRecord] = []
        while self._to_write and len(entries) < room:
            entry = self._to_write.popleft()
            if self.cache.get(entry.key) is entry:
                self.cache.pin(entry)
                entries.append(entry)
        if not entries:
            return []
        records = [Record(entry.key, entry.record, entry.length) for entry in entries]
        job, self._jobs = self._jobs, self._jobs + 1
        self._writes[job] = Ongoing(records, self._ranks, entries)
        return [Write(job, records)]

    def reported(self, report: Report) -> None:
        """Notes the work that ranks have finished.

        Args:
            report: The sum of the ranks' reports.
        """
        for job, numbers in report.gone.items():
            self._saves[job].gone |= numbers
        for name, numbers in report.lost.items():
            self._loads[name].lost.update(numbers)
        for job, ranks in report.saved.items():
            if self._over(self._saves[job], ranks):
                self._end_save(self._saves.pop(job))
        for job, ranks in report.written.items():
            if self._over(self._writes[job], ranks):
                write = self._writes.pop(job)
                self.counts.written += len(write.entries)
                for entry in write.entries:
                    self.cache.unpin(entry)

    @staticmethod
    def _over(ongoing: Ongoing, ranks: int) -> bool:
        ongoing.left -= ranks
        return ongoing.left == 0

    def _end_save(self, save: Ongoing) -> None:
        for record in save.records:
            self._saving.discard(record.key)
            if save.dropped or record.number in save.gone:
                self.cache.pool.release([record.number])
                self.counts.refused += not save.dropped
                continue
            entry = self.cache.add(record.key, record.number, record.length)
            self.counts.saved += 1
            if self._store is not None:
                self._to_write.append(entry)

    def loaded(self, finished: Iterable[str], failed: Collection[str]) -> None:
        """Notes loads that have ended on all ranks.

        Args:
            finished: Ids of the requests.
            failed: Those of the requests for which the load failed on some rank.
        """
        for name in finished:
            if (fetching := self._loads.pop(name, None)) is None:
                continue
            load, pinned, lost = fetching
            for entry in pinned:
                self.cache.unpin(entry)
            for key, number, length in reversed(load.fetched):
                if number not in lost:
                    self.cache.add(key, number, length, fetched=True)
            if name not in failed:
                self.counts.loaded += len(load.records)
                self.counts.fetched += len(load.fetched)
                continue
            self.counts.lost += 1
            self.cache.pool.release(list(lost))
            if name in self._known:
                self._known[name].gone.update(record.key for record in load.fetched if record.number in lost)
            logs.event(LOG, logging.WARNING, "load failed", request=name, lost=len(lost), records=len(load.records))

    def ended(self, name: str) -> None:
        """Forgets which blocks a request has in vLLM's memory. A load that is under way is kept until all ranks end it.

        Args:
            name: Id of a request that has ended or is preempted.
        """
        if known := self._known.get(name):
            known.cursors, known.start, known.question = [], 0, None

    def finished(self, name: str) -> None:
        """Forgets a request that has ended.

        Args:
            name: Id of the request.
        """
        self._known.pop(name, None)

    @property
    def busy(self) -> bool:
        """Whether saves or writes are under way, so that vLLM must run more steps."""
        return bool(self._saves or self._writes or self._to_write)

    def reset(self) -> bool:
        """Forgets all that is in host memory. Returns whether host memory is empty then.

        From now on, this process does not use earlier records in the store either: vLLM calls this when weights have
        changed in memory, which no file shows. The store keeps the records for processes that load the weights from the
        files.
        """
        self._to_write.clear()
        for known in self._known.values():
            known.question = None
        self._digest = os.urandom(DIGEST_BYTES)
        for save in self._saves.values():
            save.dropped = True
        for entry in [entry for entry in self.cache.entries() if not entry.pins]:
            self.cache.drop(entry)
        return not (len(self.cache) or self._loads)

    def close(self) -> None:
        """Ends the thread and closes the store."""
        self._workers.drain()
        self._threads.shutdown()
        if self._store is not None:
            self._store.close()
