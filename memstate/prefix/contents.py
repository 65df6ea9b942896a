"""What the prefix cache holds: the tree of prefixes and its states; and what makes way.

evict   a state: its slot is free, and KV stays (a tombstone) or goes with the leaf; a leaf's pages: its state goes too

Superseded states go first, then the policies decide. Nothing here touches a tensor, and nothing is submitted.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import fields, replace
from itertools import chain, islice
from typing import Any

from memstate import logs
from memstate.checks import NotCopied, shown
from memstate.prefix.lease import Below, Lease, Watcher
from memstate.prefix.policies import Lru, LruPages, PagePolicy, StatePolicy
from memstate.prefix.settings import Prefix
from memstate.prefix.tree import Found, Node, Tree
from memstate.requests.handles import Snapshot
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.sheet import MOST_ROWS, Sheet, Shown, figures, section, sheet
from memstate.slots.commands import CommandBuffer
from memstate.stats import LOST, PrefixStats
from memstate.tokens import BYTES

LOG = logs.logger("prefix")
UNHEARD = 64  # requests of which the policies do not know yet, at most
KEYS = 2**20  # tokens of prompts remembered where KV is the caller's: 8 MiB of keys


class Contents(NotCopied, Shown):
    """Holds the prefixes and their states, and gives them up.

    Args:
        settings: Policies and limits. None: an empty cache that stays empty, in which callers look nothing up.
        commands: Records the changes of owners.
        pages: KV pages of rows.
        holdings: Owners and readers of states.

    Attributes:
        enabled: Whether it keeps anything.
        tree: The prefixes, to look at.
        leases: Leases by row, to look at.
        heard: Requests of which the policies do not know yet: where each matches, and its tokens.
        below: Hears of cached, used and evicted states; None where nothing lies below the device.
        watcher: Hears of all that comes and goes; None for nobody.
    """

    def __init__(self, settings: Prefix | None, commands: CommandBuffer, pages: PageTable, holdings: Holdings) -> None:
        self.enabled = settings is not None
        self.settings = settings = settings or Prefix(Lru(), LruPages(), evict=False)
        self._commands, self._pages, self._holdings = commands, pages, holdings
        self._policies = settings.states, settings.of_pages
        for policy in self._policies:
            policy.belong(self)
        self._unit = BYTES * pages.page_size
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
        pages, size = self._pages.allocator.pages, self._pages.page_size
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
        self._moves: list[tuple[int, int]] = []  # recorded with the next eviction, or at the end of a batch
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
            states.asked(found.known, tokens // self._pages.page_size)
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
        owners = [self._holdings.owner[register] for register in self._holdings.held["cached"]]
        yield from (owner for owner in owners if isinstance(owner, Node))

    @property
    def states(self) -> int:
        """Cached states."""
        return len(self._holdings.held["cached"])

    def _note_superseded(self, node: Node) -> None:
        self._superseded.pop(node, None)
        self._superseded[node] = None

    def _record_moves(self) -> None:
        moves, self._moves = self._moves, []
        if moves:
            self._commands.move([to for to, _ in moves], [of for _, of in moves])

    @property
    def evictable_states(self) -> int:
        """States that no first step is about to read."""
        return self._holdings.evictable("cached")

    @property
    def superseded_states(self) -> int:
        """States that can be evicted, and whose row or session has left or keeps a newer one."""
        return sum(1 for _ in self._idle(()))

    @property
    def evictable_pages(self) -> int:
        """Pages without a lease of a row or session; other owners may hold them too."""
        return self.tree.total_pages - self.tree.leased_pages if self._pages.allocator.pages else 0

    def can_evict(self, pages: int) -> bool:
        """Returns whether eviction could free so many pages.

        A page counts where no lease keeps it and only the tree owns it. Leaves are checked first, in the order of
        eviction, and the tree only as far as it takes.

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
        # Pages under two salts count as well.
        return left <= sum(allocator.holders[page] == times > 1 for page, times in held.items())

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
        self._record_moves()
        if self.below and chosen and not self._clearing:
            self.below.save(list(chosen))
        self._holdings.end([node.snapshot for node in chosen if node.snapshot])
        for node in chosen:
            self.detach(node, "superseded" if node in self._superseded else why)
            self.drop_bare(node)
        return len(chosen)

    def next_states(self, n: int) -> list[Node]:
        """Returns up to n nodes whose states `evict_states` would take about next. Changes nothing."""
        return list(islice(self._idle(self.state_policy.coming()), n))

    def _idle(self, victims: Iterable[Node]) -> Iterator[Node]:
        """Yields the nodes whose states nobody reads: superseded ones, then the others in the order of the policy."""
        readers = self._holdings.readers
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
        self._record_moves()
        allocator = self._pages.allocator
        before = allocator.free
        goal = before + n
        while allocator.free < goal:  # a policy may have skipped nodes that became leaves meanwhile
            if not self._give_up_leaves(self.page_policy.victims(), goal):
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

    def clear(self) -> None:
        """Evicts everything that no row and no session uses. Nothing below the device keeps it.

        Raises:
            Broken: An earlier call was interrupted.
        """
        with self._commands.guard.changing("clear"):
            self._clearing = True
            self.evict_states(self.states)
            nodes = [node for _, node in self.tree.walk() if not node.leases]
            for node in reversed(nodes):  # children first
                if not node.ghost:
                    self._give_up(node, len(node.pages))
            self._forget(0)
            self._clearing = False

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
            if self.page_policy.keeps(node) and self._pages.allocator.pages:
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
            self._holdings.end([leaf.snapshot])
            self.detach(leaf, "pages")
        elif 0 < pages < size:
            size = pages
        self.page_policy.dropped(leaf)
        if self.watcher:
            self.watcher.pages_removed(leaf, size)
        gone = self.tree.ghost(leaf, size)
        self._pages.allocator.release(gone)
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
        return self._pages.page_size

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
        kv, counts = self._pages.allocator.pages, self._counts
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
