"""The host tier: what lies below the slots by key, what is saved there and what is loaded.

Of rows it knows only the pages that a planned step completes.

device   node of the prefix cache    state in a register      pages
           | save (evicted, or written through)     ^ load: a hit that reaches further than the tree's
below    host records of states and of KV pages, by the digest of the tokens up to where they stand
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstate import logs
from memstate.prefix import Match
from memstate.prefix.tree import Node, Tree
from memstate.requests.page_table import PageTable
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.registers import Longs
from memstate.tiers.digests import Digests
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.transfers import Ticket, Transfers
from memstate.tokens import Prompt

LOG = logs.logger("tiers")
Copy = tuple[int, CachedRecord]  # a register or a page, and the record it goes to or comes from
Way = Callable[[Tensor | None, Sequence[int], Sequence[int]], Ticket]  # `Transfers.out` or `Transfers.into`


class RecordSet(NamedTuple):
    """Records of one kind in one place, and the transfers to and from them."""

    cache: RecordCache
    transfers: Transfers


@dataclass(frozen=True)
class Hit:
    """A state below the device that a prompt can start from.

    Attributes:
        length: Tokens up to the state.
        state: The state's entry.
        first: The first page that is not on the device.
        pages: Entries of the KV pages from `first` on.
        keys: Digests of all pages up to the state.
    """

    length: int
    state: CachedRecord
    first: int
    pages: Sequence[CachedRecord]
    keys: Sequence[bytes] = ()


class Due(NamedTuple):
    """What a save copies: of each record its register or page, and where it goes."""

    states: list[Copy]
    pages: list[Copy]


class InFlight(NamedTuple):
    """Records of one set on their way."""

    record_set: RecordSet
    entries: list[CachedRecord]
    ticket: Ticket


class HostTier:
    """Saves states and KV pages to host memory, and loads them again.

    Args:
        tree: The prefix cache's tree.
        digests: Computes digests of prompts and nodes.
        commands: The manager's command buffer.
        pages: The page table of all rows.
        states: States in host memory.
        kv: KV pages in host memory, None where KV is the caller's.
    """

    def __init__(
        self, tree: Tree, digests: Digests, commands: CommandBuffer, pages: PageTable, states: RecordSet,
        kv: RecordSet | None,
    ) -> None:  # fmt: skip
        self.tree, self._digests = tree, digests
        self._of_states, self._of_kv = states, kv
        self._built = [each for each in (states, kv) if each is not None]
        self.states, self.kv = states.cache, kv.cache if kv else None
        self._commands, self._slots = commands, commands.registers.table.slots
        self._pages_of, self._page_size = pages.of, pages.page_size
        self.loads: list[list[InFlight]] = []
        self.backups: list[list[InFlight]] = []
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
        if self.kv is not None:
            first, end = before // self._page_size, after // self._page_size
            whole = np.flatnonzero(end > first).tolist()
            self._unwritten = {page for i in whole for page in self._pages_of(int(rows[i]))[first[i] : end[i]]}

    def find(self, prompt: Prompt, match: Match, unit: int) -> Hit | None:
        """Finds a state that stands for more of a prompt than the tree's, with all KV in between.

        Args:
            prompt: The part of the prompt that may be hit.
            match: What the device has of the prompt.
            unit: Bytes of a key that one page takes.

        Returns:
            The deepest hit, None for none.
        """
        if not len(self.states) or len(prompt.key) // unit * self._page_size <= match.length:
            return None
        digests = self._digests.of_prompt(self.tree, prompt, match.found)
        first = match.kv_length // self._page_size
        pages = self.kv.reach(digests[first:]) if self.kv is not None else []
        reach = first + len(pages) if self.kv is not None else len(digests)
        for end in range(reach, match.length // self._page_size, -1):
            if (state := self.states.get(digests[end - 1])) is not None:
                rest = pages[: max(0, end - first)]
                return Hit(end * self._page_size, state, min(first, end), rest, digests[:end])
        return None

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Notes a use of the state at the end of these pages, and of their KV."""
        self.states.touch(digests[-1:])
        if self.kv is not None:
            self.kv.touch(digests)

    def digests(self, prompt: Prompt, match: Match) -> list[bytes]:
        """Returns the digests of a prompt's whole pages."""
        return self._digests.of_prompt(self.tree, prompt, match.found)

    def has(self, node: Node) -> bool:
        """Tells whether a node's state and all KV up to it are in host memory."""
        digests = self._digests.of_node(self.tree, node)
        return digests[-1] in self.states and (self.kv is None or all(digest in self.kv for digest in digests))

    def has_state(self, node: Node) -> bool:
        """Tells whether a node's state is in host memory, with or without KV."""
        return self._digests.of_node(self.tree, node)[-1] in self.states

    def agreed_hit(self, length: int, keys: Sequence[bytes], first: int) -> Hit | None:
        """Returns the hit of a length that all ranks agreed on, None where a record is gone.

        Args:
            length: Tokens up to the state.
            keys: Digests of all pages up to it.
            first: Pages whose KV is on the device.
        """
        if (state := self.states.get(keys[-1])) is None:
            return None
        kv = self.kv
        pages = [entry for key in keys[first:] if kv is not None and (entry := kv.get(key)) is not None]
        if kv is not None and len(pages) < len(keys) - first:
            return None
        return Hit(length, state, first, pages, keys)

    def pin(self, hit: Hit) -> None:
        """Keeps the records of a hit until `unpin`."""
        self.states.pin(hit.state)
        if self.kv is not None and hit.pages:
            self.kv.pin(*hit.pages)

    def unpin(self, hit: Hit) -> None:
        """Ends `pin`."""
        self.states.unpin(hit.state)
        if self.kv is not None and hit.pages:
            self.kv.unpin(*hit.pages)

    def save(self, nodes: Sequence[Node], *, ahead: bool = False) -> int:
        """Copies states of nodes, and the KV up to them, to host memory. Skips what is there, and what finds no room.

        What is on the device may change owners right behind this call, so what finds no staging is lost. It is counted.

        Args:
            nodes: Nodes with a state; others are skipped.
            ahead: Whether the device keeps the states, so that nothing is lost: it ends at the first that finds no
                staging. Of that one the KV goes as far as there is staging, so that the longest prompt goes down in
                several calls.

        Returns:
            How many of the nodes are done with.

        Syncs: no.
        """
        due, done = Due([], []), 0
        for node in nodes:
            if node.snapshot is not None and not self._add(node, node.snapshot.register, due, partly=ahead):
                if ahead:
                    break
                self.unstaged += 1
                self._told.event(logging.INFO, "save lost", why="staging is full", tokens=node.snapshot.length)
            done += 1
        self._send(due)
        return done

    @property
    def room(self) -> int:
        """States that find staging now.

        Syncs: no.
        """
        return self._of_states.transfers.room

    def _add(self, node: Node, register: int, due: Due, *, partly: bool) -> bool:
        """Adds records for what is missing of a node; returns False where it finds no staging.

        Args:
            node: The node.
            register: Its state.
            due: Where the records are added.
            partly: Add the pages that find staging.
        """
        room = self._of_kv.transfers.room - len(due.pages) if self._of_kv is not None else 0
        digests, length = self._digests.of_node(self.tree, node), node.end * self._page_size
        missing = [at for at, digest in enumerate(digests) if digest not in self.kv] if self.kv is not None else []
        fits = len(missing) <= room and (digests[-1] in self.states or self.room > len(due.states))
        kept = not (fits or partly) or self._add_pages(node, digests, missing, room, due.pages)
        if fits:
            kept = kept and self._add_record(self.states, digests[-1], length, register, due.states)
        self.refused += not kept
        if not kept:
            self._told.event(logging.INFO, "save lost", why="host memory has no room", tokens=length)
        self._touch(digests)
        return fits or not kept

    @staticmethod
    def _add_record(cache: RecordCache, key: bytes, length: int, of: int, due: list[Copy]) -> bool:
        """Adds a record that `of` will fill, unless the key is there; returns whether it is then."""
        if key in cache:
            return True
        if not (record := cache.claim(1)):
            return False
        due.append((of, cache.add(key, record[0], length)))
        cache.pin(due[-1][1])  # or the next of these nodes could take the record before it is filled
        return True

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
        assert self.kv is not None  # digests are missing there
        kv = self.kv
        present = [entry for digest in digests if (entry := kv.get(digest)) is not None]
        kv.pin(*present)
        try:
            if len(missing) > kv.pool.free + kv.evictable:
                return False
            chosen = missing[:most]
            records = kv.claim(len(chosen))
        finally:
            kv.unpin(*present)
        for at, record in zip(chosen, records, strict=False):
            due.append((of[at], kv.add(digests[at], record, (at + 1) * self._page_size)))
            kv.pin(due[-1][1])
        return len(records) == len(chosen)

    def _send(self, due: Due) -> None:
        """Fills the records of `due`, behind what is recorded of their registers.

        Pages do not wait for a forward, because they may be given to others at once.
        """
        registers = {register for register, _ in due.states}
        named = bool(registers) and self._commands.named(sorted(registers))
        if named and due.pages and self._commands.waiting:
            self._send(Due([], due.pages))
            due = due._replace(pages=[])
        all_due = (self._of_states, due.states), (self._of_kv, due.pages)
        parts = [(record_set, of) for record_set, of in all_due if record_set and of]
        for record_set, of in parts:
            record_set.transfers.reserve(len(of))
        fill = Action(lambda: self._fill(parts), [entry for _, of in parts for _, entry in of])
        if named:
            self._commands.then(fill, registers)
        elif parts:
            fill.run()

    def _fill(self, due: Sequence[tuple[RecordSet, list[Copy]]]) -> None:
        parts: list[InFlight] = []
        try:
            for record_set, records in due:
                record_set.transfers.reserve(-len(records))
                parts.append(self._move(record_set, records, record_set.transfers.out))
        finally:
            self.backups += [parts] if parts else []
            for record_set, records in due:
                sent = any(part.record_set is record_set for part in parts)
                for _, entry in records:
                    record_set.cache.unpin(entry)
                    if not sent:  # nothing may be found that was never filled
                        record_set.cache.drop(entry)

    def _move(self, record_set: RecordSet, due: Sequence[Copy], way: Way) -> InFlight:
        """Begins to copy records, out to host memory or in to slots."""
        entries = [entry for _, entry in due]
        ticket = way(self._slots_of(record_set), [at for at, _ in due], [entry.record for entry in entries])
        return InFlight(record_set, entries, ticket)

    def _slots_of(self, record_set: RecordSet) -> Tensor | None:
        """Returns the slots of the registers that records of a set belong to; None for pages, which have none."""
        return None if record_set is self._of_kv else self._slots

    def bring(self, states: Sequence[tuple[int, Hit]], pages: Sequence[Copy]) -> None:
        """Copies states of hits to registers, and KV pages to page ids, behind what is recorded so far.

        Nothing reads them before `await_loads`.

        Args:
            states: Register and hit of each state.
            pages: Page id and entry of each KV page.

        Syncs: no.
        """
        for _, hit in states:
            self._touch(hit.keys)
        due = list(zip(self._built, ([(to, hit.state) for to, hit in states], pages), strict=False))
        kept = [entry for _, records in due for _, entry in records]
        for record_set, records in due:
            record_set.cache.pin(*[entry for _, entry in records])

        def begin() -> None:
            self.loads.append([self._move(each, records, each.transfers.into) for each, records in due if records])
            self._coming += self.loads[-1]

        self._commands.then(Action(begin, kept, [page for page, _ in pages]))

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
        for load in [load for load in self.loads if all(part.ticket.done for part in load)]:
            self.loads.remove(load)
            for record_set, entries, _ in load:
                record_set.transfers.end([entry.record for entry in entries])
                record_set.cache.unpin(*entries)
        arrived: list[CachedRecord] = []
        while self.backups and all(part.ticket.done for part in self.backups[0]):
            for record_set, entries, _ in reversed(self.backups.pop(0)):
                record_set.transfers.end([entry.record for entry in entries])
                arrived += entries
        return arrived

    def warm_up(self) -> None:
        """Compiles everything that saves and loads launch. Moves nothing.

        Syncs: no.
        """
        for record_set in self._built:
            record_set.transfers.warm_up(self._slots_of(record_set))

    def reset(self) -> None:
        """Empties host memory, and forgets every transfer. A step in flight stays known.

        Syncs: yes.
        """
        self.synchronize()
        for record_set in self._built:
            record_set.transfers.reset()
        self.loads, self.backups = [], []
        for record_set in self._built:
            record_set.cache.reset()

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers on the device."""
        return sum(record_set.transfers.staging_bytes for record_set in self._built)

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
        for part in chain(*self.loads, *self.backups):
            part.ticket.synchronize()
