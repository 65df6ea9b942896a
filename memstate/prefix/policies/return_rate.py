"""The default policy: a state is worth the pages it saves x the rate at which it is asked for, learned while running.

Kinds of states return very differently: the end of a first turn, of a later one, a prompt's end whose answer's end is
kept too, a branch point, what was used once and what is used all the time; and what a chat leaves, or a question to a
long text (`Request(kind=)`). The figures of a service are not known beforehand, so they are counted. States that were
given up count too, as long as their place is in the tree: a request that reaches it shows what keeping the state would
have brought. A state also serves the requests of the given-up states below it, and is worth their rates too.

    value = (own rate + rates of its dependents) x pages back to the next state above

The clock is the request. Each request costs the logarithm of the number of states, and a walk up the path.
"""

from collections.abc import Iterator
from itertools import chain

from memstate.errors import ConfigurationError
from memstate.prefix.policies.base import Place, StatePolicy
from memstate.prefix.policies.learning import EDGES, ReturnRates
from memstate.prefix.policies.lru import LruPages
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node

TURNS = 3  # later turns of a conversation are all alike
BRANCH, PASSED, USED = TURNS + 1, TURNS + 2, TURNS + 3  # then by the logarithm of the uses, to 16 and more
USED_PASSED, NAMED, BOUNDARY = USED + 5, USED + 6, USED + 7
CLASSES, POOLED = BOUNDARY + 1, USED  # boundaries are many and seldom asked for: pooled, they would hide the others
OF_KINDS = {"branch": BRANCH, "named": NAMED}
KINDS = 8  # of requests with pooled classes of their own; the others have those of requests without a kind
OF_TURNS = ("prompt", "again")
GROWTHS = 9  # pages beyond the state, by their logarithm, to 128 and more
UPDATE = 64  # requests between two looks at what was counted
GONE = Node(None, b"")
MEMORY = 2**15  # touches after which what was counted has lost half its weight


class Candidate:
    """What is known of a node that has or had a state.

    Attributes:
        held: It has the state now.
        first: The first class of its request's kind.
        provider: The candidate that serves requests here: itself while it is held, else the nearest held one above.
        dependents: The candidates that it serves.
        worth: The sum of their rates.
    """

    __slots__ = (
        "age", "dependents", "first", "growth", "held", "kind", "node", "provider", "rate", "touched", "turn", "uses",
        "what", "worth",
    )  # fmt: skip

    def __init__(self, node: Node, what: str, first: int) -> None:
        self.node, self.what, self.first = node, what, first
        self.held = False
        self.uses = self.turn = self.growth = self.kind = self.age = self.touched = 0
        self.rate = self.worth = 0.0
        self.provider: Candidate | None = None
        self.dependents: dict[Candidate, None] = {}


class ReturnRate(StatePolicy):
    """Ranks states by learned rate of return x pages saved.

    Example:
        >>> ReturnRate().pages()
        ReturnRatePages()
    """

    remembers = True

    def __init__(self) -> None:
        self.reset()

    def pages(self) -> "ReturnRatePages":
        """Returns the policy for pages that goes with this one, None for any."""
        return ReturnRatePages(self)

    def reset(self) -> None:
        """Forgets every node."""
        self.rates = ReturnRates(CLASSES, POOLED, GROWTHS)
        self._firsts: dict[str | None, int] = {None: 0}  # the first class of each kind of requests
        self.order, self.leaves = Ranking(), Ranking()  # by value; of leaves, which KV depends on, by density
        self._unranked: dict[Node, None] = {}  # nodes whose worth changed since victims were looked for
        self.lost: dict[Node, None] = {}  # nodes that lost their state since the page policy looked
        self._now = self._touches = 0
        self._log: dict[int, list[tuple[Candidate, int]]] = {}  # request -> its touches

    def admits(self, place: Place) -> bool:
        """Tells whether to keep a state there at all."""
        return True

    def asked(self, node: Node, pages: int) -> None:
        """Hears of a prompt."""
        self._tick()
        step: Node | None = node
        while step is not None and step.worth is None:
            step = step.parent
        if step is not None:
            candidate: Candidate = step.worth
            self.rates.asked(candidate.kind, candidate.age, candidate.growth)
            candidate.uses += 1
            self._touch(candidate, pages - step.end)
        self._place(self._unranked)

    def added(self, node: Node, kind: str) -> None:
        """Hears that a node has a state now."""
        known = node.worth is not None
        if node.kind not in self._firsts and len(self._firsts) <= KINDS:
            self._firsts[node.kind] = self.rates.add(POOLED, POOLED)
        first = self._firsts.get(node.kind, 0)
        candidate: Candidate = node.worth or Candidate(node, "prompt" if kind == "end" else kind, first)
        node.worth, candidate.held = candidate, True
        if known:
            self._credit(candidate)
        else:
            self._begin(candidate, node, kind == "end")

    def _begin(self, candidate: Candidate, node: Node, answer: bool) -> None:
        """Classifies a new place by how far it goes beyond the one above, which it may leave behind.

        Args:
            candidate: What is known of the node.
            node: The node.
            answer: Whether an answer ends there.
        """
        above = node.parent
        while above is not None and above.worth is None:
            above = above.parent
        grown = node.end - (above.end if above is not None else 0)
        before: Candidate | None = above.worth if above is not None else None
        if before is not None and before.what == candidate.what == "prompt":
            if answer and not before.uses:
                candidate.turn = before.turn  # the answer to the prompt that ends above
                self._pass(before, before.first + PASSED)
            elif before.uses == 1 and 2 * grown <= before.node.end:
                candidate.turn = min(before.turn + 1, TURNS)  # the conversation goes on
                self._pass(before, USED_PASSED)
        self._touch(candidate, grown)

    def _pass(self, candidate: Candidate, kind: int) -> None:
        """Moves a place to another class: its conversation has gone on, and has a newer state."""
        candidate.kind = kind
        self.rates.enter(kind, candidate.age, candidate.growth)
        self._credit(candidate)

    def used(self, node: Node) -> None:
        """Does nothing: `asked` has counted the request."""

    def dropped(self, node: Node) -> None:
        """Hears that the node has no state any more."""
        candidate: Candidate = node.worth
        candidate.held = False
        self.order.remove(node)
        self.lost[node] = None
        heir = self._provider(node)
        for dependent in candidate.dependents:
            dependent.provider = heir
        if heir is not None:
            heir.dependents |= candidate.dependents
            heir.worth += candidate.worth
            self._rank(heir)
        candidate.dependents, candidate.worth = {}, 0.0

    def forgotten(self, node: Node) -> None:
        """Hears that a node without a state leaves the tree, or that no prompt ends there any more."""
        if (candidate := node.worth) is not None:
            self._provide(candidate, None)
            candidate.touched = -1  # what the log says of it is void, and may not keep its tokens
            candidate.node, node.worth = GONE, None
            self.lost.pop(node, None)
            self._unranked.pop(node, None)

    def victims(self) -> Iterator[Node]:
        """Yields nodes with a state, the least worthy first. The cache skips those in use."""
        self._place(self._unranked)
        for node in self.order.ascending():
            value = self.value(node.worth)
            if value > 1.001 * self.order.rank(node) + 1e-12:
                self.order.place(node, value)  # what stood above it is gone: it comes later
            else:
                yield node

    def coming(self) -> Iterator[Node]:
        """Yields about what `victims` would: by the ranks of the last request, then what has come since."""
        return chain(self.order.ascending(), (node for node in self._unranked if node.snapshot))

    def value(self, candidate: Candidate) -> float:
        """Returns the pages saved per request of keeping a state."""
        above = self._provider(candidate.node)
        return self.density(candidate) * (candidate.node.end - (above.node.end if above is not None else 0))

    def density(self, candidate: Candidate) -> float:
        """Returns the chances per request of keeping a state: its own and those of its dependents."""
        return max(candidate.worth, candidate.rate)

    def _provider(self, node: Node) -> Candidate | None:
        """Returns what serves requests where a node's state is gone: the nearest state above it."""
        above = node.parent
        while above is not None and not (above.worth is not None and above.worth.held):
            above = above.parent
        return above.worth if above is not None else None

    def _touch(self, candidate: Candidate, growth: int) -> None:
        self._touches += 1
        candidate.touched, candidate.age = self._touches, 0
        candidate.growth = min(max(growth, 0).bit_length(), GROWTHS - 1)
        if candidate.uses:
            candidate.kind = USED + min(candidate.uses.bit_length() - 1, 4)
        else:
            kind = candidate.turn if candidate.what in OF_TURNS else OF_KINDS.get(candidate.what, BOUNDARY)
            candidate.kind = candidate.first + kind if kind < POOLED else kind
        self._log.setdefault(self._now, []).append((candidate, candidate.touched))
        if self._touches % (MEMORY // 2) == 0:
            self.rates.fade(0.5**0.5)
        self.rates.enter(candidate.kind, 0, candidate.growth)
        self._credit(candidate)

    def _credit(self, candidate: Candidate) -> None:
        """Adds a candidate's rate to its present provider."""
        provider = candidate if candidate.held else self._provider(candidate.node)
        if provider is not candidate.provider or provider is None:
            self._provide(candidate, provider)
            return
        before, candidate.rate = candidate.rate, self.rates.rate(candidate.kind, candidate.age, candidate.growth)
        provider.worth += candidate.rate - before
        self._rank(provider)

    def _provide(self, candidate: Candidate, provider: Candidate | None) -> None:
        if candidate.provider is not None:
            del candidate.provider.dependents[candidate]
            candidate.provider.worth -= candidate.rate
            if candidate.provider is not provider:
                self._rank(candidate.provider)
        candidate.provider, candidate.rate = provider, self.rates.rate(candidate.kind, candidate.age, candidate.growth)
        if provider is not None:
            provider.dependents[candidate] = None
            provider.worth += candidate.rate
            self._rank(provider)

    def _rank(self, candidate: Candidate) -> None:
        """Notes that a candidate's worth has changed; `victims` ranks it again."""
        if candidate.held:
            self._unranked[candidate.node] = None

    def _place(self, nodes: dict[Node, None]) -> None:
        """Ranks nodes whose worth has changed."""
        for node in nodes:
            if node.worth is not None and node.worth.held:
                self.order.place(node, self.value(node.worth))
                if node in self.leaves:
                    self.leaves.place(node, self.density(node.worth))
        nodes.clear()

    def _tick(self) -> None:
        """Counts one more request; a candidate that reaches another age changes its worth."""
        self._now = now = self._now + 1
        log = self._log
        for age, edge in enumerate(EDGES[1:], 1):
            for candidate, touched in log.get(now - edge, ()):
                if candidate.touched == touched:
                    candidate.age = age
                    self.rates.enter(candidate.kind, age, candidate.growth)
                    self._credit(candidate)
        log.pop(now - EDGES[-1], None)
        if now % UPDATE == 0:
            self.rates.update()


class ReturnRatePages(LruPages):
    """Ranks leaves without a state first, by last use; then the others by the rates of their states.

    Args:
        states: The policy that knows the rates.
    """

    def __init__(self, states: ReturnRate) -> None:
        if not isinstance(states, ReturnRate):
            raise ConfigurationError(f"ReturnRatePages({states!r}): expected the cache's ReturnRate")
        self.states = states
        super().__init__()

    def __repr__(self) -> str:
        return "ReturnRatePages()"

    def _place(self, node: Node) -> None:
        self.dropped(node)
        if node.snapshot:
            self.states.leaves.place(node, self.states.density(node.worth))
        else:
            super()._place(node)

    def dropped(self, node: Node) -> None:
        """Hears that the node is no leaf any more, or gone."""
        super().dropped(node)
        self.states.leaves.remove(node)

    def victims(self) -> Iterator[Node]:
        """Yields leaves, the least worthy first, some more than once if need be."""
        yield from self._bare()
        for node in self.states.leaves.ascending():
            yield node
            yield from self._bare()  # what that one stood on may be without a state now

    def _bare(self) -> Iterator[Node]:
        """Yields leaves without a state, by last use."""
        lost, self.states.lost = self.states.lost, {}
        for node in lost:
            if node in self.states.leaves:
                self._place(node)
        for node in self._order.ascending():
            if node.snapshot:
                self._place(node)  # it has got one
            else:
                yield node
