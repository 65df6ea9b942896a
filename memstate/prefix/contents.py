"""What the prefix cache holds: the tree of prefixes and its states; and what makes way.

evict   a state: its slot is free, and KV stays (a tombstone) or goes with the leaf; a leaf's pages: its state goes too

Superseded states go first, then the policies decide. Nothing here touches a tensor, and nothing is submitted.
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
from memstate.prefix.policies import Lru, LruPages, PagePolicy, StatePolicy
from memstate.prefix.settings import Prefix
from memstate.prefix.tree import Found, Node, Tree
from memstate.requests.handles import Snapshot
from memstate.sheet import MOST_ROWS, Sheet, Shown, figures, section, sheet
from memstate.stats import LOST, PrefixStats
from memstate.tokens import BYTES

LOG = logs.logger("prefix")
UNHEARD = 64  # requests of which the policies do not know yet, at most
KEYS = 2**20  # tokens of prompts remembered where KV is the caller's: 8 MiB of keys


class Keeper(Protocol):
    """Owns the KV pages and the states that a cache holds, and takes back those that make way.

    Attributes:
        page_size: Tokens of a page.
        pages: KV pages altogether; 0 where the cache holds none.
    """

    page_size: int
    pages: int

    def free(self) -> int:
        """Returns how many pages are free."""

    def release(self, pages: Sequence[int]) -> None:
        """Takes pages back. Those with another owner do not become free."""

    def held(self) -> Collection[int]:
        """Returns the ids of the states that the cache holds, in the order in which they came."""

    def owner(self, state: int) -> object:
        """Returns the node that has a state."""

    def readers(self) -> Counter[int]:
        """Returns how many first steps are about to read each state; none of 0."""

    def end(self, states: Sequence[Snapshot]) -> None:
        """Takes states back."""


class Contents(NotCopied, Shown):
    """Holds the prefixes and their states, and gives them up.

    Args:
        settings: Policies and limits. None: an empty cache that stays empty, in which callers look nothing up.
        keeper: Owns the pages and the states.

    Attributes:
        enabled: Whether it keeps anything.
        tree: The prefixes, to look at.
        leases: Leases by row, to look at.
        heard: Requests of which the policies do not know yet: where each matches, and its tokens.
        below: Hears of cached, used and evicted states; None where nothing lies below the device.
        watcher: Hears of all that comes and goes; None for nobody.
    """

    def __init__(self, settings: Prefix | None, keeper: Keeper) -> None:
        self.enabled = settings is not None
        self.settings = settings = settings or Prefix(Lru(), LruPages(), evict=False)
        self._keeper, self._policies = keeper, (settings.states, settings.of_pages)
        for policy in self._policies:
            policy.belong(self)
        self._unit = BYTES * keeper.page_size
        self.below: Below | None = None
        self.watcher: Watcher | None = None
        self.tree = Tree(self._unit)
        self._counts = Counter(dict.fromkeys((each.name for each in fields(PrefixStats)), 0))
        self.keep(None)

    def keep(self, sure: Mapping[int, Snapshot] | None, unsure: Set[int] = frozenset()) -> None:
        """Forgets all but the prefixes that are sound, and ends all leases.

        Call it only where registers, holders and pages will be set.

        Args:
            sure: The cached states that stay, by register. None: nothing stays.
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
        self._superseded: dict[Node, None] = {}  # their row or session has a newer state, and no other uses them
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
        """The policy for states, once it knows of all requests."""
        return (self.learn() if self.heard else self._policies)[0]

    @property
    def page_policy(self) -> PagePolicy:
        """The policy for pages, once it knows of all requests."""
        return (self.learn() if self.heard else self._policies)[1]

    def hear(self, found: Found, tokens: int) -> None:
        """Notes that a request comes. The policies learn of it when they are asked something, or at `learn`.

        Args:
            found: Where its prompt matches.
            tokens: Tokens of its prompt.
        """
        self.heard.append((found, tokens))
        if len(self.heard) >= UNHEARD:
            self.learn()

    def learn(self) -> tuple[StatePolicy, PagePolicy]:
        """Tells the policies which requests have come, and returns them. A step does this while its forward runs."""
        (states, kv), heard, self.heard = self._policies, self.heard, []
        for found, tokens in heard:
            states.asked(found.known, tokens // self._keeper.page_size)
            if found.stated is not None and found.stated.snapshot:  # a request may have taken it over
                states.used(found.stated)
            if found.reach.parent is not None and not found.reach.ghost:  # it may be gone since
                kv.used(found.reach)
        return self._policies

    def grown(self, node: Node) -> None:
        """Tells the policy for pages that KV has come, up to the end of a node."""
        if node.parent is not None:
            self.page_policy.dropped(node.parent)
        self.page_policy.leaf(node)

    def drop_bare_leaves(self) -> None:
        """Gives up the KV of all leaves without a state, if the policy says so."""
        for node in [node for _, node in self.tree.walk() if not node.carriers]:
            self.drop_bare(node)

    def stated(self) -> Iterator[Node]:
        """Yields the nodes with a state, in the order in which their states came."""
        owners = [self._keeper.owner(state) for state in self._keeper.held()]
        yield from (owner for owner in owners if isinstance(owner, Node))

    @property
    def states(self) -> int:
        """Cached states."""
        return len(self._keeper.held())

    def _note_superseded(self, node: Node) -> None:
        self._superseded.pop(node, None)
        self._superseded[node] = None

    @property
    def evictable_states(self) -> int:
        """States that no first step is about to read."""
        held = self._keeper.held()
        return len(held) - sum(map(held.__contains__, self._keeper.readers()))

    @property
    def superseded_states(self) -> int:
        """States that can be evicted, and whose row or session has left or keeps a newer one."""
        return sum(1 for _ in self._idle(()))

    @property
    def evictable_pages(self) -> int:
        """Pages without a lease of a row or session; other owners may hold them too."""
        return self.tree.total_pages - self.tree.leased_pages if self._keeper.pages else 0

    def evict_states(self, n: int, why: str = "room") -> int:
        """Evicts states: superseded ones first, then the least valuable. What lies below the device may keep them.

        Args:
            n: States to evict; fewer are evicted where there are fewer without a pin.
            why: What counts those that are not superseded: a `gone_` figure of `PrefixStats`.

        Returns:
            How many slots this frees.
        """
        if n <= 0:
            return 0
        chosen: dict[Node, None] = {}  # a policy may offer a node more than once
        for node in self._idle(chain(self.state_policy.victims(), self.stated())):  # last what the policy leaves out
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
        """Returns up to n nodes whose states `evict_states` would take about next. Changes nothing."""
        return list(islice(self._idle(self.state_policy.coming()), n))

    def _idle(self, victims: Iterable[Node]) -> Iterator[Node]:
        """Yields the nodes whose states nobody reads: superseded ones, then the others in the order of the policy."""
        readers = self._keeper.readers()
        for node in chain(list(self._superseded), (node for node in victims if node not in self._superseded)):
            if node.snapshot and not readers[node.snapshot.register]:
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
        before = self._keeper.free()
        goal = before + n
        while self._keeper.free() < goal:  # a policy may have skipped nodes that became leaves meanwhile
            if not self._give_up_leaves(self.page_policy.victims(), goal):
                rest = [node for _, node in self.tree.walk()]
                if not self._give_up_leaves(reversed(rest), goal):  # children first
                    break
        return self._keeper.free() - before

    def _give_up_leaves(self, nodes: Iterable[Node], goal: int) -> bool:
        """Gives up those nodes that are leaves, until `goal` pages are free. Returns whether there were any."""
        any_given = False
        for node in nodes:
            if not (node.leases or node.carriers or node.ghost):
                self._give_up(node, goal - self._keeper.free())
                any_given = True  # its pages may have other owners, but its parent may be a leaf now
                if self._keeper.free() >= goal:
                    break
        return any_given

    def detach(self, node: Node, why: str) -> None:
        """Notes that a node has lost its state. A tombstone stays.

        Args:
            node: The node.
            why: What counts it: a `gone_` figure of `PrefixStats`.
        """
        snapshot, node.snapshot = node.snapshot, None
        if snapshot:
            why = "cleared" if self._clearing else why
            self._counts[f"gone_{why}"] += 1
            if LOG.isEnabledFor(logging.INFO):
                logs.event(LOG, logging.INFO, "evicted", why=why, tokens=snapshot.length, uses=node.uses)
            node.evicted = True
            self._superseded.pop(node, None)
            self._counts["evicted_states"] += 1
            self.state_policy.dropped(node)
            if self.watcher:
                self.watcher.state_removed(node)

    def drop_bare(self, node: Node | None) -> None:
        """Gives up the KV of a leaf without a state, if the policy says so.

        Its parent follows where the same is true of it, and so on.

        Args:
            node: The leaf. Other nodes stay.
        """
        while node is not None and not (node.is_root or node.carriers or node.snapshot or node.leases or node.ghost):
            if self.page_policy.keeps(node) and self._keeper.pages:
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
        """Removes ghosts that the memory has no room for."""
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
            most: How many at most; None for all.
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
        """Returns counts since the start, and what is held now.

        Syncs: no.
        """
        kv, counts = self._keeper.pages, self._counts
        asked = counts["hit_tokens"] + sum(counts[name] for name in LOST.values())  # so that they always add up
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
