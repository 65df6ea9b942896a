"""The clairvoyant bound: keep states where a later request goes on, and evict what is used again latest.

L. Belady, IBM Systems Journal 1966. It reads the rest of a trace, so no engine can have it; replays print it beside
policies. A length is in blocks.
"""

from bisect import bisect_right
from collections.abc import Sequence

from memstate.cli.replay.requests import Served
from memstate.prefix import Match, Prefix
from memstate.prefix.placement import Placement
from memstate.prefix.policies.base import PagePolicy, Place, Ranked, RankedStates
from memstate.prefix.tree import Node
from memstate.tokens import BYTES

NEVER = 2**62


class Future:
    """Knows when each block is where a request's known part ends: what earlier prompts and answers had.

    With a state there and KV up to it, the request hits all it can.

    Args:
        requests: The trace.
        per_block: Units of a block.

    Attributes:
        now: The present request.
    """

    def __init__(self, requests: Sequence[Served], per_block: int) -> None:
        self.now, self._per_block = 0, per_block
        self._blocks: list[list[int]] = []  # of each request, the filled ones
        self._uses: dict[int, list[int]] = {}
        seen: set[int] = set()
        for request in requests:
            blocks = (request.tokens[per_block - 1 :: per_block] // per_block).tolist()
            most = max(0, request.prompt - 1) // per_block  # the last token of a prompt is computed in any case
            known = next((n for n, block in enumerate(blocks[:most]) if block not in seen), most)
            if known:
                self._uses.setdefault(blocks[known - 1], []).append(request.at)
            self._blocks.append(blocks)
            seen.update(blocks)

    def next(self, block: int) -> int:
        """Returns the next request after the present one whose known part ends with the block, NEVER for none."""
        uses = self._uses.get(block, ())
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else NEVER

    def after(self, length: int) -> int:
        """Returns the same for the block with which so many blocks of the present request end."""
        return self.next(self._blocks[self.now][length - 1])

    def wanted(self) -> list[int]:
        """Returns the lengths of the present request at which it should leave states."""
        return [n for n in range(1, len(self._blocks[self.now]) + 1) if self.after(n) < NEVER]

    def rank(self, node: Node) -> int:
        """Returns the rank of a node: what is used latest goes first."""
        return -self.next(int.from_bytes(node.key[-BYTES:], "little", signed=True) // self._per_block)

    def prefix(self, states: int) -> Prefix:
        """Returns the settings of a clairvoyant prefix cache of so many states."""
        return Prefix(Foresight(self), ForesightPages(self), most_states=states, placement=Foreseen(self))


class Foreseen(Placement):
    """Keeps a state at each length at which a later request goes on."""

    def __init__(self, future: Future) -> None:
        self.future = future

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """See `Placement.marks`."""
        return {n * page_size: "foreseen" for n in self.future.wanted()}


class Foresight(RankedStates):
    """Ranks states by their next use; the latest goes first."""

    def __init__(self, future: Future) -> None:
        self.future = future
        super().__init__()

    def admits(self, place: Place) -> bool:
        """Tells whether to keep a state there at all."""
        return self.future.after(place.end) < NEVER

    def used(self, node: Node) -> None:
        """Hears that a request starts from the node's state."""
        self._order.place(node, self.future.rank(node))


class ForesightPages(Ranked, PagePolicy):
    """Ranks leaves by the next use of their last block; the latest goes first."""

    def __init__(self, future: Future) -> None:
        self.future = future
        super().__init__()

    def leaf(self, node: Node) -> None:
        """Hears that a node is a leaf now: it is new, or its last child is gone."""
        self._order.place(node, self.future.rank(node))

    def used(self, node: Node) -> None:
        """Hears that a prompt was followed down to this node, a leaf or not."""
        if node in self._order:
            self.leaf(node)
