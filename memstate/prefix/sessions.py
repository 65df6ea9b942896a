"""Streaming sessions: between the turns of a conversation its states and pages stay where they are. All by moves.

turn ends       live, lanes -> holders of the session, as far as they stand for real tokens; the row's pages too
turn begins     the longest state that the new prompt begins with -> live; shorter ones -> lanes
turn aborted    what stood at the turn's beginning, as far as a register still holds it
closed          released
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from memstate.checks import hashable
from memstate.errors import InvalidArgument, StaleHandle
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix.cache import Lease, PrefixCache
from memstate.prefix.tree import Node
from memstate.requests.handles import Session, Snapshot
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.slots.commands import CommandBuffer
from memstate.tokens import BYTES, common

PER_ROW = REGISTERS_PER_ROW
_SERIALS = count(1)  # of all managers: another's handle is stale here


@dataclass
class Conversation:
    """What a session holds while no turn runs, and which turn runs.

    tokens: those that its states and pages stand for, as a key, or that its turn began with. kept: its states, longest
    first. own: nodes of the prefix cache whose states it left there, and how often it used them itself. row: of the
    turn that runs, 0 for none; start: tokens that this turn began with.
    """

    handle: Session
    tokens: bytes = b""
    kept: list[Snapshot] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    lease: Lease | None = None
    own: dict[Node, int] = field(default_factory=dict)
    salt: Hashable = None
    row: int = 0
    start: int = 0


class Resumption(NamedTuple):
    """Where a turn can go on: tokens that its state stands for, registers for live and lanes, pages of these tokens."""

    length: int
    registers: list[int]
    pages: list[int]


class Sessions:
    """Open sessions. lanes: lane registers that a row may fill."""

    def __init__(self, commands: CommandBuffer, pages: PageTable, snapshots: Snapshots, lanes: int) -> None:
        self._commands, self._file, self._pages, self._snapshots = commands, commands.registers, pages, snapshots
        self._lanes = lanes
        self.refused = 0  # states lost for want of a holder register
        self.reset()

    def reset(self) -> None:
        """Closes all of them without giving anything back: only where registers and pages are reset as well."""
        self.opened: dict[Session, Conversation] = {}
        self.by_row: dict[int, Conversation] = {}
        self._by_register: dict[int, tuple[Conversation, int]] = {}

    def open(self, name: Hashable) -> Session:
        """A new session, which holds nothing yet."""
        handle = Session(hashable("session", name), next(_SERIALS))
        self.opened[handle] = Conversation(handle)
        return handle

    def get(self, handle: Session) -> Conversation:
        """An open session that no turn is running of. Raises: StaleHandle, InvalidArgument."""
        if not isinstance(handle, Session):
            raise InvalidArgument(f"{handle!r} is no session: use the handle that open_session() returned")
        found = self.opened.get(hashable("session", handle))
        if found is None:
            raise StaleHandle(f"session {handle.id!r}", handle.serial, 0)
        if found.row:
            raise InvalidArgument(
                f"session {handle.id!r} has a turn running in row {found.row}: one turn at a time; release it first"
            )
        return found

    def find(self, session: Conversation, key: bytes, salt: Hashable) -> Resumption:
        """How far the session's states serve a prompt; at least its last token is left to compute."""
        if salt != session.salt:
            return Resumption(0, [], [])
        shared = min(common(session.tokens, key, BYTES), len(key) - BYTES) // BYTES
        serving = [snap for snap in session.kept if snap.length <= shared][: 1 + self._lanes]
        if not serving:
            return Resumption(0, [], [])
        length = serving[0].length
        return Resumption(length, [snap.register for snap in serving], session.pages[: self._pages.count(length)])

    def surplus(self, session: Conversation, resumption: Resumption) -> tuple[int, int]:
        """Slots and pages that a turn with this beginning gives back before it takes any."""
        pages = session.pages[len(resumption.pages) :]
        alone = sum(self._pages.allocator.holders[page] == 1 for page in pages)
        return len(session.kept) - len(resumption.registers), alone

    def give_up(self, session: Conversation, resumption: Resumption) -> None:
        """Gives back what the turn does not go on from."""
        self._commands.release([snap.register for snap in session.kept if snap.register not in resumption.registers])
        self._pages.allocator.release(session.pages[len(resumption.pages) :])
        session.pages = session.pages[: len(resumption.pages)]

    def begin(
        self, session: Conversation, row: int, resumption: Resumption, start: int, key: bytes, salt: Hashable
    ) -> None:
        """Moves what is left to a new row, which shares the pages already.

        start: tokens of the key that the row begins with, from here or, without a resumption, from elsewhere.
        """
        first = PER_ROW * row
        self._commands.move(range(first, first + len(resumption.registers)), resumption.registers)
        self._empty(session)
        if salt != session.salt:
            session.own.clear()  # nothing under this salt replaces what was left under another
        session.row, session.start, session.tokens, session.salt = row, start, key[: start * BYTES], salt
        self.by_row[row] = session

    def _empty(self, session: Conversation) -> None:
        """The registers are moved or released: the rest of what a session holds goes."""
        for snap in session.kept:
            self._snapshots.end(snap)
            del self._by_register[snap.register]
        self._pages.allocator.release(session.pages)
        session.kept, session.pages, session.lease = [], [], None

    def end(self, row: int, known: int, key: bytes | None, lease: Lease | None, cache: PrefixCache | None) -> bool:
        """Keeps what a turn leaves: registers up to `known` tokens, and pages. Returns whether the lease is kept too.

        key: the conversation's tokens; None: the turn was aborted, and what it began with is what counts.
        """
        session = self.by_row.pop(row)
        session.row = 0
        known = min(known, session.start if key is None else len(key) // BYTES)
        session.tokens = (session.tokens if key is None else key)[: known * BYTES]
        labels, first = self._file.labels, PER_ROW * row
        registers = [r for r in range(first, first + 1 + self._lanes) if self._file.held[r] and 1 <= labels[r] <= known]
        registers = [r for r in registers if self._pages.own_partial(row, int(labels[r]))]
        for register in sorted(registers, key=lambda r: -int(labels[r])):
            if not self._snapshots.free and cache is not None:
                cache.evict_states(1)
            self.refused += not self._snapshots.free
            if self._snapshots.free:
                snapshot = self._snapshots.add(int(labels[register]), ())
                session.kept.append(snapshot)
                self._by_register[snapshot.register] = (session, snapshot.length)
                self._commands.move([snapshot.register], [register])
        if cache is not None:
            cache.supersede(session.own, session.kept[0].length if session.kept else 0)
        if not session.kept:
            return False
        session.pages = self._pages.of(row)[: self._pages.count(session.kept[0].length)]
        self._pages.allocator.share(session.pages)
        session.lease = lease
        if lease is not None and cache is not None:
            cache.shorten(lease, session.kept[0].length)
        return lease is not None

    def close(self, handle: Session) -> Lease | None:
        """Gives back what a session holds; returns its lease. Raises: StaleHandle, InvalidArgument (a turn runs)."""
        session = self.get(handle)
        del self.opened[handle]
        self._commands.release([snap.register for snap in session.kept])
        lease = session.lease
        self._empty(session)
        return lease

    @property
    def held(self) -> int:
        """Slots that idle sessions hold."""
        return len(self._by_register)

    def require_continued(self, row: int, key: bytes) -> None:
        """Raises: InvalidArgument where tokens do not go on from those that the row's turn began with."""
        session = self.by_row[row]
        if not (key.startswith(session.tokens) or session.tokens.startswith(key)):
            raise InvalidArgument(
                f"row {row}: the tokens are not those that the turn of session {session.handle.id!r} began with: hand "
                "over all of them, from the first on"
            )

    def inspect(self) -> list[dict[str, Any]]:
        """The open sessions as plain data."""
        return [
            {
                "id": str(session.handle.id),
                "row": session.row,
                "tokens": len(session.tokens) // BYTES,
                "states": [[snap.register, snap.length] for snap in session.kept],
                "pages": len(session.pages),
            }
            for session in self.opened.values()
        ]

    def owner(self, register: int) -> str:
        """Who owns a holder register, where it is a session's."""
        session, length = self._by_register.get(register, (None, 0))
        return f"session {session.handle.id!r} ({length} tokens)" if session else ""
