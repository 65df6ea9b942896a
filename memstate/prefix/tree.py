"""The radix tree: which token prefixes have KV pages, and which have a state. Knows no slot, register or policy.

root (salt)
 └─ [page page page]  state        a node is a run of whole pages; its state stands for everything up to its end
     ├─ [page]                     no state: KV only
     ├─ [page page]  evicted       a tombstone: KV only; its state was evicted
     └─ [page page]  ghost         no state, and no KV here or below: only the tokens are remembered
"""

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from memstate.requests.handles import Snapshot
from memstate.requests.pages import NO_PAGES, Ids
from memstate.tokens import Key, SaltedTokens, common


class Node:
    """A sequence of whole pages that continues its parent. A node is the owner of its state.

    Attributes:
        key: Tokens of its own pages, encoded.
        end: Number of pages from the root up to the end of this node.
        pages: Ids of its own pages, empty if the caller keeps the KV.
        snapshot: The state that stands for all tokens up to its end, None for none.
        evicted: Whether it had a state that was evicted.
        kind: `Request.kind` of the request that left its last state, None for none.
        leases: Number of rows and sessions whose leased path contains this node.
        uses: Number of requests that started from its state.
        ghost: Whether its KV was evicted.
        carriers: Number of children that are not ghosts.
        digests: Digests of its first own pages, as many as the tiers have asked for so far.
        touched: A number for the use of the page policy.
        worth: An object for the use of the state policy.
    """

    __slots__ = (
        "carriers", "children", "digests", "end", "evicted", "ghost", "key", "kind", "leases", "pages", "parent",
        "snapshot", "touched", "uses", "worth",
    )  # fmt: skip
    holds: ClassVar[str] = "cached"

    def __init__(self, parent: "Node | None", key: Key, pages: Ids = NO_PAGES, end: int = 0) -> None:
        self.parent, self.key, self.pages, self.end = parent, key, pages, end
        self.children: dict[Key, Node] = {}
        self.snapshot: Snapshot | None = None
        self.kind: str | None = None
        self.digests: Sequence[bytes] = ()
        self.evicted = self.ghost = False
        self.leases = self.uses = self.touched = self.carriers = 0
        self.worth: Any = None

    def __repr__(self) -> str:
        state = "with a state" if self.snapshot else "evicted" if self.evicted else "without a state"
        return f"Node({self.end} pages, {state}, {len(self.children)} children, {self.leases} leases)"

    @property
    def is_root(self) -> bool:
        """Whether this is the root of a salt: a node without tokens."""
        return self.parent is None

    def path(self) -> Iterator["Node"]:
        """Yields this node and its ancestors, deepest first, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Found(NamedTuple):
    """How far the tree matches a key.

    Attributes:
        known: The deepest node whose end the key reaches.
        stated: The deepest node with a state whose end the key reaches.
        evicted: The deepest tombstone below `stated` whose end the key reaches.
        kv: Number of first pages of the key that the tree has with KV.
        reach: The node in which these pages end.
    """

    known: Node
    stated: Node | None
    evicted: Node | None
    kv: int
    reach: Node


class Tree:
    """Radix tree of token prefixes, one root per salt.

    Args:
        page: Bytes of the key of one page.
        memory: Limit of the pages that all ghosts together stand for; the oldest ghosts are removed first.

    Example:
        >>> tree = Tree(page=2)
        >>> node, had = tree.insert(SaltedTokens(b"aabbcc", salt=None), array("q", [1, 2, 3]))
        >>> tree.insert(SaltedTokens(b"aabbdd", salt=None), array("q", [1, 2, 4]))[1]  # pages that had KV
        2
        >>> lookup = tree.find(SaltedTokens(b"aabbccee", salt=None))
        >>> lookup.kv, tree.pages_to(lookup.reach).tolist()
        (3, [1, 2, 3])
    """

    def __init__(self, page: int, memory: int = 0) -> None:
        self.page, self.memory = page, memory
        self._ghosts: dict[Node, None] = {}  # oldest first: children before their parents
        self.ghost_pages = 0
        self.roots: dict[Hashable, Node] = {}
        self._salts: dict[Node, Hashable] = {}
        self.nodes = self.total_pages = 0
        self.leased_pages = 0  # pages of leased nodes: they cannot be evicted

    def root(self, salt: Hashable) -> Node:
        """Returns the root of a salt. Creates it if it is missing."""
        if salt not in self.roots:
            self.roots[salt] = root = Node(None, b"")
            self._salts[root] = salt
        return self.roots[salt]

    def find(self, prompt: SaltedTokens, end: int | None = None, start: "Node | None" = None) -> Found:
        """Follows a prompt as far as whole pages agree. The cost grows with the prompt, not with the tree.

        Args:
            prompt: The prompt.
            end: Limit of the pages of the prompt to follow; None for all.
            start: A leased node on the prompt's path at which the search begins. None: the root.

        Returns:
            How far the tree matches the prompt.
        """
        key, known = prompt.key, start if start is not None else self.roots.get(prompt.salt)
        if known is None:
            nowhere = Node(None, b"")
            return Found(nowhere, None, None, 0, nowhere)
        page, reach, gone = self.page, known, None
        stated: Node | None = known
        at = kv = known.end * page
        end = len(key) if end is None else end * page
        while stated is not None and stated.snapshot is None:
            stated = stated.parent
        while at < end and (child := known.children.get(key[at : at + page])):
            inside = len(child.key)
            if at + inside > end or key[at : at + inside] != child.key:
                inside = min(common(key, child.key, page, at), end - at)
            at += inside
            if not child.ghost:
                reach, kv = child, at
            if inside < len(child.key):
                break
            known = child
            if child.snapshot:
                stated, gone = child, None
            elif child.evicted and not child.ghost:
                gone = child
        return Found(known, stated, gone, kv // page, reach)

    def insert(
        self, prompt: SaltedTokens, pages: Ids, start: "Node | None" = None, end: int | None = None
    ) -> tuple[Node, int]:
        """Creates or splits nodes so that one ends at page `end` of a prompt, and gives KV to all pages up to there.

        Args:
            prompt: The prompt.
            pages: Ids of the prompt's pages; empty if the caller keeps the KV. The tree takes the ids of those pages
                that had no KV in it.
            start: A node with KV on the prompt's path at which the search begins. None: the root.
            end: Number of pages of the prompt at which the node ends; None for all.

        Returns:
            The node, and how many pages up to its end had KV before.
        """
        key, page, node = prompt.key, self.page, start or self.root(prompt.salt)
        had, at, last = node.end, node.end * page, len(key) if end is None else end * page
        while at < last:
            if (child := node.children.get(key[at : at + page])) is None:
                return self._grow(node, key[at:last], pages[at // page : last // page]), had
            inside = len(child.key)
            if at + inside > last or key[at : at + inside] != child.key:
                inside = min(common(key, child.key, page, at), last - at)
            node = child if inside == len(child.key) else self._split(child, inside)
            at += inside
            if not node.ghost:
                had = node.end
                continue
            size = len(node.key) // page  # this ghost gets KV again; its ancestors got theirs before
            node.ghost, node.pages = False, pages[node.end - size : node.end]
            assert node.parent is not None
            node.parent.carriers += 1
            self.total_pages += size
            self.ghost_pages -= size
            del self._ghosts[node]
        return node, had

    def ghost(self, leaf: Node, pages: int) -> Ids:
        """Takes the KV of the last pages of a node. Their tokens stay in the tree as a ghost.

        Args:
            leaf: The node. It has no lease, and no node below it has KV.
            pages: How many pages at the end of the node lose their KV.

        Returns:
            The ids of the pages.
        """
        size = len(leaf.key) // self.page
        assert leaf.parent is not None and not (leaf.carriers or leaf.leases or leaf.ghost) and 0 < pages <= size
        if pages < size:
            self._split(leaf, (size - pages) * self.page)
        gone, leaf.pages, leaf.ghost = leaf.pages, NO_PAGES, True
        leaf.parent.carriers -= 1
        self.total_pages -= pages
        self.ghost_pages += pages
        self._ghosts[leaf] = None
        return gone

    def forgettable(self, memory: int) -> Node | None:
        """Returns the oldest ghost if ghosts stand for more than `memory` pages, None otherwise."""
        return next(iter(self._ghosts)) if self.ghost_pages > memory else None

    def _grow(self, parent: Node, key: Key, pages: Ids) -> Node:
        size = len(key) // self.page
        if not (parent.is_root or parent.children or parent.snapshot or parent.evicted):
            parent.key += key  # the parent's end has no state or branch: a prompt in chunks stays one node
            parent.pages += pages
            parent.end += size
            self.total_pages += size
            self.leased_pages += size if parent.leases else 0
            return parent
        node = Node(parent, key, pages, parent.end + size)
        parent.children[key[: self.page]] = node
        parent.carriers += 1
        self.nodes += 1
        self.total_pages += size
        return node

    def _split(self, node: Node, inside: int) -> Node:
        """Splits a node after `inside` bytes of its key. The upper part is a new node without a state."""
        parent, size = node.parent, inside // self.page
        assert parent is not None  # a root has no key to cut
        upper = Node(parent, node.key[:inside], node.pages[:size], parent.end + size)
        parent.children[node.key[: self.page]] = upper
        node.parent, node.key, node.pages = upper, node.key[inside:], node.pages[size:]
        upper.digests, node.digests = node.digests[:size], node.digests[size:]
        upper.children[node.key[: self.page]] = node
        upper.leases, upper.ghost, upper.touched = node.leases, node.ghost, node.touched
        upper.carriers = int(not node.ghost)
        if node.ghost:
            self._ghosts[upper] = None  # after the lower node, because children are forgotten before their parents
        self.nodes += 1
        return upper

    def remove(self, node: Node) -> None:
        """Removes a leaf, and its root if no other node is below it. The caller releases the leaf's pages and state."""
        parent, size = node.parent, len(node.key) // self.page
        assert parent is not None and not node.children and not node.leases
        del parent.children[node.key[: self.page]]
        self.nodes -= 1
        if node.ghost:
            del self._ghosts[node]
            self.ghost_pages -= size
        else:
            parent.carriers -= 1
            self.total_pages -= size
        node.parent = None
        if parent.is_root and not parent.children:
            del self.roots[self._salts.pop(parent)]

    def cut(self, node: Node, end: int) -> Node:
        """Splits a node at page `end`, which lies inside it. Returns the upper part."""
        return self._split(node, len(node.key) - (node.end - end) * self.page)

    def lease(self, node: Node) -> None:
        """Adds a lease to a node and to its ancestors."""
        while node.parent is not None:
            if not node.leases:
                self.leased_pages += len(node.key) // self.page
            node.leases += 1
            node = node.parent

    def unlease(self, node: Node) -> None:
        """Ends one lease of a node and of its ancestors."""
        while node.parent is not None:
            node.leases -= 1
            if not node.leases:
                self.leased_pages -= len(node.key) // self.page
            node = node.parent

    def has(self, node: Node) -> bool:
        """Returns whether a node is in the tree and has KV. True for a root, too."""
        return not node.end or (node.parent is not None and not node.ghost)

    def pages_to(self, node: Node) -> Ids:
        """Returns the ids of all pages from the root up to a node's end."""
        return array("q", b"".join([step.pages for step in node.path()][::-1]))

    def salt(self, node: Node) -> Hashable:
        """Returns the salt of a node's prefix."""
        while node.parent is not None:
            node = node.parent
        return self._salts[node]

    def take(self, other: "Tree") -> None:
        """Replaces all content of this tree by that of another."""
        vars(self).update(vars(other))

    def sound(self, kv: bool) -> Iterator[tuple[SaltedTokens, Ids, Node]]:
        """Yields each node whose key, end and pages are consistent with its ancestors, parents first. Skips ghosts.

        Args:
            kv: Whether the nodes of this tree have KV pages.

        Returns:
            Triples: (tokens and salt from the root to the node's end, ids of all pages of these tokens, the node).
        """
        for salt, root in self.roots.items():
            waiting = [(SaltedTokens(b"", salt), NO_PAGES, root)]
            while waiting:
                (key, *_), pages, node = waiting.pop()
                for first, child in node.children.items():
                    size = len(child.key) // self.page
                    whole = size * self.page == len(child.key) and child.key[: self.page] == first
                    placed = child.parent is node and child.end * self.page == len(key) + len(child.key)
                    if child.ghost or not (whole and placed and len(child.pages) == (size if kv else 0)):
                        continue
                    waiting.append((SaltedTokens(key + child.key, salt), pages + child.pages, child))
                    yield waiting[-1]

    def miscounts(self, leased: "Counter[Node]") -> list[str]:
        """Returns a text for each wrong count of nodes, pages and leases.

        Args:
            leased: For each node, the number of rows and sessions whose lease ends there.
        """
        leases, nodes = Counter[Node](), [node for _, node in self.walk()]
        for end, times in leased.items():
            for node in end.path():
                leases[node] += times
        faults = [f"{node} has {leases[node]} leases" for node in nodes if node.leases != leases[node]]
        faults += [f"a lease ends at {node}, which is not in the tree" for node in leases.keys() - set(nodes)]
        size = {node: len(node.key) // self.page for node in nodes}
        counted = {
            "nodes": (self.nodes, len(nodes)),
            "pages": (self.total_pages, sum(size[node] for node in nodes if not node.ghost)),
            "leased pages": (self.leased_pages, sum(size[node] for node in nodes if node.leases)),
            "pages that are remembered": (self.ghost_pages, sum(size[node] for node in nodes if node.ghost)),
        }
        faults += [
            f"{noted} {what} are noted, not {there}" for what, (noted, there) in counted.items() if noted != there
        ]
        for node in nodes:
            if node.carriers != (there := sum(not child.ghost for child in node.children.values())):
                faults.append(f"{node} is noted with KV in {node.carriers} children, {there} have some")
        return faults

    def walk(self) -> Iterator[tuple[Hashable, Node]]:
        """Yields every node with its salt, parents first."""
        for salt, root in self.roots.items():
            waiting = list(root.children.values())
            while waiting:
                node = waiting.pop()
                yield salt, node
                waiting += node.children.values()
