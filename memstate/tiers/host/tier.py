"""Saves states and KV pages of the prefix cache to host memory, and loads them again.

device   node of the prefix cache:  state in a register, pages
           | save: the state is evicted or written through     ^ load: a hit covers more tokens than states of the tree
host     records of states and of KV pages, found by the digest of all tokens up to their end

Of the rows, it knows only the KV pages that a planned step completes.
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
from memstate.requests.page_table import PageTable
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.registers import Longs
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.transfers import Ticket, Transfers
from memstate.tiers.keys import Keys
from memstate.tokens import SaltedTokens

LOG = logs.logger("tiers")
Copy = tuple[int, CachedRecord]  # (register or page, the host record to or from which it is copied)
Way = Callable[[Sequence[int], Sequence[int]], Ticket]  # `Transfers.out` or `Transfers.into`


class RecordSet(NamedTuple):
    """The records of one kind in host memory, such as states or KV pages, and the transfers to and from them."""

    cache: RecordCache
    transfers: Transfers


Due = defaultdict[RecordSet, list[Copy]]  # copies to make, by the kind of their records


@dataclass(slots=True, eq=False)
class Part:
    """A part of a parked request: its state, the memory of its row, or one of its KV pages.

    Attributes:
        of: The records of its kind.
        at: The number of the KV page; 0 for other parts.
        length: Tokens that its record stands for.
        key: The key under which prompts find its record; empty if only this request has it.
        index: Its register, row or page on the device.
        entry: Its record, which has a pin for it; None while it is on the device.
    """

    of: RecordSet
    at: int
    length: int
    key: bytes = b""
    index: int = 0
    entry: CachedRecord | None = None


@dataclass(frozen=True)
class Hit:
    """A state in host memory from which a prompt can start.

    Attributes:
        length: Tokens up to the state.
        state: The state's entry.
        first: The first page whose KV is not on the device.
        pages: Entries of the KV pages from `first` up to the state.
        keys: Digests of all pages up to the state.
    """

    length: int
    state: CachedRecord
    first: int
    pages: Sequence[CachedRecord]
    keys: Sequence[bytes] = ()


class InFlight(NamedTuple):
    """A transfer under way: records of one set, and its ticket."""

    record_set: RecordSet
    entries: list[CachedRecord]
    ticket: Ticket


class HostTier:
    """Saves states and KV pages to host memory, and loads them again.

    Args:
        tree: The prefix cache's tree.
        keys: Computes digests of prompts and nodes.
        commands: The manager's command buffer.
        pages: The page table of all rows.
        states: The record set of states.
        kv: The record set of KV pages, None if the caller manages KV.
        rows: The record set of the memory of rows, None if rows have none.

    Attributes:
        of_states: The record set of states.
        of_kv: The record set of KV pages, None if the caller manages KV.
        of_rows: The record set of the memory of rows, None if rows have none.
        states: The cache of states.
        kv: The cache of KV pages; always empty if the caller manages KV.
        keeps_kv: Whether KV pages are saved.
        sets: The record sets: states, then KV pages if they are saved, then the memory of rows if there is any.
        memories: For each set, the device memory with its states or pages.
        loads: Transfers to the device that are under way.
        backups: Transfers to host memory that are under way, oldest first.
        refused: Number of states that were not saved because host memory had no room.
        unstaged: Number of states that were not saved because staging was full when they were evicted.
        parting: Whether a request was parked since the newest plan: the forward perhaps still writes its KV pages.
    """

    def __init__(
        self, tree: Tree, keys: Keys, commands: CommandBuffer, pages: PageTable, states: RecordSet,
        kv: RecordSet | None, rows: RecordSet | None,
    ) -> None:  # fmt: skip
        self.tree, self._keys, self._page_size = tree, keys, keys.page_tokens
        self.of_states, self.of_kv, self.of_rows, self.keeps_kv = states, kv, rows, kv is not None
        self.sets = [each for each in (states, kv, rows) if each is not None]
        self.memories = [each.transfers.packing.memory for each in self.sets]
        self.states = states.cache
        self.kv = kv.cache if kv is not None else RecordCache(RecordPool(0, nbytes=1), self.states.form)
        self._commands, self._pages_of = commands, pages.of
        self.loads: list[InFlight] = []
        self.backups: list[InFlight] = []
        self._coming: list[InFlight] = []  # loads for which the work stream does not wait yet
        self.refused = 0
        self.unstaged = 0
        self.parting = False
        self._told = logs.Repeats(LOG, sums=["tokens"])
        self._unwritten: set[int] = set()  # KV pages that the newest step's forward completes
        commands.before_packet(self.await_loads)

    def planned(self, rows: Longs, before: Longs, after: Longs) -> None:
        """Notes the KV pages that a step completes. They do not have their KV before its forward is launched.

        Args:
            rows: The row of each entry of the step; row 0 is padding. int64 `batch`.
            before: Tokens of each row before the step. int64 `batch`.
            after: Tokens of each row after the step. int64 `batch`.
        """
        self.parting = False
        if self.keeps_kv:
            first, end = before // self._page_size, after // self._page_size
            whole = np.flatnonzero(end > first).tolist()
            self._unwritten = {page for i in whole for page in self._pages_of(int(rows[i]))[first[i] : end[i]]}

    def digests(self, prompt: SaltedTokens, match: Match) -> list[bytes]:
        """Returns the digests of a prompt's whole pages."""
        return self._keys.of_prompt(self.tree, prompt, match.found)

    def _kv_of(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Returns the keys under which KV pages are saved: the digests; none if the caller manages KV."""
        return digests if self.keeps_kv else ()

    def find(self, prompt: SaltedTokens, match: Match) -> Hit | None:
        """Finds a state in host memory that covers more of a prompt than the states of the tree, and has all its KV.

        Args:
            prompt: The part of the prompt that a hit may cover.
            match: The match of the prompt on the device.

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
            if (state := self.states.get(digests[end - 1])) is not None:
                return Hit(end * size, state, min(first, end), pages[: max(0, end - first)], digests[:end])
        return None

    def agreed_hit(self, length: int, keys: Sequence[bytes], first: int) -> Hit | None:
        """Returns the hit at a length on which all ranks have agreed, None if one of its records was evicted.

        Args:
            length: Tokens up to the state.
            keys: Digests of all pages up to the state.
            first: Number of pages whose KV is on the device.
        """
        wanted = self._kv_of(keys[first:])
        state, pages = self.states.get(keys[-1]), self.kv.reach(wanted)
        return Hit(length, state, first, pages, keys) if state is not None and len(pages) == len(wanted) else None

    def pin(self, hit: Hit) -> None:
        """Keeps the records of a hit from being evicted until `unpin`."""
        self.states.pin(hit.state)
        self.kv.pin(*hit.pages)

    def unpin(self, hit: Hit) -> None:
        """Ends one `pin` of a hit."""
        self.states.unpin(hit.state)
        self.kv.unpin(*hit.pages)

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Notes a use of the KV of some pages, and of the state at the end of the last one."""
        self.states.touch(digests[-1:])
        self.kv.touch(digests)

    def has(self, node: Node) -> bool:
        """Returns whether a node's state and all KV up to it are in host memory."""
        digests = self._keys.of_node(self.tree, node)
        return digests[-1] in self.states and all(digest in self.kv for digest in self._kv_of(digests))

    def has_state(self, node: Node) -> bool:
        """Returns whether a node's state is in host memory, with or without KV."""
        return self._keys.of_node(self.tree, node)[-1] in self.states

    def require_awake(self, operation: str) -> None:
        """Raises an error if the device memory of states or of KV pages is released.

        Raises:
            Asleep: One of them is released.
        """
        for memory in self.memories:
            memory.require_awake(operation)

    def save(self, nodes: Sequence[Node], *, ahead: bool = False) -> int:
        """Copies states of nodes, and the KV up to them, to host memory.

        Skips records that are there already, and states for which host memory has no room. The slots and pages may get
        other owners right after this call. So a state for which staging has no room is lost, and counted in `unstaged`.

        Args:
            nodes: Nodes with a state; others are skipped.
            ahead: Whether the states also stay on the device for now, so that none is lost. Then the call ends at the
                first node for which staging has too little room. It copies as much of this node's KV as fits, so that a
                long prompt can be saved by several calls.

        Returns:
            Number of first nodes that need no further call.

        Syncs: no.
        """
        states: list[Copy] = []
        pages: list[Copy] = []
        done = 0
        for node in nodes:
            if node.snapshot is not None and not self._add(node, node.snapshot.register, states, pages, partly=ahead):
                if ahead:
                    break
                self.unstaged += 1
                self._told.event(logging.INFO, "save lost", why="staging is full", tokens=node.snapshot.length)
            done += 1
        if self.of_kv is not None:
            self._fill(self.of_kv, pages)  # at once, because the pages may get other owners
        registers = sorted({register for register, _ in states})
        if states and self._commands.named(registers):  # copy after the recorded changes of these registers
            self.fill({self.of_states: states}, registers)
        else:
            self._fill(self.of_states, states)
        return done

    def fill(self, due: Mapping[RecordSet, Sequence[Copy]], reads: Sequence[int], behind: bool = False) -> None:
        """Copies to host memory after the changes that were recorded so far.

        Args:
            due: The copies. Staging must have room for them.
            reads: Registers that are copied.
            behind: Whether the copies come after a planned forward that uses one of these registers, too.

        Syncs: no.
        """
        for record_set, copies in due.items():
            record_set.transfers.reserve(len(copies))

        def fill() -> None:
            for record_set, copies in due.items():
                record_set.transfers.reserve(-len(copies))
                self._fill(record_set, copies)

        if entries := [entry for copies in due.values() for _, entry in copies]:
            self._commands.then(Action(fill, entries), reads, behind)

    @property
    def room(self) -> int:
        """Number of states for which staging has room now.

        Syncs: no.
        """
        return self.of_states.transfers.room

    def _add(self, node: Node, register: int, states: list[Copy], pages: list[Copy], *, partly: bool) -> bool:
        """Claims records for the state and the KV of a node that host memory does not have, and adds their copies.

        Args:
            node: The node.
            register: Register of the node's state.
            states: List to which the copy of the state is appended.
            pages: List to which the copies of KV pages are appended.
            partly: Whether to add KV pages even if staging has no room for all of them.

        Returns:
            False if staging has too little room for the node.
        """
        room = self.of_kv.transfers.room - len(pages) if self.of_kv is not None else 0
        digests, length = self._keys.of_node(self.tree, node), node.end * self._page_size
        missing = [at for at, digest in enumerate(self._kv_of(digests)) if digest not in self.kv]
        if missing or digests[-1] not in self.states:
            self.require_awake("save")  # before a record is added: an error here must leave no unfilled record
        fits = len(missing) <= room and (digests[-1] in self.states or self.room > len(states))
        kept = not (fits or partly) or self._add_pages(node, digests, missing, room, pages)
        if fits and kept and digests[-1] not in self.states:
            record = self.states.claim(1)
            states += [(register, self._expected(self.states, digests[-1], at, length)) for at in record]
            kept = bool(record)
        self.refused += not kept
        if not kept:
            self._told.event(logging.INFO, "save lost", why="host memory has no room", tokens=length)
        self._touch(digests)
        return fits or not kept

    def _add_pages(
        self, node: Node, digests: Sequence[bytes], missing: Sequence[int], most: int, due: list[Copy]
    ) -> bool:
        """Adds the first `most` of the missing KV pages; adds none if a forward or load must still fill one of these.

        Returns:
            Whether host memory has room for all missing pages, and no forward or queued load must still fill one.
        """
        if not missing:
            return True
        of, late = self.tree.pages_to(node), self._commands.unsure_pages()
        if not (late | self._unwritten if self._commands.fencing else late).isdisjoint(of[at] for at in missing):
            return False
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
        """Adds a record to a cache and returns its entry. The entry has a pin until the bytes have arrived."""
        entry = cache.add(key, record, length)
        cache.pin(entry)
        return entry

    def _fill(self, record_set: RecordSet, due: Sequence[Copy]) -> None:
        if due:
            self.await_loads()  # KV of a request that went on is perhaps still on its way
            self.backups.append(self._move(record_set, due, record_set.transfers.out))

    @staticmethod
    def _move(record_set: RecordSet, due: Sequence[Copy], way: Way) -> InFlight:
        """Begins copies to host memory or to the device."""
        entries = [entry for _, entry in due]
        return InFlight(record_set, entries, way([at for at, _ in due], [entry.record for entry in entries]))

    def bring(self, states: Sequence[tuple[int, Hit]], pages: Sequence[Copy]) -> None:
        """Loads the states of hits into registers, and KV into pages, after the changes that were recorded so far.

        Call `await_loads` before anything reads these registers or pages.

        Args:
            states: Pairs (register, hit).
            pages: Pairs (page id, entry of the KV page).

        Syncs: no.
        """
        for _, hit in states:
            self._touch(hit.keys)
        due = {self.of_states: [(to, hit.state) for to, hit in states]}
        self.load(due if self.of_kv is None else due | {self.of_kv: list(pages)})

    def load(self, due: Mapping[RecordSet, Sequence[Copy]]) -> None:
        """Loads records into registers, pages and the memory of rows, after the changes that were recorded so far.

        Call `await_loads` before anything reads what is loaded.

        Args:
            due: The copies.

        Syncs: no.
        """
        for record_set, copies in due.items():
            record_set.cache.pin(*[entry for _, entry in copies])

        def begin() -> None:
            loads = [self._move(each, copies, each.transfers.into) for each, copies in due.items() if copies]
            self.loads += loads
            self._coming += loads

        pages = [page for page, _ in due.get(self.of_kv, ())] if self.of_kv is not None else []
        if kept := [entry for copies in due.values() for _, entry in copies]:
            self._commands.then(Action(begin, kept, pages, [register for register, _ in due.get(self.of_states, ())]))

    def await_loads(self) -> None:
        """Makes the work stream wait for loads that are under way, before anything there reads what they bring.

        Called before each packet, action, plan and save, and where the caller of a fork copies pages.

        Syncs: no.
        """
        for part in self._coming:
            part.ticket.wait()
        self._coming.clear()

    @property
    def idle(self) -> bool:
        """Whether no transfer is under way, so that `advance` has nothing to do."""
        return not (self.loads or self.backups)

    def coming(self) -> set[CachedRecord]:
        """Returns the records whose bytes are still to come from the device."""
        waiting = [entry for action in self._commands.waiting if isinstance(action, Action) for entry in action.keeps]
        return {*waiting, *(entry for backup in self.backups for entry in backup.entries)}

    def advance(self) -> list[CachedRecord]:
        """Handles transfers that are done.

        Returns:
            Entries whose bytes have arrived in host memory, KV before states.

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
        """Compiles all kernels of saves and loads. Moves nothing.

        Syncs: no.
        """
        for record_set in self.sets:
            record_set.transfers.warm_up()

    def reset(self) -> None:
        """Empties host memory and forgets every transfer, but not the pages that an open step completes.

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
        """Numbers of copies since the start: (states out, states in, pages out, pages in). "Out" is to host memory."""
        states, kv = self.of_states.transfers, self.of_kv.transfers if self.of_kv else None
        return states.moved_out, states.moved_in, kv.moved_out if kv else 0, kv.moved_in if kv else 0

    def synchronize(self) -> None:
        """Waits for every transfer.

        Syncs: yes.
        """
        self.await_loads()
        for part in (*self.loads, *self.backups):
            part.ticket.synchronize()
