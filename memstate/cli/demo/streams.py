"""Which conversations run as streaming sessions: opened with the first turn, closed after the last. Knows no slot."""

from collections.abc import Sequence

from memstate.cli.demo.peek import session_snapshots
from memstate.cli.demo.work import Work
from memstate.engine.manager import StateManager
from memstate.requests.handles import Session, Snapshot


class Streams:
    """The sessions of the first `count` conversations, longest unused first."""

    def __init__(self, mem: StateManager, count: int) -> None:
        self.mem, self.count = mem, count
        self._open: dict[int, Session] = {}

    def of(self, work: Work) -> Session | None:
        """Returns the session of a request's conversation, opened if need be; None where it runs without."""
        number = work.conversation.number
        if number >= self.count:
            return None
        if number not in self._open:
            self._open[number] = self.mem.open_session(f"conversation {number}")
        return self._open[number]

    def kept(self, work: Work) -> list[Snapshot]:
        """Returns the states that the session of a request's conversation keeps now."""
        session = self._open.get(work.conversation.number)
        return session_snapshots(self.mem, session) if session else []

    def rest(self, work: Work) -> None:
        """Notes that a turn has ended, whether or not its conversation goes on later."""
        if session := self._open.pop(work.conversation.number, None):
            self._open[work.conversation.number] = session

    def close(self, work: Work) -> None:
        """Closes the session of a request's conversation, if it has one."""
        if session := self._open.pop(work.conversation.number, None):
            self.mem.close_session(session)

    def give_up_idle(self, running: Sequence[Work]) -> bool:
        """Closes the session that has been idle for longest; its next turn starts from the cache or anew.

        Returns:
            Whether there was one that held something.
        """
        busy = {work.conversation.number for work in running}
        for number, session in self._open.items():
            if number not in busy and session_snapshots(self.mem, session):
                self.mem.close_session(self._open.pop(number))
                return True
        return False
