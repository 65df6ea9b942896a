"""Least recently used: what nobody came back for goes first. A use refreshes what was used, not what leads to it."""

from collections.abc import Iterator

from memstate.prefix.policies.base import PagePolicy, StatePolicy
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node


class Lru(StatePolicy):
    """States by their last use."""

    def __init__(self) -> None:
        self.reset()

    def __repr__(self) -> str:
        return "Lru()"

    def reset(self) -> None:
        self._order = Ranking()
        self._clock = 0

    def added(self, node: Node, kind: str) -> None:
        self.used(node)

    def used(self, node: Node) -> None:
        self._clock += 1
        self._order.place(node, self._clock)

    def superseded(self, node: Node) -> None:
        self._order.place(node, 0)

    def dropped(self, node: Node) -> None:
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        return self._order.ascending()


class LruPages(PagePolicy):
    """Leaves by the last time a prompt was followed down to them.

    tombstones: whether a leaf whose state was evicted keeps its KV. It can tell that a state is missed, and takes pages
    from those that have one.
    """

    def __init__(self, tombstones: bool = True) -> None:
        self.tombstones = tombstones
        self.reset()

    def __repr__(self) -> str:
        return f"LruPages(tombstones={self.tombstones})"

    def reset(self) -> None:
        self._order = Ranking()
        self._clock = 0

    def keeps(self, node: Node) -> bool:
        return self.tombstones or not node.evicted

    def leaf(self, node: Node) -> None:
        if not node.touched:
            self._touch(node)
        self._order.place(node, node.touched)

    def used(self, node: Node) -> None:
        self._touch(node)
        if node in self._order:
            self._order.place(node, node.touched)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.touched = self._clock

    def dropped(self, node: Node) -> None:
        if node.parent is not None:  # which was on the way to it
            node.parent.touched = max(node.parent.touched, node.touched)
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        return self._order.ascending()
