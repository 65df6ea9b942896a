"""Streaming sessions: states and pages of a conversation stay in memory between its turns. Slots move, bytes do not.

turn ends       the states in live and lanes, up to the last real token, move to holders of the session; pages stay too
turn begins     of the states whose tokens begin the new prompt, the longest moves to live, shorter ones to lanes
turn aborted    the session keeps the states from which the turn began, if a register still holds them
turns part      two turns in a row could not start from a state of the answer before: the cache keeps their states
room is short   states of whole pages move to the prefix cache; the others are released (room.py)
closed          states and pages are released; if a turn runs, at its end
forked          both sessions share the newest state; the first to start a turn reads it, the last takes it over
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import count, islice
from typing import Any

from memstate.checks import hashable, text
from memstate.errors import InvalidArgument, StaleHandle
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix.cache import PrefixCache
from memstate.prefix.conversation import Conversation, SessionFork, SessionInfo
from memstate.prefix.lease import NO_NODE, Lease
from memstate.prefix.session_settings import SessionLimits
from memstate.prefix.tree import Node
from memstate.requests.handles import ZEROS, Session, Snapshot, Source
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.requests.pages import NO_PAGES
from memstate.slots.commands import CommandBuffer
from memstate.tokens import BYTES, EMPTY, Key, SaltedTokens, common

_SERIALS = count(1)  # shared by all managers, so that a manager refuses a handle of another one


class Sessions:
    """Keeps the open sessions.

    Args:
        commands: Records the changes of owners.
        pages: KV pages of rows.
        holdings: Owners of states; gives and takes back holders.
        lanes: Number of lane registers that a row may fill.
        limits: Limits of the states that idle sessions keep.

    Attributes:
        opened: Open sessions by handle, the oldest first.
        by_row: Sessions with a running turn, by row.
        refused: Number of states that were lost because no holder was free.
        emptied: Number of times that an idle session gave up its states, to make room or because it had expired.
        parted: Number of turns that could not start from a state of the answer before them.
        starting: Sessions whose next turn is about to begin. They keep their states until then.
        expiry: No idle session expires before this time; infinite if none does. See `note_expiries`.
    """

    def __init__(
        self, commands: CommandBuffer, pages: PageTable, holdings: Holdings, lanes: int, limits: SessionLimits
    ) -> None:
        self._file, self._pages, self._holdings, self._guard = commands.registers, pages, holdings, commands.guard
        self._lanes, self.limits = lanes, limits
        self._share = limits.share * commands.registers.allocator.capacity
        self.refused = self.emptied = self.parted = 0
        self._turns = count(1)
        self.opened: dict[Session, Conversation] = {}
        self.keep(None)

    def keep(self, sure: Mapping[int, Snapshot] | None, unsure: Set[int] = frozenset()) -> None:
        """Ends all turns, and forgets states and pages that are not certain. For a new manager and for `recover`.

        The caller makes registers and pages agree with what stays.

        Args:
            sure: register -> the session's state that stays. None: all sessions close.
            unsure: KV pages that do not stay.
        """
        still = [session for session in self.opened.values() if sure is not None and not session.closing]
        kept = [self._survivor(session, sure or {}, unsure) for session in still]
        self.opened = {session.handle: session for session in kept}
        for session in kept:
            session.forks[:] = [other for other in kept if other.forks is session.forks]
        self.by_row: dict[int, Conversation] = {}
        self.starting: list[Conversation] = []
        self.expiry: float = math.inf
        self.note_expiries()

    def _survivor(self, session: Conversation, sure: Mapping[int, Snapshot], unsure: Set[int]) -> Conversation:
        bare = replace(session, prompt=EMPTY, kept=[], pages=NO_PAGES, path=NO_NODE, own={}, row=0, start=0)
        if session.row:
            bare.since = self.limits.clock()
        kept = [] if session.row else [snap for snap in session.kept if sure.get(snap.register) == snap]
        count = self._pages.count(kept[0].length if kept else 0)
        known = session.pages[:count]
        if not kept or session.prompt.tokens < kept[0].length or len(known) < count or not unsure.isdisjoint(known):
            return bare
        return replace(bare, prompt=session.prompt, kept=kept, pages=known)

    def miscounts(self) -> list[str]:
        """Returns a text for each session and row that disagree about which turn runs."""
        faults = [
            f"session {session.handle.id!r} says that row {session.row} runs its turn, and the row does not"
            for session in self.opened.values()
            if session.row and self.by_row.get(session.row) is not session
        ]
        return faults + [
            f"row {row} runs a turn of session {session.handle.id!r}, and the session does not say so"
            for row, session in self.by_row.items()
            if session.row != row or self.opened.get(session.handle) is not session
        ]

    def open(self, name: Hashable, priority: int, ttl: float | None) -> Session:
        """Opens a session without states and pages.

        Args:
            name: The caller's name for the session.
            priority: If room is short, the session with the lowest number gives up its states first.
            ttl: Seconds for which the idle session keeps its states, None for no limit.

        Returns:
            Its handle.
        """
        handle, now = Session(name, next(_SERIALS)), self.limits.clock()
        self.opened[handle] = Conversation(
            handle, priority=priority, ttl=ttl, opened=now, since=now, turn=next(self._turns)
        )
        return handle

    def fork(self, session: Conversation, name: Hashable) -> SessionFork:
        """Opens a session that shares the newest state of an idle session. The caller leases the new session's path.

        Args:
            session: The idle session. If its last page is partly filled, the caller makes sure that a page is free.
            name: The caller's name for the new session.

        Returns:
            The new session, and the pages to copy.
        """
        twin = self.opened[self.open(name, session.priority, session.ttl)]
        whole = session.length // self._pages.page_size
        shared, partial = session.pages[:whole], session.pages[whole:]
        fresh = self._pages.allocator.claim(len(partial))
        self._pages.allocator.share(shared)
        twin.prompt, twin.path, twin.kept, twin.pages = session.prompt, session.path, session.kept[:1], shared + fresh
        twin.asked, twin.parted = session.asked, session.parted
        twin.forks = session.forks = session.forks or [session]
        session.forks.append(twin)
        return SessionFork(twin.handle, list(zip(fresh, partial, strict=True)))

    def _heir(self, session: Conversation, state: Snapshot) -> Conversation | None:
        """Returns another session that shares a state, None for none."""
        return next((other for other in session.forks if other is not session and state in other.kept), None)

    def stays(self, session: Conversation, state: Snapshot) -> bool:
        """Returns whether the slot of a state stays in use when its session gives it up: a fork or a row needs it."""
        shared = bool(session.forks) and self._heir(session, state) is not None
        return shared or state.register in self._holdings.readers

    def _let_go(self, session: Conversation, states: Sequence[Snapshot]) -> None:
        """Releases states of a session. If a fork shares a state, the fork becomes its owner instead."""
        heirs = [(state, self._heir(session, state)) for state in states]
        for state, heir in heirs:
            if heir is not None:
                self._holdings.give(state, heir)
        self._holdings.end([state for state, heir in heirs if heir is None])

    def owned(self, session: Conversation) -> list[Snapshot]:
        """Returns the states of a session, without those whose owner is one of its forks."""
        owner, others = self._holdings.owner, [other for other in session.forks if other is not session]
        return [state for state in session.kept if owner[state.register] not in others]

    def require(self, handle: Session) -> Conversation:
        """Returns an open session.

        Args:
            handle: The handle that `open` returned.

        Raises:
            StaleHandle: The session is closed, or belongs to another manager.
            InvalidArgument: `handle` is not the handle of a session.
        """
        if not isinstance(handle, Session):
            raise InvalidArgument(f"{handle!r} is no session: use the handle that sessions.open() returned")
        try:
            session = self.opened.get(handle)
        except TypeError:
            session = self.opened.get(hashable("session", handle))
        if session is None or session.closing:
            why = "it was closed, ended by recover(), or belongs to another manager"
            raise StaleHandle(f"session {handle.id!r}", handle.serial, 0, why)
        return session

    def get(self, handle: Session) -> Conversation:
        """Returns an open session without a running turn.

        Args:
            handle: The handle that `open` returned.

        Raises:
            StaleHandle: The session is closed, or belongs to another manager.
            InvalidArgument: `handle` is not the handle of a session, or a turn runs.
        """
        session = self.require(handle)
        if session.row:
            raise InvalidArgument(
                f"session {handle.id!r} has a turn running in row {session.row}: one turn at a time; end it first"
            )
        return session

    @staticmethod
    def shared(session: Conversation, prompt: SaltedTokens) -> int:
        """Returns how many first tokens a prompt has in common with the session's last turn.

        Args:
            session: The session.
            prompt: The prompt.
        """
        last = session.prompt.key
        if prompt.key[: len(last)] == last and prompt.salt == session.prompt.salt:  # most turns go on
            return len(last) // BYTES
        return common(session.prompt.key, prompt.key, BYTES) // BYTES if prompt.salt == session.prompt.salt else 0

    def find(self, session: Conversation, prompt: SaltedTokens, shared: int | None = None) -> Source:
        """Finds the session's states from which a prompt can start. They leave at least its last token to compute.

        Args:
            session: The session.
            prompt: The prompt.
            shared: Number of first tokens that the prompt and the last turn have in common. None: it is computed here.

        Returns:
            The states and pages from which the turn can start; `ZEROS` if no state serves the prompt.
        """
        most = min(self.shared(session, prompt) if shared is None else shared, len(prompt.key) // BYTES - 1)
        serving = session.kept
        while serving and serving[0].length > most:
            serving = serving[1:]
        if not serving:
            return ZEROS
        length, takes = serving[0].length, not self.stays(session, serving[0])
        pages = session.pages and session.pages[: self._pages.count(length)]
        return Source(length, serving[: 1 + self._lanes if takes else 1], pages, session, takes)

    def surplus(self, session: Conversation, source: Source) -> tuple[int, int]:
        """Returns how many slots and pages of the session become free when a turn begins, before it claims others.

        Args:
            session: The session.
            source: What the turn starts from: states of the session, or other ones.
        """
        states, pages = (source.states, len(source.pages)) if source.of is session else ((), 0)
        given = [snap for snap in session.kept if snap not in states and not self.stays(session, snap)]
        return len(given), self._pages.allocator.alone(session.pages[pages:])

    def give_up(self, session: Conversation, source: Source) -> None:
        """Releases those states and pages of a session that its new turn does not start from.

        Args:
            session: The session.
            source: What the turn starts from: states of the session, or other ones.
        """
        turn = source if source.of is session else ZEROS
        self._let_go(session, [snap for snap in session.kept if snap not in turn.states])
        session.kept = list(turn.states)
        self._pages.allocator.release(session.pages[len(turn.pages) :])
        session.pages = session.pages[: len(turn.pages)]

    def begin(
        self, session: Conversation, row: int, prompt: SaltedTokens, shared: int, source: Source, cache: PrefixCache
    ) -> Node:
        """Begins a turn. The row must have its states and pages already.

        Notes whether the turn goes on from the last answer, or parts from it. Neither is noted if the prompt is only a
        beginning of the last turn, or if the last turn was aborted.

        Args:
            session: The session.
            row: The new row.
            prompt: The prompt.
            shared: Number of first tokens that the prompt and the last turn have in common.
            source: What the row starts from: states of the session, or other ones.
            cache: The prefix cache.

        Returns:
            The last node of the session's path in the prefix cache. The caller ends the lease on it.
        """
        if prompt.salt != session.prompt.salt:
            session.own.clear()  # states under the old salt stay useful: no state under the new salt replaces them
        length, tokens = source.length, len(prompt.key) // BYTES
        whole = shared == len(session.prompt.key) // BYTES
        if min(shared, length) > session.asked or (whole and tokens > session.asked <= shared):
            if session.parted:
                session.own.clear()  # a later turn that parts may need these states: mark none of them superseded
            session.parted = 0
        elif not whole and shared < tokens:
            session.parted += 1
            self.parted += 1
            cache.supersede(session.own, length, length)  # mark all but the state from which the turn starts
        session.asked = tokens
        if source.takes and source.of is session:
            session.kept = []
        path = self.empty(session)
        session.row, session.start, session.prompt = row, length, prompt
        self.by_row[row] = session
        if session in self.starting:
            self.starting.remove(session)
        return path

    def end(
        self, row: int, known: int, key: Key | None, lease: Lease | None, cache: PrefixCache,
        free_registers: Callable[[int], object], later: tuple[list[int], list[int]] | None = None,
    ) -> bool:  # fmt: skip
        """Ends a turn: the session keeps the row's states of at most `known` tokens, and their pages.

        A session that is closing keeps nothing. A session whose turns part keeps states only if the turn was aborted:
        those from which it began.

        Args:
            row: The turn's row.
            known: Number of the row's first tokens that are known to be real.
            key: The conversation's tokens, encoded. None after an abort: the tokens from which the turn began are used.
            lease: The row's lease, None for none.
            cache: The prefix cache.
            free_registers: Function that evicts states until the given number of holders is free.
            later: See `Holdings.move_in`. Give it only if every turn of the call finds enough free holders.

        Returns:
            Whether the session keeps the lease.
        """
        session = self.by_row[row]
        known = min(known, session.start if key is None else len(key) // BYTES)
        prompt = session.prompt
        session.prompt = SaltedTokens((prompt.key if key is None else key)[: known * BYTES], prompt.salt, prompt.kind)
        # After an abort, the session keeps the states from which its row began, because nobody else has them.
        keeps = not session.closing and (key is None or not cache.enabled or not session.parts)
        registers = self._real(row, known)[: self.limits.per_session] if keeps else []
        if len(registers) <= self._holdings.free:
            session.kept, registers = self._holdings.move_in(registers, session, later=later), []
        for register in registers:
            if not self._holdings.free:
                (cache.evict_states if session.kept else free_registers)(1)  # other sessions make way for one only
            self.refused += not self._holdings.free
            if self._holdings.free:
                session.kept += self._holdings.move_in([register], session)
        if session.own:
            self.supersede(session, session.length, cache)
        del self.by_row[row]
        session.row, session.since, session.turn = 0, self.limits.clock(), next(self._turns)
        if session.closing:
            del self.opened[session.handle]
        if not session.kept:
            return False
        if self._pages.allocator.pages:
            session.pages = self._pages.of(row, self._pages.count(session.kept[0].length))
            self._pages.allocator.share(session.pages)
        if lease is not None and cache.enabled:
            cache.shorten(lease, session.kept[0].length)
            session.path = lease.node
        if session.ttl is not None:
            self.expiry = min(self.expiry, session.since + session.ttl)
        return lease is not None

    @staticmethod
    def supersede(session: Conversation, length: int, cache: PrefixCache) -> None:
        """Marks those cached states of a session as superseded that its next turn will hardly need.

        Args:
            session: The session.
            length: Tokens of the newest state that the session keeps, 0 for none.
            cache: The prefix cache.
        """
        if session.parts:
            cache.supersede(session.own, 0, session.asked)
        elif session.parted:  # the next turn may need the state at the end of prompt or answer: mark neither
            cache.supersede(session.own, 0)
        else:
            cache.supersede(session.own, length + 1 if length else None)

    def _real(self, row: int, known: int) -> list[int]:
        """Returns the row's registers whose states the session can keep, longest first."""
        labels, first, pages = self._file.label_at, REGISTERS_PER_ROW * row, self._pages
        real: list[int] = []
        for register in range(first, first + 1 + self._lanes):  # an empty register has the label 0
            length = labels[register]
            if 1 <= length <= known and not length % pages.grid and pages.own_partial(row, length):
                real.append(register)
        if len(real) > 1:
            real.sort(key=labels.__getitem__, reverse=True)
        return real

    def close(self, handle: Session) -> Node:
        """Closes a session and releases its states and pages. If a turn runs, this happens at the end of the turn.

        Args:
            handle: The handle that `open` returned.

        Returns:
            The last node of its path in the prefix cache. The caller ends the lease on it.

        Raises:
            StaleHandle: The session is closed, or belongs to another manager.
            InvalidArgument: `handle` is not the handle of a session.
        """
        session = self.require(handle)
        if session.row:
            session.closing = True
            return NO_NODE
        del self.opened[handle]
        return self.empty(session)

    def empty(self, session: Conversation) -> Node:
        """Releases the states and pages of an idle session.

        Args:
            session: The session.

        Returns:
            The last node of its path in the prefix cache. The caller ends the lease on it.
        """
        path = session.path
        if session.kept:
            self._let_go(session, session.kept)
            session.kept = []  # first: an interrupt must not leave a state to two sessions that are no forks
        if session.forks:
            session.forks.remove(session)
            session.forks = []
        if session.pages:
            self._pages.allocator.release(session.pages)
        session.pages, session.path = NO_PAGES, NO_NODE
        return path

    # -- order in which sessions give up states ---------------------------------------------------------

    def idle(self) -> list[Conversation]:
        """Returns the sessions that can give up states: expired ones first, then by priority, then by last use."""
        if not self.held:
            return []
        idle = [session for session in self.opened.values() if session.kept and session not in self.starting]
        return sorted(idle, key=lambda session: (not self.expired(session), session.priority, session.turn))

    @property
    def idle_states(self) -> int:
        """Number of states that sessions can give up."""
        starting = {state.register for session in self.starting for state in session.kept}
        return self._holdings.evictable("session") - len(starting - self._holdings.readers.keys())

    def expired(self, session: Conversation) -> bool:
        """Returns whether an idle session has kept its states for longer than its time to live."""
        return session.ttl is not None and self.limits.clock() - session.since > session.ttl

    def set(self, session: Conversation, priority: int, ttl: float | None) -> None:
        """Changes when an idle session gives up its states.

        Args:
            session: The session.
            priority: If room is short, the session with the lowest number gives up its states first.
            ttl: Seconds after its last turn for which it keeps its states, None for no limit.
        """
        session.priority, session.ttl = priority, ttl
        if ttl is not None:
            self.expiry = min(self.expiry, session.since + ttl)

    def note_expiries(self) -> None:
        """Notes the time at which the next idle session expires: then `any_expired` compares only this time."""
        times = [session.since + session.ttl for session in self.idle() if session.ttl is not None]
        self.expiry = min(times, default=math.inf)

    @property
    def any_expired(self) -> bool:
        """Whether an idle session may have expired. Call `note_expiries` after emptying the expired sessions."""
        return self.expiry < math.inf and self.limits.clock() > self.expiry

    @property
    def beyond_share(self) -> bool:
        """Whether idle sessions keep more than their share of the slots."""
        return self.held > self._share

    @property
    def too_many(self) -> bool:
        """Whether idle sessions keep more states than `SessionLimits.most_states`."""
        return self.limits.most_states is not None and self.held > self.limits.most_states

    def infos(self) -> list[SessionInfo]:
        """Returns a record of each open session, in the order in which they were opened."""
        now = self.limits.clock()
        return [session.info(now) for session in self.opened.values()]

    def keeps(self, row: int, cache: PrefixCache) -> bool:
        """Returns whether the states of a row go to a session when the row ends."""
        session = self.by_row.get(row)
        return session is not None and not (session.closing or (session.parts and cache.enabled))

    @property
    def held(self) -> int:
        """Number of slots that idle sessions hold."""
        return len(self._holdings.held["session"])

    def ages(self, now: float) -> tuple[float, float]:
        """Returns two ages in seconds: that of the oldest open session, and the longest time that one has been idle.

        An age is 0 if there is no such session.

        Args:
            now: The time, in seconds of the clock.
        """
        oldest = next((session.opened for session in self.opened.values()), now)
        return now - oldest, now - min(
            (session.since for session in self.opened.values() if not session.row), default=now
        )

    def inspect(self, most: int | None = None) -> list[dict[str, Any]]:
        """Returns the open sessions as plain data.

        Args:
            most: limit of the sessions that are returned; None for all.
        """
        now = self.limits.clock()
        return [
            {
                "id": text(session.handle.id),
                "row": session.row,
                "tokens": session.start if session.row else session.prompt.tokens,
                "states": [[snap.register, snap.length] for snap in session.kept],
                "pages": len(session.pages),
                "age": round(now - session.opened, 3),
                "idle": round(0.0 if session.row else now - session.since, 3),
            }
            for session in islice(self.opened.values(), most)
        ]
