"""Keeps nodes in the order of their ranks: a heap in which outdated entries stay until they come up."""

import heapq
from collections.abc import Iterator
from itertools import count

from memstate.prefix.tree import Node

_Entry = tuple[float, int, Node]


class Ranking:
    """Orders nodes by rank. Of equal ranks, the node that was placed first comes first.

    Every operation costs the logarithm of the number of nodes.

    Example:
        >>> first, second = (Node(None, b"", [], 0) for _ in range(2))
        >>> ranking = Ranking()
        >>> ranking.place(first, 2.0)
        >>> ranking.place(second, 1.0)
        >>> [ranking.rank(node) for node in ranking.ascending()]
        [1.0, 2.0]
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[Node, _Entry] = {}  # node -> its valid entry; every other entry in the heap is outdated
        self._serial = count()
        self._passed: list[_Entry] = []  # entries that the last `ascending` took from the heap

    def __iter__(self) -> Iterator[Node]:
        return iter(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def rank(self, node: Node) -> float:
        """Returns the rank of a node that has one."""
        return self._entries[node][0]

    def place(self, node: Node, rank: float) -> None:
        """Sets the rank of a node. A rank that it had before no longer counts."""
        entry = self._entries[node] = (rank, next(self._serial), node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) is entry]
            heapq.heapify(self._heap)

    def remove(self, node: Node) -> None:
        """Removes a node, if it has a rank."""
        self._entries.pop(node, None)

    def ascending(self) -> Iterator[Node]:
        """Yields the nodes, the lowest rank first, without removing them.

        The caller may stop at any node, and may remove and place nodes between two of them.
        """
        self._restore()
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                self._passed.append(entry)
                yield entry[2]

    def _restore(self) -> None:
        """Puts back the entries that the last `ascending` took. If its caller stopped early, it could not do so."""
        while self._passed:
            entry = self._passed.pop()
            if self._entries.get(entry[2]) is entry:
                heapq.heappush(self._heap, entry)
