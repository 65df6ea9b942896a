"""What the prefix cache asks of policies. They decide, the cache executes. Knows no slot and no register."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple
from weakref import ref

from memstate.errors import ConfigurationError
from memstate.prefix.ranking import Ranking
from memstate.prefix.tree import Node


class Place(NamedTuple):
    """A place where a state could be kept. Lengths are pages from the start.

    Attributes:
        end: Pages that the state would stand for.
        above: Pages up to the deepest state that a request with this prefix would otherwise start from.
        kind: `boundary` (of decode), `prompt` (the end of a prompt), `branch` (KV reached here and no state did),
            `again` (a state was here), `end` (of an answer), `named` (by the request), or what a placement calls it.
    """

    end: int
    above: int
    kind: str


class Policy:
    """A policy of one prefix cache, because it remembers that cache's nodes."""

    _cache: "ref[object] | None" = None

    def belong(self, cache: object) -> None:
        """Binds the policy to a cache.

        Raises:
            ConfigurationError: It belongs to another one.
        """
        other = self._cache() if self._cache is not None else None
        if other is not None and other is not cache:
            raise ConfigurationError(f"{self!r} belongs to another manager's prefix cache: give each one of its own")
        self._cache = ref(cache)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class StatePolicy(Policy, ABC):
    """Decides which states are worth their slots.

    It hears of admissions (`asked`, then `used`) in their order: before any later question, and otherwise in `settle`.

    Attributes:
        remembers: Whether the tree remembers prompts whose KV is gone too, as many pages again as there are.
    """

    remembers: ClassVar[bool] = False

    def pages(self) -> "PagePolicy | None":
        """Returns the policy for pages that goes with this one, None for any."""
        return None

    @abstractmethod
    def reset(self) -> None:
        """Forgets every node."""

    def asked(self, node: Node, pages: int) -> None:
        """Hears of a prompt.

        Args:
            node: The deepest node that the prompt goes all the way through, or a root.
            pages: Pages of the prompt.
        """

    def admits(self, place: Place) -> bool:
        """Tells whether to keep a state there at all."""
        return place.kind != "again"

    @abstractmethod
    def added(self, node: Node, kind: str) -> None:
        """Hears that a node has a state now. After a `reset` by `recover` it hears it again of each state that stays.

        Args:
            node: The node.
            kind: The kind of its place; "again" after a `recover`.
        """

    @abstractmethod
    def used(self, node: Node) -> None:
        """Hears that a request starts from the node's state."""

    @abstractmethod
    def dropped(self, node: Node) -> None:
        """Hears that the node has no state any more."""

    def forgotten(self, node: Node) -> None:
        """Hears that a node without a state leaves the tree, or that no prompt ends there any more."""

    @abstractmethod
    def victims(self) -> Iterator[Node]:
        """Yields all nodes with a state, the least worthy first. The cache skips those in use.

        What is not yielded goes last, the oldest first: no policy can keep more states than there is room for.
        """

    def coming(self) -> Iterator[Node]:
        """Yields about what `victims` would, and changes nothing, however often it is called.

        Ranks of tensor parallelism may ask at different times, and still evict the same.
        """
        return self.victims()


class Ranked:
    """Has nodes in the order of their ranks; a subclass places them there."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets every node."""
        self._order = Ranking()

    def dropped(self, node: Node) -> None:
        """Hears that a node is no longer ranked."""
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        """Yields the nodes, the least worthy first. The cache skips those in use."""
        return self._order.ascending()


class RankedStates(Ranked, StatePolicy):
    """Ranks states by their uses; a subclass says how, in `used`."""

    def added(self, node: Node, kind: str) -> None:
        """Hears that a node has a state now. It counts as a use, unless a policy says otherwise."""
        self.used(node)


class PagePolicy(Policy, ABC):
    """Decides which KV pages are worth keeping.

    It is asked about leaves only, because what leads to others must stay.
    """

    @abstractmethod
    def reset(self) -> None:
        """Forgets every node."""

    def keeps(self, node: Node) -> bool:
        """Tells whether a leaf without a state keeps its KV.

        Such KV can show that a state is missed, and serves no hit.
        """
        return True

    @abstractmethod
    def leaf(self, node: Node) -> None:
        """Hears that a node is a leaf now: it is new, or its last child is gone."""

    @abstractmethod
    def used(self, node: Node) -> None:
        """Hears that a prompt was followed down to this node, a leaf or not."""

    @abstractmethod
    def dropped(self, node: Node) -> None:
        """Hears that the node is no leaf any more, or gone."""

    @abstractmethod
    def victims(self) -> Iterator[Node]:
        """Yields leaves, the least worthy first, some more than once if need be.

        The cache skips those in use. What is not yielded goes last.
        """
