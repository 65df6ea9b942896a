"""A cap on the states of one path, around another policy: a long conversation may not fill the pool with its past."""

from collections.abc import Iterator
from itertools import chain

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.prefix.policies.base import PagePolicy, Place, StatePolicy
from memstate.prefix.tree import Node


class PathCap(StatePolicy):
    """Offers what is beyond the cap first, then what the other policy offers.

    most: states from the start of a prompt to its end. Beyond them goes the one that fewest used; of equals the
    shortest. A state from which continuations part is not counted: it is nobody's past alone.
    """

    def __init__(self, most: int, policy: StatePolicy) -> None:
        if not is_count(most) or most < 1 or not isinstance(policy, StatePolicy):
            raise ConfigurationError(f"PathCap({most!r}, {policy!r}): expected at least 1 state, and a StatePolicy")
        self.most, self.policy, self.remembers = most, policy, policy.remembers  # type: ignore[misc]
        self.reset()

    def __repr__(self) -> str:
        return f"PathCap({self.most}, {self.policy})"

    def reset(self) -> None:
        self.policy.reset()
        self._beyond: dict[Node, None] = {}  # in the order in which they came to be too many

    def admits(self, place: Place) -> bool:
        return self.policy.admits(place)

    def added(self, node: Node, kind: str) -> None:
        self.policy.added(node, kind)
        path = [step for step in node.path() if step.snapshot and step is not node and len(step.children) < 2]
        path = [step for step in path if step not in self._beyond]
        if len(path) >= self.most:
            self._beyond[min(path, key=lambda step: (step.uses, step.end))] = None

    def used(self, node: Node) -> None:
        self._beyond.pop(node, None)
        self.policy.used(node)

    def belong(self, cache: object) -> None:
        super().belong(cache)
        self.policy.belong(cache)

    def pages(self) -> PagePolicy | None:
        return self.policy.pages()

    def asked(self, node: Node, pages: int) -> None:
        self.policy.asked(node, pages)

    def forgotten(self, node: Node) -> None:
        self.policy.forgotten(node)

    def superseded(self, node: Node) -> None:
        self.policy.superseded(node)

    def dropped(self, node: Node) -> None:
        self._beyond.pop(node, None)
        self.policy.dropped(node)

    def victims(self) -> Iterator[Node]:
        rest = (node for node in self.policy.victims() if node not in self._beyond)
        return chain(list(self._beyond), rest)
