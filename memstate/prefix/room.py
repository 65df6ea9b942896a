"""Frees slots, registers and KV pages for a call that lacks them, from cached states and idle sessions.

superseded states -> expired sessions -> sessions beyond their share -> cached states, by policy -> idle sessions

To make way is to give up states and pages. A session that makes way hands its states of whole pages to the prefix
cache, with their KV. The cache may evict them at once, like any other states. The tiers save evicted states, and a
later prompt can find them there.
"""

import logging
from collections import Counter
from collections.abc import Callable
from itertools import chain

from memstate import logs
from memstate.prefix.cache import PrefixCache
from memstate.prefix.conversation import Conversation
from memstate.prefix.sessions import Sessions
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.slots.allocator import SlotAllocator

LOG = logs.logger("sessions")


class Room:
    """Says how much room calls can get, and makes it.

    Args:
        cache: The prefix cache, enabled or not.
        sessions: Open sessions. A session whose turn is about to begin keeps its states.
        allocator: The allocator of the slots.
        pages: KV pages of rows.
        holdings: Owners of states.
    """

    def __init__(
        self, cache: PrefixCache, sessions: Sessions, allocator: SlotAllocator, pages: PageTable, holdings: Holdings
    ) -> None:
        self.cache, self._sessions = cache, sessions
        self._allocator, self._pages, self._holdings = allocator, pages, holdings

    @property
    def states(self) -> int:
        """Number of states that can make way. Each frees a slot and a register."""
        return self.cache.evictable_states + self._sessions.idle_states

    def can_free_pages(self, n: int) -> bool:
        """Returns whether n pages can be freed. Changes nothing.

        Args:
            n: Pages to free, besides those that are free now.
        """
        if self.cache.can_evict(n):
            return True
        if not (idle := self._sessions.idle()):
            return False
        leases = Counter(node for session in idle for node in session.path.path())
        nodes = (node.pages for _, node in self.cache.tree.walk() if node.leases == leases[node])
        held = Counter(chain.from_iterable(chain((session.pages for session in idle), nodes)))
        holders = self._pages.allocator.holders
        return n <= sum(holders[page] == times for page, times in held.items())

    def free_slots(self, n: int) -> None:
        """Evicts states until n slots are free, or no further state can make way."""
        self._free_states(lambda: n - self._allocator.free)

    def free_registers(self, n: int) -> None:
        """Evicts states until n holders are free, or no further state can make way."""
        self._free_states(lambda: n - self._holdings.free)

    def for_marks(self, n: int, reserve: int) -> None:
        """Evicts cached states until n more states can be kept. Sessions do not make way for marks.

        Args:
            n: States to keep. Each takes a slot and a register.
            reserve: Slots that stay free.
        """
        self.cache.evict_states(max(reserve + n - self._allocator.free, n - self._holdings.free))

    def _free_states(self, lacking: Callable[[], int]) -> None:
        if (n := lacking()) > 0:
            self.cache.evict_states(min(n, self.cache.superseded_states))
            self._free(lacking, self.cache.evict_states)

    def free_pages(self, n: int) -> None:
        """Evicts pages until n KV pages are free, or no further page can be freed."""
        self._free(lambda: n - self._pages.allocator.free, self.cache.evict_pages)

    def _free(self, lacking: Callable[[], int], evict: Callable[[int], object]) -> None:
        sessions = self._sessions
        if lacking() > 0 and (sessions.beyond_share or sessions.any_expired):
            self._give_way(lacking, evict, lambda session: sessions.expired(session) or sessions.beyond_share)
        if lacking() > 0:
            evict(lacking())
        if lacking() > 0 and sessions.held:
            self._give_way(lacking, evict, lambda session: True)

    def _give_way(
        self, lacking: Callable[[], int], evict: Callable[[int], object], goes: Callable[[Conversation], bool]
    ) -> None:
        """Lets sessions that `goes` accepts make way until nothing is lacking. After each session, calls `evict`."""
        for session in self._sessions.idle():
            if goes(session):
                self.give_way(session)
                if lacking() > 0:
                    evict(lacking())
                if lacking() <= 0:
                    return

    def give_way(self, session: Conversation) -> None:
        """Calls `hand_over` for an idle session, and counts and logs that the session made way.

        Args:
            session: The session, which stays open.
        """
        self._sessions.emptied += 1
        if LOG.isEnabledFor(logging.INFO):
            fields = {"states": len(session.kept), "pages": len(session.pages), "priority": session.priority}
            logs.event(LOG, logging.INFO, "session emptied", expired=self._sessions.expired(session), **fields)
        self.hand_over(session)

    def hand_over(self, session: Conversation) -> None:
        """Takes all states and pages from an idle session.

        States of whole pages go to the cache, unless the session has expired; the others are released.

        Args:
            session: The session, which stays open.
        """
        if self.cache.enabled and not self._sessions.expired(session):
            size = self._pages.page_size
            for snapshot in session.kept[::-1]:
                if snapshot.length % size == 0 and not self._sessions.stays(session, snapshot):
                    prompt, pages = session.prompt.head(snapshot.length), session.pages[: snapshot.length // size]
                    if node := self.cache.adopt(snapshot, prompt, pages):
                        session.kept.remove(snapshot)
                        session.own[node] = node.uses
            self._sessions.supersede(session, 0, self.cache)
        self.cache.release(self._sessions.empty(session))
        self.cache.trim()

    def expire(self) -> None:
        """Lets the idle sessions that have expired make way."""
        for session in filter(self._sessions.expired, self._sessions.idle()):
            self.give_way(session)
        self._sessions.note_expiries()

    def trim(self) -> None:
        """Lets sessions make way until they keep at most `SessionLimits.most_states` states."""
        for session in self._sessions.idle() if self._sessions.too_many else ():
            if self._sessions.too_many:
                self.give_way(session)
