"""Records of one session: its states, pages and turn, and the figures that callers see. Plain data."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from memstate.prefix.lease import NO_NODE
from memstate.prefix.tree import Node
from memstate.requests.handles import Session, Snapshot
from memstate.requests.pages import NO_PAGES, Ids
from memstate.tokens import EMPTY, SaltedTokens


@dataclass(frozen=True)
class SessionInfo:
    """One open session, as `mem.sessions.infos()` lists it.

    Attributes:
        session: the handle of the session.
        running: whether a turn runs.
        closing: whether it closes when its turn ends.
        tokens: tokens that its longest state stands for; 0 without a state, and while a turn runs.
        states: number of states that the session keeps; 0 while a turn runs.
        pages: number of KV pages that the session keeps; 0 while a turn runs.
        priority: if room is short, the session with the lowest number gives up its states first.
        age: seconds since it was opened.
        idle: seconds since its last turn ended or, before the first turn, since it was opened; 0 while a turn runs.
        ttl: seconds after which an idle session expires, None for never.
        parted: how many turns in a row could not start from a state of the answer before them. From two on, the prefix
            cache keeps the states of the turns, and the session keeps nothing.
    """

    session: Session
    running: bool
    closing: bool
    tokens: int
    states: int
    pages: int
    priority: int
    age: float
    idle: float
    ttl: float | None
    parted: int = 0


class SessionFork(NamedTuple):
    """The result of `mem.sessions.fork`.

    Attributes:
        session: the new session.
        page_copies: pairs (new page, old page). The old page belongs to the forked session and is partly filled. The
            caller copies its KV to the new page.
    """

    session: Session
    page_copies: list[tuple[int, int]]


@dataclass(eq=False)
class Conversation:
    """The states and pages of a session, and its running turn. The object is the owner of its states.

    A session and its forks share their newest state until one of them starts a turn. Only one of them owns that state.

    Attributes:
        handle: The session's handle.
        prompt: The tokens that its states and pages stand for; while a turn runs, the prompt of this turn.
        kept: Its states, longest first.
        pages: Ids of its KV pages.
        path: The node at which its lease in the prefix cache ends; `NO_NODE` without a lease.
        own: A dict with the nodes whose states the session left in the prefix cache. The value of a node says how often
            the session itself used its state.
        row: Row of the turn that runs, 0 for none.
        start: Tokens of the state from which the row of this turn started.
        asked: Tokens of the last prompt. The tokens of `prompt` beyond them are the answer.
        parted: How many turns in a row could not start from a state of the answer before them.
        priority: If room is short, the session with the lowest number gives up its states first.
        ttl: Seconds for which the idle session keeps its states, None for no limit.
        opened: When it was opened, in seconds of the clock.
        since: When its last turn ended or, before the first turn, when it was opened; in seconds of the clock.
        turn: Serial number of the event whose time is `since`; the least recently used session has the smallest.
        closing: Whether it closes when its turn ends.
        forks: Sessions that may share its newest state, itself included; empty if it was never forked.
    """

    holds: ClassVar[str] = "session"
    handle: Session
    prompt: SaltedTokens = EMPTY
    kept: list[Snapshot] = field(default_factory=list)
    pages: Ids = field(default_factory=lambda: NO_PAGES)
    path: Node = NO_NODE
    own: dict[Node, int] = field(default_factory=dict)
    row: int = 0
    start: int = 0
    asked: int = 0
    parted: int = 0
    priority: int = 0
    ttl: float | None = None
    opened: float = 0.0
    since: float = 0.0
    turn: int = 0
    closing: bool = False
    forks: list["Conversation"] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that its newest state stands for, 0 without a state."""
        return self.kept[0].length if self.kept else 0

    @property
    def parts(self) -> bool:
        """Whether two or more turns in a row parted from the answer before. One alone may be an edit by the user."""
        return self.parted > 1

    def info(self, now: float) -> SessionInfo:
        """Returns the record of this session that callers get.

        Args:
            now: The time, in seconds of the clock.
        """
        return SessionInfo(
            self.handle, bool(self.row), self.closing, self.length, len(self.kept), len(self.pages),
            self.priority, now - self.opened, 0.0 if self.row else now - self.since, self.ttl, self.parted,
        )  # fmt: skip
