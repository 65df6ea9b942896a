"""GreedyDual: a state is worth what it has saved, plus a clock that every eviction turns on.

After P. Cao and S. Irani, Cost-aware WWW proxy caching algorithms (USITS 1997): value = clock + uses x cost; the least
goes, and the clock becomes its value, so that worth fades without anybody counting down.
"""

from collections.abc import Iterator

from memstate.prefix.policies.base import StatePolicy
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node


def gain(node: Node) -> int:
    """Pages that need not be computed because of a node's state: back to the nearest state above it."""
    above = node.parent
    while above is not None and above.snapshot is None:
        above = above.parent
    return node.end - (above.end if above is not None else 0)


class GreedyDual(StatePolicy):
    """States by uses x pages saved. The cost of a state is its place among the others, so no parameter is left."""

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return "GreedyDual()"

    def reset(self) -> None:
        self._order = Ranking()
        self._clock = 0.0

    def added(self, node: Node, kind: str) -> None:
        self.used(node)

    def used(self, node: Node) -> None:
        self._order.place(node, self._clock + (1 + node.uses) * gain(node))

    def superseded(self, node: Node) -> None:
        self._order.place(node, self._clock)

    def dropped(self, node: Node) -> None:
        if self._order.least() is node:
            self._clock = self._order.rank(node)
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        return self._order.ascending()
