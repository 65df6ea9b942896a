"""Which conversations run as streaming sessions: opened with the first turn, closed after the last. Knows no slot."""

from memstate.cli.demo.peek import session_snapshots
from memstate.cli.demo.work import Work
from memstate.engine.manager import StateManager
from memstate.requests.handles import Session, Snapshot


class Streams:
    """The sessions of the first `count` conversations."""

    def __init__(self, mem: StateManager, count: int) -> None:
        self.mem, self.count = mem, count
        self._open: dict[int, Session] = {}

    def of(self, work: Work) -> Session | None:
        """Returns the session of a request's conversation, opened if need be; None where it runs without."""
        number = work.conversation.number
        if number >= self.count:
            return None
        if number not in self._open:
            self._open[number] = self.mem.sessions.open(f"conversation {number}")
        return self._open[number]

    def kept(self, work: Work) -> list[Snapshot]:
        """Returns the states that the session of a request's conversation keeps now."""
        session = self._open.get(work.conversation.number)
        return session_snapshots(self.mem, session) if session else []

    def close(self, work: Work) -> None:
        """Closes the session of a request's conversation, if it has one."""
        if session := self._open.pop(work.conversation.number, None):
            self.mem.sessions.close(session)
