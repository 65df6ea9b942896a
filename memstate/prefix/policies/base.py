"""Base classes of policies, which decide what the prefix cache keeps. Policies know no slot and no register."""

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
        above: Pages of the deepest cached state before it on the path: without the new state, a request starts there.
        kind: `boundary` (of decode), `prompt` (the end of a prompt), `branch` (KV reached here and no state did),
            `again` (an evicted state was here), `end` (of an answer), `named` (by the request), or another kind that a
            placement returned.
    """

    end: int
    above: int
    kind: str


class Policy:
    """Base of policies. A policy belongs to one prefix cache, because it remembers nodes of this cache."""

    _cache: "ref[object] | None" = None

    def belong(self, cache: object) -> None:
        """Binds the policy to a cache.

        Raises:
            ConfigurationError: The policy belongs to another cache.
        """
        other = self._cache() if self._cache is not None else None
        if other is not None and other is not cache:
            raise ConfigurationError(f"{self!r} belongs to another manager's prefix cache: give each one of its own")
        self._cache = ref(cache)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class StatePolicy(Policy, ABC):
    """Decides which states are worth their slots.

    The policy hears of each admission by `asked`, then `used`, in the order of admissions. The two calls may come later
    than the admission: before the policy must decide again, or in `settle`.

    Attributes:
        remembers: Whether the tree keeps ghosts. Together they stand for at most as many pages as memstate manages.
    """

    remembers: ClassVar[bool] = False

    def pages(self) -> "PagePolicy | None":
        """Returns the policy for pages that this one needs beside it, None if it works with any."""
        return None

    @abstractmethod
    def reset(self) -> None:
        """Forgets every node."""

    def asked(self, node: Node, pages: int) -> None:
        """Hears that a request came.

        Args:
            node: The deepest node whose end the prompt reaches, or a root if there is none.
            pages: Number of whole pages of the prompt.
        """

    def admits(self, place: Place) -> bool:
        """Returns whether to keep a state at a place."""
        return place.kind != "again"

    @abstractmethod
    def added(self, node: Node, kind: str) -> None:
        """Hears that a node has a state now. Called again after `recover` for each state that stays.

        Args:
            node: The node.
            kind: `Place.kind` of the state; "again" after `recover` or a load by the tiers.
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
        """Yields the nodes with a state, the least valuable first. The cache skips states that are in use.

        Nodes that are not yielded are evicted last, the oldest first. So no policy can protect a state for ever.
        """

    def coming(self) -> Iterator[Node]:
        """Yields roughly the nodes that `victims` would, and changes nothing.

        It must not change what `victims` yields: ranks of tensor parallelism may call it at different times, and must
        still evict the same states.
        """
        return self.victims()


class Ranked:
    """Base of policies that rank nodes. A subclass places them in `_order`, a `Ranking`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets every node."""
        self._order = Ranking()

    def dropped(self, node: Node) -> None:
        """Hears that a node is no longer ranked."""
        self._order.remove(node)

    def victims(self) -> Iterator[Node]:
        """Yields the nodes, the lowest rank first. The cache skips nodes in use."""
        return self._order.ascending()


class RankedStates(Ranked, StatePolicy):
    """Base of policies that rank states by their uses. A subclass sets the rank in `used`."""

    def added(self, node: Node, kind: str) -> None:
        """Hears that a node has a state now. This counts as a use of it, unless a subclass overrides this method."""
        self.used(node)


class PagePolicy(Policy, ABC):
    """Decides which KV pages are worth keeping.

    The cache asks it about leaves only, because a node with KV below it must stay.
    """

    @abstractmethod
    def reset(self) -> None:
        """Forgets every node."""

    def keeps(self, node: Node) -> bool:
        """Returns whether a leaf without a state keeps its KV.

        Such KV gives no hit, because no request can start without a state. It only shows, as a branch point, where a
        state is missing.
        """
        return True

    @abstractmethod
    def leaf(self, node: Node) -> None:
        """Hears that a node is a leaf now: it is new, or its last child is gone."""

    @abstractmethod
    def used(self, node: Node) -> None:
        """Hears that a lookup of a prompt ended in this node, which may be a leaf or not."""

    @abstractmethod
    def dropped(self, node: Node) -> None:
        """Hears that a node is no leaf any more, or has left the tree."""

    @abstractmethod
    def victims(self) -> Iterator[Node]:
        """Yields leaves, the least valuable first. A leaf may be yielded more than once.

        The cache skips leaves in use. Leaves that are not yielded are evicted last.
        """
