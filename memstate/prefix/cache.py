"""The prefix cache: a tree of token prefixes, policies that decide, and the command buffer that executes.

insert   a row's snapshot moves to a holder that a node of the tree names; the row's KV pages get one more owner
match    the deepest node with a state; a row starts from it and leases the path that leads to it
evict    what makes way, see `memstate.prefix.contents`

`Holdings` keeps the readers: a first step is about to read the state. The tree keeps the leases: a row or a session
shares the pages. Nothing here touches a tensor, and nothing is submitted.
"""

from collections.abc import Sequence

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.prefix.contents import Contents
from memstate.prefix.lease import NO_MATCH, NO_NODE, Branch, Insertion, Lease
from memstate.prefix.match import Match
from memstate.prefix.policies import Place
from memstate.prefix.tree import Node
from memstate.requests.handles import Snapshot
from memstate.tokens import BYTES, Prompt

DECODED = ("boundary", "end")  # kinds of states beyond the prompt


class PrefixCache(Contents):
    """Finds states again by token prefix.

    Args:
        settings: Policies and limits.
        commands: Records the changes of owners.
        pages: KV pages of rows.
        holdings: Owners and readers of states.

    Attributes:
        leases: Leases by row, to look at.
    """

    enabled = True

    def keep(self, branches: Sequence[Branch]) -> None:
        """Forgets everything else, leases too. Call it only where registers and pages are set accordingly.

        Args:
            branches: What stays, parents first.
        """
        self.leases: dict[int, Lease] = {}
        super().keep(branches)

    def __repr__(self) -> str:
        held = f"{self.states} states, {self.tree.total_pages} pages in {self.tree.nodes} nodes"
        return f"PrefixCache({held}, {self._states}, {self._kv})"

    def match(self, prompt: Prompt, most: int | None = None) -> Match:
        """Looks a prompt up and changes nothing.

        Args:
            prompt: The prompt.
            most: Tokens that a hit may cover; the rest is computed in any case. None: all but the last.

        Returns:
            What was found, and how far it reaches.
        """
        key = prompt.key
        most = max(0, len(key) // BYTES - 1) if most is None else most
        found = self.tree.find(Prompt(key[: most * BYTES // self._unit * self._unit], prompt.salt))
        size, stated = self._pages.page_size, found.stated
        length = stated.end * size if stated else 0
        gone = found.evicted.end * size if found.evicted else length
        return Match(
            len(key) // BYTES, length, found.kv * size, gone, stated.snapshot if stated else None, found=found
        )  # fmt: skip

    def hold(self, match: Match, prompt: Prompt) -> Lease:
        """Keeps what was matched until `release`, whatever else is evicted.

        The state is pinned too, until `unpin`.

        Args:
            match: What `match` returned.
            prompt: The prompt.

        Returns:
            The lease.
        """
        node = match.found.stated if match.found and match.found.stated else NO_NODE
        self.tree.lease(node)
        if match.snapshot:
            self._holdings.begin_read(match.snapshot.register)
        return Lease(node, prompt, match)

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
            self._holdings.end_read(lease.match.snapshot.register)

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

    def suspend(self, lease: Lease, length: int, match: Match, prompt: Prompt) -> Lease:
        """Opens a lease on the start of another lease's path, and releases that other path.

        `restore` takes the path again; `release_suspended` gives it up for good.

        Args:
            lease: The lease to suspend.
            length: Tokens that the new lease covers.
            match: Match of the new lease.
            prompt: Prompt of the new lease.

        Returns:
            The new lease.
        """
        node = self._up(lease.node, length)
        self.tree.lease(node)
        self.tree.unlease(lease.node)
        return Lease(node, prompt, match)

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

    def on_miss(self, row: int, prompt: Prompt) -> None:
        """Opens a lease for a row that found nothing, so that its states and KV are cached under its salt.

        Args:
            row: The row.
            prompt: Its prompt, without tokens where they are not known.
        """
        self.leases[row] = Lease(NO_NODE, prompt, NO_MATCH)

    def fork(self, row: int, others: Sequence[int], length: int) -> None:
        """Gives the lease of one row to other rows, if it has one.

        Args:
            row: The row with the lease.
            others: Rows that share its first tokens.
            length: How many tokens they share.
        """
        if lease := self.leases.get(row):
            prompt = lease.prompt.head(length)
            for other in others:
                self.tree.lease(lease.node)
                self.leases[other] = Lease(lease.node, prompt, lease.match)

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

    def take_over(self, lease: Lease) -> bool:
        """Returns whether the matched state can move to a row, because no other first step is about to read it.

        Args:
            lease: What `hold` returned.
        """
        return lease.match.snapshot is not None and self._holdings.readers[lease.match.snapshot.register] == 1

    def take(self, lease: Lease, row: int) -> None:
        """Moves the state of a match to a row, and ends the pin of `hold`. A tombstone stays.

        Args:
            lease: What `hold` returned.
            row: A row without a state.
        """
        assert lease.match.found is not None and lease.match.found.stated is not None
        assert lease.match.snapshot is not None
        self.unpin(lease)
        self._holdings.take([lease.match.snapshot], row)
        self._detach(lease.match.found.stated, "taken")

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
        return [snapshot if snapshot and self.has(snapshot) else None for snapshot in snapshots]

    def trim(self) -> None:
        """Evicts the states that are too many for `most_states`; the newest may be the least valuable."""
        if self.settings.most_states is not None:
            self.evict_states(self.states - self.settings.most_states, "limit")

    def adopt(self, snapshot: Snapshot, prompt: Prompt, pages: list[int]) -> Node | None:
        """Takes over the state of a session that makes way, in the register where it is.

        Args:
            snapshot: The state.
            prompt: What it stands for: whole pages of tokens.
            pages: Ids of these pages.

        Returns:
            Its node, None where the cache has such a state or the policy does not want it: the caller keeps it then.
        """
        found, key = self.tree.find(prompt), prompt.key
        above = found.stated.end if found.stated else 0
        if above * self._unit == len(key):
            self._counts["duplicates"] += 1
            return None
        if not self._states.admits(Place(len(key) // self._unit, above, "end")):
            self._counts["declined"] += 1
            return None
        lease = Lease(NO_NODE, prompt, NO_MATCH)
        insertion = Insertion(lease, key, pages, None, snapshot.length, "end", snapshot)
        node = self._grow(key, insertion, None)
        self._attach(node, insertion, "end")
        self._holdings.published += 1
        return node

    def has(self, snapshot: Snapshot) -> bool:
        """Returns whether a state that was cached is cached still.

        Args:
            snapshot: Its handle.
        """
        return self._holdings.held["cached"].get(snapshot.register) is snapshot

    def _insert(self, insertion: Insertion) -> Snapshot | None:
        lease, snapshot, node = insertion.lease, None, None
        if insertion.register is not None:
            head = insertion.key[: insertion.length * BYTES]
            found = self.tree.find(Prompt(head, lease.prompt.salt))
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
                self._holdings.end([held])
        self._move_lease(lease, self._shared(self._grow(insertion.key, insertion, node), insertion.pages))
        return snapshot

    def _supersede_decoded(self, lease: Lease, newer: Snapshot) -> None:
        """Marks the last state that the row left while it decoded as the first to evict. The newer one serves more."""
        older, lease.decoded = lease.decoded, newer
        node = self._holdings.owner[older.register] if older and older != newer else None
        if isinstance(node, Node) and node.snapshot == older and node.uses == lease.own.get(node):
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
        node, had = self.tree.insert(Prompt(key, insertion.lease.prompt.salt), insertion.pages, start)
        if had * self._unit < len(key):
            self._pages.allocator.share(insertion.pages[had : len(key) // self._unit])
            self._grown(node)
            if self.watcher:
                self.watcher.pages_stored(node, had)
        return node

    def _grown(self, node: Node) -> None:
        if node.parent is not None:
            self._kv.dropped(node.parent)
        self._kv.leaf(node)

    def _attach(self, node: Node, insertion: Insertion, kind: str) -> Snapshot | None:
        """Gives the node a state. It moves to a holder first, if it is in none; one must be free, or become free."""
        snapshot = self._holdings.give(insertion.held, node) if insertion.held else self._to_holder(node, insertion)
        if snapshot is None:
            self._counts["refused"] += 1
            return None
        node.snapshot, node.evicted = snapshot, False
        self._counts["inserted"] += 1
        self._states.added(node, kind)
        if self.below:
            self.below.added(node)
        if self.watcher:
            self.watcher.state_stored(node)
        return snapshot

    def _to_holder(self, node: Node, insertion: Insertion) -> Snapshot | None:
        assert insertion.register is not None
        if not self._holdings.free:
            self.tree.lease(node)  # or eviction could remove the node again
            self.evict_states(1)
            self.tree.unlease(node)
        if not self._holdings.free:
            return None
        snapshot = self._holdings.add([insertion.length], node)[0]
        self._moves.append((snapshot.register, insertion.register))
        self._holdings.published += 1
        return snapshot

    def insert_loaded(self, prompt: Prompt) -> tuple[Node, int, list[int]]:
        """Takes in a state that is loaded from below, and pages for the path to it.

        Call it only where a holder, a slot and the pages are free. `loaded` tells the policies, once the bytes are on
        their way.

        Args:
            prompt: What the state stands for.

        Returns:
            Its node, how many pages are on the device already, and the ids of the rest.
        """
        length, size, allocator = len(prompt.key) // BYTES, len(prompt.key) // self._unit, self._pages.allocator
        had = self.tree.find(prompt).kv
        fresh = allocator.claim(size - had) if allocator.pages else []
        node, _ = self.tree.insert(prompt, [0] * had + fresh if fresh else [])
        snapshot = node.snapshot = self._holdings.add([length], node)[0]
        node.evicted = False
        self._commands.claim([snapshot.register])
        self._commands.label([snapshot.register], [length])
        self._counts["loaded"] += 1
        if self.watcher:
            if had < size:
                self.watcher.pages_stored(node, had)
            self.watcher.state_stored(node)
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
