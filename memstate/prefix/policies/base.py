"""What the prefix cache asks of policies. They decide; the cache executes. Knows no slot and no register."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple
from weakref import ref

from memstate.errors import ConfigurationError
from memstate.prefix.tree import Node


class Place(NamedTuple):
    """Where a state could be kept. Lengths in pages from the start.

    end: what the state would stand for. above: up to the deepest state that a request with this prefix would go on
    from without it. kind: `boundary`, `prompt` (the end of a prompt), `branch` (KV reached here and no state did),
    `again` (here was one) or `end` (of an answer).
    """

    end: int
    above: int
    kind: str


class Policy:
    """One cache's, because it remembers that cache's nodes."""

    _cache: "ref[object] | None" = None

    def belong(self, cache: object) -> None:
        """Says whose policy this is. Raises: ConfigurationError where it is another's."""
        other = self._cache() if self._cache is not None else None
        if other is not None and other is not cache:
            raise ConfigurationError(f"{self!r} belongs to another manager's prefix cache: give each one of its own")
        self._cache = ref(cache)


class StatePolicy(Policy, ABC):
    """Which states are worth their slots.

    remembers: wants to hear of prompts whose KV is gone too, as many pages again as there are.
    """

    remembers: ClassVar[bool] = False

    def pages(self) -> "PagePolicy | None":
        """The policy for pages that goes with it, None for any."""
        return None

    @abstractmethod
    def reset(self) -> None:
        """Forgets every node."""

    def asked(self, node: Node, pages: int) -> None:
        """A prompt of so many pages has come, which the tree knows up to this node, or up to a root."""

    def admits(self, place: Place) -> bool:
        """Whether a state is to be kept there at all."""
        return place.kind != "again"

    @abstractmethod
    def added(self, node: Node, kind: str) -> None:
        """The node has a state now."""

    @abstractmethod
    def used(self, node: Node) -> None:
        """A request goes on from the node's state."""

    def superseded(self, node: Node) -> None:
        """Whoever left this state has a newer one elsewhere, and nobody else has used it."""

    @abstractmethod
    def dropped(self, node: Node) -> None:
        """The node has no state any more."""

    def forgotten(self, node: Node) -> None:
        """The node, which has no state, leaves the tree, or no prompt ends there any more."""

    @abstractmethod
    def victims(self) -> Iterator[Node]:
        """Nodes with a state, the least worthy first; the caller passes over those that are in use."""


class PagePolicy(Policy, ABC):
    """Which KV pages are worth keeping; asked about leaves only, because what leads to others must stay."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets every node."""

    def keeps(self, node: Node) -> bool:
        """Whether a leaf without a state keeps its KV, which can tell where a state is missed and serve no hit."""
        return True

    @abstractmethod
    def leaf(self, node: Node) -> None:
        """The node is a leaf now: new, or its last child is gone."""

    @abstractmethod
    def used(self, node: Node) -> None:
        """A request's prompt was followed down to this node, a leaf or not."""

    @abstractmethod
    def dropped(self, node: Node) -> None:
        """The node is no leaf any more, or gone."""

    @abstractmethod
    def victims(self) -> Iterator[Node]:
        """Leaves, the least worthy first, some more than once if need be; the caller passes over those that are in use,
        and what is not offered goes last.
        """
