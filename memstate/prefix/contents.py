"""Holds the content of the prefix cache, the tree of prefixes and its states, and evicts states and pages.

evict a state   its slot becomes free; its KV stays (a tombstone), or is given up if the node is a leaf and the policy
                does not keep it
evict pages     a leaf gives up its KV, and its state with it

Superseded states go first, then the policies decide. A state is superseded if its row or session has left a newer one,
and no other request has used it. The cache touches no tensor and submits nothing.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, replace
from itertools import chain, islice
from typing import Any, Protocol

from memstate import logs
from memstate.checks import NotCopied, shown
from memstate.prefix.lease import Below, Lease, Watcher
from memstate.prefix.names import Names
from memstate.prefix.policies import Lru, LruPages, PagePolicy, StatePolicy
from memstate.prefix.settings import Prefix
from memstate.prefix.tree import Found, Node, Tree
from memstate.requests.handles import Snapshot
from memstate.sheet import MOST_ROWS, Sheet, Shown, figures, section, sheet
from memstate.stats import LOST, PrefixStats
from memstate.tokens import BYTES, Key

LOG = logs.logger("prefix")
UNHEARD = 64  # limit of the requests that wait for `learn`
KEYS = 2**20  # limit of the tokens of ghosts if memstate manages no pages: 4 MiB of keys


class Keeper(Protocol):
    """Keeps the tables that say who owns pages and states; the cache gives evicted ones back to it.

    Attributes:
        page_size: Tokens of a page.
        pages: Number of KV pages, free or not; 0 if memstate manages no pages.
    """

    page_size: int
    pages: int

    def free(self) -> int:
        """Returns how many pages are free."""

    def release(self, pages: Sequence[int]) -> None:
        """Ends the cache's ownership of pages. A page with another owner does not become free."""

    def held(self) -> Collection[int]:
        """Returns the ids of the states that the cache holds, in the order in which they came."""

    def owner(self, state: int) -> object:
        """Returns the node to which a state belongs."""

    def readers(self) -> Counter[int]:
        """Returns, for each state, how many rows are about to read it in their first step. Zeros are left out."""

    def end(self, states: Sequence[Snapshot]) -> None:
        """Ends the cache's ownership of states, and frees their slots."""


class Contents(NotCopied, Shown):
    """Holds prefixes and their states, and evicts them.

    Args:
        settings: Policies and limits. None: the cache stays empty, and callers do not use it.
        keeper: Tables of the pages and the states.

    Attributes:
        enabled: Whether the cache keeps anything.
        names: Encodes the tokens or keys that name prefixes in this cache.
        tree: The prefixes, to be read only.
        leases: Row -> its lease, to be read only.
        heard: Requests of which the policies do not know yet: (how far the tree matches the prompt, tokens of the
            prompt).
        below: The tiers, which are told of cached, used and evicted states; None without tiers.
        watcher: Is told of all states and pages that come and go; None if nobody listens.
    """

    def __init__(self, settings: Prefix | None, keeper: Keeper) -> None:
        self.enabled = settings is not None
        self.settings = settings = settings or Prefix(Lru(), LruPages(), evict=False)
        self._keeper, self._policies = keeper, (settings.states, settings.of_pages)
        for policy in self._policies:
            policy.belong(self)
        self.names = Names(settings.keyed, keeper.page_size)
        self._unit = BYTES * keeper.page_size
        self.below: Below | None = None
        self.watcher: Watcher | None = None
        self.tree = Tree(self._unit)
        self._counts = Counter(dict.fromkeys((each.name for each in fields(PrefixStats)), 0))
        self.keep(None)

    def keep(self, sure: Mapping[int, Snapshot] | None, unsure: Set[int] = frozenset()) -> None:
        """Ends all leases, and forgets all prefixes except the sound ones. For a new cache and for `recover`.

        The caller makes registers, holders and pages agree with what stays.

        Args:
            sure: Register -> the cached state that stays. None: nothing stays.
            unsure: KV pages that do not stay.
        """
        self.heard: list[tuple[Found, int]] = []
        self.leases: dict[int, Lease] = {}
        pages, size = self._keeper.pages, self._keeper.page_size
        tree = Tree(self._unit, (pages or KEYS // size) if self.state_policy.remembers else 0)
        nodes: list[Node] = []
        for prompt, path, before in self.tree.sound(pages > 0) if sure is not None else ():
            if unsure.isdisjoint(path):
                node, _ = tree.insert(prompt, path)
                node.evicted, node.uses, node.kind, state = before.evicted, before.uses, before.kind, before.snapshot
                if sure and state and sure.get(state.register) == state and state.length == prompt.tokens:
                    node.snapshot = state
                    nodes.append(node)
                else:
                    node.evicted |= state is not None
        self.tree.take(tree)
        gone = self._counts["inserted"] + self._counts["loaded"] - len(nodes)
        self._counts["gone_cleared"] += gone - self._counts["evicted_states"]
        self._counts["evicted_states"] = gone
        self._superseded: dict[Node, None] = {}  # in the order of eviction
        self.by_key: dict[Key, list[Node]] = {}  # last key, not padded -> nodes with a state, one for each salt
        for node in nodes if self.names.keyed else ():
            self.by_key.setdefault(node.key[self.names.last], []).append(node)
        self._clearing = False
        self.state_policy.reset()
        self.page_policy.reset()
        for node in nodes:
            self.state_policy.added(node, "again")
            if self.below:
                self.below.added(node)
        for node in [node for _, node in tree.walk() if not node.carriers]:
            self.page_policy.leaf(node)
        if self.watcher:
            self.watcher.replaced()

    @property
    def state_policy(self) -> StatePolicy:
        """The policy for states. It learns of all waiting requests first."""
        return (self.learn() if self.heard else self._policies)[0]

    @property
    def page_policy(self) -> PagePolicy:
        """The policy for pages. It learns of all waiting requests first."""
        return (self.learn() if self.heard else self._policies)[1]

    def hear(self, lookup: Found, tokens: int) -> None:
        """Notes a new request. The policies learn of it at `learn`, at the latest before they are asked something.

        Args:
            lookup: How far the tree matches the prompt.
            tokens: Tokens of the prompt.
        """
        self.heard.append((lookup, tokens))
        if len(self.heard) >= UNHEARD:
            self.learn()

    def learn(self) -> tuple[StatePolicy, PagePolicy]:
        """Tells the policies of the requests in `heard`, and returns both policies. Called while a forward runs."""
        (states, kv), heard, self.heard = self._policies, self.heard, []
        for lookup, tokens in heard:
            states.asked(lookup.known, tokens // self._keeper.page_size)
            if lookup.stated is not None and lookup.stated.snapshot:  # since then, a row may have taken it over
                states.used(lookup.stated)
            if lookup.reach.parent is not None and not lookup.reach.ghost:  # the node may be evicted by now
                kv.used(lookup.reach)
        return self._policies

    def grown(self, node: Node) -> None:
        """Tells the policy for pages that a node has KV now, and that the parent of this node is no leaf any more."""
        if node.parent is not None:
            self.page_policy.dropped(node.parent)
        self.page_policy.leaf(node)

    def drop_bare_leaves(self) -> None:
        """Gives up the KV of all leaves without a state, except KV that the policy keeps."""
        for node in [node for _, node in self.tree.walk() if not node.carriers]:
            self.drop_bare(node)

    def stated(self) -> Iterator[Node]:
        """Yields the nodes with a state, in the order in which the states were cached."""
        owners = [self._keeper.owner(state) for state in self._keeper.held()]
        yield from (owner for owner in owners if isinstance(owner, Node))

    @property
    def states(self) -> int:
        """Number of cached states."""
        return len(self._keeper.held())

    def _note_superseded(self, node: Node) -> None:
        self._superseded.pop(node, None)
        self._superseded[node] = None

    @property
    def evictable_states(self) -> int:
        """Number of cached states that no first step is about to read."""
        held = self._keeper.held()
        return len(held) - sum(map(held.__contains__, self._keeper.readers()))

    @property
    def superseded_states(self) -> int:
        """Number of superseded states that no first step is about to read."""
        return sum(1 for _ in self._idle(()))

    @property
    def evictable_pages(self) -> int:
        """Number of pages of the tree without a lease. Some also have other owners, and would not become free."""
        return self.tree.total_pages - self.tree.leased_pages if self._keeper.pages else 0

    def evict_states(self, n: int, why: str = "room") -> int:
        """Evicts states: superseded ones first, then the least valuable. The tiers may save them first.

        Args:
            n: States to evict. It evicts fewer if too many states are about to be read by a first step: these stay.
            why: Which `gone_` figure of `PrefixStats` counts them. Superseded states have a figure of their own.

        Returns:
            How many states were evicted: each frees a slot.
        """
        if n <= 0:
            return 0
        chosen: dict[Node, None] = {}  # a policy may offer a node more than once
        for node in self._idle(chain(self.state_policy.victims(), self.stated())):  # the policy may offer too few
            chosen[node] = None
            if len(chosen) == n:
                break
        if self.below and chosen and not self._clearing:
            self.below.save(list(chosen))
        self._keeper.end([node.snapshot for node in chosen if node.snapshot])
        for node in chosen:
            self.detach(node, "superseded" if node in self._superseded else why)
            self.drop_bare(node)
        return len(chosen)

    def next_states(self, n: int) -> list[Node]:
        """Returns up to n nodes whose states `evict_states` would probably take next. Changes nothing."""
        return list(islice(self._idle(self.state_policy.coming()), n))

    def _idle(self, victims: Iterable[Node]) -> Iterator[Node]:
        """Yields the superseded nodes, then `victims` in their order. Leaves out states that a first step will read."""
        readers = self._keeper.readers()
        for node in chain(list(self._superseded), (node for node in victims if node not in self._superseded)):
            if node.snapshot and node.snapshot.register not in readers:
                yield node

    @property
    def turnover(self) -> int:
        """Number of states that entered the cache plus number of states that left it, since the start."""
        return self._counts["inserted"] + self._counts["loaded"] + self._counts["evicted_states"]

    def evict_pages(self, n: int) -> int:
        """Evicts leaves until enough pages are free or no leaf is left.

        The least valuable leaf goes first; leaves that the policy does not offer go last.

        Args:
            n: Pages to free, besides those that are free now.

        Returns:
            How many pages this frees.
        """
        before = self._keeper.free()
        goal = before + n
        while self._keeper.free() < goal:  # again, because an eviction can turn a parent into a leaf
            if not self._give_up_leaves(self.page_policy.victims(), goal):
                rest = [node for _, node in self.tree.walk()]
                if not self._give_up_leaves(reversed(rest), goal):  # children before their parents
                    break
        return self._keeper.free() - before

    def _give_up_leaves(self, nodes: Iterable[Node], goal: int) -> bool:
        """Gives up those nodes that are leaves, until `goal` pages are free. Returns whether it gave up any."""
        any_given = False
        for node in nodes:
            if not (node.leases or node.carriers or node.ghost):
                self._give_up(node, goal - self._keeper.free())
                any_given = True  # even if no page became free: the parent may be a leaf now
                if self._keeper.free() >= goal:
                    break
        return any_given

    def detach(self, node: Node, why: str) -> None:
        """Notes that a node has lost its state and is a tombstone now.

        Args:
            node: The node.
            why: Which `gone_` figure of `PrefixStats` counts the state.
        """
        snapshot, node.snapshot = node.snapshot, None
        if snapshot:
            why = "cleared" if self._clearing else why
            self._counts[f"gone_{why}"] += 1
            if LOG.isEnabledFor(logging.INFO):
                logs.event(LOG, logging.INFO, "evicted", why=why, tokens=snapshot.length, uses=node.uses)
            node.evicted = True
            self._superseded.pop(node, None)
            if self.by_key:
                key = node.key[self.names.last]
                self.by_key[key].remove(node)
                if not self.by_key[key]:
                    del self.by_key[key]
            self._counts["evicted_states"] += 1
            self.state_policy.dropped(node)
            if self.watcher:
                self.watcher.state_removed(node)

    def drop_bare(self, node: Node | None) -> None:
        """Gives up the KV of a leaf without a state, unless the policy keeps it.

        If this turns the parent into a leaf without a state, the same is done for the parent, and so on.

        Args:
            node: The leaf. Nothing is done for a node that is no leaf, or has a state or a lease.
        """
        while node is not None and not (node.is_root or node.carriers or node.snapshot or node.leases or node.ghost):
            if self.page_policy.keeps(node) and self._keeper.pages:
                return
            node = self._give_up(node, len(node.pages))

    def _give_up(self, leaf: Node, pages: int) -> Node | None:
        """Gives up the state and all KV of a leaf. A leaf without a state gives up only its last `pages` pages.

        Returns the parent if it has become a leaf, else None.
        """
        size = len(leaf.key) // self._unit
        if leaf.snapshot:
            if self.below and not self._clearing:
                self.below.save([leaf])
            self._keeper.end([leaf.snapshot])
            self.detach(leaf, "pages")
        elif 0 < pages < size:
            size = pages
        self.page_policy.dropped(leaf)
        if self.watcher:
            self.watcher.pages_removed(leaf, size)
        gone = self.tree.ghost(leaf, size)
        self._keeper.release(gone)
        self._counts["evicted_pages"] += len(gone)
        above = leaf.parent
        self._forget(self.tree.memory)
        if above is None or above.is_root or above.carriers:
            return None
        self.page_policy.leaf(above)
        return above

    def _forget(self, memory: int) -> None:
        """Removes the oldest ghosts until the remaining ones stand for at most `memory` pages."""
        while (node := self.tree.forgettable(memory)) is not None:
            self.state_policy.forgotten(node)
            self.tree.remove(node)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._keeper.page_size

    def inspect(self, most: int | None = None) -> list[dict[str, Any]]:
        """Returns the nodes as plain data, parents first.

        Args:
            most: Limit of the nodes that are returned; None for all.
        """
        walk = list(islice(self.tree.walk(), most))
        place = {id(node): at for at, (_, node) in enumerate(walk)}
        return [
            {
                "salt": None if salt is None else shown(salt),
                "parent": place.get(id(node.parent), -1),
                "start": node.end - len(node.key) // self._unit,
                "end": node.end,
                "register": node.snapshot.register if node.snapshot else 0,
                "evicted": node.evicted,
                "ghost": node.ghost,
                "uses": node.uses,
                "leases": node.leases,
                "children": len(node.children),
            }
            for salt, node in walk
        ]

    def stats(self) -> PrefixStats:
        """Returns the figures of the cache: what it holds now, and counts since the start.

        Syncs: no.
        """
        kv, counts = self._keeper.pages, self._counts
        asked = counts["hit_tokens"] + sum(counts[name] for name in LOST.values())  # hits and losses add up to it
        return replace(
            PrefixStats(**counts), states=self.states, nodes=self.tree.nodes, prompt_tokens=asked,
            pages=self.tree.total_pages if kv else 0, leased_pages=self.tree.leased_pages if kv else 0,
        )  # fmt: skip

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        stats, size = self.stats(), self.page_size
        rows = [
            (
                node["salt"] or "",
                f"{node['start'] * size:,} .. {node['end'] * size:,}",
                "held" if node["register"] else "evicted" if node["evicted"] else "none",
                "ghost" if node["ghost"] else "held",
                node["uses"],
                node["leases"],
            )
            for node in self.inspect(MOST_ROWS)
        ]
        heads = ("salt", "tokens", "state", "KV", "uses", "leases")
        sections = [section("nodes", heads, rows, stats.nodes), figures("figures", stats)]
        return sheet(repr(self), [stats.prompts()], sections)
