"""Stands in for the prefix cache of a manager without one, so that callers need not ask whether there is one."""

from collections.abc import Hashable, Sequence

from memstate.prefix.cache import PrefixCache
from memstate.prefix.lease import Insertion
from memstate.prefix.settings import Prefix
from memstate.requests.handles import Snapshot
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.slots.commands import CommandBuffer


class NoCache(PrefixCache):
    """An empty cache that stays empty: callers look nothing up in it, and it keeps nothing.

    Args:
        commands: Records the changes of owners.
        pages: KV pages of rows.
        snapshots: Registers and pins of published states.
    """

    enabled = False

    def __init__(self, commands: CommandBuffer, pages: PageTable, snapshots: Snapshots) -> None:
        super().__init__(Prefix(evict=False), commands, pages, snapshots)

    def insert(self, insertions: Sequence[Insertion]) -> list[Snapshot | None]:
        """Keeps nothing, and returns None for each insertion."""
        return [None] * len(insertions)

    def require_foreign(self, snapshots: Sequence[Snapshot]) -> None:
        """Refuses nothing: no snapshot is its own."""

    def on_miss(self, row: int, salt: Hashable, key: bytes | None) -> None:
        """Opens no lease."""
