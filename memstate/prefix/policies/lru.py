"""Policies `Lru` and `LruPages`: evict the least recently used first. A use of a node is no use of its ancestors."""

from memstate.prefix.policies.base import PagePolicy, Ranked, RankedStates
from memstate.prefix.tree import Node


class Lru(RankedStates):
    """Ranks states by their last use.

    Example:
        >>> Lru()
        Lru()
    """

    def reset(self) -> None:
        """Forgets every node."""
        super().reset()
        self._clock = 0

    def used(self, node: Node) -> None:
        """Hears that a request starts from the node's state."""
        self._clock += 1
        self._order.place(node, self._clock)


class LruPages(Ranked, PagePolicy):
    """Ranks leaves by the last time that the lookup of a prompt ended in them.

    Args:
        tombstones: Whether a leaf whose state was evicted keeps its KV. This KV shows where a state is missing, but it
            takes pages from leaves with a state.

    Example:
        >>> LruPages(tombstones=False)
        LruPages(tombstones=False)
    """

    def __init__(self, tombstones: bool = True) -> None:
        self.tombstones = tombstones
        super().__init__()

    def __repr__(self) -> str:
        return f"LruPages(tombstones={self.tombstones})"

    def reset(self) -> None:
        """Forgets every node."""
        super().reset()
        self._clock = 0

    def keeps(self, node: Node) -> bool:
        """Returns whether a leaf without a state keeps its KV."""
        return self.tombstones or not node.evicted

    def leaf(self, node: Node) -> None:
        """Hears that a node is a leaf now: it is new, or its last child is gone."""
        if not node.touched:
            self._touch(node)
        self._place(node)

    def used(self, node: Node) -> None:
        """Hears that a lookup of a prompt ended in this node, which may be a leaf or not."""
        self._touch(node)
        if node in self._order:
            self._place(node)

    def _place(self, node: Node) -> None:
        self._order.place(node, node.touched)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.touched = self._clock

    def dropped(self, node: Node) -> None:
        """Hears that a node is no leaf any more, or has left the tree."""
        if node.parent is not None:  # a prompt that used the node used its parent as well
            node.parent.touched = max(node.parent.touched, node.touched)
        self._order.remove(node)
