"""The prefix cache: a tree of token prefixes, policies that decide, and the command buffer that executes.

insert   a row's snapshot moves to a holder that a node of the tree names; the row's KV pages get one more owner
match    the deepest node with a state; a row starts from it and leases the path that leads to it
evict    a state: its slot is free, and KV stays (a tombstone) or goes with the leaf; a leaf's pages: its state goes too

`Snapshots` keeps the pins: a first step is about to read the state. The tree keeps the leases: a row or a session
shares the pages. Nothing here touches a tensor, and nothing is submitted.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from itertools import islice
from typing import Any

from memstate.checks import NotCopied, shown
from memstate.errors import InvalidArgument
from memstate.prefix.lease import NO_MATCH, NO_NODE, Below, Branch, Insertion, Lease
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

DECODED = ("boundary", "end")  # kinds of states beyond the prompt
KEYS = 2**20  # tokens of prompts remembered where KV is the caller's: 8 MiB of keys


class PrefixCache(NotCopied):
    """Finds states again by token prefix.

    Args:
        settings: Policies and limits.
        commands: Records the changes of owners.
        pages: KV pages of rows.
        snapshots: Registers and pins of published states.

    Attributes:
        tree: The prefixes, to look at.
        leases: Leases by row, to look at.
        nodes: Nodes with a state, by holder register, to look at.
        below: Hears of cached, used and evicted states; None where nothing lies below the device.
    """

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
        self._counts: Counter[str] = Counter()
        self.reset()

    def __repr__(self) -> str:
        held = f"{len(self.nodes)} states, {self.tree.total_pages} pages in {self.tree.nodes} nodes"
        return f"PrefixCache({held}, {self._states}, {self._kv})"

    def reset(self) -> None:
        """Forgets everything. Call it only where registers and pages are reset as well."""
        self.keep(())
        self._counts = Counter(dict.fromkeys((each.name for each in fields(PrefixStats)), 0))

    def keep(self, branches: Sequence[Branch]) -> None:
        """Forgets everything else. Call it only where registers and pages are set accordingly.

        Args:
            branches: What stays, parents first.
        """
        pages, size = self._pages.allocator.pages, self._pages.page_size
        tree = Tree(self._unit, (pages or KEYS // size) if self._states.remembers else 0)
        nodes: dict[int, Node] = {}
        for branch in branches:
            node, _ = tree.insert(branch.key, branch.pages, branch.salt)
            node.evicted, node.uses, node.snapshot = branch.node.evicted, branch.node.uses, branch.snapshot
            if branch.snapshot is not None:
                nodes[branch.snapshot.register] = node
            elif branch.node.snapshot is not None:
                node.evicted = True
        self.tree.take(tree)
        self._counts["evicted_states"] = self._counts["inserted"] + self._counts["loaded"] - len(nodes)
        self.nodes: dict[int, Node] = nodes
        self._superseded: dict[Node, None] = {}  # their row or session has a newer state, and no other uses them
        self.leases: dict[int, Lease] = {}
        self._moves: list[tuple[int, int]] = []  # recorded with the next eviction, or at the end of a batch
        self._clearing = False
        self._states.reset()
        self._kv.reset()
        for node in nodes.values():
            self._states.added(node, "again")
            if self.below:
                self.below.added(node)
        for node in [node for _, node in tree.walk() if not node.carriers]:
            self._kv.leaf(node)

    def surviving(self, sure: Mapping[int, Snapshot], pages: Set[int]) -> list[Branch]:
        """Returns the prefixes that are sound if only some states stay.

        Args:
            sure: The snapshots that stay, by register.
            pages: KV pages that do not stay.
        """
        found = []
        for salt, key, path, node in self.tree.sound(self._pages.allocator.pages > 0):
            snap = node.snapshot
            stays = snap is not None and sure.get(snap.register) == snap and snap.length * BYTES == len(key)
            if pages.isdisjoint(path):
                found.append(Branch(salt, key, path, snap if stays else None, node))
        return found

    def drop_bare_leaves(self) -> None:
        """Gives up the KV of all leaves without a state, if the policy says so."""
        for node in [node for _, node in self.tree.walk() if not node.carriers]:
            self._drop_bare_leaves(node)

    @property
    def registers(self) -> set[int]:
        """Registers of cached states."""
        return self.nodes.keys() | {node.snapshot.register for _, node in self.tree.walk() if node.snapshot}

    def miscounts(self, leases: Iterable[Lease]) -> list[str]:
        """Returns what is wrong with the tree and the cached states.

        Args:
            leases: The leases of sessions.
        """
        found = self.tree.miscounts(Counter(lease.node for lease in (*self.leases.values(), *leases)))
        stated = {node.snapshot.register: node for _, node in self.tree.walk() if node.snapshot}
        if stated != self.nodes:
            found.append(f"states are cached in registers {sorted(stated)}, noted are {sorted(self.nodes)}")
        kept = self._snapshots.kept
        found += [f"{node} has no snapshot" for r, node in stated.items() if kept.get(r) != node.snapshot]
        return found

    def match(self, key: bytes, salt: Hashable, most: int) -> Match:
        """Looks a prompt up and changes nothing.

        Args:
            key: Its tokens, encoded.
            salt: Its salt.
            most: Tokens that a hit may cover; the rest is computed in any case.

        Returns:
            What was found, and how far it reaches.
        """
        found = self.tree.find(key[: most * BYTES // self._unit * self._unit], salt)
        size, stated = self._pages.page_size, found.stated
        length = stated.end * size if stated else 0
        gone = found.evicted.end * size if found.evicted else length
        return Match(
            len(key) // BYTES, length, found.kv * size, gone, stated.snapshot if stated else None, found=found
        )  # fmt: skip

    def hold(self, match: Match, salt: Hashable) -> Lease:
        """Keeps what was matched until `release`, whatever else is evicted.

        The state is pinned too, until `unpin`.

        Args:
            match: What `match` returned.
            salt: Salt of the prompt.

        Returns:
            The lease.
        """
        node = match.found.stated if match.found and match.found.stated else NO_NODE
        self.tree.lease(node)
        if match.snapshot:
            self._snapshots.pin(match.snapshot.register)
        return Lease(node, salt, match)

    def pages(self, match: Match) -> list[int]:
        """Returns the ids of the pages up to the matched state.

        Args:
            match: What `match` returned.
        """
        stated = match.found.stated if match.found else None
        return self.tree.pages_to(stated) if stated else []

    def unpin(self, lease: Lease) -> None:
        """Ends the pin of `hold`, once the reader has its own pin or its copy is recorded.

        Args:
            lease: What `hold` returned.
        """
        if lease.match.snapshot:
            self._snapshots.unpin(lease.match.snapshot.register)

    def release(self, lease: Lease) -> None:
        """Ends a lease, and evicts KV that no request can use any more, if the policy says so.

        Args:
            lease: The lease to end.
        """
        self.tree.unlease(lease.node)
        self._drop_bare_leaves(lease.node)

    def shorten(self, lease: Lease, length: int) -> None:
        """Moves the end of a lease up the tree; the rest of its path is no longer shared.

        Args:
            lease: The lease to shorten.
            length: Tokens that it still covers.
        """
        node, end = self._up(lease.node, length), length // self._pages.page_size
        self._move_lease(lease, self.tree.cut(node, end) if node.end > end else node)

    def _up(self, node: Node, length: int) -> Node:
        """Returns the node at or above `node` that has the last whole page of `length` tokens."""
        end = length // self._pages.page_size
        while node.parent is not None and node.end - len(node.key) // self._unit >= end:
            node = node.parent
        return node

    def suspend(self, lease: Lease, length: int, match: Match, salt: Hashable) -> Lease:
        """Opens a lease on the start of another lease's path, and releases that other path.

        `restore` takes the path again; `release_suspended` gives it up for good.

        Args:
            lease: The lease to suspend.
            length: Tokens that the new lease covers.
            match: Match of the new lease.
            salt: Salt of the new lease.

        Returns:
            The new lease.
        """
        node = self._up(lease.node, length)
        self.tree.lease(node)
        self.tree.unlease(lease.node)
        return Lease(node, salt, match)

    def release_suspended(self, lease: Lease) -> None:
        """Gives up a suspended lease for good, and evicts KV that it leaves unused, if the policy says so.

        Args:
            lease: The lease that `suspend` was called with.
        """
        self._drop_bare_leaves(lease.node)

    def restore(self, lease: Lease) -> None:
        """Undoes `suspend`: the lease covers its whole path again.

        Args:
            lease: The lease that `suspend` was called with.
        """
        self.tree.lease(lease.node)

    def on_miss(self, row: int, salt: Hashable, key: bytes | None) -> None:
        """Opens a lease for a row that found nothing, so that its states and KV are cached under its salt.

        Args:
            row: The row.
            salt: Its salt.
            key: Tokens of its prompt, encoded; None where they are not known.
        """
        self.leases[row] = Lease(NO_NODE, salt, NO_MATCH, key=key or b"")

    def fork(self, row: int, others: Sequence[int], length: int) -> None:
        """Gives the lease of one row to other rows, if it has one.

        Args:
            row: The row with the lease.
            others: Rows that share its first tokens.
            length: How many tokens they share.
        """
        if lease := self.leases.get(row):
            for other in others:
                self.tree.lease(lease.node)
                self.leases[other] = Lease(lease.node, lease.salt, lease.match, key=lease.key[: length * BYTES])

    def end(self, rows: Sequence[int]) -> None:
        """Ends the leases of rows.

        Args:
            rows: Rows; those without a lease are skipped.
        """
        for row in rows:
            if lease := self.leases.pop(row, None):
                self.release(lease)

    def supersede(self, own: dict[Node, int], length: int) -> None:
        """Marks a session's older states as the first to evict.

        A state is marked where the session has a newer one and no other request has used it.

        Args:
            own: Nodes whose states the session left here, with its own uses of each. Those without a state are removed.
            length: Tokens of the newest state that the session keeps itself; 0 where its newest state is cached here.
        """
        for node in [node for node in own if not node.snapshot]:
            del own[node]
        size = self._pages.page_size
        newest = length or max((node.end * size for node in own), default=0) - 1
        for node, uses in own.items():
            if node.end * size <= newest and node.uses == uses:
                self._note_superseded(node)

    def _note_superseded(self, node: Node) -> None:
        self._superseded.pop(node, None)
        self._superseded[node] = None

    def take_over(self, lease: Lease) -> bool:
        """Returns whether the matched state can move to a row, because no other first step is about to read it.

        Args:
            lease: What `hold` returned.
        """
        return lease.match.snapshot is not None and self._snapshots.pins(lease.match.snapshot.register) == 1

    def taken(self, lease: Lease) -> None:
        """Detaches the state of a match that has moved to a row. A tombstone stays.

        Args:
            lease: What `hold` returned.
        """
        assert lease.match.found is not None and lease.match.found.stated is not None
        if snapshot := self._detach(lease.match.found.stated):
            self._snapshots.end([snapshot])  # its register is freed with the pin

    def marks(self, match: Match) -> list[tuple[int, str]]:
        """Returns the lengths at which a prompt is to keep states, and why.

        The placement names them. Lengths that the policy for states would not keep are left out.

        Args:
            match: What the prompt matched.

        Returns:
            Lengths in tokens, ascending, multiples of the page size.

        Raises:
            InvalidArgument: The placement names something else.
        """
        size, placement = self._pages.page_size, self.settings.placement
        found = placement.marks(match, size)
        sound = isinstance(found, dict) and all(type(at) is int and isinstance(kind, str) for at, kind in found.items())
        wanted = sorted(at for at in found if match.length < at <= match.tokens) if sound else []
        if not sound or any(at % size for at in wanted):
            raise InvalidArgument(
                f"{placement!r} returned {shown(found)}: expected a dict of lengths, multiples of page_size={size}, "
                "and kinds, such as {64: 'prompt'}"
            )
        return [
            (at, found[at]) for at in wanted
            if self._states.admits(Place(at // size, match.length // size, found[at]))
        ]  # fmt: skip

    def use(self, lease: Lease) -> None:
        """Notes that a request starts from what it matched: counts it, and tells the policies.

        Args:
            lease: The request's lease.
        """
        match = lease.match
        lost = {f"lost_{reason}": tokens for reason, tokens in match.lost.items()}
        self._counts.update(lookups=1, prompt_tokens=match.tokens, hit_tokens=match.length, **lost)
        if match.found is None:
            return
        if not match.found.reach.is_root:
            self._kv.used(match.found.reach)
        self._states.asked(match.found.known, match.tokens // self._pages.page_size)
        if match.found.stated:
            match.found.stated.uses += 1
            self._superseded.pop(match.found.stated, None)
            if match.found.stated in lease.own:
                lease.own[match.found.stated] += 1
            self._states.used(match.found.stated)
            if self.below:
                self.below.used(match.found.stated)

    def insert(self, insertions: Sequence[Insertion]) -> list[Snapshot | None]:
        """Takes KV of rows in any case, and their states as the policy says.

        Each lease moves on to the end of its key.

        Args:
            insertions: What the rows have. A key of no tokens is skipped.

        Returns:
            For each insertion the state that stands for its length now, None for none.
        """
        try:
            snapshots = [self._insert(insertion) if insertion.key else None for insertion in insertions]
        finally:  # also where a caller's policy raises: states that nodes have by then are moved
            self._record_moves()
        self.trim()
        return [snapshot if snapshot and self._has(snapshot) else None for snapshot in snapshots]

    def trim(self) -> None:
        """Evicts the states that are too many for `most_states`; the newest may be the least valuable."""
        if self.settings.most_states is not None:
            self.evict_states(len(self.nodes) - self.settings.most_states)

    def adopt(self, snapshot: Snapshot, key: bytes, pages: list[int], salt: Hashable) -> Node | None:
        """Takes over the state of a session that makes way, in the register where it is.

        Args:
            snapshot: The state.
            key: Its tokens, encoded: whole pages.
            pages: Ids of these pages.
            salt: Their salt.

        Returns:
            Its node, None where the cache has such a state or the policy does not want it: the caller keeps it then.
        """
        found = self.tree.find(key, salt)
        above = found.stated.end if found.stated else 0
        if above * self._unit == len(key):
            self._counts["duplicates"] += 1
            return None
        if not self._states.admits(Place(len(key) // self._unit, above, "end")):
            self._counts["declined"] += 1
            return None
        lease = Lease(NO_NODE, salt, NO_MATCH)
        insertion = Insertion(lease, key, pages, None, snapshot.length, "end", snapshot)
        node = self._grow(key, insertion, None)
        self._attach(node, insertion, "end")
        self._snapshots.published += 1
        return node

    def _has(self, snapshot: Snapshot) -> bool:
        node = self.nodes.get(snapshot.register)
        return node is not None and node.snapshot == snapshot

    def _insert(self, insertion: Insertion) -> Snapshot | None:
        lease, snapshot, node = insertion.lease, None, None
        if insertion.register is not None:
            head = insertion.key[: insertion.length * BYTES]
            found = self.tree.find(head, lease.salt)
            kind, held = insertion.kind, insertion.held
            above = found.stated.end if found.stated else 0
            there = found.stated if found.stated and above * self._unit == len(head) else None
            if there:
                self._counts["duplicates"] += 1
                if held is None:
                    self._commands.release([insertion.register])
                snapshot = there.snapshot
            elif not self._states.admits(Place(len(head) // self._unit, above, kind)):
                self._counts["declined"] += 1
            else:
                node = self._grow(head, insertion, None)
                snapshot = self._attach(node, insertion, kind)
                if snapshot:
                    lease.own[node] = node.uses
            if snapshot and kind in DECODED:
                self._supersede_decoded(lease, snapshot)
            if held is not None and snapshot is not held:
                self._snapshots.drop([held])
        self._move_lease(lease, self._shared(self._grow(insertion.key, insertion, node), insertion.pages))
        return snapshot

    def _supersede_decoded(self, lease: Lease, newer: Snapshot) -> None:
        """Marks the last state that the row left while it decoded as the first to evict. The newer one serves more."""
        older, lease.decoded = lease.decoded, newer
        node = self.nodes.get(older.register) if older else None
        if node and older != newer and node.snapshot == older and node.uses == lease.own.get(node):
            self._note_superseded(node)

    @staticmethod
    def _shared(node: Node, pages: list[int]) -> Node:
        """Returns the deepest node that has the row's own pages.

        Pages that another row brought first are not the row's to keep.
        """
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

    def _attach(self, node: Node, insertion: Insertion, kind: str) -> Snapshot | None:
        """Gives the node a state. It moves to a holder first, if it is in none; one must be free, or become free."""
        snapshot = insertion.held or self._to_holder(node, insertion)
        if snapshot is None:
            self._counts["refused"] += 1
            return None
        node.snapshot, node.evicted = snapshot, False
        self.nodes[snapshot.register] = node
        self._counts["inserted"] += 1
        self._states.added(node, kind)
        if self.below:
            self.below.added(node)
        return snapshot

    def _to_holder(self, node: Node, insertion: Insertion) -> Snapshot | None:
        assert insertion.register is not None
        if not self._snapshots.free:
            self.tree.lease(node)  # or eviction could remove the node again
            self.evict_states(1)
            self.tree.unlease(node)
        if not self._snapshots.free:
            return None
        snapshot = self._snapshots.add(insertion.length, ())
        self._moves.append((snapshot.register, insertion.register))
        self._snapshots.published += 1
        return snapshot

    def insert_loaded(self, key: bytes, salt: Hashable, length: int) -> tuple[Node, int, list[int]]:
        """Takes in a state that is loaded from below, and pages for the path to it.

        Call it only where a holder, a slot and the pages are free. `loaded` tells the policies, once the bytes are on
        their way.

        Args:
            key: The tokens that the state stands for, encoded.
            salt: Their salt.
            length: How many tokens these are.

        Returns:
            Its node, how many pages are on the device already, and the ids of the rest.
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
        """Tells the policies of states that were loaded from below.

        Args:
            nodes: Their nodes, each with whether KV was loaded too.
        """
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
        """States that no first step is about to read."""
        return len(self.nodes) - sum(register in self.nodes for register in self._snapshots.pinned)

    @property
    def superseded_states(self) -> int:
        """States that can be evicted, and whose row or session has left or keeps a newer one."""
        pinned = self._snapshots.pinned
        return sum(node.snapshot is not None and node.snapshot.register not in pinned for node in self._superseded)

    @property
    def evictable_pages(self) -> int:
        """Pages without a lease of a row or session; other owners may hold them too."""
        return self.tree.total_pages - self.tree.leased_pages if self._pages.allocator.pages else 0

    def can_evict(self, pages: int) -> bool:
        """Returns whether eviction could free so many pages.

        A page counts where no lease keeps it and only the tree owns it. Leaves are checked first, in the order of
        eviction; the whole tree only where these are not enough.

        Args:
            pages: Pages to free.
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
        # Pages under two salts count as well.
        return pages <= sum(holders[page] == times for page, times in held.items())

    def _alone(self, node: Node) -> int:
        holders = self._pages.allocator.holders
        return sum(holders[page] == 1 for page in node.pages)

    def evict_states(self, n: int) -> int:
        """Evicts states: superseded ones first, then the least valuable. What lies below the device may keep them.

        Args:
            n: States to evict; fewer are evicted where there are fewer without a pin.

        Returns:
            How many slots this frees.
        """
        chosen: list[Node] = []
        if n <= 0:
            return 0
        for node in self._in_order(self._states.victims()):
            if node.snapshot and node.snapshot.register not in self._snapshots.pinned:
                chosen.append(node)
                if len(chosen) == n:
                    break
        self._record_moves()
        if self.below and chosen and not self._clearing:
            self.below.save(chosen)
        self._snapshots.drop([node.snapshot for node in chosen if node.snapshot])
        for node in chosen:
            self._detach(node)
            self._drop_bare_leaves(node)
        return len(chosen)

    def next_states(self, n: int) -> list[Node]:
        """Returns up to n nodes whose states `evict_states` would take about next. Changes nothing."""
        pinned = self._snapshots.pinned
        nodes = self._in_order(self._states.coming())
        return list(islice((node for node in nodes if node.snapshot and node.snapshot.register not in pinned), n))

    def _in_order(self, victims: Iterable[Node]) -> Iterator[Node]:
        """Yields superseded states, then the others in the order of the policy."""
        yield from list(self._superseded)
        for node in victims:
            if node not in self._superseded:
                yield node

    @property
    def turnover(self) -> int:
        """States that came and went since the start."""
        return self._counts["inserted"] + self._counts["loaded"] + self._counts["evicted_states"]

    def evict_pages(self, n: int) -> int:
        """Evicts leaves until enough pages are free or no leaf is left.

        The least valuable leaf goes first; leaves that the policy does not offer go last.

        Args:
            n: Pages to free, besides those that are free now.

        Returns:
            How many pages this frees.
        """
        self._record_moves()
        allocator = self._pages.allocator
        before = allocator.free
        goal = before + n
        while allocator.free < goal:  # a policy may have skipped nodes that became leaves meanwhile
            if not self._give_up_leaves(self._kv.victims(), goal):
                rest = [node for _, node in self.tree.walk()]
                if not self._give_up_leaves(reversed(rest), goal):  # children first
                    break
        return allocator.free - before

    def _give_up_leaves(self, nodes: Iterable[Node], goal: int) -> bool:
        """Gives up those nodes that are leaves, until `goal` pages are free. Returns whether there were any."""
        allocator, any_given = self._pages.allocator, False
        for node in nodes:
            if not (node.leases or node.carriers or node.ghost):
                self._give_up(node, goal - allocator.free)
                any_given = True  # its pages may have other owners, but its parent may be a leaf now
                if allocator.free >= goal:
                    break
        return any_given

    def require_foreign(self, snapshots: Sequence[Snapshot]) -> None:
        """Refuses snapshots that belong to the cache.

        Args:
            snapshots: Handles that a caller wants to drop.

        Raises:
            InvalidArgument: One of them is the cache's to drop.
        """
        for snapshot in snapshots:
            if isinstance(snapshot, Snapshot) and self._has(snapshot):
                raise InvalidArgument(
                    f"{snapshot} is the prefix cache's: it drops it when the slot is needed, and finds it by tokens=..."
                )

    def clear(self) -> None:
        """Evicts everything that no row and no session uses. Nothing below the device keeps it.

        Raises:
            Broken: An earlier call was interrupted.
        """
        with self._commands.guard.changing("clear"):
            self._clearing = True
            self._clear()
            self._clearing = False

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
            self._superseded.pop(node, None)
            self._counts["evicted_states"] += 1
            self._states.dropped(node)
        return snapshot

    def _drop_bare_leaves(self, node: Node | None) -> None:
        """Gives up the KV of a leaf without a state, if the policy says so.

        Its parent follows where the same is true of it, and so on.
        """
        while node is not None and not (node.is_root or node.carriers or node.snapshot or node.leases or node.ghost):
            if self._kv.keeps(node) and self._pages.allocator.pages:
                return
            node = self._give_up(node, len(node.pages))

    def _give_up(self, leaf: Node, pages: int) -> Node | None:
        """Gives up the KV of a leaf and its state; without a state only the end of its KV, where that is enough.

        Returns the parent where it is a leaf then, else None.
        """
        size = len(leaf.key) // self._unit
        if leaf.snapshot:
            if self.below and not self._clearing:
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
        """Removes ghosts that the memory has no room for."""
        while (node := self.tree.forgettable(memory)) is not None:
            self._states.forgotten(node)
            self.tree.remove(node)

    def inspect(self) -> list[dict[str, Any]]:
        """Returns the nodes as plain data, parents first."""
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
        """Returns counts since the start, and what is held now.

        Syncs: no.
        """
        kv = self._pages.allocator.pages
        return replace(
            PrefixStats(**self._counts), states=len(self.nodes), nodes=self.tree.nodes,
            pages=self.tree.total_pages if kv else 0, leased_pages=self.tree.leased_pages if kv else 0,
        )  # fmt: skip
