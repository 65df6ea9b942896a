"""The default policy: the value of a state is the pages it saves x its learned rate of hits.

Classes of states differ very much in their rates: the end of a first turn or of a later one, the end of a prompt whose
answer has a state too, a branch point, a state that was used once, a state that is used all the time. States of
different kinds of requests (`Request(kind=)`) differ too, such as chats and questions about a long text. The rates of a
service are not known beforehand, so the policy counts. It also counts evicted states whose node is still in the tree: a
request that reaches the node shows that the state would have been a hit. A cached state also serves requests for
evicted states below it, its dependents.

    value = (own rate + rates of its dependents) x pages between the next state above and this one

Time is counted in requests. The cost of a request grows with the logarithm of the number of states and with the number
of nodes on its path.
"""

from collections.abc import Iterator
from itertools import chain

from memstate.errors import ConfigurationError
from memstate.prefix.policies.base import Place, StatePolicy
from memstate.prefix.policies.learning import EDGES, ReturnRates
from memstate.prefix.policies.lru import LruPages
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node

TURNS = 3  # later turns of a conversation share one class
BRANCH, PASSED, USED = TURNS + 1, TURNS + 2, TURNS + 3  # USED and 4 more: log2 of uses, the last for 16 and more
USED_PASSED, NAMED, BOUNDARY = USED + 5, USED + 6, USED + 7
CLASSES, POOLED = BOUNDARY + 1, USED  # boundaries are not pooled: they are many and have few hits
OF_KINDS = {"branch": BRANCH, "named": NAMED}
KINDS = 8  # kinds of requests with their own pooled classes; further kinds count as requests without a kind
OF_TURNS = ("prompt", "again")
GROWTHS = 9  # growths: log2 of the pages of the last request beyond the state; the last: from 128 pages on
UPDATE = 64  # requests between two updates of the rates
GONE = Node(None, b"")
MEMORY = 2**15  # touches (calls of `_touch`) after which a count has half its weight


class Candidate:
    """The policy's record of a node that has or had a state.

    Attributes:
        held: Whether the node has its state now.
        first: The first class of its request's kind.
        provider: The candidate whose state serves requests for this node: the candidate itself while it has its state,
            else the nearest one above that has a state.
        dependents: The candidates whose provider this one is.
        worth: The sum of the rates of its dependents.
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
    """Ranks states by how often they are expected to be asked for x the pages that they save.

    Example:
        >>> ReturnRate().pages()
        ReturnRatePages()
    """

    remembers = True

    def __init__(self) -> None:
        self.reset()

    def pages(self) -> "ReturnRatePages":
        """Returns the policy for pages that goes with this one."""
        return ReturnRatePages(self)

    def reset(self) -> None:
        """Forgets every node."""
        self.rates = ReturnRates(CLASSES, POOLED, GROWTHS)
        self._firsts: dict[str | None, int] = {None: 0}  # kind of requests -> its first class
        self.order, self.leaves = Ranking(), Ranking()  # all states, by value; states of leaves, by density
        self._unranked: dict[Node, None] = {}  # nodes whose worth changed since they were ranked
        self.lost: dict[Node, None] = {}  # nodes that lost their state since the last `ReturnRatePages._bare`
        self._now = self._touches = 0
        self._log: dict[int, list[tuple[Candidate, int]]] = {}  # request number -> (candidate, touch number)

    def admits(self, place: Place) -> bool:
        """Returns whether to keep a state at a place."""
        return True

    def asked(self, node: Node, pages: int) -> None:
        """Hears that a request came: its prompt reaches the end of `node`, and has `pages` whole pages."""
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
        """Sets the turn of a new candidate. If it continues a conversation, the candidate above changes its class.

        Args:
            candidate: The new candidate.
            node: Its node.
            answer: Whether an answer of the model ends at this node.
        """
        above = node.parent
        while above is not None and above.worth is None:
            above = above.parent
        grown = node.end - (above.end if above is not None else 0)
        before: Candidate | None = above.worth if above is not None else None
        if before is not None and before.what == candidate.what == "prompt":
            if answer and not before.uses:
                candidate.turn = before.turn  # the answer to the prompt above belongs to the same turn
                self._pass(before, before.first + PASSED)
            elif before.uses == 1 and 2 * grown <= before.node.end:
                candidate.turn = min(before.turn + 1, TURNS)  # the conversation goes on
                self._pass(before, USED_PASSED)
        self._touch(candidate, grown)

    def _pass(self, candidate: Candidate, kind: int) -> None:
        """Moves a candidate to another class, because its conversation has a newer state."""
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
            candidate.touched = -1  # so that `_tick` ignores its entries in the log
            candidate.node, node.worth = GONE, None  # the log must not keep the node's tokens in memory
            self.lost.pop(node, None)
            self._unranked.pop(node, None)

    def victims(self) -> Iterator[Node]:
        """Yields the nodes with a state, the least valuable first. The cache skips states that are in use."""
        self._place(self._unranked)
        for node in self.order.ascending():
            value = self.value(node.worth)
            if value > 1.001 * self.order.rank(node) + 1e-12:
                self.order.place(node, value)  # the state above was evicted: this one is worth more now
            else:
                yield node

    def coming(self) -> Iterator[Node]:
        """Yields roughly what `victims` would: first nodes by their last rank, then those that must be ranked again."""
        return chain(self.order.ascending(), (node for node in self._unranked if node.snapshot))

    def value(self, candidate: Candidate) -> float:
        """Returns the value of a state: the pages that it is expected to save, per request during which it is kept."""
        above = self._provider(candidate.node)
        return self.density(candidate) * (candidate.node.end - (above.node.end if above is not None else 0))

    def density(self, candidate: Candidate) -> float:
        """Returns the chance of a hit, per request during which a state is kept: hits of its dependents count too."""
        return max(candidate.worth, candidate.rate)

    def _provider(self, node: Node) -> Candidate | None:
        """Returns the candidate of the nearest state above a node, None for none."""
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
        """Computes a candidate's rate again, and adds the change to the worth of its provider."""
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
        """Notes that a candidate's worth has changed, so that it is ranked again before the next eviction."""
        if candidate.held:
            self._unranked[candidate.node] = None

    def _place(self, nodes: dict[Node, None]) -> None:
        """Ranks the nodes that have a state, and empties the dict."""
        for node in nodes:
            if node.worth is not None and node.worth.held:
                self.order.place(node, self.value(node.worth))
                if node in self.leaves:
                    self.leaves.place(node, self.density(node.worth))
        nodes.clear()

    def _tick(self) -> None:
        """Counts one more request, and raises the age of the candidates that have waited long enough."""
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
    """Ranks leaves without a state first, by their last use; then leaves with a state, by the rate of the state.

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
        """Hears that a node is no leaf any more, or has left the tree."""
        super().dropped(node)
        self.states.leaves.remove(node)

    def victims(self) -> Iterator[Node]:
        """Yields leaves, the least valuable first. A leaf may be yielded more than once."""
        yield from self._bare()
        for node in self.states.leaves.ascending():
            yield node
            yield from self._bare()  # if `node` was evicted, its parent may be a leaf without a state now

    def _bare(self) -> Iterator[Node]:
        """Yields leaves without a state, by last use."""
        lost, self.states.lost = self.states.lost, {}
        for node in lost:
            if node in self.states.leaves:
                self._place(node)
        for node in self._order.ascending():
            if node.snapshot:
                self._place(node)  # the leaf has got a state: it moves to the other ranking
            else:
                yield node
