"""Parks requests: `park` of the manager. `Request(resume=)` goes on from a parked request.

A parked request does not run. Its state of any length, the memory of its row, its KV with the last page and what the
host knows of it are in host memory, and it owns them: nobody finds its records by their contents.
"""

import logging
from collections.abc import Sequence

from memstate import logs
from memstate.checks import sequence, shown
from memstate.engine.ending import Ending
from memstate.engine.stepping import Stepping
from memstate.engine.world import Verbs, World
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.requests.handles import Parked, Row, Session
from memstate.tiers.host.parking import Leaving
from memstate.tokens import Tokens

LOG = logs.logger("parking")


class Parking(Verbs):
    """Moves rows and idle sessions to host memory.

    This part ends what it parks, and adds records to host memory. Of the open step it only notes that rows have handed
    out what the step computes, so that the step cannot be cancelled.

    Args:
        world: the tables of the manager.
        stepping: knows the open step, which perhaps still has to compute what is parked.
        ending: ends rows.
    """

    def __init__(self, world: World, stepping: Stepping, ending: Ending) -> None:
        super().__init__(world)
        self._stepping, self._ending = stepping, ending
        rows = world.layout.rows
        self._fills = rows is not None and any(plane.fill is not None for plane in rows.planes)

    def park(
        self, handles: Sequence[Row | Session], tokens: Sequence[Tokens | None] | None, user: Sequence[bytes] | None
    ) -> list[Parked]:
        """See `StateManager.park`."""
        if self._tiers is None or self._cache.below is None:
            raise ConfigurationError("requests are parked in host memory: build the manager with tiers=ms.Tiers(...)")
        if self._tiers.settings.int8:
            raise ConfigurationError("park with Tiers(int8=): a parked state must be exact, and these records are not")
        handles = sequence("rows or sessions", handles, "park([row])")
        named = sequence("sequences of tokens", [None] * len(handles) if tokens is None else tokens, "tokens=[[1, 2]]")
        users = sequence("bytes", [b""] * len(handles) if user is None else user, 'user=[b""]')
        if not len(handles) == len(named) == len(users) or not all(isinstance(one, bytes) for one in users):
            raise InvalidArgument(f"tokens={shown(tokens)}, user={shown(user)}: expected one for each, user in bytes")
        sessions = [handle for handle in handles if isinstance(handle, Session)]
        rows = [handle for handle in handles if not isinstance(handle, Session)]
        numbers = dict(zip(rows, self._table.indices(rows), strict=True))
        self._require_parkable([*numbers.values()], sessions)
        leaving = [
            self._of_session(one, given, more) if isinstance(one, Session) else self._of_row(numbers[one], given, more)
            for one, given, more in zip(handles, named, users, strict=True)
        ]
        self._tiers.parked.require_room(leaving)
        before = self._stepping.lengths_before()
        with self._guard.changing("park"):
            self._tiers.parked.park(leaving)
            found = [one.parked for one in leaving]
            self._ending.free([*numbers.values()], None, None, "parked")
            lengths = [one.length for one in found]
            self._stepping.promise([one.row for one in leaving], lengths, before)
            for session in sessions:
                self._cache.release(self._sessions.close(session))
            logs.event(LOG, logging.INFO, "parked", requests=len(found), tokens=sum(lengths))
            return found

    def _require_parkable(self, rows: Sequence[int], sessions: Sequence[Session]) -> None:
        """Raises an error unless all of these can be parked now.

        Raises:
            StaleHandle: a session is closed.
            InvalidArgument: the device decides what a row has, the caller keeps its tail, a row is finished or a turn,
                or a session runs, keeps no state or is named twice.
        """
        self._stepping.require_told(rows)
        elsewhere = [row for row in rows if self._file.pending_at[row] and self._planes.rows is None]
        for wrong, why in (
            (elsewhere, "have tokens in a tail of your own: run a step of 0 tokens, then park"),
            (self._stepping.drafting(rows), "are in a step with drafts: call accept, then park"),
            ([row for row in rows if row in self._sessions.by_row], "are turns: end them, and park their sessions"),
            ([row for row in rows if self._table.finished[row]], "are finished: end them"),
        ):
            if wrong:
                raise InvalidArgument(f"rows {wrong} {why}")
        if len(set(sessions)) != len(sessions):
            raise InvalidArgument(f"a session is named twice in {sessions}")
        if bare := [one.id for one in sessions if not self._sessions.get(one).kept]:
            raise InvalidArgument(f"sessions {bare} keep no state, so there is nothing to park: close them")

    def _of_row(self, row: int, tokens: Tokens | None, user: bytes) -> Leaving:
        length, pending = self._file.length(row), self._file.pending_at[row]
        prompt = self._cache.leases[row].prompt
        if tokens is not None:
            prompt = prompt._replace(key=self._ending.key(row, tokens))
        memory, pages = length > 0 and (pending > 0 or self._fills), self._pages.of(row, self._pages.count(length))
        return Leaving(Parked(length, pending, prompt, user), self._file.origin(row), row, memory, pages)

    def _of_session(self, handle: Session, tokens: Tokens | None, user: bytes) -> Leaving:
        if tokens is not None:
            raise InvalidArgument(f"tokens of session {handle.id!r}: a session knows its tokens: give None for it")
        session = self._sessions.get(handle)
        state, pages = session.kept[0], session.pages[: self._pages.count(session.kept[0].length)]
        return Leaving(Parked(state.length, 0, session.prompt, user), state.register, 0, False, pages)
