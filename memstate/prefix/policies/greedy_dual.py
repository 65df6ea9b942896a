"""GreedyDual: a state is worth what it has saved, plus a clock that every eviction advances.

After P. Cao and S. Irani, Cost-aware WWW proxy caching algorithms (USITS 1997): value = clock + uses x cost. The least
goes, and the clock becomes its value, so that worth fades without a pass over all states.
"""

from memstate.prefix.policies.base import RankedStates
from memstate.prefix.tree import Node


def gain(node: Node) -> int:
    """Returns the pages that need not be computed because of a node's state: back to the nearest state above it."""
    above = node.parent
    while above is not None and above.snapshot is None:
        above = above.parent
    return node.end - (above.end if above is not None else 0)


class GreedyDual(RankedStates):
    """Ranks states by uses x pages saved, plus the clock. It has no parameter.

    Example:
        >>> GreedyDual()
        GreedyDual()
    """

    def reset(self) -> None:
        """Forgets every node."""
        super().reset()
        self._clock = 0.0

    def used(self, node: Node) -> None:
        """Hears that a request starts from the node's state."""
        self._order.place(node, self._clock + (1 + node.uses) * gain(node))

    def dropped(self, node: Node) -> None:
        """Hears that the node has no state any more."""
        if self._order.least() is node:
            self._clock = self._order.rank(node)
        super().dropped(node)
