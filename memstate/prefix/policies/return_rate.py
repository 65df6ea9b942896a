"""The default: a state is worth the pages it saves x the rate at which it is asked for, learned while running.

Kinds of states return very differently: the end of a first turn, of a later one, a junction, what was used once (its
conversation has moved on) and what is used all the time. Nobody knows the figures of a service beforehand, so they are
counted: also for states that were given up, as long as their place is in the tree, because a request that reaches it
shows what holding on would have brought. A state also serves the requests of those that were given up below it, and is
worth their rates too.

    value = (own rate + rates of those that it serves) x pages back to the next state above

The clock is the request. Each request costs the logarithm of the number of states, and a walk up the path.
"""

from collections.abc import Iterator

from memstate.prefix.policies.base import PagePolicy, Place, StatePolicy
from memstate.prefix.policies.learning import AGES, EDGES, ReturnRates
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node

TURNS = 3  # later turns of a conversation are all alike
JUNCTION, BOUNDARY, USED = TURNS + 1, TURNS + 2, TURNS + 3  # then by the logarithm of the uses, to 16 and more
CLASSES, POOLED = USED + 5, USED
GROWTHS = 9  # pages beyond the state, by their logarithm, to 128 and more
UPDATE = 256  # requests between two looks at what was counted
GONE = Node(None, b"", [], 0)
MEMORY = 2**15  # touches after which what was counted has lost half its weight


class Spot:
    """What is known of a node that has or had a state.

    held: has it now. server: who serves requests here: the spot itself while it is held, else the nearest held one
    above. wards: whom it serves; worth: the sum of their rates.
    """

    __slots__ = (
        "age", "growth", "held", "kind", "node", "over", "rate", "server", "touched", "turn", "uses", "wards", "what",
        "worth",
    )  # fmt: skip

    def __init__(self, node: Node, what: str) -> None:
        self.node, self.what = node, what
        self.held = self.over = False
        self.uses = self.turn = self.growth = self.kind = self.age = self.touched = 0
        self.rate = self.worth = 0.0
        self.server: Spot | None = None
        self.wards: dict[Spot, None] = {}


class ReturnRate(StatePolicy):
    """States by learned rate of return x pages saved."""

    remembers = True

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return "ReturnRate()"

    def pages(self) -> PagePolicy:
        return ReturnRatePages(self)

    def reset(self) -> None:
        self.rates = ReturnRates(CLASSES, POOLED, GROWTHS)
        self.order = Ranking()
        self._unranked: dict[Node, None] = {}  # nodes whose worth changed since victims were looked for
        self.moved: dict[Node, None] = {}  # nodes whose worth changed since the page policy looked
        self._now = self._touches = 0
        self._log: list[tuple[int, Spot, int]] = []  # (request, spot, its touch): oldest first
        self._aged = [0] * AGES  # how far of the log has reached each age

    def admits(self, place: Place) -> bool:
        return True

    def asked(self, node: Node, pages: int) -> None:
        self._tick()
        step: Node | None = node
        while step is not None and step.worth is None:
            step = step.parent
        if step is not None:
            spot: Spot = step.worth
            self.rates.asked(spot.kind, spot.age, spot.growth)
            spot.uses += 1
            spot.over = False
            self._touch(spot, pages - step.end)

    def added(self, node: Node, kind: str) -> None:
        known = node.worth is not None
        spot: Spot = node.worth or Spot(node, "prompt" if kind == "end" else kind)
        node.worth, spot.held, spot.over = spot, True, False
        if known:
            self._credit(spot)
        else:
            self._begin(spot, node)

    def _begin(self, spot: Spot, node: Node) -> None:
        """A place not known before: how far it goes beyond the one above says what it is."""
        above = node.parent
        while above is not None and above.worth is None:
            above = above.parent
        grown = node.end - (above.end if above is not None else 0)
        before: Spot | None = above.worth if above is not None else None
        known = before is not None and before.uses == 1 and before.what == spot.what == "prompt"
        if before is not None and known and 2 * grown <= before.node.end:
            spot.turn = min(before.turn + 1, TURNS)  # the conversation goes on
        self._touch(spot, grown)

    def used(self, node: Node) -> None:
        """`asked` has said it."""

    def dropped(self, node: Node) -> None:
        spot: Spot = node.worth
        spot.held = False
        self.order.remove(node)
        self.moved[node] = None
        heir = self._server(node)
        for ward in spot.wards:
            ward.server = heir
        if heir is not None:
            heir.wards |= spot.wards
            heir.worth += spot.worth
            self._rank(heir)
        spot.wards, spot.worth = {}, 0.0

    def forgotten(self, node: Node) -> None:
        if (spot := node.worth) is not None:
            self._serve(spot, None)
            spot.touched = -1  # what the log says of it is void, and may not keep its tokens
            spot.node, node.worth = GONE, None
            self.moved.pop(node, None)
            self._unranked.pop(node, None)

    def superseded(self, node: Node) -> None:
        if (spot := node.worth) is not None:
            spot.over = True
            self._rank(spot)

    def victims(self) -> Iterator[Node]:
        unranked, self._unranked = self._unranked, {}
        for node in unranked:
            if node.worth is not None and node.worth.held:
                self.order.place(node, self.value(node.worth))
        for node in self.order.ascending():
            value = self.value(node.worth)
            if value > 1.001 * self.order.rank(node) + 1e-12:
                self.order.place(node, value)  # what stood above it is gone: it comes later
            else:
                yield node

    def value(self, spot: Spot) -> float:
        """Pages saved per request of holding on."""
        above = self._server(spot.node)
        return self.density(spot) * (spot.node.end - (above.node.end if above is not None else 0))

    def density(self, spot: Spot) -> float:
        """Chances per request of holding on, of its own and of those that it serves."""
        return 0.0 if spot.over else max(spot.worth, spot.rate)

    def _server(self, node: Node) -> Spot | None:
        """Who serves requests where a node's state is gone: the nearest state above it."""
        above = node.parent
        while above is not None and not (above.worth is not None and above.worth.held):
            above = above.parent
        return above.worth if above is not None else None

    def _touch(self, spot: Spot, growth: int) -> None:
        self._touches += 1
        spot.touched, spot.age = self._touches, 0
        spot.growth = min(max(growth, 0).bit_length(), GROWTHS - 1)
        if spot.uses:
            spot.kind = USED + min(spot.uses.bit_length() - 1, 4)
        else:
            spot.kind = {"junction": JUNCTION, "boundary": BOUNDARY}.get(spot.what, spot.turn)
        self._log.append((self._now, spot, spot.touched))
        self.rates.enter(spot.kind, 0, spot.growth)
        self._credit(spot)

    def _credit(self, spot: Spot) -> None:
        """Gives a spot's rate to whoever serves it now."""
        server = spot if spot.held else self._server(spot.node)
        if server is not spot.server or server is None:
            self._serve(spot, server)
            return
        before, spot.rate = spot.rate, self.rates.rate(spot.kind, spot.age, spot.growth)
        server.worth += spot.rate - before
        self._rank(server)

    def _serve(self, spot: Spot, server: Spot | None) -> None:
        if spot.server is not None:
            del spot.server.wards[spot]
            spot.server.worth -= spot.rate
            if spot.server is not server:
                self._rank(spot.server)
        spot.server, spot.rate = server, self.rates.rate(spot.kind, spot.age, spot.growth)
        if server is not None:
            server.wards[spot] = None
            server.worth += spot.rate
            self._rank(server)

    def _rank(self, spot: Spot) -> None:
        """Notes that a spot is worth something else now; who looks for victims ranks it."""
        if spot.held:
            self.moved[spot.node] = self._unranked[spot.node] = None

    def _tick(self) -> None:
        """One more request: whatever reaches another age is worth something else."""
        self._now += 1
        log = self._log
        for age in range(1, AGES):
            at, limit = self._aged[age], self._now - EDGES[age]
            while at < len(log) and log[at][0] <= limit:
                _, spot, touched = log[at]
                if spot.touched == touched:
                    spot.age = age
                    self.rates.enter(spot.kind, age, spot.growth)
                    self._credit(spot)
                at += 1
            self._aged[age] = at
        if self._now % UPDATE == 0:
            self.rates.update()
        if len(log) > MEMORY + MEMORY // 2:
            self._log = log[MEMORY // 2 :]
            self._aged = [max(0, at - MEMORY // 2) for at in self._aged]
            self.rates.fade(0.5**0.5)


class ReturnRatePages(PagePolicy):
    """Leaves without a state first, the least recently used of them first; then by the rates of what they carry.

    states: the policy that knows the rates.
    """

    def __init__(self, states: ReturnRate) -> None:
        self.states = states
        self.reset()

    def __repr__(self) -> str:
        return "ReturnRatePages()"

    def reset(self) -> None:
        self._bare, self._carrying = Ranking(), Ranking()
        self._clock = 0

    def leaf(self, node: Node) -> None:
        if not node.touched:
            self._touch(node)
        self._place(node)

    def used(self, node: Node) -> None:
        self._touch(node)
        if node in self._bare:
            self._place(node)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.touched = self._clock

    def _place(self, node: Node) -> None:
        self.dropped(node)
        if node.snapshot:
            self._carrying.place(node, self.states.density(node.worth))
        else:
            self._bare.place(node, node.touched)

    def dropped(self, node: Node) -> None:
        if node.parent is not None:  # which was on the way to it
            node.parent.touched = max(node.parent.touched, node.touched)
        self._bare.remove(node)
        self._carrying.remove(node)

    def victims(self) -> Iterator[Node]:
        moved, self.states.moved = self.states.moved, {}
        for node in moved:
            if node in self._bare or node in self._carrying:
                self._place(node)
        yield from self._bare.ascending()
        for node in self._carrying.ascending():
            yield node
            yield from self._bare.ascending()  # what that one stood on may be bare now
