"""Streaming sessions: between the turns of a conversation its states and pages stay where they are. All by moves.

turn ends       live, lanes -> holders of the session, up to the last real token; the row's pages too
turn begins     the longest state that the new prompt begins with -> live; shorter ones -> lanes
turn aborted    what stood at the turn's beginning, as far as a register still holds it
closed          released
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from memstate.checks import hashable
from memstate.errors import InvalidArgument, StaleHandle
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix.cache import PrefixCache
from memstate.prefix.lease import Lease
from memstate.prefix.tree import Node
from memstate.requests.handles import Session, Snapshot
from memstate.requests.origin import START, Origin
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.slots.commands import CommandBuffer
from memstate.tokens import BYTES, common

PER_ROW = REGISTERS_PER_ROW
_SERIALS = count(1)  # of all managers: another's handle is stale here


@dataclass
class Conversation:
    """What a session holds while no turn runs, and which turn runs.

    Attributes:
        handle: The session's handle.
        tokens: Tokens that its states and pages stand for, encoded; while a turn runs, those that it began with.
        kept: Its states, longest first.
        pages: Ids of its KV pages.
        lease: Its lease in the prefix cache, None for none.
        own: Nodes of the prefix cache whose states it left there, with how often it used each itself.
        salt: Salt of its tokens.
        row: Row of the turn that runs, 0 for none.
        start: Tokens that this turn began with.
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


class Sessions:
    """Keeps the open sessions.

    Args:
        commands: Records the changes of owners.
        pages: KV pages of rows.
        snapshots: Gives and ends holder registers.
        lanes: Lane registers that a row may fill.

    Attributes:
        opened: Open sessions by handle.
        by_row: Sessions with a running turn, by row.
        refused: States lost for lack of a holder register.
    """

    def __init__(self, commands: CommandBuffer, pages: PageTable, snapshots: Snapshots, lanes: int) -> None:
        self._commands, self._file, self._pages, self._snapshots = commands, commands.registers, pages, snapshots
        self._lanes = lanes
        self.refused = 0  # states lost for lack of a holder register
        self.reset()

    def reset(self, kept: Sequence[Conversation] = ()) -> None:
        """Closes all sessions and releases nothing. Call it only where registers and pages are reset as well.

        Args:
            kept: sessions that stay open, without a turn.
        """
        self.opened: dict[Session, Conversation] = {session.handle: session for session in kept}
        self.by_row: dict[int, Conversation] = {}
        self._by_register: dict[int, tuple[Conversation, int]] = {
            snap.register: (session, snap.length) for session in kept for snap in session.kept
        }

    @property
    def registers(self) -> set[int]:
        """Registers of states that sessions keep."""
        return self._by_register.keys() | {s.register for session in self.opened.values() for s in session.kept}

    def surviving(self, sure: Mapping[int, Snapshot], pages: Set[int]) -> list[Conversation]:
        """Returns the open sessions as they are if all turns end now and only some states stay.

        Args:
            sure: the snapshots that stay, by register.
            pages: KV pages that do not stay.
        """
        return [self._survivor(session, sure, pages) for session in self.opened.values()]

    def _survivor(self, session: Conversation, sure: Mapping[int, Snapshot], pages: Set[int]) -> Conversation:
        kept = [snap for snap in session.kept if sure.get(snap.register) == snap]
        known = [] if session.row or not kept else session.pages[: (count := self._pages.count(kept[0].length))]
        if session.row or not kept or len(known) < count or not pages.isdisjoint(known):
            return Conversation(session.handle)
        if len(session.tokens) < kept[0].length * BYTES:
            return Conversation(session.handle)
        return Conversation(session.handle, session.tokens, kept, known, salt=session.salt)

    def miscounts(self) -> list[str]:
        """Returns what is wrong with running turns, and with the states of sessions."""
        found = [
            f"session {session.handle.id!r} says that row {session.row} runs its turn, and the row does not"
            for session in self.opened.values()
            if session.row and self.by_row.get(session.row) is not session
        ]
        found += [
            f"row {row} runs a turn of session {session.handle.id!r}, and the session does not say so"
            for row, session in self.by_row.items()
            if session.row != row or self.opened.get(session.handle) is not session
        ]
        kept = {s.register: s for session in self.opened.values() for s in session.kept}
        if kept.keys() != self._by_register.keys():
            found.append(f"sessions keep registers {sorted(kept)}, noted are {sorted(self._by_register)}")
        found += [f"{self.owner(r)} has no snapshot" for r, s in kept.items() if self._snapshots.kept.get(r) != s]
        return found

    def open(self, name: Hashable) -> Session:
        """Opens a session, which holds nothing yet.

        Args:
            name: The caller's name for it.

        Returns:
            Its handle.
        """
        handle = Session(hashable("session", name), next(_SERIALS))
        self.opened[handle] = Conversation(handle)
        return handle

    def get(self, handle: Session) -> Conversation:
        """Returns an open session without a running turn.

        Args:
            handle: What `open` returned.

        Raises:
            StaleHandle: The session is closed, or another manager's.
            InvalidArgument: This is no handle, or a turn runs.
        """
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

    def find(self, session: Conversation, key: bytes, salt: Hashable) -> Origin:
        """Finds how far the session's states serve a prompt. At least its last token is left to compute.

        Args:
            session: The session.
            key: Tokens of the prompt, encoded.
            salt: Salt of the prompt.

        Returns:
            Where the turn can continue; `START` where no state serves it.
        """
        if salt != session.salt:
            return START
        shared = min(common(session.tokens, key, BYTES), len(key) - BYTES) // BYTES
        serving = [snap for snap in session.kept if snap.length <= shared][: 1 + self._lanes]
        if not serving:
            return START
        length = serving[0].length
        pages = session.pages[: self._pages.count(length)]
        return Origin(length, [snap.register for snap in serving], pages, moves=True)

    def surplus(self, session: Conversation, turn: Origin) -> tuple[int, int]:
        """Returns the slots and pages that a turn gives back before it takes any.

        Args:
            session: The session.
            turn: Where the turn continues; `START` if it takes nothing from the session.
        """
        pages = session.pages[len(turn.pages) :]
        alone = sum(self._pages.allocator.holders[page] == 1 for page in pages)
        return len(session.kept) - len(turn.registers), alone

    def give_up(self, session: Conversation, turn: Origin) -> None:
        """Releases the states and pages that the turn does not continue from.

        Args:
            session: The session.
            turn: Where the turn continues; `START` if it takes nothing from the session.
        """
        self._commands.release([snap.register for snap in session.kept if snap.register not in turn.registers])
        self._pages.allocator.release(session.pages[len(turn.pages) :])
        session.pages = session.pages[: len(turn.pages)]

    def begin(self, session: Conversation, row: int, turn: Origin, start: int, key: bytes, salt: Hashable) -> None:
        """Moves what is left to a new row, which shares the pages already.

        Args:
            session: The session.
            row: The new row.
            turn: Where the turn continues; `START` if it takes nothing from the session.
            start: Tokens of the key that the row begins with, from the session or from elsewhere.
            key: Tokens of the prompt, encoded.
            salt: Salt of the prompt.
        """
        first = PER_ROW * row
        self._commands.move(range(first, first + len(turn.registers)), turn.registers)
        self._empty(session)
        if salt != session.salt:
            session.own.clear()  # nothing under this salt replaces what was left under another
        session.row, session.start, session.tokens, session.salt = row, start, key[: start * BYTES], salt
        self.by_row[row] = session

    def _empty(self, session: Conversation) -> None:
        """Ends the states and releases the pages. The registers have been moved or released before."""
        self._snapshots.end(session.kept)
        for snap in session.kept:
            del self._by_register[snap.register]
        self._pages.allocator.release(session.pages)
        session.kept, session.pages, session.lease = [], [], None

    def end(self, row: int, known: int, key: bytes | None, lease: Lease | None, cache: PrefixCache) -> bool:
        """Keeps what a turn leaves: registers with states of at most `known` tokens, and pages.

        Args:
            row: The turn's row.
            known: Tokens that are known to be real.
            key: The conversation's tokens, encoded. None after an abort: what the turn began with counts then.
            lease: The row's lease, None for none.
            cache: The prefix cache; it evicts a state where a holder is needed.

        Returns:
            Whether the session keeps the lease.
        """
        session = self.by_row.pop(row)
        session.row = 0
        known = min(known, session.start if key is None else len(key) // BYTES)
        session.tokens = (session.tokens if key is None else key)[: known * BYTES]
        labels, first = self._file.labels, PER_ROW * row
        registers = [r for r in range(first, first + 1 + self._lanes) if self._file.held[r] and 1 <= labels[r] <= known]
        registers = [r for r in registers if self._pages.own_partial(row, int(labels[r]))]
        for register in sorted(registers, key=lambda r: -int(labels[r])):
            if not self._snapshots.free:
                cache.evict_states(1)
            self.refused += not self._snapshots.free
            if self._snapshots.free:
                snapshot = self._snapshots.add(int(labels[register]), ())
                session.kept.append(snapshot)
                self._by_register[snapshot.register] = (session, snapshot.length)
                self._commands.move([snapshot.register], [register])
        cache.supersede(session.own, session.kept[0].length if session.kept else 0)
        if not session.kept:
            return False
        session.pages = self._pages.of(row)[: self._pages.count(session.kept[0].length)]
        self._pages.allocator.share(session.pages)
        session.lease = lease
        if lease is not None:
            cache.shorten(lease, session.kept[0].length)
        return lease is not None

    def close(self, handle: Session) -> Lease | None:
        """Closes a session and releases what it holds.

        Args:
            handle: What `open` returned.

        Returns:
            Its lease, which the caller ends; None for none.

        Raises:
            StaleHandle: The session is closed, or another manager's.
            InvalidArgument: This is no handle, or a turn runs.
        """
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
        """Refuses tokens that do not continue those that the row's turn began with.

        Args:
            row: The turn's row.
            key: The conversation's tokens, encoded.

        Raises:
            InvalidArgument: They do not.
        """
        session = self.by_row[row]
        if not (key.startswith(session.tokens) or session.tokens.startswith(key)):
            raise InvalidArgument(
                f"row {row}: the tokens are not those that the turn of session {session.handle.id!r} began with: hand "
                "over all of them, from the first on"
            )

    def inspect(self) -> list[dict[str, Any]]:
        """Returns the open sessions as plain data."""
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
        """Returns text that names the session which owns a holder register, "" where no session does.

        Args:
            register: The register.
        """
        session, length = self._by_register.get(register, (None, 0))
        return f"session {session.handle.id!r} ({length} tokens)" if session else ""
