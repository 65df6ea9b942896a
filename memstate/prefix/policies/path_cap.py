"""A cap on the states of one path, around another policy: a long conversation may not fill the pool with its past."""

from collections.abc import Iterator
from itertools import chain

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.prefix.policies.base import PagePolicy, Place, StatePolicy
from memstate.prefix.tree import Node


class PathCap(StatePolicy):
    """Evicts states beyond the cap first, then follows another policy.

    Beyond the cap goes the state with the fewest uses, of equals the shortest. A state where continuations part is not
    counted, because more than one conversation needs it.

    Args:
        most: States from the start of a prompt to its end.
        policy: The other policy.

    Raises:
        ConfigurationError: The cap is below 1, or `policy` is no StatePolicy.

    Example:
        >>> from memstate.prefix.policies.lru import Lru
        >>> PathCap(3, Lru())
        PathCap(3, Lru())
    """

    def __init__(self, most: int, policy: StatePolicy) -> None:
        if not is_count(most) or most < 1 or not isinstance(policy, StatePolicy):
            raise ConfigurationError(f"PathCap({most!r}, {policy!r}): expected at least 1 state, and a StatePolicy")
        self.most, self.policy, self.remembers = most, policy, policy.remembers  # type: ignore[misc]
        self.reset()

    def __repr__(self) -> str:
        return f"PathCap({self.most}, {self.policy})"

    def reset(self) -> None:
        """Forgets every node."""
        self.policy.reset()
        self._beyond: dict[Node, None] = {}  # in the order in which they came to be too many

    def admits(self, place: Place) -> bool:
        """Tells whether to keep a state there at all."""
        return self.policy.admits(place)

    def added(self, node: Node, kind: str) -> None:
        """Hears that a node has a state now."""
        self.policy.added(node, kind)
        path = [step for step in node.path() if step.snapshot and step is not node and len(step.children) < 2]
        path = [step for step in path if step not in self._beyond]
        if len(path) >= self.most:
            self._beyond[min(path, key=lambda step: (step.uses, step.end))] = None

    def used(self, node: Node) -> None:
        """Hears that a request starts from the node's state."""
        self._beyond.pop(node, None)
        self.policy.used(node)

    def belong(self, cache: object) -> None:
        """Binds the policy to a cache."""
        super().belong(cache)
        self.policy.belong(cache)

    def pages(self) -> PagePolicy | None:
        """Returns the policy for pages that goes with this one, None for any."""
        return self.policy.pages()

    def asked(self, node: Node, pages: int) -> None:
        """Hears of a prompt."""
        self.policy.asked(node, pages)

    def forgotten(self, node: Node) -> None:
        """Hears that a node without a state leaves the tree, or that no prompt ends there any more."""
        self.policy.forgotten(node)

    def dropped(self, node: Node) -> None:
        """Hears that the node has no state any more."""
        self._beyond.pop(node, None)
        self.policy.dropped(node)

    def victims(self) -> Iterator[Node]:
        """Yields nodes with a state, the least worthy first. The cache skips those in use."""
        rest = (node for node in self.policy.victims() if node not in self._beyond)
        return chain(list(self._beyond), rest)

    def coming(self) -> Iterator[Node]:
        """Yields about what `victims` would, and changes nothing."""
        rest = (node for node in self.policy.coming() if node not in self._beyond)
        return chain(list(self._beyond), rest)
