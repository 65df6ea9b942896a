"""The clairvoyant bound: evict what is used again latest, and do not keep what is never used again.

L. Belady, IBM Systems Journal 1966. It reads the rest of a trace, so no engine can have it; replays print it beside
policies.
"""

from bisect import bisect_right
from collections.abc import Sequence

from memstate.prefix.policies.base import PagePolicy, Place, Ranked, RankedStates
from memstate.prefix.tree import Node
from memstate.tokens import BYTES

NEVER = 2**62


class Future:
    """Knows when each block is where a request's known part ends.

    With a state there and KV up to it, the request hits all it can.

    Args:
        requests: Blocks of each request, in order. An id names a block and all before it.

    Attributes:
        now: The present request.
    """

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self.requests, self.now = requests, 0
        self._uses: dict[int, list[int]] = {}
        seen: set[int] = set()
        for at, blocks in enumerate(requests):
            known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
            if known:
                self._uses.setdefault(blocks[known - 1], []).append(at)
            seen.update(blocks)

    def next(self, block: int) -> int:
        """Returns the next request after the present one whose known part ends with the block, NEVER for none."""
        uses = self._uses.get(block, ())
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else NEVER

    def wanted(self) -> list[int]:
        """Returns where the present request should leave states, in blocks from its start."""
        return [n for n, block in enumerate(self.requests[self.now], 1) if self.next(block) < NEVER]

    def end(self, node: Node) -> int:
        """Returns the block that a node ends with."""
        return int.from_bytes(node.key[-BYTES:], "little", signed=True)


class Foresight(RankedStates):
    """Ranks states by their next use; the latest goes first."""

    def __init__(self, future: Future) -> None:
        self.future = future
        super().__init__()

    def admits(self, place: Place) -> bool:
        """Tells whether to keep a state there at all."""
        return self.future.next(self.future.requests[self.future.now][place.end - 1]) < NEVER

    def used(self, node: Node) -> None:
        """Hears that a request starts from the node's state."""
        self._order.place(node, -self.future.next(self.future.end(node)))


class ForesightPages(Ranked, PagePolicy):
    """Ranks leaves by the next use of their last block; the latest goes first."""

    def __init__(self, future: Future) -> None:
        self.future = future
        super().__init__()

    def leaf(self, node: Node) -> None:
        """Hears that a node is a leaf now: it is new, or its last child is gone."""
        self._order.place(node, -self.future.next(self.future.end(node)))

    def used(self, node: Node) -> None:
        """Hears that a prompt was followed down to this node, a leaf or not."""
        if node in self._order:
            self.leaf(node)
