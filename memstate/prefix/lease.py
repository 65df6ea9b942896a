"""What the prefix cache, its callers and the tiers hand each other: leases, and who hears of what. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memstate.prefix.match import Match
from memstate.prefix.tree import Node
from memstate.requests.handles import Snapshot
from memstate.slots.registers import Longs
from memstate.tokens import Prompt, Tokens

NO_NODE = Node(None, b"")  # the path of a lease that shares nothing
NO_MATCH = Match(0, 0, 0, 0)


class Below(Protocol):
    """Hears of states that are cached, used and evicted, to keep them below the device."""

    def added(self, node: Node) -> None:
        """Notes that a state has been cached.

        Args:
            node: Its node.
        """

    def used(self, node: Node) -> None:
        """Notes that a request starts from a state.

        Args:
            node: Its node.
        """

    def planned(self, rows: Longs, before: Longs, after: Longs) -> None:
        """Notes a step whose forward has still to write KV pages.

        Args:
            rows: Rows of the step's entries; row 0 is padding. int64 `batch`.
            before: Tokens of each row before the step. int64 `batch`.
            after: Tokens of each row after the step. int64 `batch`.
        """

    def save(self, nodes: Sequence[Node]) -> None:
        """Saves states that are evicted right after this call.

        Args:
            nodes: Their nodes.
        """


class Watcher(Protocol):
    """Hears of all that comes to the prefix cache and goes, to tell others."""

    def pages_stored(self, node: Node, first: int) -> None:
        """Notes KV that is there now.

        Args:
            node: The node in which it ends.
            first: Pages from the root that had KV before.
        """

    def pages_removed(self, node: Node, pages: int) -> None:
        """Notes KV that goes right after this call.

        Args:
            node: A node without KV below it.
            pages: How many pages go, from its end.
        """

    def state_stored(self, node: Node) -> None:
        """Notes a state that is there now.

        Args:
            node: Its node.
        """

    def state_removed(self, node: Node) -> None:
        """Notes a state that has gone.

        Args:
            node: Its node.
        """

    def replaced(self) -> None:
        """Notes that everything may be different now."""


@dataclass
class Lease:
    """The part of the tree that a row keeps. Of a session it is `Conversation.path`.

    Attributes:
        node: End of the path that is kept; what is below it is not.
        prompt: The prompt, without tokens where they are not known. All tokens that are handed over later must continue
            it.
        match: What the lookup found.
        own: Nodes whose states came from here, with how often they were used from here.
        decoded: The last state beyond the prompt that came from here.
        given: What the row was admitted with, whose first tokens are the prompt. None: it is not known.
        end: Pages to which the path was its own when the lease began. The node may have grown since, for another row.
    """

    node: Node
    prompt: Prompt
    match: Match
    own: dict[Node, int] = field(default_factory=dict)
    decoded: Snapshot | None = None
    given: Tokens | None = None
    end: int = 0
