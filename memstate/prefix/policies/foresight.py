"""The clairvoyant bound: what is used again latest goes first, and what is never used again is not kept (L. Belady, IBM
Systems Journal 1966). It reads the rest of a trace, so that no engine can have it; replays print it beside policies.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from memstate.prefix.policies.base import PagePolicy, Place, StatePolicy
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node
from memstate.tokens import BYTES

NEVER = 2**62


class Future:
    """When each block is where a request's known part ends: with a state there, and KV up to it, it hits all it can.

    requests: their blocks, in order; an id names a block and all before it. now: the present one.
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
        """The next request after the present one whose known part ends with the block, NEVER for none."""
        uses = self._uses.get(block, ())
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else NEVER

    def wanted(self) -> list[int]:
        """Where the present request is to leave states, in blocks from its start."""
        return [n for n, block in enumerate(self.requests[self.now], 1) if self.next(block) < NEVER]

    def end(self, node: Node) -> int:
        """The block that a node ends with."""
        return int.from_bytes(node.key[-BYTES:], "little", signed=True)


class Foresight(StatePolicy):
    """States where requests will need them, by their next use; the latest first to go."""

    def __init__(self, future: Future) -> None:
        self.future = future
        self.reset()

    def __repr__(self) -> str:
        return "Foresight()"

    def reset(self) -> None:
        self._order = Ranking()

    def admits(self, place: Place) -> bool:
        return self.future.next(self.future.requests[self.future.now][place.end - 1]) < NEVER

    def added(self, node: Node, kind: str) -> None:
        self._order.place(node, -self.future.next(self.future.end(node)))

    def used(self, node: Node) -> None:
        self.added(node, "")

    def dropped(self, node: Node) -> None:
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        return self._order.ascending()


class ForesightPages(PagePolicy):
    """Leaves by the next use of their last block, the latest first to go."""

    def __init__(self, future: Future) -> None:
        self.future = future
        self.reset()

    def __repr__(self) -> str:
        return "ForesightPages()"

    def reset(self) -> None:
        self._order = Ranking()

    def leaf(self, node: Node) -> None:
        self._order.place(node, -self.future.next(self.future.end(node)))

    def used(self, node: Node) -> None:
        if node in self._order:
            self.leaf(node)

    def dropped(self, node: Node) -> None:
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        return self._order.ascending()
