"""The prefix cache: a tree of token prefixes, policies that decide, and the command buffer that executes.

insert   a row's snapshot moves to a holder that a node of the tree names; the row's KV pages get one more owner
match    the deepest node with a state; a row starts from it and takes a lease on what leads to it
evict    a state: its slot is free, KV stays (a tombstone) or goes with the leaf; a leaf's pages: its state goes too

Pins are the holders' (a first step is about to read the state), leases the tree's (a row or a session shares the
pages). Nothing here touches a tensor, and nothing is submitted.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.prefix.match import Match
from memstate.prefix.policies import Place
from memstate.prefix.settings import Prefix
from memstate.prefix.tree import Node, Tree
from memstate.requests.handles import Snapshot
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.slots.commands import CommandBuffer
from memstate.stats import PrefixStats
from memstate.tokens import BYTES

NO_NODE = Node(None, b"", [], 0)  # the path of who shares nothing
NO_MATCH = Match(0, 0, 0, 0)
KEYS = 2**20  # tokens of prompts remembered where KV is the caller's: 8 MiB of keys


class Below(Protocol):
    """What lies below the device: it hears of states that come, are used and go."""

    def added(self, node: Node) -> None:
        """A state has been cached."""

    def used(self, node: Node) -> None:
        """A request goes on from a state."""

    def save(self, nodes: Sequence[Node]) -> None:
        """The states of these nodes are given up right behind this call."""


@dataclass
class Lease:
    """What a row or a session has of the tree.

    node: what its path leads to; what is below it is not kept. kinds: why a snapshot is wanted at a length. own: nodes
    whose states came from here, and how often they were used from here. key: the prompt's, which all that is handed
    over later must go on from.
    """

    node: Node
    salt: Hashable
    match: Match
    kinds: dict[int, str]
    own: dict[Node, int] = field(default_factory=dict)
    key: bytes = b""


@dataclass
class Insertion:
    """What a row has for the tree: a key of whole pages, their ids, and a register with a state of `length` tokens."""

    lease: Lease
    key: bytes
    pages: list[int]
    register: int | None
    length: int
    ended: bool


class PrefixCache:
    """Finds states again by token prefix. Attributes: tree, leases (by row), nodes (by holder register), to look at."""

    enabled = True

    def __init__(self, settings: Prefix, commands: CommandBuffer, pages: PageTable, snapshots: Snapshots) -> None:
        self.settings = settings
        self._commands, self._pages, self._snapshots = commands, pages, snapshots
        self._states, self._kv = settings.states, settings.of_pages
        for policy in (self._states, self._kv):
            policy.belong(self)
        self._unit = BYTES * pages.page_size
        self.below: Below | None = None
        self.tree = Tree(self._unit)
        self.reset()

    def __repr__(self) -> str:
        held = f"{len(self.nodes)} states, {self.tree.total_pages} pages in {self.tree.nodes} nodes"
        return f"PrefixCache({held}, {self._states}, {self._kv})"

    def reset(self) -> None:
        """Forgets everything: only where registers and pages are reset as well."""
        pages, size = self._pages.allocator.pages, self._pages.page_size
        self.tree.reset((pages or KEYS // size) if self._states.remembers else 0)
        self.leases: dict[int, Lease] = {}
        self.nodes: dict[int, Node] = {}
        self._moves: list[tuple[int, int]] = []  # recorded with the next eviction, or at the end of a batch
        self._states.reset()
        self._kv.reset()
        self._counts = dict.fromkeys((each.name for each in fields(PrefixStats)), 0)

    def match(self, key: bytes, salt: Hashable, most: int) -> Match:
        """Looks a prompt up and changes nothing.

        key: its tokens. most: tokens that a hit may cover; the rest is computed in any case.
        """
        found = self.tree.find(key[: most * BYTES // self._unit * self._unit], salt)
        size, stated = self._pages.page_size, found.stated
        length = stated.end * size if stated else 0
        gone = found.evicted.end * size if found.evicted else length
        return Match(
            len(key) // BYTES, length, found.kv * size, gone, stated.snapshot if stated else None, found=found
        )  # fmt: skip

    def hold(self, match: Match, salt: Hashable) -> Lease:
        """Keeps what was matched, whatever else is evicted, until `let_go`."""
        node = match.found.stated if match.found and match.found.stated else NO_NODE
        self.tree.lease(node)
        if match.snapshot:
            self._snapshots.pin(match.snapshot.register)
        return Lease(node, salt, match, {})

    def pages(self, match: Match) -> list[int]:
        """Ids of the pages up to the state that was matched."""
        stated = match.found.stated if match.found else None
        return self.tree.pages_to(stated) if stated else []

    def unpin(self, lease: Lease) -> None:
        """Ends the pin of `hold`: who reads the state has one of its own, or its copy is recorded."""
        if lease.match.snapshot:
            self._snapshots.unpin(lease.match.snapshot.register)

    def release(self, lease: Lease) -> None:
        """Ends a lease; KV that nobody can use goes with it, if the policy says so."""
        self.tree.unlease(lease.node)
        self._drop_bare_leaves(lease.node)

    def shorten(self, lease: Lease, length: int) -> None:
        """Moves a lease up to the first `length` tokens: the rest is not shared."""
        node, end = self._up(lease.node, length), length // self._pages.page_size
        self._move_lease(lease, self.tree.cut(node, end) if node.end > end else node)

    def _up(self, node: Node, length: int) -> Node:
        """The node above that has the last whole page of `length` tokens."""
        end = length // self._pages.page_size
        while node.parent is not None and node.end - len(node.key) // self._unit >= end:
            node = node.parent
        return node

    def suspend(self, lease: Lease, length: int, match: Match, salt: Hashable) -> Lease:
        """A lease on the first `length` tokens of another's, which lets go of its own until `restore` or for good."""
        node = self._up(lease.node, length)
        self.tree.lease(node)
        self.tree.unlease(lease.node)
        return Lease(node, salt, match, {})

    def release_suspended(self, lease: Lease) -> None:
        """Looks after what a suspended lease led to, now that it is gone for good."""
        self._drop_bare_leaves(lease.node)

    def restore(self, lease: Lease) -> None:
        """Undoes `suspend` for the lease that let go."""
        self.tree.lease(lease.node)

    def on_miss(self, row: int, salt: Hashable, key: bytes | None) -> None:
        """Notes a row that found nothing here: what it leaves goes under its salt all the same."""
        self.leases[row] = Lease(NO_NODE, salt, NO_MATCH, {}, key=key or b"")

    def fork(self, row: int, others: Sequence[int], length: int) -> None:
        """Gives more rows the lease of one that they share the first `length` tokens with."""
        if lease := self.leases.get(row):
            for other in others:
                self.tree.lease(lease.node)
                self.leases[other] = Lease(lease.node, lease.salt, lease.match, {}, key=lease.key[: length * BYTES])

    def end(self, rows: Sequence[int]) -> None:
        """Ends the leases of rows."""
        for row in rows:
            if lease := self.leases.pop(row, None):
                self.release(lease)

    def supersede(self, own: dict[Node, int], length: int) -> None:
        """Says that whoever left these states here keeps a newer one of `length` tokens, or here where that is 0: older
        ones that nobody else has used go first.
        """
        for node in [node for node in own if not node.snapshot]:
            del own[node]
        size = self._pages.page_size
        newest = length or max((node.end * size for node in own), default=0) - 1
        for node, uses in own.items():
            if node.end * size <= newest and node.uses == uses:
                self._states.superseded(node)

    def take_over(self, lease: Lease) -> bool:
        """Whether the state of a match can go to a row itself, because nobody else is about to read it."""
        return lease.match.snapshot is not None and self._snapshots.pins(lease.match.snapshot.register) == 1

    def taken(self, lease: Lease) -> None:
        """The state of a match has moved to a row: a tombstone stays."""
        assert lease.match.found is not None and lease.match.found.stated is not None
        if snapshot := self._detach(lease.match.found.stated):
            self._snapshots.end(snapshot)  # its register is free with the pin

    def boundaries(self, lease: Lease, tokens: int) -> list[int]:
        """Lengths at which a request is to take snapshots besides the boundaries: the junction, where KV reached and no
        state did, and the end of the prompt; as far as the policy would keep them.
        """
        size, match = self._pages.page_size, lease.match
        kinds = {match.evicted_length: "again", match.kv_length: "branch", tokens // size * size: "prompt"}
        lease.kinds = {
            length: kind
            for length, kind in sorted(kinds.items())
            if length > match.length and self._states.admits(Place(length // size, match.length // size, kind))
        }
        return list(lease.kinds)

    def use(self, lease: Lease) -> None:
        """Notes that a request starts from what it matched: counts, and tells the policies."""
        match, counts = lease.match, self._counts
        counts["lookups"] += 1
        counts["prompt_tokens"] += match.tokens
        counts["hit_tokens"] += match.length
        for reason, lost in match.lost.items():
            counts[f"lost_{reason}"] += lost
        if match.found is None:
            return
        if not match.found.reach.is_root:
            self._kv.used(match.found.reach)
        self._states.asked(match.found.known, match.tokens // self._pages.page_size)
        if match.found.stated:
            match.found.stated.uses += 1
            if match.found.stated in lease.own:
                lease.own[match.found.stated] += 1
            self._states.used(match.found.stated)
            if self.below:
                self.below.used(match.found.stated)

    def insert(self, insertions: Sequence[Insertion]) -> list[Snapshot | None]:
        """Takes what rows have: KV in any case, states as the policy says. Returns the states that stand for each
        offer's length now; leases move on to the ends of their keys.
        """
        try:
            snapshots = [self._insert(insertion) if insertion.key else None for insertion in insertions]
        finally:  # also where a policy of somebody's raises: what a node has is moved there
            self._record_moves()
        if self.settings.most_states is not None:  # what has just come may be what is worth least
            self.evict_states(len(self.nodes) - self.settings.most_states)
        return [snapshot if snapshot and self._has(snapshot) else None for snapshot in snapshots]

    def _has(self, snapshot: Snapshot) -> bool:
        node = self.nodes.get(snapshot.register)
        return node is not None and node.snapshot == snapshot

    def _insert(self, insertion: Insertion) -> Snapshot | None:
        lease, snapshot, node = insertion.lease, None, None
        if insertion.register is not None:
            head = insertion.key[: insertion.length * BYTES]
            found = self.tree.find(head, lease.salt)
            kind = lease.kinds.get(insertion.length, "end" if insertion.ended else "boundary")
            above = found.stated.end if found.stated else 0
            there = found.stated if found.stated and above * self._unit == len(head) else None
            if there:
                self._counts["duplicates"] += 1
                self._commands.release([insertion.register])
                snapshot = there.snapshot
            elif not self._states.admits(Place(len(head) // self._unit, above, kind)):
                self._counts["declined"] += 1
            else:
                node = self._grow(head, insertion, None)
                snapshot = self._attach(node, insertion.register, insertion.length, kind)
                if snapshot:
                    lease.own[node] = node.uses
        self._move_lease(lease, self._shared(self._grow(insertion.key, insertion, node), insertion.pages))
        return snapshot

    @staticmethod
    def _shared(node: Node, pages: list[int]) -> Node:
        """The deepest node that has the row's own pages: those that another brought first are not the row's to keep."""
        while pages and node.parent is not None and node.pages[-1] != pages[node.end - 1]:
            node = node.parent
        return node

    def _move_lease(self, lease: Lease, node: Node) -> None:
        before, lease.node = lease.node, node
        self.tree.lease(node)
        self.tree.unlease(before)
        self._drop_bare_leaves(before)

    def _grow(self, key: bytes, insertion: Insertion, start: Node | None) -> Node:
        node, had = self.tree.insert(key, insertion.pages, insertion.lease.salt, start)
        if had * self._unit < len(key):
            self._pages.allocator.share(insertion.pages[had : len(key) // self._unit])
            self._grown(node)
        return node

    def _grown(self, node: Node) -> None:
        if node.parent is not None:
            self._kv.dropped(node.parent)
        self._kv.leaf(node)

    def _attach(self, node: Node, register: int, length: int, kind: str) -> Snapshot | None:
        """Moves a state to the node, if a holder can be had."""
        if not self._snapshots.free:
            self.tree.lease(node)  # or making room could take it away again
            self.evict_states(1)
            self.tree.unlease(node)
        if not self._snapshots.free:
            self._counts["refused"] += 1
            return None
        snapshot = node.snapshot = self._snapshots.add(length, ())
        node.evicted = False
        self._moves.append((snapshot.register, register))
        self.nodes[snapshot.register] = node
        self._counts["inserted"] += 1
        self._snapshots.published += 1
        self._states.added(node, kind)
        if self.below:
            self.below.added(node)
        return snapshot

    def insert_loaded(self, key: bytes, salt: Hashable, length: int) -> tuple[Node, int, list[int]]:
        """Takes in a state that arrives from below, and pages for what leads to it. Only where a holder, a slot and the
        pages are free; `planted` tells the policies, once the bytes are on their way.

        key: the `length` tokens that it stands for. Returns its node, how many pages are here already, and ids of the
        rest.
        """
        size, allocator = len(key) // self._unit, self._pages.allocator
        had = self.tree.find(key, salt).kv
        fresh = allocator.claim(size - had) if allocator.pages else []
        node, _ = self.tree.insert(key, [0] * had + fresh if fresh else [], salt)
        snapshot = node.snapshot = self._snapshots.add(length, ())
        node.evicted = False
        self.nodes[snapshot.register] = node
        self._commands.claim([snapshot.register])
        self._commands.label([snapshot.register], [length])
        self._counts["loaded"] += 1
        return node, had, fresh

    def loaded(self, nodes: Sequence[tuple[Node, bool]]) -> None:
        """Tells the policies of states that have come up, each with whether KV has come with it."""
        for node, grown in nodes:
            self._states.added(node, "again")
            if grown:
                self._grown(node)

    def _record_moves(self) -> None:
        moves, self._moves = self._moves, []
        if moves:
            self._commands.move([to for to, _ in moves], [of for _, of in moves])

    @property
    def evictable_states(self) -> int:
        """States that nobody is about to read."""
        return len(self.nodes) - sum(register in self.nodes for register in self._snapshots.pinned)

    @property
    def evictable_pages(self) -> int:
        """Pages of which no row and no session has a lease; others may hold them."""
        return self.tree.total_pages - self.tree.leased_pages if self._pages.allocator.pages else 0

    def can_evict(self, pages: int) -> bool:
        """Whether so many pages would be free: those that no lease keeps and nobody else holds. Leaves are looked at
        first, in the order in which they would go; everything only where these are not enough.
        """
        if pages <= 0 or pages > self.evictable_pages:
            return pages <= 0
        left, seen = pages, set[Node]()  # a policy may offer a node more than once
        for node in self._kv.victims():
            if not (node.leases or node in seen):
                seen.add(node)
                left -= self._alone(node)
                if left <= 0:
                    return True
        held = Counter(page for _, node in self.tree.walk() if not node.leases for page in node.pages)
        holders = self._pages.allocator.holders
        return pages <= sum(holders[page] == times for page, times in held.items())  # those under two salts as well

    def _alone(self, node: Node) -> int:
        holders = self._pages.allocator.holders
        return sum(holders[page] == 1 for page in node.pages)

    def evict_states(self, n: int) -> int:
        """Gives up n states, the least worthy first, or as many as there are; returns how many slots are free then.
        What lies below the device may keep them.
        """
        chosen: list[Node] = []
        for node in self._states.victims() if n > 0 else ():
            if node.snapshot and node.snapshot.register not in self._snapshots.pinned:
                chosen.append(node)
                if len(chosen) == n:
                    break
        self._record_moves()
        if self.below and chosen:
            self.below.save(chosen)
        self._snapshots.drop([node.snapshot for node in chosen if node.snapshot])
        for node in chosen:
            self._detach(node)
            self._drop_bare_leaves(node)
        return len(chosen)

    def evict_pages(self, n: int) -> int:
        """Gives up leaves, the least worthy first and those that the policy does not offer last, until n pages are free
        that were not, or none is left to give up; returns how many are.
        """
        self._record_moves()
        allocator = self._pages.allocator
        before = allocator.free
        goal = before + n
        while allocator.free < goal:  # a policy may have passed over what became a leaf meanwhile
            if not self._give_up_leaves(self._kv.victims(), goal):
                rest = [node for _, node in self.tree.walk()]
                if not self._give_up_leaves(reversed(rest), goal):  # children first
                    break
        return allocator.free - before

    def _give_up_leaves(self, nodes: Iterable[Node], goal: int) -> bool:
        """Gives up those that are leaves, until so many pages are free; returns whether there were any."""
        allocator, any_given = self._pages.allocator, False
        for node in nodes:
            if not (node.leases or node.carriers or node.ghost):
                self._give_up(node, goal - allocator.free)
                any_given = True  # others may hold its pages: what it stood on is a leaf now
                if allocator.free >= goal:
                    break
        return any_given

    def make_room(self, pages: int) -> None:
        """Gives up as many pages, where that many can be given up, else none."""
        if self.can_evict(pages):
            self.evict_pages(pages)

    def require_foreign(self, snapshots: Sequence[Snapshot]) -> None:
        """Raises: InvalidArgument for snapshots that are the cache's to drop."""
        for snapshot in snapshots:
            if isinstance(snapshot, Snapshot) and self._has(snapshot):
                raise InvalidArgument(
                    f"{snapshot} is the prefix cache's: it drops it when the slot is needed, and finds it by tokens=..."
                )

    def clear(self) -> None:
        """Gives up everything that no row and no session uses, for good: nothing below the device keeps it."""
        below, self.below = self.below, None
        try:
            self._clear()
        finally:
            self.below = below

    def _clear(self) -> None:
        self.evict_states(len(self.nodes))
        nodes = [node for _, node in self.tree.walk() if not node.leases]
        for node in reversed(nodes):  # children first
            if not node.ghost:
                self._give_up(node, len(node.pages))
        self._forget(0)

    def _detach(self, node: Node) -> Snapshot | None:
        snapshot, node.snapshot = node.snapshot, None
        if snapshot:
            node.evicted = True
            del self.nodes[snapshot.register]
            self._counts["evicted_states"] += 1
            self._states.dropped(node)
        return snapshot

    def _drop_bare_leaves(self, node: Node | None) -> None:
        """Gives up KV of a leaf without a state, if the policy says so, then its parent's where that is true too."""
        while node is not None and not (node.is_root or node.carriers or node.snapshot or node.leases or node.ghost):
            if self._kv.keeps(node) and self._pages.allocator.pages:
                return
            node = self._give_up(node, len(node.pages))

    def _give_up(self, leaf: Node, pages: int) -> Node | None:
        """Takes the KV of a leaf, with its state, or only the end of one without a state where that is enough. Returns
        what is the leaf then, if it is one.
        """
        size = len(leaf.key) // self._unit
        if leaf.snapshot:
            if self.below:
                self.below.save([leaf])
            self._snapshots.drop([leaf.snapshot])
            self._detach(leaf)
        elif 0 < pages < size:
            size = pages
        self._kv.dropped(leaf)
        gone = self.tree.ghost(leaf, size)
        self._pages.allocator.release(gone)
        self._counts["evicted_pages"] += len(gone)
        above = leaf.parent
        self._forget(self.tree.memory)
        if above is None or above.is_root or above.carriers:
            return None
        self._kv.leaf(above)
        return above

    def _forget(self, memory: int) -> None:
        """Takes out hollow nodes that the memory has no room for."""
        while (node := self.tree.forgettable(memory)) is not None:
            self._states.forgotten(node)
            self.tree.remove(node)

    def inspect(self) -> list[dict[str, Any]]:
        """The nodes as plain data, parents first."""
        return [
            {
                "salt": None if salt is None else shown(salt),
                "start": node.end - len(node.key) // self._unit,
                "end": node.end,
                "register": node.snapshot.register if node.snapshot else 0,
                "evicted": node.evicted,
                "ghost": node.ghost,
                "uses": node.uses,
                "leases": node.leases,
                "children": len(node.children),
            }
            for salt, node in self.tree.walk()
        ]

    def stats(self) -> PrefixStats:
        """Figures since the start, and what is held now. Syncs: no."""
        kv = self._pages.allocator.pages
        return replace(
            PrefixStats(**self._counts), states=len(self.nodes), nodes=self.tree.nodes,
            pages=self.tree.total_pages if kv else 0, leased_pages=self.tree.leased_pages if kv else 0,
        )  # fmt: skip
