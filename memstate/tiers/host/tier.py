"""The host tier: what lies below the slots by key, what is saved there and what is loaded.

Of rows it knows only the pages that a planned step completes.

device   node of the prefix cache    state in a register      pages
           | save (evicted, or written through)     ^ load: a hit that reaches further than the tree's
below    host records of states, of levels and of KV pages, by the digest of the tokens up to where they stand
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from memstate import logs
from memstate.prefix import Match
from memstate.prefix.tree import Node, Tree
from memstate.requests.levels import NONE, LevelSets, level_ends
from memstate.requests.page_table import PageTable
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.registers import Longs
from memstate.tiers.host.cache import CachedRecord, RecordCache, RecordKey
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.transfers import Ticket, Transfers
from memstate.tiers.keys import Keys
from memstate.tokens import Prompt

LOG = logs.logger("tiers")
Copy = tuple[int, CachedRecord]  # a register, a page or a level slot, and the record it goes to or comes from
Due = defaultdict[RecordCache, list[Copy]]
Way = Callable[[Sequence[int], Sequence[int]], Ticket]  # `Transfers.out` or `Transfers.into`


class RecordSet(NamedTuple):
    """Records of one kind in one place, and the transfers to and from them."""

    cache: RecordCache
    transfers: Transfers


class LevelRecords(NamedTuple):
    """Level slots of states, and the records of levels."""

    sets: LevelSets
    records: RecordSet


@dataclass(frozen=True)
class Hit:
    """A state below the device that a prompt can start from.

    Attributes:
        length: Tokens up to the state.
        state: The state's entry.
        first: The first page that is not on the device.
        pages: Entries of the KV pages from `first` on.
        levels: Entries of the state's levels, the lowest first.
        keys: Digests of all pages up to the state.
    """

    length: int
    state: CachedRecord
    first: int
    pages: Sequence[CachedRecord]
    levels: Sequence[CachedRecord] = ()
    keys: Sequence[bytes] = ()


class InFlight(NamedTuple):
    """Records of one set on their way."""

    record_set: RecordSet
    entries: list[CachedRecord]
    ticket: Ticket


class HostTier:
    """Saves states, their levels and KV pages to host memory, and loads them again.

    Args:
        tree: The prefix cache's tree.
        keys: Computes digests of prompts and nodes.
        commands: The manager's command buffer.
        pages: The page table of all rows.
        states: States in host memory.
        kv: KV pages in host memory, None where KV is the caller's.
        levels: Levels of states in host memory, None for states without.

    Attributes:
        states: The cache of states.
        kv: The cache of KV pages; without a record where KV is the caller's.
        keeps_kv: Whether KV pages are kept here.
        sets: All that is kept here.
        memories: Where on the device it comes from.
    """

    def __init__(
        self, tree: Tree, keys: Keys, commands: CommandBuffer, pages: PageTable, states: RecordSet,
        kv: RecordSet | None, levels: LevelRecords | None = None,
    ) -> None:  # fmt: skip
        self.tree, self._keys, self._page_size = tree, keys, keys.page_tokens
        self._of_states, self._of_kv, self.keeps_kv = states, kv, kv is not None
        self._levels = levels
        self.sets = [each for each in (states, kv, levels and levels.records) if each is not None]
        self.memories = [each.transfers.packing.memory for each in self.sets]
        self._records = {each.cache: each for each in self.sets}
        self.states = states.cache
        self.kv = kv.cache if kv is not None else RecordCache(RecordPool(0, nbytes=1), self.states.form)
        self._commands, self._pages_of = commands, pages.of
        self.loads: list[InFlight] = []
        self.backups: list[InFlight] = []
        self._coming: list[InFlight] = []  # of the loads: what the stream of the steps has still to wait for
        self.refused = 0  # states that found no room here
        self.unstaged = 0  # states that were evicted while staging was full
        self._told = logs.Repeats(LOG, sums=["tokens"])
        self._unwritten: set[int] = set()  # KV pages that the newest step's forward completes
        commands.before_packet(self.await_loads)

    def planned(self, rows: Longs, before: Longs, after: Longs) -> None:
        """Notes the KV pages that a step completes: until its forward is launched they hold other bytes.

        Args:
            rows: Rows of the step's entries; row 0 is padding. int64 `batch`.
            before: Tokens of each row before the step. int64 `batch`.
            after: Tokens of each row after the step. int64 `batch`.
        """
        if self.keeps_kv:
            first, end = before // self._page_size, after // self._page_size
            whole = np.flatnonzero(end > first).tolist()
            self._unwritten = {page for i in whole for page in self._pages_of(int(rows[i]))[first[i] : end[i]]}

    def digests(self, prompt: Prompt, match: Match) -> list[bytes]:
        """Returns the digests of a prompt's whole pages."""
        return self._keys.of_prompt(self.tree, prompt, match.found)

    def _kv_of(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the keys of the KV of pages: none where KV is the caller's."""
        return digests if self.keeps_kv else ()

    def parts(self, digests: Sequence[bytes], end: int) -> list[RecordKey]:
        """Returns the records that the state at a page end is made of: its own, then those of its levels.

        Args:
            digests: Digests of the pages up to it, at least.
            end: Pages.
        """
        found = [RecordKey(self.states, digests[end - 1], end * self._page_size)]
        if self._levels is not None:
            sets, (cache, _) = self._levels
            for level, tokens in level_ends(end * self._page_size, sets.chunk):
                key = self._keys.of_level(digests[tokens // self._page_size - 1], level)
                found.append(RecordKey(cache, key, tokens, level))
        return found

    def entries(self, digests: Sequence[bytes], end: int) -> list[CachedRecord]:
        """Returns the entries of `parts`, none if one is missing."""
        if (state := self.states.get(digests[end - 1])) is None:
            return []
        if self._levels is None:
            return [state]
        found = [part.cache.get(part.key) for part in self.parts(digests, end)]
        return [entry for entry in found if entry is not None] if None not in found else []

    def _missing(self, digests: Sequence[bytes], end: int) -> dict[RecordCache, list[RecordKey]]:
        """Returns what is not here of `parts`, by cache."""
        state = digests[end - 1]
        found = {} if state in self.states else {self.states: [RecordKey(self.states, state, end * self._page_size)]}
        if self._levels is not None:
            cache, (_, *parts) = self._levels.records.cache, self.parts(digests, end)
            if lacking := [part for part in parts if part.key not in cache]:
                found[cache] = lacking
        return found

    def find(self, prompt: Prompt, match: Match) -> Hit | None:
        """Finds a state that stands for more of a prompt than the tree's, with all KV in between.

        Args:
            prompt: The part of the prompt that may be hit.
            match: What the device has of the prompt.

        Returns:
            The deepest hit, None for none.
        """
        size = self._page_size
        if not len(self.states) or len(prompt.key) // self._keys.unit <= match.length // size:
            return None
        digests, first = self.digests(prompt, match), match.kv_length // size
        pages = self.kv.reach(digests[first:])
        reach = first + len(pages) if self.keeps_kv else len(digests)
        for end in range(reach, match.length // size, -1):
            if digests[end - 1] in self.states and (found := self.entries(digests, end)):
                state, *levels = found
                return Hit(end * size, state, min(first, end), pages[: max(0, end - first)], levels, digests[:end])
        return None

    def agreed_hit(self, length: int, keys: Sequence[bytes], first: int) -> Hit | None:
        """Returns the hit of a length that all ranks agreed on, None where a record is gone.

        Args:
            length: Tokens up to the state.
            keys: Digests of all pages up to it.
            first: Pages whose KV is on the device.
        """
        wanted = self._kv_of(keys[first:])
        found, pages = self.entries(keys, len(keys)), self.kv.reach(wanted)
        return Hit(length, found[0], first, pages, found[1:], keys) if found and len(pages) == len(wanted) else None

    def pin(self, hit: Hit) -> None:
        """Keeps the records of a hit until `unpin`."""
        self.states.pin(hit.state)
        self.kv.pin(*hit.pages)
        if self._levels is not None:
            self._levels.records.cache.pin(*hit.levels)

    def unpin(self, hit: Hit) -> None:
        """Ends `pin`."""
        self.states.unpin(hit.state)
        self.kv.unpin(*hit.pages)
        if self._levels is not None:
            self._levels.records.cache.unpin(*hit.levels)

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Notes a use of the state at the end of these pages, and of their KV."""
        self.states.touch(digests[-1:])
        self.kv.touch(digests)
        for part in self.parts(digests, len(digests))[1:] if self._levels is not None else ():
            part.cache.touch([part.key])

    def has(self, node: Node) -> bool:
        """Tells whether a node's state and all KV up to it are in host memory."""
        digests = self._keys.of_node(self.tree, node)
        return bool(self.entries(digests, node.end)) and all(digest in self.kv for digest in self._kv_of(digests))

    def has_state(self, node: Node) -> bool:
        """Tells whether a node's state is in host memory, with or without KV."""
        return bool(self.entries(self._keys.of_node(self.tree, node), node.end))

    def require_awake(self, operation: str) -> None:
        """Refuses an operation while states or KV pages sleep.

        Raises:
            Asleep: The memory of one of them is released.
        """
        for memory in self.memories:
            memory.require_awake(operation)

    def save(self, nodes: Sequence[Node], *, ahead: bool = False) -> int:
        """Copies states of nodes, and the KV up to them, to host memory. Skips what is there, and what finds no room.

        What is on the device may change owners right after this call, so what finds no staging is lost. It is counted.

        Args:
            nodes: Nodes with a state; others are skipped.
            ahead: Whether the device keeps the states, so that nothing is lost: it ends at the first that finds no
                staging. Of that one the KV goes as far as there is staging, so that the longest prompt goes down in
                several calls.

        Returns:
            How many of the nodes are done with.

        Syncs: no.
        """
        due: Due = defaultdict(list)
        reads = set[int]()
        done = 0
        for node in nodes:
            if node.snapshot is not None and not self._add(node, node.snapshot.register, due, reads, partly=ahead):
                if ahead:
                    break
                self.unstaged += 1
                self._told.event(logging.INFO, "save lost", why="staging is full", tokens=node.snapshot.length)
            done += 1
        pages = due.pop(self.kv, [])
        if self._of_kv is not None:
            self._fill(self._of_kv, pages)  # at once: the pages may be given to others
        rest = [(self._records[cache], copies) for cache, copies in due.items() if copies]
        if rest and self._commands.named(sorted(reads)):  # after what is recorded of them
            for records, copies in rest:
                records.transfers.reserve(len(copies))

            def fill() -> None:
                for records, copies in rest:
                    records.transfers.reserve(-len(copies))
                    self._fill(records, copies)

            self._commands.then(Action(fill, [entry for _, copies in rest for _, entry in copies]), reads)
        else:
            for records, copies in rest:
                self._fill(records, copies)
        return done

    @property
    def room(self) -> int:
        """States that find staging now.

        Syncs: no.
        """
        return self._of_states.transfers.room

    def _add(self, node: Node, register: int, due: Due, reads: set[int], *, partly: bool) -> bool:
        """Adds records for what is missing of a node; returns False where it finds no staging.

        Args:
            node: The node.
            register: Its state.
            due: Where the copies are added.
            reads: Where registers are added whose state is copied, or a level of it.
            partly: Add the pages that find staging.
        """
        room = self._of_kv.transfers.room - len(due[self.kv]) if self._of_kv is not None else 0
        digests, length = self._keys.of_node(self.tree, node), node.end * self._page_size
        missing = [at for at, digest in enumerate(self._kv_of(digests)) if digest not in self.kv]
        parts = self._missing(digests, node.end)
        if missing or parts:
            self.require_awake("save")  # before a record is added: none is found that was never filled
        fits = len(missing) <= room
        for cache in parts:
            fits = fits and len(due[cache]) + len(parts[cache]) <= self._records[cache].transfers.room
        kept = not (fits or partly) or self._add_pages(node, digests, missing, room, due[self.kv])
        if fits and kept and parts and (kept := self._add_parts(register, digests, node.end, parts, due)):
            reads.add(register)
        self.refused += not kept
        if not kept:
            self._told.event(logging.INFO, "save lost", why="host memory has no room", tokens=length)
        self._touch(digests)
        return fits or not kept

    def _add_parts(
        self, register: int, digests: Sequence[bytes], end: int, missing: Mapping[RecordCache, Sequence[RecordKey]],
        due: Due,
    ) -> bool:  # fmt: skip
        """Adds records for what is missing of a state, all or none; returns whether they find room.

        Args:
            register: The state.
            digests: Digests of the pages up to it.
            end: Pages.
            missing: What is missing of it.
            due: Where the copies are added.
        """
        levels, fits = NONE, True
        present: list[tuple[RecordCache, CachedRecord]] = []
        if self._levels is not None:
            levels = self._levels.sets.of(register)
            for part in self.parts(digests, end):
                if (entry := part.cache.get(part.key)) is not None:
                    part.cache.pin(entry)
                    present.append((part.cache, entry))
            for cache in missing:
                fits = fits and len(missing[cache]) <= cache.pool.free + cache.evictable
        for cache in missing if fits else ():
            records = cache.claim(len(missing[cache]))
            fits = len(records) > 0
            for (_, key, length, level), record in zip(missing[cache], records, strict=fits):
                place = register if level is None else levels[level]
                due[cache].append((place, self._expected(cache, key, record, length)))
        for cache, entry in present:
            cache.unpin(entry)
        return fits

    def _add_pages(
        self, node: Node, digests: Sequence[bytes], missing: Sequence[int], most: int, due: list[Copy]
    ) -> bool:
        """Adds the first `most` of the KV pages that are missing, except where a forward has still to write one.

        Returns:
            Whether host memory has room for all that are missing.
        """
        of = self.tree.pages_to(node) if missing else []
        if not missing or (self._commands.fencing and not self._unwritten.isdisjoint(of[at] for at in missing)):
            return not missing
        kv, chosen = self.kv, missing[:most]
        present = [entry for digest in digests if (entry := kv.get(digest)) is not None]
        kv.pin(*present)
        if fits := len(missing) <= kv.pool.free + kv.evictable:
            for at, record in zip(chosen, kv.claim(len(chosen)), strict=True):
                due.append((of[at], self._expected(kv, digests[at], record, (at + 1) * self._page_size)))
        kv.unpin(*present)
        return fits

    @staticmethod
    def _expected(cache: RecordCache, key: bytes, record: int, length: int) -> CachedRecord:
        """Adds a record that is pinned until its bytes have arrived."""
        entry = cache.add(key, record, length)
        cache.pin(entry)
        return entry

    def _fill(self, record_set: RecordSet, due: Sequence[Copy]) -> None:
        if due:
            self.backups.append(self._move(record_set, due, record_set.transfers.out))

    @staticmethod
    def _move(record_set: RecordSet, due: Sequence[Copy], way: Way) -> InFlight:
        """Begins to copy records, out to host memory or in to slots."""
        entries = [entry for _, entry in due]
        return InFlight(record_set, entries, way([at for at, _ in due], [entry.record for entry in entries]))

    def bring(self, states: Sequence[tuple[int, Hit]], pages: Sequence[Copy], levels: Sequence[Copy] = ()) -> None:
        """Copies states of hits to registers, KV pages to page ids and levels, after what is recorded so far.

        Nothing reads them before `await_loads`.

        Args:
            states: Register and hit of each state.
            pages: Page id and entry of each KV page.
            levels: Level slot and entry of each level.

        Syncs: no.
        """
        for _, hit in states:
            self._touch(hit.keys)
        of_levels = self._levels.records if self._levels is not None else None
        copies = [(to, hit.state) for to, hit in states]
        due = [
            (each, records)
            for each, records in ((self._of_states, copies), (self._of_kv, pages), (of_levels, levels))
            if each is not None
        ]
        kept = [entry for _, records in due for _, entry in records]
        for record_set, records in due:
            record_set.cache.pin(*[entry for _, entry in records])

        def begin() -> None:
            loads = [self._move(each, records, each.transfers.into) for each, records in due if records]
            self.loads += loads
            self._coming += loads

        self._commands.then(Action(begin, kept, [page for page, _ in pages], [to for to, _ in states]))

    def await_loads(self) -> None:
        """Makes the stream of the steps wait for states on their way, before a packet.

        Syncs: no.
        """
        for part in self._coming:
            part.ticket.wait()
        self._coming.clear()

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way, so that `advance` has nothing to do."""
        return not (self.loads or self.backups)

    def advance(self) -> list[CachedRecord]:
        """Ends transfers that are done.

        Returns:
            Entries whose bytes are in host memory now, KV before states.

        Syncs: no.
        """
        for load in [load for load in self.loads if load.ticket.done]:
            self.loads.remove(load)
            load.record_set.cache.unpin(*load.entries)
        arrived: list[CachedRecord] = []
        while self.backups and self.backups[0].ticket.done:
            backup = self.backups.pop(0)
            backup.record_set.cache.unpin(*backup.entries)
            arrived += backup.entries
        return arrived

    def warm_up(self) -> None:
        """Compiles everything that saves and loads launch. Moves nothing.

        Syncs: no.
        """
        for record_set in self.sets:
            record_set.transfers.warm_up()

    def reset(self) -> None:
        """Empties host memory, and forgets every transfer. A step in flight stays known.

        Syncs: yes.
        """
        self.synchronize()
        for record_set in self.sets:
            record_set.transfers.reset()
        self.loads, self.backups = [], []
        for record_set in self.sets:
            record_set.cache.reset()

    @property
    def moved(self) -> tuple[int, int, int, int]:
        """States out and in, and pages out and in, between device and host since the start."""
        states, kv = self._of_states.transfers, self._of_kv.transfers if self._of_kv else None
        return states.moved_out, states.moved_in, kv.moved_out if kv else 0, kv.moved_in if kv else 0

    def synchronize(self) -> None:
        """Waits for every transfer.

        Syncs: yes.
        """
        self.await_loads()
        for part in (*self.loads, *self.backups):
            part.ticket.synchronize()
