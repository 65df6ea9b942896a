"""Policy `FlopAware`: ranks states by recency and by the computation that they save per byte.

After R. Pan et al., Marconi: prefix caching for the era of hybrid LLMs (MLSys 2025, arXiv 2411.19379). The value of a
state is its recency + alpha x FLOPs saved per byte, both scaled to 0..1 over all states. States with several
continuations are evicted last.
"""

from collections.abc import Iterator

from memstate.errors import ConfigurationError
from memstate.prefix.policies.lru import Lru
from memstate.prefix.tree import Node


def gain(node: Node) -> int:
    """Returns how many pages a node's state saves: those between the nearest state above and the node's end."""
    above = node.parent
    while above is not None and above.snapshot is None:
        above = above.parent
    return node.end - (above.end if above is not None else 0)


class FlopAware(Lru):
    """Ranks states by recency + alpha x computation saved per byte.

    All states have the same size here, so bytes need not be counted. The computation is counted in pages, because in
    recurrent layers it is linear in tokens. The cost of an eviction is linear in the number of states.

    Args:
        alpha: Weight of the saved computation against recency; 0 is LRU.

    Raises:
        ConfigurationError: The weight is negative.

    Example:
        >>> FlopAware(alpha=0.5)
        FlopAware(alpha=0.5)
    """

    def __init__(self, alpha: float = 1.0) -> None:
        if not isinstance(alpha, int | float) or not 0 <= alpha < float("inf"):
            raise ConfigurationError(f"alpha={alpha!r}: expected a weight from 0 on")
        self.alpha = alpha
        super().__init__()

    def __repr__(self) -> str:
        return f"FlopAware(alpha={self.alpha})"

    def victims(self) -> Iterator[Node]:
        """Yields the nodes with a state, the least valuable first. The cache skips states that are in use."""
        if not (last := {node: self._order.rank(node) for node in self._order}):
            return iter(())
        saved = {node: gain(node) for node in last}
        most, oldest = max(saved.values()) or 1, min(last.values())
        span = self._clock - oldest or 1

        def worth(node: Node) -> tuple[bool, float]:
            shared = len(node.children) > 1
            return shared, (last[node] - oldest) / span + self.alpha * saved[node] / most

        return iter(sorted(last, key=worth))
