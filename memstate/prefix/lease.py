"""Leases of paths in the prefix cache, and the protocols by which tiers and watchers hear of its changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memstate.prefix.match import Match
from memstate.prefix.tree import Node
from memstate.requests.handles import Snapshot
from memstate.slots.registers import Longs
from memstate.tokens import Key, Keys, SaltedTokens, Tokens

NO_NODE = Node(None, b"")  # the last node of an empty path: the lease shares no page
NO_MATCH = Match(0, 0, 0, 0)


class Below(Protocol):
    """The calls by which the prefix cache tells the tiers of states that are cached, used and evicted."""

    def added(self, node: Node) -> None:
        """Notes that a state has been cached.

        Args:
            node: The node that has the state.
        """

    def used(self, node: Node) -> None:
        """Notes that a request starts from a state.

        Args:
            node: The node that has the state.
        """

    def planned(self, rows: Longs, before: Longs, after: Longs) -> None:
        """Notes a step whose forward has not written its KV pages yet.

        Args:
            rows: The row of each entry of the step; row 0 is padding. int64 `batch`.
            before: Tokens of each row before the step. int64 `batch`.
            after: Tokens of each row after the step. int64 `batch`.
        """

    def save(self, nodes: Sequence[Node]) -> None:
        """Saves states that are evicted right after this call.

        Args:
            nodes: The nodes that have the states.
        """


class Watcher(Protocol):
    """Is told of all KV and states that enter and leave the prefix cache, to tell others."""

    def pages_stored(self, node: Node, first: int) -> None:
        """Notes that pages on the path to a node got KV.

        Args:
            node: The node at whose end the new KV ends.
            first: Number of pages, from the root on, that had KV before.
        """

    def pages_removed(self, node: Node, pages: int) -> None:
        """Notes pages whose KV is given up right after this call.

        Args:
            node: The node of these pages. No node below it has KV.
            pages: How many pages at its end are given up.
        """

    def state_stored(self, node: Node) -> None:
        """Notes that a state has been cached.

        Args:
            node: The node that has the state.
        """

    def state_removed(self, node: Node) -> None:
        """Notes that a state is no longer cached.

        Args:
            node: The node that had the state.
        """

    def replaced(self) -> None:
        """Notes that any content of the cache may have changed."""


@dataclass
class Lease:
    """Lease of a row on a path of the tree. Of the lease of a session, only the last node is kept: `Conversation.path`.

    Attributes:
        node: Last node of the path.
        prompt: The prompt; empty if its tokens are not known. Tokens that the row files later must begin with it.
        match: How far the tree matched the prompt.
        own: A dict with the nodes whose states this row filed. The value of a node is its `uses` at that time, plus the
            uses by this row since.
        decoded: The last state beyond the prompt that this row filed.
        given: Tokens with which the row was admitted; they begin with the prompt. None: not known.
        encoded: With keys: the keys that the row has given so far, encoded, so that only new keys need encoding.
        end: Number of pages of the path when the lease began. The last node may have grown since, by the pages of
            another row.
    """

    node: Node
    prompt: SaltedTokens
    match: Match
    own: dict[Node, int] = field(default_factory=dict)
    decoded: Snapshot | None = None
    given: Tokens | Keys | None = None
    encoded: Key = b""
    end: int = 0
