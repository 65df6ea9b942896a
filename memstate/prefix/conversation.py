"""What is known of one session. Plain data."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from memstate.prefix.lease import NO_NODE
from memstate.prefix.tree import Node
from memstate.requests.handles import Session, Snapshot
from memstate.requests.pages import NO_PAGES, Ids
from memstate.tokens import EMPTY, Prompt


@dataclass(frozen=True)
class SessionInfo:
    """One open session, as `mem.sessions.infos()` lists it.

    Attributes:
        session: its handle.
        running: whether a turn runs.
        closing: whether it closes when its turn ends.
        tokens: tokens that its longest state stands for; 0 without a state, and while a turn runs.
        states: number of states that it keeps; 0 while a turn runs.
        pages: number of KV pages that it keeps; 0 while a turn runs.
        priority: its priority; the lowest makes way first.
        age: seconds since it was opened.
        idle: seconds since its last turn ended or, before the first turn, since it was opened; 0 while a turn runs.
        ttl: seconds after which an idle session expires, None for never.
        parted: turns in a row that no state of the last answer served. From two on, the prefix cache keeps what the
            turns leave, and the session keeps nothing.
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
    """What a session holds while no turn runs, and which turn runs. It is the owner of its states.

    Forks share a state as long as none of them goes on; one of them is its owner.

    Attributes:
        handle: The session's handle.
        prompt: What its states and pages stand for; while a turn runs, what it began with.
        kept: Its states, longest first.
        pages: Ids of its KV pages.
        path: The node of the prefix cache up to which it keeps KV there; `NO_NODE` for none.
        own: Nodes of the prefix cache whose states it left there, with how often it used each itself.
        row: Row of the turn that runs, 0 for none.
        start: Tokens that this turn began with.
        asked: Tokens of the last prompt. What follows is its answer.
        parted: Turns in a row that no state of the last answer served.
        priority: The lowest makes way first.
        ttl: Seconds that it keeps its states while idle, None for any time.
        opened: When it was opened, in seconds of the clock.
        since: When its last turn ended, or when it was opened.
        turn: Number of that event among all sessions: the least recently used session has the smallest.
        closing: It closes when its turn ends.
        forks: Sessions that may share its newest state, itself included; empty if it was never forked.
    """

    holds: ClassVar[str] = "session"
    handle: Session
    prompt: Prompt = EMPTY
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
        """Tokens that its newest state stands for, 0 for none."""
        return self.kept[0].length if self.kept else 0

    @property
    def parts(self) -> bool:
        """Whether its turns part: not one alone, which may be an edit."""
        return self.parted > 1

    def info(self, now: float) -> SessionInfo:
        """Returns what a caller may know of it.

        Args:
            now: The time, in seconds of the clock.
        """
        return SessionInfo(
            self.handle, bool(self.row), self.closing, self.length, len(self.kept), len(self.pages),
            self.priority, now - self.opened, 0.0 if self.row else now - self.since, self.ttl, self.parted,
        )  # fmt: skip
