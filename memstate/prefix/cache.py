"""The prefix cache: a tree of token prefixes, policies that decide, and the command buffer that executes.

file     a row's snapshot moves to a holder that a node of the tree names; the row's KV pages get one more owner
match    the deepest node with a state; a row starts from it and leases the path that leads to it
evict    states and pages are given up to make room, see `memstate.prefix.contents`

`Holdings` counts the readers of a state: rows whose first step is going to read it. The tree counts the leases of a
path: rows and sessions that share its pages. The cache only records changes. It touches no tensor and submits nothing.
"""

import logging
import math
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from memstate import logs
from memstate.checks import is_whole, shown
from memstate.errors import InvalidArgument
from memstate.prefix.contents import Contents
from memstate.prefix.lease import NO_NODE, Lease
from memstate.prefix.match import Match
from memstate.prefix.policies import Place
from memstate.prefix.settings import Prefix
from memstate.prefix.tree import Node
from memstate.requests.handles import Snapshot
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.requests.pages import NO_PAGES, Ids
from memstate.slots.commands import CommandBuffer
from memstate.tokens import BYTES, Key, SaltedTokens

DECODED = ("boundary", "end")  # kinds of states whose length is beyond the prompt


class TableKeeper:
    """A `Keeper` of the pages and states in the tables of a manager.

    Args:
        pages: KV pages of rows.
        holdings: Owners and readers of states.
    """

    def __init__(self, pages: PageTable, holdings: Holdings) -> None:
        self.page_size, self.pages = pages.page_size, pages.allocator.pages
        self._allocator, self._holdings = pages.allocator, holdings

    def free(self) -> int:
        """Returns how many pages are free."""
        return self._allocator.free

    def release(self, pages: Sequence[int]) -> None:
        """Ends the cache's ownership of pages."""
        self._allocator.release(pages)

    def held(self) -> Collection[int]:
        """Returns the registers of cached states."""
        return self._holdings.held["cached"]

    def owner(self, state: int) -> object:
        """Returns the node to which a state belongs."""
        return self._holdings.owner[state]

    def readers(self) -> Counter[int]:
        """Returns, for each state, how many rows are about to read it in their first step."""
        return self._holdings.readers

    def end(self, states: Sequence[Snapshot]) -> None:
        """Releases states and the holders in which they lie."""
        self._holdings.end(states)


class PrefixCache(Contents):
    """Finds states again by token prefix.

    Args:
        settings: Policies and limits. None: the cache stays empty, and callers do not use it.
        commands: Records the changes of owners.
        pages: KV pages of rows.
        holdings: Owners and readers of states.
    """

    def __init__(self, settings: Prefix | None, commands: CommandBuffer, pages: PageTable, holdings: Holdings) -> None:
        self._commands, self._pages, self._holdings = commands, pages, holdings
        self._told = logs.Repeats(logs.logger("prefix"))
        super().__init__(settings, TableKeeper(pages, holdings))

    def __repr__(self) -> str:
        held = f"{self.states} states, {self.tree.total_pages} pages in {self.tree.nodes} nodes"
        return "PrefixCache({}, {}, {})".format(held, *self._policies)

    def match(self, prompt: SaltedTokens, most: int | None = None) -> Match:
        """Looks a prompt up and changes nothing.

        Args:
            prompt: The prompt.
            most: Tokens that a hit may cover at most. None: all but the last.

        Returns:
            The match: the deepest cached state, and how many first tokens of the prompt have a state, have KV, and are
            known to the tree.
        """
        size, named = self._pages.page_size, len(prompt.key) // BYTES
        known, reach = prompt.extent or (named, named)
        end = min(max(0, known - 1) if most is None else most, reach) // size
        lookup = self.tree.find(prompt, end)
        stated, evicted, kv = lookup.stated, lookup.evicted, lookup.kv
        above = stated.end if stated else 0
        if prompt.extent:  # the caller has KV up to here, whatever the tree knows
            evicted, kv = next((node for node in lookup.known.path() if node.evicted and node.end > above), None), end
        gone = evicted.end if evicted else above
        snapshot, remembered = stated.snapshot if stated else None, lookup.known.end * size
        return Match(known, above * size, kv * size, gone * size, snapshot, found=lookup, known_length=remembered)

    def hold(self, match: Match, prompt: SaltedTokens) -> Lease:
        """Leases the path of a match until `release`: until then, no eviction takes the KV of the path.

        The matched state gets one more reader. The caller must end this read.

        Args:
            match: The match of the prompt. The path ends at the node of the matched state.
            prompt: The prompt.

        Returns:
            The lease.
        """
        if match.snapshot:
            self._holdings.begin_read(match.snapshot.register)
        node = (match.found and match.found.stated) or NO_NODE
        self.tree.lease(node)
        return Lease(node, prompt, match, end=node.end)

    def release(self, node: Node) -> None:
        """Ends a lease. Evicts the node's KV if the node is a leaf without a state and the policy does not keep its KV.

        Args:
            node: The deepest node of the leased path.
        """
        self.tree.unlease(node)
        self.drop_bare(node)

    def shorten(self, lease: Lease, length: int) -> None:
        """Moves the end of a lease up the tree, so that it covers fewer tokens.

        Args:
            lease: The lease to shorten.
            length: Tokens that the lease covers from then on.
        """
        node, end = self.up(lease.node, length), length // self._pages.page_size
        self._move_lease(lease, self.tree.cut(node, end) if node.end > end else node)

    def up(self, node: Node, length: int) -> Node:
        """Returns the node that has the last whole page of a prefix.

        Args:
            node: The deepest node of a path that begins with the prefix.
            length: Tokens of the prefix.
        """
        end = length // self._pages.page_size
        while node.parent is not None and node.end - len(node.key) // self._unit >= end:
            node = node.parent
        return node

    def fork(self, row: int, others: Sequence[int], length: int) -> None:
        """Gives the lease of one row to other rows, if it has one.

        Args:
            row: The row with the lease.
            others: Rows that share its first tokens.
            length: How many tokens they share.
        """
        if lease := self.leases.get(row):
            # If the rows share only part of a block, the key of this block names other tokens in each row.
            prompt = lease.prompt.head(length - length % self.names.size)
            for other in others:
                self.tree.lease(lease.node)
                self.leases[other] = Lease(lease.node, prompt, lease.match, end=lease.end)

    def end(self, rows: Sequence[int]) -> None:
        """Ends the leases of rows.

        Args:
            rows: Rows; those without a lease are skipped.
        """
        for row in rows:
            if lease := self.leases.pop(row, None):
                self.release(lease.node)

    def supersede(self, own: dict[Node, int], first: int | None, last: float = math.inf) -> None:
        """Marks states of a session as superseded, unless another request has used them.

        A state whose length is from `first` to `last` is not marked.

        Args:
            own: A dict with the nodes whose states the session left here. The value of a node says how often the
                session used its state. Nodes that have no state now are removed from the dict.
            first: Shortest length that is not marked, in tokens. None: every state but the longest is marked, and the
                longest loses the mark that it may have had.
            last: Longest length that is not marked, in tokens.
        """
        for node in [node for node in own if not node.snapshot]:
            del own[node]
        size = self._pages.page_size
        if first is None and own:
            longest = max(own, key=lambda node: node.end)
            self._superseded.pop(longest, None)
            first = longest.end * size
        for node, uses in own.items():
            if not (first or 0) <= node.end * size <= last and node.uses == uses:
                self._note_superseded(node)

    def marks(self, match: Match) -> list[tuple[int, str]]:
        """Returns the lengths at which a prompt is to keep states: the placement names them, the policy admits them.

        Args:
            match: How far the cache matches the prompt.

        Returns:
            Pairs (length, kind), ascending. Lengths are in tokens, multiples of `PageTable.unit`.

        Raises:
            InvalidArgument: The placement did not return a dict of such lengths and kinds.
        """
        size, unit, placement = self._pages.page_size, self._pages.unit, self.settings.placement
        named = placement.marks(match, unit)
        wanted: list[tuple[int, str]] = []
        for at, kind in named.items() if isinstance(named, dict) else ((None, None),):
            sound = (type(at) is int or is_whole(at)) and isinstance(kind, str)
            if sound and not match.length < at <= match.tokens:
                continue
            if not sound or at % unit:
                raise InvalidArgument(
                    f"{placement!r} returned {shown(named)}: expected a dict of lengths, multiples of {unit}, "
                    "and kinds, such as {64: 'prompt'}"
                )
            wanted.append((int(at), kind))
        above, admits = match.length // size, self.state_policy.admits
        return [one for one in sorted(wanted) if admits(Place(one[0] // size, above, one[1]))]

    def use(self, lease: Lease) -> None:
        """Counts a request, and a use of the matched state if there is one. Policies learn of it later, see `hear`.

        Args:
            lease: The request's lease.
        """
        match = lease.match
        counts = self._counts
        counts["lookups"] += 1
        counts["hit_tokens"] += match.length
        counts["lost_no_sharing"] += match.tokens - match.kv_length  # `Match.lost`, inlined: a tenth of a match faster
        counts["lost_evicted"] += match.evicted_length - match.length
        counts["lost_no_snapshot"] += match.kv_length - match.evicted_length
        if match.found is None:
            return
        if (stated := match.found.stated) is not None:
            stated.uses += 1
            if self._superseded:
                self._superseded.pop(stated, None)
            if stated in lease.own:
                lease.own[stated] += 1
            if self.below:
                self.below.used(stated)
        self.hear(match.found, match.tokens)

    def file(
        self, rows: Iterable[tuple[Lease, SaltedTokens, int, Ids, Sequence[tuple[int, int, str]]]]
    ) -> list[Snapshot | None]:
        """Takes the KV of rows, and those of their states that the policy admits.

        Each lease is extended over the pages that its row now shares with the tree.

        Args:
            rows: For each row: its lease, its tokens, the number of whole pages to take, their ids, and its states in
                ascending order. A state is (register, tokens, kind), see `memstate.prefix.policies.base.Place`. If the
                register is a holder, its state moves no further: the cache becomes its owner. Rows with 0 pages are
                skipped.

        Returns:
            For each row the longest cached state at one of the lengths in `rows`, None if there is none.
        """
        moves: list[tuple[int, int]] = []
        try:
            cached = [self._file(*row, moves) if row[2] else [] for row in rows]
        finally:  # if a policy raises, record the moves so far: their nodes own the states already
            self._record(moves)
        self.trim()
        return [next((state for state in reversed(states) if self.has(state)), None) for states in cached]

    def trim(self) -> None:
        """Evicts states until at most `most_states` are cached. This can evict the newest state."""
        if self.settings.most_states is not None:
            self.evict_states(self.states - self.settings.most_states, "limit")

    def can_evict(self, pages: int) -> bool:
        """Returns whether eviction could free a number of pages.

        A page counts if no lease keeps it and the tree is its only owner. The pages of leaves are counted first, in the
        order of eviction, then those of the other nodes, until there are enough.

        Args:
            pages: Pages to free.
        """
        if pages <= 0 or pages > self.evictable_pages:
            return pages <= 0
        allocator = self._pages.allocator
        left, seen, held = pages, set[Node](), Counter[int]()
        for node in chain(self.page_policy.victims(), (node for _, node in self.tree.walk())):
            if not (node.leases or node in seen):  # a policy may offer a node more than once
                seen.add(node)
                alone = allocator.alone(node.pages)
                left -= alone
                if left <= 0:
                    return True
                if alone < len(node.pages):
                    held.update(node.pages)
        # A page that nodes of several salts share becomes free when all of these nodes are evicted.
        return left <= sum(allocator.holders[page] == times > 1 for page, times in held.items())

    def clear(self) -> None:
        """Evicts all states and pages that no row and no session uses. The tiers do not save them.

        Raises:
            Broken: An earlier call was interrupted.
        """
        with self._commands.guard.changing("clear"):
            self._clearing = True
            self.evict_states(self.states)
            nodes = [node for _, node in self.tree.walk() if not node.leases]
            for node in reversed(nodes):  # children before their parents
                if not node.ghost:
                    self._give_up(node, len(node.pages))
            self._forget(0)
            self._clearing = False

    def adopt(self, snapshot: Snapshot, prompt: SaltedTokens, pages: Ids) -> Node | None:
        """Takes over the state of a session that must free its slots. The state stays in its register.

        Args:
            snapshot: The state.
            prompt: The tokens that the state stands for: whole pages.
            pages: Ids of these pages.

        Returns:
            The state's node. None: the cache has a state of these tokens already, or the policy declines this one. The
            session then stays the owner.
        """
        node = self._place(prompt, len(prompt.key) // self._unit, pages, "end", None, [])
        if node is None or node.snapshot is not None:
            return None
        self._attach(node, self._holdings.give(snapshot, node), "end", prompt)
        self._holdings.published += 1
        return node

    def has(self, snapshot: Snapshot) -> bool:
        """Returns whether a state is still cached.

        Args:
            snapshot: The handle of a state that was cached.
        """
        return self._holdings.held["cached"].get(snapshot.register) is snapshot

    def _file(
        self, lease: Lease, prompt: SaltedTokens, end: int, pages: Ids, states: Sequence[tuple[int, int, str]],
        moves: list[tuple[int, int]],
    ) -> list[Snapshot]:  # fmt: skip
        """Does the work of `file` for one row, and returns the states that are cached at its lengths, ascending.

        Adds a pair (holder, register) to `moves` for each state that moves from a register of the row to a holder.
        """
        start, known = lease.node, min(end, lease.end, len(lease.prompt.key) // self._unit)
        while start.end > known and start.parent is not None:
            start = start.parent
        kept: list[Snapshot] = []
        node, path = None, start if start.end else None
        for register, length, kind in states:
            held = self._holdings.state(register)  # None: a register of the row, not a holder
            node = self._place(prompt, length // self._pages.page_size, pages, kind, path, moves)
            cached = node.snapshot if node is not None else None
            if cached is not None and held is None:
                self._commands.release([register])
            elif cached is None and node is not None:
                cached = self._holdings.give(held, node) if held else self._to_holder(node, register, length, moves)
                if cached is not None:
                    self._attach(node, cached, kind, prompt)
                    lease.own[node] = node.uses
            if cached is not None:
                kept.append(cached)
                if kind in DECODED:
                    self._supersede_decoded(lease, cached)
            if held is not None and cached is not held:
                self._holdings.end([held])
        if node is None or node.end < end:
            node = self._grow(prompt, end, pages, node or path)
        self._move_lease(lease, self._shared(node, pages))
        return kept

    def _place(
        self, prompt: SaltedTokens, end: int, pages: Ids, kind: str, start: Node | None, moves: list[tuple[int, int]]
    ) -> Node | None:
        """Returns the node for a state of the first `end` pages of a prompt, None if the policy declines the state.

        If the returned node has a state already, it is a state of the same tokens, and the new one is a duplicate.
        `start` is a leased node on the path. `moves` are not recorded yet.
        """
        start = start if start is not None and start.end <= end else None
        lookup = self.tree.find(prompt, end, start)
        above = lookup.stated.end if lookup.stated is not None else 0
        if above == end:
            self._counts["duplicates"] += 1
            if self.names.keyed and lookup.stated is not None:
                self._superseded.pop(lookup.stated, None)  # the engine has the KV up to this node, perhaps again
            return lookup.stated
        admits = self.state_policy.admits(Place(end, above, kind))
        if not admits or (self.by_key and self._named_twice(prompt, end, moves)):
            self._counts["declined"] += 1
            return None
        return self._grow(prompt, end, pages, start)

    def _named_twice(self, prompt: SaltedTokens, end: int, moves: list[tuple[int, int]]) -> bool:
        """Returns whether the key of a block names another prefix as well. If so, the state of that prefix is ended."""
        key = prompt.key[(end - 1) * self._unit : end * self._unit][self.names.last]
        others = [node for node in self.by_key.get(key, ()) if self.tree.salt(node) == prompt.salt]
        for other in others:
            self._record(moves)  # `other` may have a state of another row of this call
            why = "a key is at two places: it is no hash of all tokens up to its end, or keys= begin at another block"
            self._told.event(logging.WARNING, "two prefixes", blocks=f"{other.end} {end}", why=why)
            self._note_superseded(other)
            if other.snapshot and other.snapshot.register not in self._holdings.readers:
                self._holdings.end([other.snapshot])
                self.detach(other, "cleared")
                self.drop_bare(other)
        return bool(others)

    def forget(self, key: Key) -> None:
        """Marks states to be evicted first, because the engine has no KV of their tokens any more. Releases nothing.

        Args:
            key: Encoded keys of blocks. Keys without a state are skipped.
        """
        for at in range(0, len(key), self._unit):
            for node in self.by_key.get(key[at : at + self._unit][self.names.last], ()):
                self._note_superseded(node)

    def _supersede_decoded(self, lease: Lease, newer: Snapshot) -> None:
        """Marks the row's previous decoded state as superseded, unless another request has used it."""
        older, lease.decoded = lease.decoded, newer
        node = self._holdings.owner[older.register] if older and older != newer else None
        if isinstance(node, Node) and node.snapshot == older and node.uses == lease.own.get(node):
            self._note_superseded(node)

    @staticmethod
    def _shared(node: Node, pages: Ids) -> Node:
        """Returns the deepest node on the path whose pages are the row's own.

        In deeper nodes the tree has the pages of another row, which came first. The row's lease does not cover them.
        """
        while pages and node.parent is not None and node.pages[-1] != pages[node.end - 1]:
            node = node.parent
        return node

    def _move_lease(self, lease: Lease, node: Node) -> None:
        before, lease.node, lease.end = lease.node, node, node.end
        self.tree.lease(node)
        self.tree.unlease(before)
        self.drop_bare(before)

    def _grow(self, prompt: SaltedTokens, end: int, pages: Ids, start: Node | None) -> Node:
        """Returns the node that ends at page `end` of a prompt, and gives KV to the path from `start` to it."""
        node, had = self.tree.insert(prompt, pages, start, end)
        if had < end:
            self._pages.allocator.share(pages[had:end])
            self.grown(node)
            if self.watcher:
                self.watcher.pages_stored(node, had)
        return node

    def _attach(self, node: Node, state: Snapshot, kind: str, prompt: SaltedTokens) -> None:
        """Notes that a node has a state. The state's holder belongs to the node already."""
        policy = self.state_policy  # this access makes the policy learn of earlier requests before the node changes
        node.snapshot, node.evicted, node.kind = state, False, prompt.kind
        if self.names.keyed:
            self.by_key.setdefault(node.key[self.names.last], []).append(node)
        self._counts["inserted"] += 1
        policy.added(node, kind)
        if self.below:
            self.below.added(node)
        if self.watcher:
            self.watcher.state_stored(node)

    def _to_holder(self, node: Node, register: int, length: int, moves: list[tuple[int, int]]) -> Snapshot | None:
        """Adds to `moves` the move of a row's state to a holder. Returns None if no holder is or can be made free."""
        if not self._holdings.free:
            self._record(moves)  # eviction may release the target of one of these moves
            self.tree.lease(node)  # eviction must not remove the node
            self.evict_states(1)
            self.tree.unlease(node)
        if not self._holdings.free:
            self._counts["refused"] += 1
            return None
        state = self._holdings.add([length], node)[0]
        moves.append((state.register, register))
        self._holdings.published += 1
        return state

    def _record(self, moves: list[tuple[int, int]]) -> None:
        """Records the moves, pairs (target register, source register), and empties the list."""
        if moves:
            self._commands.move([to for to, _ in moves], [of for _, of in moves])
            moves.clear()

    def insert_loaded(self, prompt: SaltedTokens) -> tuple[Node, int, Ids]:
        """Claims a holder and a slot for a state that the tiers load, and pages for the tokens that it stands for.

        Call this only if a holder, a slot and the pages are free. Call `loaded` once the loads are under way.

        Args:
            prompt: The tokens that the state stands for.

        Returns:
            The state's node; how many pages of its path had KV already; the ids of the pages that were claimed.
        """
        length, size, allocator = len(prompt.key) // BYTES, len(prompt.key) // self._unit, self._pages.allocator
        had = self.tree.find(prompt).kv
        fresh = allocator.claim(size - had) if allocator.pages else NO_PAGES
        node, _ = self.tree.insert(prompt, array("q", [0]) * had + fresh if fresh else NO_PAGES)
        snapshot = node.snapshot = self._holdings.add([length], node)[0]
        node.evicted, node.kind = False, prompt.kind
        self._commands.claim([snapshot.register], [length])
        self._counts["loaded"] += 1
        if self.watcher:
            if had < size:
                self.watcher.pages_stored(node, had)
            self.watcher.state_stored(node)
        return node, had, fresh

    def loaded(self, nodes: Sequence[tuple[Node, bool]]) -> None:
        """Tells the policies that the tiers load states.

        Args:
            nodes: Pairs (node of the state, whether KV pages are loaded with the state).
        """
        for node, grown in nodes:
            self.state_policy.added(node, "again")
            if grown:
                self.grown(node)
