"""Offers the calls of `mem.sessions`, which open, fork and close conversations."""

from collections.abc import Hashable
from types import EllipsisType

from memstate.checks import hashable
from memstate.engine.door import Door
from memstate.engine.verbs import Parts
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.prefix.conversation import SessionFork, SessionInfo
from memstate.prefix.session_settings import is_duration
from memstate.requests.handles import Session


def require_settings(priority: object, ttl: object) -> None:
    """Raises an error unless the priority and the time to live of a session are valid.

    Raises:
        InvalidArgument: a value is not valid.
    """
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgument(f"priority={priority!r}: expected a whole number")
    if ttl is not None and not is_duration(ttl):
        raise InvalidArgument(f"ttl={ttl!r}: expected seconds from 0 on, or None")


class SessionCalls:
    """Opens, forks and closes sessions, and changes their priority and time to live.

    If a request, a snapshot or a load needs room, idle sessions make way: see `SessionLimits`. Such a session stays
    open. Its next turn starts from what the prefix cache or the tiers have of its tokens.

    Args:
        parts: the parts of the manager.
        door: lets calls in.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> talk = mem.sessions.open("alice")
        >>> row = mem.admit([ms.Request("turn 1", tokens=[1, 2, 3], session=talk)])[0]
        >>> mem.settle(mem.plan([row], [3]))
        >>> _ = mem.end([row], keep="cache", tokens=[[1, 2, 3]])
        >>> mem.sessions.infos()[0].tokens
        3
    """

    def __init__(self, parts: Parts, door: Door) -> None:
        self._parts, self._door = parts, door

    def __repr__(self) -> str:
        return f"SessionCalls({len(self._parts.sessions.opened)} open sessions)"

    def open(self, name: Hashable, *, priority: int = 0, ttl: float | None = None) -> Session:
        """Opens a session.

        Args:
            name: the name that audits show. Two open sessions can have the same name; each keeps its own states.
            priority: sessions of a lower priority make way first.
            ttl: seconds of `SessionLimits.clock` that the idle session keeps its states. After that the next `admit` or
                `poll` releases them. None: no limit.

        Returns:
            The session, for `Request(session=...)`.

        Raises:
            InvalidArgument: the name is not hashable, or a number is not valid.

        Syncs: no.
        """
        self._door.enter()
        require_settings(priority, ttl)
        hashable("session", name)
        with self._parts.guard.changing("sessions.open"):
            return self._parts.sessions.open(name, priority, ttl)

    def fork(self, session: Session, name: Hashable) -> SessionFork:
        """Opens a second session that goes on from the same turn, with the same priority and `ttl`.

        Both sessions share the newest state, and KV of whole pages. Whichever session goes on first reads this state in
        its first step, and the other session keeps it. No state is copied, except with `Forward(direct_hits=False)`.
        Without states, both start from what the cache or the tiers have.

        Args:
            session: the session to fork, without a running turn.
            name: the name of the new session.

        Returns:
            The new session, and the KV pages to copy: at most one.

        Raises:
            StaleHandle: the session is closed.
            InvalidArgument: a turn runs, the name is not hashable, or a page is to be copied while changes wait for the
                newest step's forward.
            OutOfPages: no page is free for a copy of the last one, which is filled in part.

        Syncs: no.
        """
        self._door.enter()
        parts, talk = self._parts, self._parts.sessions.get(session)
        hashable("session", name)
        partial = len(talk.pages) - talk.length // parts.pages.page_size if talk.pages else 0
        if partial and parts.commands.waiting:
            raise InvalidArgument(
                "a page that is filled in part is copied at once, and changes of owners wait for the newest step's "
                "forward: launch it, say so with submit(step), then fork"
            )
        with parts.guard.changing("sessions.fork"):
            parts.sessions.starting = [talk]
            lack = parts.admission.make_room(0, partial, 0)
            parts.sessions.starting = []
            if lack is not None:
                parts.admission.refuse("sessions.fork", lack)
                raise parts.guard.orderly(lack)
            fork = parts.sessions.fork(talk, name)
            parts.cache.tree.lease(talk.path)
            if fork.page_copies:  # the caller copies at once, and a load is perhaps under way
                parts.commands.prepare()
        return fork

    def set(
        self, session: Session, *, priority: int | EllipsisType = ..., ttl: float | EllipsisType | None = ...
    ) -> None:
        """Changes when an idle session makes way, for example while its client waits for a tool.

        Args:
            session: the session, without a running turn.
            priority: sessions of a lower priority make way first. `...`: as before.
            ttl: seconds that the idle session keeps its states after its last turn. None: no limit. `...`: as before.

        Raises:
            StaleHandle: the session is closed.
            InvalidArgument: a turn runs, or a number is not valid.

        Syncs: no.
        """
        self._door.enter()
        talk = self._parts.sessions.get(session)
        priority, ttl = talk.priority if priority is ... else priority, talk.ttl if ttl is ... else ttl
        require_settings(priority, ttl)
        with self._parts.guard.changing("sessions.set"):
            self._parts.sessions.set(talk, priority, ttl)

    def rest(self, session: Session) -> None:
        """Lets an idle session make way now, for example before a tool that takes long.

        States of whole pages go to the prefix cache, which evicts them like any others, and to the tiers. The session's
        other states are released. If the session has expired, all of its states are released. A state that a fork
        shares stays with the fork. The session stays open, and its next turn starts from what the cache or the tiers
        have of its tokens.

        Args:
            session: the session, without a running turn. A session without states stays as it is.

        Raises:
            StaleHandle: the session is closed.
            InvalidArgument: a turn runs.
            ConfigurationError: there is no prefix cache that could take the states.

        Syncs: no.
        """
        self._door.enter()
        talk = self._parts.sessions.get(session)
        if not self._parts.cache.enabled:
            raise ConfigurationError(
                "there is no prefix cache to take the states of a session that rests: build the manager with "
                "prefix=ms.Prefix(); close(session) releases them"
            )
        with self._parts.guard.changing("sessions.rest"):
            self._parts.room.hand_over(talk)

    def close(self, session: Session) -> None:
        """Closes a session and frees what it holds.

        If a turn of the session runs, the handle becomes stale at once, and the session closes when the turn ends. The
        states of that turn go to the prefix cache, like those of any other request.

        Args:
            session: what `open` returned.

        Raises:
            StaleHandle: the session was closed before.

        Syncs: no.
        """
        self._door.enter()
        self._parts.sessions.require(session)
        with self._parts.guard.changing("sessions.close"):
            self._parts.cache.release(self._parts.sessions.close(session))

    def infos(self) -> list[SessionInfo]:
        """Returns the open sessions, in the order in which they were opened.

        Syncs: no.
        """
        return self._parts.sessions.infos()
