"""Parks requests: `park` and `drop` of the manager. `Request(resume=)` goes on from a parked request.

A parked request does not run. Its state of any length, the memory of its row, its KV with the last page and what the
host knows of it are in host memory, and it owns them: nobody finds its records by their contents.
"""

import logging
from collections.abc import Sequence

from memstate import logs
from memstate.checks import sequence
from memstate.engine.ending import Ending
from memstate.engine.stepping import Stepping
from memstate.engine.world import Verbs, World
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.requests.handles import Parked, Row, Session
from memstate.tiers.host.parking import Leaving
from memstate.tiers.manager import TierManager
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
        tiers = self._require_tiers()
        handles = sequence("rows or sessions", handles, "park([row])")
        given = [None] * len(handles) if tokens is None else sequence("sequences of tokens", tokens, "tokens=[[1, 2]]")
        users = [b""] * len(handles) if user is None else sequence("bytes", user, 'user=[b""]')
        if not len(handles) == len(given) == len(users) or not all(isinstance(one, bytes) for one in users):
            raise InvalidArgument(f"{len(handles)} handles, tokens of {len(given)}, user={users!r}: expected one each")
        sessions = [handle for handle in handles if isinstance(handle, Session)]
        rows = [handle for handle in handles if not isinstance(handle, Session)]
        numbers = self._table.indices(rows)
        self._require_parkable(numbers, sessions)
        of_rows, leaving = iter(numbers), list[Leaving]()
        for handle, named, bytes_ in zip(handles, given, users, strict=True):
            leaving.append(
                self._of_session(handle, named, bytes_) if isinstance(handle, Session)
                else self._of_row(next(of_rows), named, bytes_)
            )  # fmt: skip
        tiers.parked.require_room(leaving)
        before = self._stepping.lengths_before()
        with self._guard.changing("park"):
            tiers.parked.park(leaving)
            found = [one.parked for one in leaving]
            self._ending.free(numbers, None, None, "parked")
            lengths = [
                one.length for one, handle in zip(found, handles, strict=True) if not isinstance(handle, Session)
            ]
            self._stepping.promise(numbers, lengths, before)
            for handle in sessions:
                self._cache.release(self._sessions.close(handle))
            logs.event(LOG, logging.INFO, "parked", requests=len(found), tokens=sum(one.length for one in found))
            return found

    def require(self, parked: Sequence[Parked]) -> None:
        """Raises an error unless all handles are valid, and none is named twice.

        Raises:
            StaleHandle: a request went on, was dropped, or was lost.
            InvalidArgument: a handle is named twice.
            ConfigurationError: there is no host memory.
        """
        tiers = self._require_tiers()
        for one in parked:
            tiers.parked.require(one)
        if len(set(parked)) != len(parked):
            raise InvalidArgument(f"a parked request is named twice: {parked}")

    def drop(self, parked: Sequence[Parked]) -> None:
        """Ends parked requests. Call `require` before."""
        tiers = self._require_tiers()
        for one in parked:
            tiers.parked.drop(one)

    def _require_tiers(self) -> TierManager:
        if self._tiers is None or self._tiers.closed:
            raise ConfigurationError("parked requests are in host memory: build the manager with tiers=ms.Tiers(...)")
        if self._tiers.settings.int8:
            raise ConfigurationError(
                "park with Tiers(int8=): a parked request keeps its exact state, and these records do not"
            )
        return self._tiers

    def _require_parkable(self, rows: Sequence[int], sessions: Sequence[Session]) -> None:
        """Raises an error unless all of these can be parked now.

        Raises:
            StaleHandle: a session is closed.
            InvalidArgument: the device decides what a row has, a row is finished or a turn, or a session runs or keeps
                no state.
        """
        self._stepping.require_told(rows)
        if drafted := self._stepping.drafting(rows):
            raise InvalidArgument(f"rows {drafted} are in a step with drafts: call accept first, then park")
        if turns := [row for row in rows if row in self._sessions.by_row]:
            raise InvalidArgument(f"rows {turns} are turns of sessions: end the turns, then park the sessions")
        if over := [row for row in rows if self._table.finished[row]]:
            raise InvalidArgument(f"rows {over} are finished: end them")
        if len(set(sessions)) != len(sessions):
            raise InvalidArgument(f"a session is named twice in {sessions}")
        if bare := [one.id for one in sessions if not self._sessions.get(one).kept]:
            raise InvalidArgument(f"sessions {bare} keep no state: close them, there is nothing to park")

    def _of_row(self, row: int, tokens: Tokens | None, user: bytes) -> Leaving:
        file, pages = self._file, self._pages
        register, length, pending = file.origin(row), file.length(row), file.pending_at[row]
        prompt = self._cache.leases[row].prompt
        if tokens is not None:
            prompt = prompt._replace(key=self._ending.key(row, tokens))
        parked = Parked(length, pending, file.tracked_at[row], prompt, user)
        of_row = row if length and self._planes.rows is not None and (pending or self._fills) else 0
        return Leaving(parked, register, of_row, pages.of(row, pages.count(length)))

    def _of_session(self, handle: Session, tokens: Tokens | None, user: bytes) -> Leaving:
        if tokens is not None:
            raise InvalidArgument(f"tokens of session {handle.id!r}: a session knows its tokens, so give None for it")
        session = self._sessions.get(handle)
        state = session.kept[0]
        parked = Parked(state.length, 0, state.length, session.prompt, user)
        return Leaving(parked, state.register, 0, session.pages[: self._pages.count(state.length)])
