"""Stands in for the prefix cache of a manager without one, so that callers need not ask whether there is one."""

from memstate.prefix.cache import PrefixCache
from memstate.prefix.policies import Lru, LruPages
from memstate.prefix.settings import Prefix
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.slots.commands import CommandBuffer


class NoCache(PrefixCache):
    """An empty cache that stays empty: callers look nothing up in it, and it keeps nothing.

    Args:
        commands: Records the changes of owners.
        pages: KV pages of rows.
        holdings: Owners and readers of states.
    """

    enabled = False

    def __init__(self, commands: CommandBuffer, pages: PageTable, holdings: Holdings) -> None:
        super().__init__(Prefix(Lru(), LruPages(), evict=False), commands, pages, holdings)
