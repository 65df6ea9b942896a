"""Builds the tiers of one manager, and decides which states to save, load and prefetch. It moves no byte itself."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakSet

from torch import Tensor

from memstate.checks import NotCopied
from memstate.errors import AgreementLost, ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import on
from memstate.prefix import Match, PrefixCache
from memstate.prefix.tree import Node
from memstate.requests.handles import Parked, Snapshot
from memstate.requests.page_table import PageTable
from memstate.sheet import Sheet, Shown
from memstate.slots.commands import Action, CommandBuffer
from memstate.state.planes import Planes
from memstate.stats import NO_PREFETCH, TierStats
from memstate.tiers.alike import compare
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.tier import Hit, HostTier, RecordSet
from memstate.tiers.host.transfers import Transfers
from memstate.tiers.keys import Keys, fingerprint
from memstate.tiers.parking import ParkedRequests
from memstate.tiers.prefetch.agreement import Ranks
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.prefetcher import Prefetcher
from memstate.tiers.records import RecordFormat
from memstate.tiers.settings import Tiers
from memstate.tiers.sizing import pages_in_proportion, staged_pages
from memstate.tiers.stores.base import NoStore, evicted_of, faults_of
from memstate.tiers.travel import Trip
from memstate.tiers.workers import Threads, Workers
from memstate.tiers.writeback import WriteBack
from memstate.tokens import BYTES, SaltedTokens, Tokens

SECOND_HIT = 2  # "selective" saves a state at this number of its uses
LOOK_S = 0.1  # limit of the seconds for which `wait` waits
AHEAD = 64  # limit of the states that are saved ahead of their eviction, without `Tiers(ahead=)`


class TierManager(NotCopied, Shown):
    """Keeps states and KV pages in host memory and storage, below a prefix cache.

    Args:
        settings: Settings of the tiers.
        planes: Planes of the states on the device.
        cache: The prefix cache; this object becomes its `below`.
        commands: The manager's command buffer.
        pages: The page table of all rows.
        alike: Settings on which decisions of the manager depend, by name. They must be equal on all ranks of a group.

    Attributes:
        planned: Function that notes the KV pages that a step completes; see `HostTier.planned`.

    Raises:
        ConfigurationError: The settings do not fit the manager's pages or planes, memory is short, or the ranks of the
            group have other settings.
    """

    def __init__(
        self, settings: Tiers, planes: Planes, cache: PrefixCache, commands: CommandBuffer, pages: PageTable,
        alike: Mapping[str, object],
    ) -> None:  # fmt: skip
        self.settings, self._cache, self._commands, self._guard = settings, cache, commands, commands.guard
        self._closed = False
        mark, sets = _record_sets(settings, planes, pages, commands.registers.table.slots)
        self.keys = Keys(mark, pages.page_size)
        self.host = HostTier(cache.tree, self.keys, commands, pages, *sets)
        copied = pages.allocator.pages * pages.page_size if settings.write == "through" else 0
        limits = settings.prefetch.in_tokens(self.host.kv.pool.records * pages.page_size, copied)
        ranks = None if settings.group is None else Ranks(settings.group)
        if ranks is not None:
            limits = replace(limits, limit=compare(ranks, settings.rank, alike, limits.limit))
        self.planned = self.host.planned
        self._caches = [records.cache for records in self.host.sets]
        self._due: list[tuple[Node, Snapshot]] = []
        self._ahead = min(AHEAD, settings.host_slots // 16) if settings.ahead is None else settings.ahead
        self._ahead *= settings.write != "through"  # "through" saves every state as soon as it is cached
        self._least_uses = 1 if settings.write == "selective" else 0  # states with fewer uses are not saved
        self._looked, self._foreseen = 0, set[Snapshot]()
        self._workers = Workers(settings.executor or Threads(settings.threads))
        self.parked = ParkedRequests(self.host, self.keys, pages.allocator, settings, self._workers, self._guard)
        # Prefetch -> the hit on which all ranks agreed, pinned until the request is admitted. Ranks may have different
        # records in host memory, because threads and copies pin records at different times. So with several ranks,
        # requests start only from these hits, or from states on the device, which are the same on all ranks.
        self._agreed: dict[Fetch, Hit] = {}
        self.writeback: WriteBack | None = None
        self.prefetcher: Prefetcher | None = None
        if settings.store is not None:
            for records in self._caches:
                settings.store.register(records.pool.memory)
            self.writeback = WriteBack(settings.store, self._workers, settings.clock)
        if settings.store is not None or settings.group is not None:
            self.prefetcher = Prefetcher(
                self.host.kv, self.host.states, settings.store or NoStore(), limits, pages.page_size,
                ranks, self._workers, settings.clock, self._keep_agreed,
            )  # fmt: skip
        self._own: WeakSet[Fetch] = WeakSet()
        self._hit_tokens = Counter[str]()
        self._stream = commands.registers.allocator.stream
        cache.below = self

    def find(self, prompt: SaltedTokens, match: Match, known: int) -> Hit | None:
        """Finds a state in host memory that lets a request compute fewer tokens.

        Args:
            prompt: The prompt. A hit never covers its last token.
            match: The match of the prompt on the device.
            known: Tokens of the state from which the request can start without host memory.

        Returns:
            The hit, None if there is no hit beyond `known` tokens.
        """
        if self._closed:
            return None
        hit = self.host.find(prompt.head(max(0, len(prompt.key) // BYTES - 1)), match)
        return hit if hit and hit.length > known else None

    def offer(self, fetch: Fetch | None, prompt: SaltedTokens, match: Match, known: int) -> Hit | None:
        """Finds the host state from which a request starts: what `find` returns or, with several ranks, the agreed hit.

        Args:
            fetch: The request's prefetch, None for none. With several ranks, the hit is the one agreed for it.
            prompt: The prompt.
            match: The match of the prompt on the device.
            known: Tokens of another state from which the request can start, such as one of its session.

        Returns:
            The hit, None if there is no hit beyond `known` tokens and the match.

        Raises:
            InvalidArgument: The prefetch was begun for another prompt.
            Asleep: The device memory for the hit is released.
        """
        known = max(known, match.length)
        if self.settings.group is None:
            hit = self.find(prompt, match, known)
        else:
            hit = self._agreed_hit(fetch, prompt, match, known) if fetch is not None else None
        if hit is not None:
            self.host.require_awake("admit")
        return hit

    def _keep_agreed(self, fetch: Fetch) -> None:
        """Pins the hit on which the ranks have just agreed, before its records can be evicted."""
        if self.settings.group is not None and fetch.length > fetch.covered:
            keys = fetch.keys[: fetch.length // self.keys.page_tokens]
            first = min(fetch.kv_pages, len(keys)) if self.host.keeps_kv else 0
            if hit := self.host.agreed_hit(fetch.length, keys, first):
                self._agreed[fetch] = hit
                self.host.pin(hit)

    def _agreed_hit(self, fetch: Fetch, prompt: SaltedTokens, match: Match, known: int) -> Hit | None:
        """Returns the hit on which the ranks agreed, None if the request cannot use it.

        A hit of at most `known` tokens saves nothing. A hit lacks its first KV pages if the device had them at the time
        of the prefetch, so that they were not fetched, and has evicted them since.
        """
        hit, size = self._agreed.get(fetch), self.keys.page_tokens
        if hit is None or hit.length <= known or match.kv_length < hit.first * size:
            return None
        at = hit.length // size
        if self.host.digests(prompt, match)[at - 1 : at] != [hit.state.key]:
            raise InvalidArgument(f"{fetch} was begun for other tokens or another salt than the request's")
        return hit

    def _forget_agreed(self, fetch: Fetch) -> None:
        """Unpins the agreed hit of a request that was admitted or was given up."""
        if hit := self._agreed.pop(fetch, None):
            self.host.unpin(hit)

    def admitted(self, fetches: Sequence[Fetch]) -> None:
        """Notes that the requests of these prefetches have been admitted. Forgets the hits agreed for them."""
        for fetch in fetches:
            if not fetch.done and self.prefetcher is not None:
                self.prefetcher.note_late(fetch)
            self._forget_agreed(fetch)

    def bring(self, loads: Sequence[tuple[SaltedTokens, Match, Hit]]) -> list[tuple[Node, bool]]:
        """Begins to load hits, and adds them to the prefix cache. A hit that several requests have is loaded once.

        Call this only if the device has room and its memory is not released. The caller tells the policies of the
        returned nodes.

        Args:
            loads: Triples (prompt, its match on the device, its hit in host memory).

        Returns:
            Pairs (node of a state, whether KV pages are loaded with the state).
        """
        nodes: list[tuple[Node, bool]] = []
        states: list[tuple[int, Hit]] = []
        pages: list[tuple[int, CachedRecord]] = []
        distinct = {hit.state.key: (prompt, hit) for prompt, _, hit in loads}
        for prompt, hit in sorted(distinct.values(), key=lambda each: each[1].length):
            node, had, fresh = self._cache.insert_loaded(prompt.head(hit.length))
            assert node.snapshot is not None
            nodes.append((node, had * self.keys.page_tokens < hit.length))
            states.append((node.snapshot.register, hit))
            pages += zip(fresh, hit.pages[had - hit.first :], strict=bool(fresh))
        self.host.bring(states, pages)
        for _, match, hit in loads:
            self._hit_tokens["storage" if hit.state.fetched else "host"] += hit.length - match.length
        return nodes

    def save(self, nodes: Sequence[Node]) -> None:
        """Copies to host memory the states that the device is about to evict, if the setting `write` asks for it.

        Args:
            nodes: The nodes of these states.

        Syncs: no.
        """
        self._stream.require()
        self.host.save([node for node in nodes if node.uses >= self._least_uses])

    def added(self, node: Node) -> None:
        """Notes that a state was cached."""
        if self.settings.write == "through" and node.snapshot:
            self._due.append((node, node.snapshot))

    def used(self, node: Node) -> None:
        """Notes that a request started from a cached state."""
        if self.settings.write == "selective" and node.uses == SECOND_HIT and node.snapshot:
            self._due.append((node, node.snapshot))

    @property
    def _idle(self) -> bool:
        """Whether `poll` has nothing to do."""
        parked = self.parked.above or self.parked.trips
        ours = not (self._due or self._looks_ahead or parked) and self.host.idle
        below = (self.writeback is None or self.writeback.idle) and (self.prefetcher is None or self.prefetcher.idle)
        return ours and below

    @property
    def _looks_ahead(self) -> bool:
        """Whether it is time for `_look_ahead`: slots are short, and enough states came or went since the last look."""
        allocator = self._commands.registers.allocator
        short = allocator.free - allocator.reserve < self._ahead
        return short and abs(self._cache.turnover - self._looked) >= max(1, self._ahead // 4)

    def _look_ahead(self) -> None:
        """Queues copies of the states that the device will evict next, so that their eviction need not copy them."""
        self._looked, least = self._cache.turnover, self._least_uses
        known, self._foreseen = self._foreseen, set()
        for node in self._cache.next_states(self._ahead):
            if node.snapshot is not None and node.uses >= least:
                self._foreseen.add(node.snapshot)
                if node.snapshot not in known and not self.host.has_state(node):
                    self._due.append((node, node.snapshot))

    def _write_due(self) -> None:
        """Copies to host memory the states whose copies are queued, as far as staging has room.

        If a packet that is not sent yet names the register of a state, the state stays queued until then.
        """
        due = [(node, snapshot) for node, snapshot in self._due if node.snapshot == snapshot]
        tried, later = due[: self.host.room], due[self.host.room :]
        waiting = [entry for entry in tried if self._commands.named([entry[1].register])]
        ready = [entry for entry in tried if entry not in waiting]
        done = self.host.save([node for node, _ in ready], ahead=True)
        self._due = [*ready[done:], *waiting, *later]

    def prefetch(self, prompt: SaltedTokens, match: Match, covered: int) -> Fetch:
        """Starts a prefetch; see `StateManager.prefetch`.

        Args:
            prompt: The prompt.
            match: The match of the prompt on the device.
            covered: Tokens that the request need not compute even without the prefetch.

        Returns:
            The handle of the prefetch.

        Raises:
            ConfigurationError: There is no storage, or the manager is closed.
        """
        most = max(0, len(prompt.key) // BYTES - 1)
        prefetcher = self._fetching()
        digests = self.host.digests(prompt.head(most), match)
        kv_pages = match.kv_length // self.keys.page_tokens if self.host.keeps_kv else len(digests)
        with self._guard.changing("prefetch"):
            fetch = prefetcher.start(most, digests, covered=covered, kv_pages=kv_pages)
            self._own.add(fetch)
            return fetch

    def ready(self, fetch: Fetch) -> bool:
        """Returns whether a prefetch is over, so that its request can be admitted. Stops it if the settings say so.

        Args:
            fetch: The handle that `prefetch` returned.

        Raises:
            ConfigurationError: There is no storage, or the manager is closed.
            InvalidArgument: The handle does not belong to this manager.

        Syncs: no.
        """
        prefetcher = self._fetching()
        self.require_own(fetch)
        with self._guard.changing("ready"), self._losing_ranks():
            return prefetcher.ready(fetch)

    def wait(self, fetch: Fetch) -> None:
        """Waits until a call of storage for a prefetch has ended, but at most 0.1 s. Changes nothing.

        Call it if the loop has no other work before the prefetch is ready, instead of calling `ready` again at once.

        Args:
            fetch: The handle that `prefetch` returned.

        Raises:
            InvalidArgument: The handle does not belong to this manager.

        Syncs: waits for the store.
        """
        self.require_own(fetch)
        if self.prefetcher is not None:
            self._workers.wait(self.prefetcher.jobs(fetch), LOOK_S, any)

    @contextmanager
    def _losing_ranks(self) -> Iterator[None]:
        """Lets AgreementLost pass without breaking the manager: all prefetches are over then."""
        try:
            yield
        except AgreementLost as error:
            raise self._guard.orderly(error) from None

    def cancel(self, fetch: Fetch) -> None:
        """Cancels a prefetch at any moment, such as when its request is aborted, and frees its host memory.

        Args:
            fetch: The handle that `prefetch` returned.

        Raises:
            ConfigurationError: There is no storage, or the manager is closed.
            InvalidArgument: The handle does not belong to this manager.

        Syncs: no.
        """
        prefetcher = self._fetching()
        self.require_own(fetch)
        with self._guard.changing("cancel"):
            prefetcher.cancel(fetch)
            self._forget_agreed(fetch)

    def _fetching(self) -> Prefetcher:
        """Returns the prefetcher. Raises ConfigurationError if there is no storage or the manager is closed."""
        if self.prefetcher is None or self._closed:
            why = "the manager is closed" if self._closed else "Tiers(store=FileStore(path)) names one"
            raise ConfigurationError(f"there is no storage: {why}")
        return self.prefetcher

    def require_own(self, fetch: Fetch) -> None:
        """Raises an error if a handle is not one that this manager's `prefetch` returned.

        Raises:
            InvalidArgument: The handle belongs to another manager, or it is not a handle.
        """
        if not isinstance(fetch, Fetch) or fetch not in self._own:
            raise InvalidArgument(f"{fetch!r} is not what this manager's prefetch() returned")

    def _require_in_order(self, operation: str) -> None:
        """Raises InvalidArgument if an operation is called on another stream, or while changes wait for a forward."""
        self._guard.require_whole()
        self._stream.require()
        if self._commands.waiting:
            raise InvalidArgument(
                f"{operation}: changes of owners wait for the newest step's forward: launch it, then "
                "say so with submit(step), settle it, or plan the next step"
            )

    def settle(self) -> None:
        """Waits until no transfer between device and host is under way. The caller must have entered the guard.

        Syncs: yes.
        """
        self._stream.require()
        self.host.synchronize()
        self._write_back(self.host.advance())

    def poll(self) -> None:
        """Advances transfers, writes and prefetches. Call it once per iteration of the loop.

        Raises:
            AgreementLost: The ranks no longer agree.
            Asleep: A state must be copied while its memory is released.

        Syncs: no; with several ranks, a rank waits for one that has called `poll` less often.
        """
        if self._closed:
            return
        self._guard.require_whole()
        if self._idle:
            return
        if self._due:
            self.host.require_awake("poll")
        with self._guard.changing("poll"):
            asleep = any(memory.asleep for memory in self.host.memories)
            if self._looks_ahead and not asleep:
                self._look_ahead()
            self._write_due()
            if self.parked.above and not (asleep or (self._commands.fencing and self.host.parting)):
                self.parked.advance()
            self._write_back(self.host.advance())
            if self.writeback is not None:
                self.writeback.advance()
            if self.prefetcher is not None:
                with self._losing_ranks():
                    self.prefetcher.poll()
            self.parked.travel()

    def _write_back(self, entries: Sequence[CachedRecord]) -> None:
        if self.writeback is None:
            return
        for cache in self._caches[::-1]:  # KV first: a state without its KV is useless
            self.writeback.add(cache, [entry for entry in entries if cache.get(entry.key) is entry])

    def write(
        self, parked: Parked, tokens: Tokens | None = None, *, key: bytes = b"", seconds: float = 30.0
    ) -> Trip:  # fmt: skip
        """Begins to write a parked request to storage, from where another process can `read` it.

        Records that storage has already are not written. The handle stays valid: drop it once the manifest is safe. If
        the request goes on or is dropped before, its records stay until the trip is over.

        Args:
            parked: The handle.
            tokens: All tokens of the request, as far as you know them. None: those that were known when it was parked.
            key: Up to 64 bytes that writers and readers share. With a key, nobody else can make or change a manifest or
                the request's own records. Without one, the store must be private.
            seconds: Time after which the trip fails.

        Returns:
            The trip, which `poll` advances. Its `manifest` is yours to send or to save.

        Raises:
            StaleHandle: The request went on, was dropped, or was lost; nothing changed.
            InvalidArgument: An argument is not valid, the tokens known before do not come first, or the manifest would
                be beyond 16 MiB.
            ConfigurationError: There is no storage.

        Syncs: no.
        """
        self._fetching()
        return self.parked.write(parked, tokens, key, seconds)

    def read(self, manifest: bytes, salt: Hashable = None, *, key: bytes = b"", seconds: float = 30.0) -> Trip:
        """Begins to read a parked request from storage into host memory.

        Args:
            manifest: What a write has made, in this process or another.
            salt: The salt of the request. It must be that of the manifest.
            key: The key of the write.
            seconds: Time after which the trip fails.

        Returns:
            The trip, which `poll` advances. Its `parked` is for `Request(resume=)`.

        Raises:
            InvalidArgument: The manifest is damaged, sealed with another key, or of another model, layout, page size,
                rank or salt, or an argument is not valid; nothing changed.
            OutOfRecords: Back-pressure: host memory has too little room; nothing changed.
            ConfigurationError: There is no storage.

        Syncs: no.
        """
        self._fetching()
        return self.parked.read(manifest, salt, key, seconds)

    def flush(self) -> None:
        """Copies every cached state to host memory and, if there is storage, to storage.

        Raises:
            Asleep: The memory of states or KV pages is released.
            InvalidArgument: Changes of owners wait for a forward; nothing changed then.

        Syncs: yes.
        """
        if self._closed:
            return
        self.host.require_awake("flush")
        self._require_in_order("flush")
        with self._guard.changing("flush"):
            self._commands.submit()
            self._due = []
            for cache in reversed(self._caches):
                self._write_back(list(cache.entries()))  # records that storage refused before are tried again
            self._write_all()
            nodes, room = list(self._cache.stated()), max(1, self.host.states.pool.records // 2)
            for at in range(0, len(nodes), room):  # in parts: stored records can be evicted for the next part
                chosen = nodes[at : at + room]
                self._save_all(chosen)
                for node in chosen:  # states whose KV did not fit together: one by one
                    if not self.host.has(node):
                        self._save_all([node])

    def _save_all(self, nodes: Sequence[Node]) -> None:
        """Copies states to host memory and from there to storage, and waits until all are written."""
        while nodes:
            nodes = nodes[self.host.save(nodes, ahead=True) :]
            self._write_all()

    def _write_all(self) -> None:
        """Waits until no copy to host memory and no write to storage is under way."""
        self.settle()
        while self.writeback is not None and self.writeback.pending:
            self.writeback.advance()
            self._workers.wait(self.writeback.jobs)
            self.writeback.advance()

    def clear(self) -> None:
        """Empties host memory, for example after a change of the weights. Storage keeps its records.

        Parked requests are lost, and their handles stale.

        Raises:
            InvalidArgument: Changes of owners wait for a forward; nothing changed then.

        Syncs: yes.
        """
        self._require_in_order("clear")
        with self._guard.changing("clear"):
            self.reset()

    def reset(self) -> None:
        """Empties host memory as `clear` does, even if an exception has left a call half done.

        Syncs: yes.
        """
        self._due, self._foreseen = [], set()
        self.parked.reset()
        if self.prefetcher is not None:
            self.prefetcher.reset()
        if self.writeback is not None:
            self.writeback.reset()
        self._workers.drain()
        self._agreed = {}
        self.host.reset()

    def stats(self) -> TierStats:
        """Returns the figures of the tiers: what they hold now, and what has moved since the start.

        Syncs: no.
        """
        host, writeback = self.host, self.writeback
        states, kv = host.states, host.kv
        raised = [each.raised for each in (writeback, self.prefetcher) if each is not None]
        return TierStats(
            host_states=len(states),
            host_state_records=states.pool.records,
            host_pages=len(kv),
            host_page_records=kv.pool.records,
            host_bytes=sum(cache.pool.memory.nbytes for cache in self._caches),
            staging_bytes=sum(records.transfers.staging_bytes for records in host.sets),
            host_hit_tokens=self._hit_tokens["host"],
            storage_hit_tokens=self._hit_tokens["storage"],
            states_out=host.moved[0],
            states_in=host.moved[1],
            pages_out=host.moved[2],
            pages_in=host.moved[3],
            refused=host.refused,
            unstaged=host.unstaged,
            evicted_states=states.evicted,
            evicted_pages=kv.evicted,
            written=writeback.written if writeback else 0,
            write_failed=writeback.failed if writeback else 0,
            write_missed=writeback.missed if writeback else 0,
            writes_pending=writeback.pending if writeback else 0,
            state_bytes=states.form.body_bytes,
            page_bytes=kv.form.body_bytes if host.keeps_kv else 0,
            leaked_records=self.leaked,
            parked=len(self.parked) - len(self.parked.trips),
            parked_bytes=sum({entry: part.of.cache.form.nbytes for part, entry in self.parked.below.items()}.values()),
            parked_pages=len(self.parked.above),
            failures=dict(sum(raised, faults_of(self.settings.store))),
            store_evicted=evicted_of(self.settings.store),
            prefetch=self.prefetcher.stats() if self.prefetcher else NO_PREFETCH,
        )

    def miscounts(self) -> list[str]:
        """Returns a text for each wrong count of pins and claimed host records, by counting them again.

        Syncs: no.
        """
        pins = Counter[CachedRecord]()
        for moved in (*self.host.loads, *self.host.backups):
            pins.update(moved.entries)
        for action in self._commands.waiting:
            pins.update(action.keeps if isinstance(action, Action) else ())
        if self.writeback is not None:
            pins.update(self.writeback.writing)
        pins.update(entry for hit in self._agreed.values() for entry in (hit.state, *hit.pages))
        pins.update(self.parked.below.values())
        if self.prefetcher is not None:
            pins.update(self.prefetcher.pinned)
        return [text for cache, n in zip(self._caches, self._held, strict=False) for text in cache.miscounts(pins, n)]

    @property
    def leaked(self) -> int:
        """Number of host records that are neither free, nor in a cache, nor held by a prefetch; above 0 it is a bug."""
        return sum(cache.pool.claimed - len(cache) for cache in self._caches) - sum(self._held)

    @property
    def _held(self) -> tuple[int, ...]:
        """Numbers of host records that prefetches have claimed: (for states, for KV pages, for the memory of rows)."""
        return (*self.prefetcher.held, 0) if self.prefetcher is not None else (0, 0, 0)

    def close(self) -> None:
        """Flushes to storage, ends threads and transfers, and closes the storage. Requests go on without tiers.

        If an earlier call was interrupted, nothing is written, because host memory could be wrong.

        Raises:
            Asleep: The memory of states or KV pages is released.
            InvalidArgument: Changes of owners wait for a forward, or requests are parked; nothing changed then.

        Syncs: yes.
        """
        if self._closed:
            return
        if self._guard.call:
            self.reset()
        else:
            self._require_in_order("close")
            if n := len(self.parked):
                raise InvalidArgument(f"close: {n} requests are parked or on their way: drop them, then poll()")
            self.flush()
            self.clear()
        if self.settings.executor is None:
            self._workers.executor.shutdown(wait=True)
        try:
            if self.settings.store is not None:
                self.settings.store.close()
        except Exception:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        """Notes that the tiers are closed. It comes last in `close`, so that an interrupted `close` can be repeated."""
        for each in (self.writeback, self.prefetcher):
            if each is not None:
                each.close()
        self._closed, self._cache.below = True, None

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        stats = self.stats()
        sheet = stats.sheet()
        title = f"{type(self).__name__}({stats.host_states} of {stats.host_state_records} states in host memory)"
        notes = (*sheet.notes, "Closed: nothing is loaded or saved any more.") if self._closed else sheet.notes
        return sheet._replace(title=title, notes=notes)


def _record_sets(
    settings: Tiers, planes: Planes, pages: PageTable, slots: Tensor
) -> tuple[bytes, tuple[RecordSet, RecordSet | None, RecordSet | None]]:
    """Returns the fingerprint of all records, and the record sets of states, KV pages and the memory of rows."""
    kv, on_device = settings.kv, pages.allocator.pages
    if (kv is not None) != (on_device > 0) or (kv is not None and kv.slots != on_device):
        raise ConfigurationError(
            f"tiers with kv={kv} for {on_device} KV pages: give the planes of all pages, or manage pages elsewhere, "
            "with pages=ms.Pages(size=...)"
        )
    packing = Packing(planes, settings.int8)
    if not packing.nbytes:
        raise ConfigurationError(f"tiers for {planes}: its states have 0 bytes, so there is nothing to save")
    mark = fingerprint(
        settings.model, packing.layout, kv.layout if kv else None, pages.page_size, settings.rank, settings.ranks
    )

    def made(packing: Packing, form: RecordFormat, records: int, staging: int, slots: Tensor | None) -> RecordSet:
        with on(planes.device):
            pool = RecordPool(records, form.nbytes, pinned=planes.device.type == "cuda")
        reserve = int(records * settings.reserve)
        return RecordSet(RecordCache(pool, form, reserve), Transfers(packing, pool, staging, slots))

    of_kv = None
    states = made(packing, RecordFormat("state", packing.layout, mark), settings.host_slots, settings.staging, slots)
    if kv is not None:
        form, of_page = RecordFormat("kv", kv.layout, mark), Packing(kv)
        of_page.backend = planes.backend  # the backend that counts the launches of the manager
        count = settings.host_pages or pages_in_proportion(settings.host_slots, planes.slots, on_device)
        staged = staged_pages(settings.staging, packing.nbytes, form.body_bytes, count)
        of_kv = made(of_page, form, count, staged, None)
    of_rows = None
    if planes.rows is not None:
        of_row = Packing(planes.rows)
        own = fingerprint(settings.model, packing.layout, of_row.layout, 1, settings.rank, settings.ranks)
        of_rows = made(of_row, RecordFormat("row", of_row.layout, own), settings.host_slots, settings.staging, None)
    return mark, (states, of_kv, of_rows)
