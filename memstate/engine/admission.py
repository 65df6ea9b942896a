"""Starts rows for new requests. Notes states that arrive from elsewhere.

A call gets everything that it needs, or it changes nothing. This module does not know steps.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from memstate import logs
from memstate.checks import counts, is_count, require_salt, sequence
from memstate.errors import InvalidArgument, OutOfPages, OutOfRows, OutOfSlots
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import Match, PrefixCache
from memstate.prefix.conversation import Conversation
from memstate.prefix.lease import Lease
from memstate.prefix.room import Room
from memstate.prefix.sessions import Sessions
from memstate.requests.handles import Request, Row, Rows, Session, Snapshot
from memstate.requests.holdings import Holdings
from memstate.requests.marks import Marks, require_lengths
from memstate.requests.origin import START, Origin
from memstate.requests.page_table import PageTable
from memstate.requests.table import RequestTable
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs
from memstate.tiers.host.tier import Hit
from memstate.tiers.load import Loader
from memstate.tokens import BYTES, Prompt, encode

PER_ROW = REGISTERS_PER_ROW
Lack = OutOfRows | OutOfPages | OutOfSlots
LOG = logs.logger("admission")


@dataclass(slots=True)
class Start:
    """How one request starts.

    Attributes:
        request: the request.
        tokens: number of tokens that pages are taken for.
        prompt: the prompt, empty if the request has no tokens.
        origin: where the state comes from.
        session: the session, if the request is one of its turns. If the session makes way, None until there is room.
        match: the match of the prompt in the prefix cache.
        lease: keeps the matched path from eviction.
        lower: a longer state in host memory. When it is loaded, `match` and `origin` are set from it.
        wanted: lengths at which states are kept, each with its kind, ascending.
        taken: whether the row takes over the slot of a cached state, instead of reading or copying the state.
    """

    request: Request
    tokens: int
    prompt: Prompt
    origin: Origin = START
    session: Conversation | None = None
    match: Match | None = None
    lease: Lease | None = None
    lower: Hit | None = None
    wanted: list[tuple[int, str]] = field(default_factory=list)
    taken: bool = False

    @property
    def turn(self) -> Origin:
        """The origin, if the state comes from the session; otherwise `START`."""
        return self.origin if self.origin.moves and not self.taken else START


class Admission:
    """Gives requests their rows, slots and pages.

    Args:
        commands: records the changes of owners.
        table: the request table.
        pages: KV pages of rows.
        holdings: owners and readers of states.
        cache: the prefix cache, or its null object.
        sessions: open sessions.
        marks: states that steps keep of prompts.
        lanes: lanes that a row holds from its admission on.
        direct_hits: whether the first step reads the snapshot itself instead of a copy.
        tracks: whether the strategy takes snapshots.
        loader: finds states in host memory and loads them; None without tiers.
        room: makes cached states and idle sessions make way.

    Attributes:
        per_request: slots that a new row claims.
        lacks: error -> calls that it refused since the start.
    """

    def __init__(
        self, commands: CommandBuffer, table: RequestTable, pages: PageTable, holdings: Holdings,
        cache: PrefixCache, sessions: Sessions, marks: Marks, lanes: int, direct_hits: bool,
        tracks: bool, loader: Loader | None, room: Room,
    ) -> None:  # fmt: skip
        self._commands, self._file, self._table = commands, commands.registers, table
        self._pages, self._holdings, self._cache = pages, holdings, cache
        self._sessions, self._marks = sessions, marks
        self.per_request, self._direct_hits, self._tracks = 1 + lanes, direct_hits, tracks
        self._loader, self._room, self._guard = loader, room, commands.guard
        self.lacks: Counter[type[Lack]] = Counter()
        self._told = logs.Repeats(LOG)

    def admit(self, requests: Sequence[Request]) -> Rows:
        """See `StateManager.admit`."""
        given = sequence("requests", requests, "admit([request])")
        starts = self._starts_of(given)
        if self._loader is not None and any(start.lower for start in starts):
            self._loader.require_awake()
            if (rows := self._try(starts)) is not None:
                return rows
            starts = self._starts_of(given, below=False)  # without the loads there is perhaps room
        kept, away = [start for start in starts if start.session and start.session.kept], list[Session]()
        for more in [one for one in kept if not one.turn.length], [one for one in kept if one.turn.length]:
            if more:  # perhaps there is room once their sessions make way: first those that the turns do not need
                if (rows := self._try(starts)) is not None:
                    return rows
                away += [start.request.session for start in more if start.request.session]
                starts = self._starts_of(given, below=False, away=away)
        try:
            return self._admit(starts)
        except (OutOfSlots, OutOfPages, OutOfRows) as lack:
            if id(lack) == self._guard.undone:  # else a policy of the caller raised it, in the middle
                self.refuse("admit", lack)
            raise

    def refuse(self, call: str, lack: Lack) -> None:
        """Counts and logs a refused call.

        Args:
            call: name of the public call.
            lack: the error that it raises.
        """
        self.lacks[type(lack)] += 1
        self._told.event(logging.INFO, "refused", call=call, error=type(lack).__name__, why=str(lack))

    def _try(self, starts: Sequence[Start]) -> Rows | None:
        """Returns a row for each start; None, and starts none, where room is short."""
        try:
            return self._admit(starts)
        except (OutOfSlots, OutOfPages, OutOfRows) as lack:
            if id(lack) != self._guard.undone:
                raise  # a policy of the caller raised it, in the middle
            return None

    def _starts_of(
        self, requests: Sequence[Request], below: bool = True, away: Collection[Session] = ()
    ) -> list[Start]:
        """Returns how requests start.

        Args:
            requests: the requests.
            below: whether they start from host memory, too.
            away: sessions that make way; their turns start from the prefix cache or from zeros.
        """
        starts = [self._start_of(request, below, away) for request in requests]
        running = [start.session.handle for start in starts if start.session]
        if len(set(running)) != len(running):
            raise InvalidArgument(f"a session is named twice in {running}: one turn at a time")
        return starts

    def _admit(self, starts: Sequence[Start]) -> Rows:
        """Returns a row for each start, or raises an error and starts none."""
        pages = sum(self._fresh(starts)) if self._pages.allocator.pages else 0
        # others have no session, match, lower state or prefetch
        found = [start for start in starts if start.request.tokens is not None or start.request.fetch is not None]
        with self._guard.changing("admit"):
            slots, emptied = self.per_request * len(starts), self._sessions.emptied
            if not found:
                if (lack := self.make_room(len(starts), pages, slots)) is not None:
                    raise self._guard.orderly(lack)
                return self._carry_out(starts, found)
            hits = [start.lower for start in found if start.lower]
            self._sessions.starting([start.session for start in found if start.session])
            self._hold(found)
            back = [self._sessions.surplus(start.session, start.turn) for start in found if start.session]
            slots -= sum(min(self.per_request, len(start.turn.registers)) for start in found)
            slots, pages = slots - sum(of for of, _ in back), pages - sum(of for _, of in back)
            # each state and page once, however many prompts start from it
            more = len({hit.state.key for hit in hits}), len({page.key for hit in hits for page in hit.pages})
            slots, pages = slots + more[0] - self._take_over(found, slots + more[0]), pages + more[1]
            if (lack := self._short_of_holders(more[0]) or self.make_room(len(starts), pages, slots)) is not None:
                self._undo(found)
                raise self._guard.orderly(lack)
            for start in found:
                if start.session is not None:
                    self._sessions.give_up(start.session, start.turn)
                elif start.request.session is not None:
                    start.session = self._sessions.get(start.request.session)
                    if start.session.kept:
                        self._room.give_way(start.session)
            if self._loader is not None:
                if more[0] > self._holdings.free:
                    self._room.free_registers(more[0])
                loads = [start for start in found if start.lower]
                self._load(self._loader, self._not_cached(loads) if self._sessions.emptied > emptied else loads)
                self._loader.begun([start.request.fetch for start in starts])
            return self._carry_out(starts, found)

    def _fresh(self, starts: Sequence[Start]) -> list[int]:
        """Returns the new pages of each start, beyond those that it shares. Count them again where an origin changes.

        Raises:
            InvalidArgument: the tokens of a request need more pages than a row can have.
        """
        return [max(0, self._pages.count(start.tokens) - len(start.origin.pages)) for start in starts]

    def _not_cached(self, starts: Sequence[Start]) -> list[Start]:
        """Returns the starts that still have to load, once sessions have made way.

        A session may have left a state in the prefix cache that serves a prompt as well. Such a request reads that
        state and loads nothing, which takes no more room.

        Args:
            starts: requests that found a state in host memory.
        """
        loading = []
        for start in starts:
            match = self._cache.match(start.prompt)
            if start.lower is not None and match.length < start.lower.length:
                loading.append(start)
            else:
                start.taken = False
                self._begin_cached(start, match)
        return loading

    def _load(self, loader: Loader, starts: Sequence[Start]) -> None:
        """Loads states from host memory. Then they are matches in the prefix cache.

        Args:
            loader: loads them.
            starts: requests that found a state in host memory.
        """
        loads = [
            (one.prompt, one.match, one.lower) for one in starts if one.match is not None and one.lower is not None
        ]
        if loads:
            self._cache.loaded(loader.bring(loads))
        for start, (prompt, _, hit) in zip(starts, loads, strict=True):
            match = self._cache.match(prompt)
            if match.length > hit.length:  # another request of the call loads a longer state; only the slot of its own
                match = self._cache.match(prompt, hit.length)  # load is counted
            self._begin_cached(start, match)

    def _begin_cached(self, start: Start, match: Match) -> None:
        """Lets a request start from the prefix cache instead of host memory."""
        self._release_lower(start)
        start.lower, start.match = None, match
        start.origin = self._cached(match)._replace(moves=start.taken)
        self._hold([start])

    def _release_lower(self, start: Start) -> None:
        """Gives up what `_hold` keeps in host memory."""
        if self._loader is not None and start.lower is not None and start.match is not None:
            self._loader.release(start.lower, start.match)

    def _short_of_holders(self, n: int) -> Lack | None:
        """Returns what to raise if n loaded states find no holders. Each must be free, or become free by making way.

        Cached states that these requests will read are pinned, so they do not count.
        """
        if n <= (free := self._holdings.free):
            return None
        return OutOfSlots(n, free, evictable) if n > free + (evictable := self._room.states) else None

    def _carry_out(self, starts: Sequence[Start], found: Sequence[Start]) -> Rows:
        """Gives rows their pages, registers and states. The caller has checked that all of these are available."""
        rows = self._table.claim([start.request.id for start in starts])
        origins = [start.origin for start in starts]
        if self._pages.allocator.pages:
            self._pages.start(rows, [origin.pages for origin in origins], self._fresh(starts))
        if found:
            self._move(rows, starts)
        source = length = np.zeros(len(rows), np.int64)
        if origins.count(START) == len(origins):
            self.claim(rows, ())
        else:
            self.claim(rows, [len(origin.registers) if origin.moves else 0 for origin in origins])
            read = [origin.registers[0] if origin.registers and not origin.moves else 0 for origin in origins]
            source = np.array(read, np.int64)
            length = np.array([origin.length for origin in origins], np.int64)
        prompt = np.array([start.match.tokens if start.match else 0 for start in starts], np.int64) if found else length
        self.start(rows, source, length, np.maximum(length, prompt))
        for row, start in zip(rows.tolist(), starts, strict=True):
            if start.wanted:
                self._marks.start(row, start.wanted, start.origin.length, len(start.prompt.key) // BYTES)
        for row, start in zip(rows.tolist(), starts, strict=True) if self._cache.enabled else ():
            if start.lease is None:
                self._cache.on_miss(row, start.prompt)
                continue
            self._cache.leases[row] = start.lease
            if not start.taken:
                self._cache.unpin(start.lease)
            self._cache.use(start.lease)
        return self._table.handles(rows)

    def _start_of(self, request: Request, below: bool, away: Collection[Session]) -> Start:
        if not isinstance(request, Request):
            raise InvalidArgument(f"{request!r} is no Request: admit([Request(id, ...), ...])")
        key = b"" if request.tokens is None else encode(request.tokens)
        known = len(key) // BYTES
        length = known if request.length is None else request.length
        if request.length is not None and not is_count(length):
            raise InvalidArgument(f"request {request.id!r}: length={length!r}: expected a whole number from 0 on")
        wanted, lengths = [], request.snapshot_at
        if isinstance(lengths, np.ndarray):
            lengths = lengths.tolist()
        if lengths != ():
            named = require_lengths(request.id, lengths, self._pages.page_size)
            wanted = [(at, "named") for at in named]
        if request.salt is not None:
            require_salt(request.salt)
        if request.fetch is not None:
            if self._loader is None:
                raise InvalidArgument(
                    f"fetch={request.fetch!r}: this manager has no storage to fetch from: Tiers(store=) names one"
                )
            self._loader.require_own(request.fetch)
        start = Start(request, length, Prompt(key, request.salt), wanted=wanted)
        if request.resume is not None:
            self._resume(start, request.resume)
        elif request.tokens is not None:
            self._look(start, below, away)
        elif request.session is not None:
            raise InvalidArgument(f"request {request.id!r}: a turn of a session needs tokens, to see where it goes on")
        return start

    def _resume(self, start: Start, snapshot: Snapshot) -> None:
        request = start.request
        if request.session is not None:
            raise InvalidArgument(f"request {request.id!r}: resume a snapshot or a session, not both")
        self._holdings.require([snapshot])
        self._holdings.require_foreign([snapshot])
        start.origin = Origin(snapshot.length, [snapshot.register], snapshot.pages)

    def _look(self, start: Start, below: bool, away: Collection[Session]) -> None:
        """Finds the longest state for a prompt, in its session, in the prefix cache or in host memory.

        Adds the lengths at which the cache wants a snapshot.
        """
        request, prompt = start.request, start.prompt
        if not prompt.key:
            raise InvalidArgument(f"request {request.id!r}: no tokens; a prompt has at least one")
        if request.session is not None and request.session not in away:
            start.session = self._sessions.get(request.session)
            start.origin = self._sessions.find(start.session, prompt)
        if self._cache.enabled:
            start.match = match = self._cache.match(prompt)
            if below and self._loader is not None:
                start.lower = self._loader.find(prompt, match, start.origin.length, request.fetch)
            if start.lower:  # zeros stand for the pages that the load brings; `_admit` counts them apart
                start.origin = Origin(pages=[0] * self._pages.count(start.lower.length))
            elif match.length > start.origin.length:
                start.origin = self._cached(match)
            if self._tracks:
                begun = start.lower.length if start.lower else start.turn.length
                wanted = dict(self._cache.marks(match.instead(begun) if begun else match)) | dict(start.wanted)
                start.wanted = sorted(wanted.items())

    def _cached(self, match: Match) -> Origin:
        """Returns the cached state of a match as an origin."""
        assert match.snapshot is not None
        return Origin(match.length, [match.snapshot.register], self._cache.pages(match))

    def _hold(self, starts: Sequence[Start]) -> None:
        """Leases the matched paths, so that no eviction frees them."""
        for start in starts:
            if start.match is None:
                continue
            if self._loader is not None and start.lower is not None:
                self._loader.hold(start.lower, start.match)
                continue
            kept = start.session.lease if start.session else None
            turn = start.turn
            if turn.length:
                start.match = start.match.instead(turn.length)
            if kept is not None and turn.length:  # the row has the session's pages
                start.lease = self._cache.suspend(kept, turn.length, start.match, start.prompt)
            else:
                start.lease = self._cache.hold(start.match, start.prompt)
                if kept is not None:
                    self._cache.tree.unlease(kept.node)

    def _undo(self, starts: Sequence[Start]) -> None:
        for start in starts:
            self._release_lower(start)
            if start.lease is None:
                continue
            if start.session is not None and start.session.lease is not None:
                self._cache.restore(start.session.lease)
            self._cache.unpin(start.lease)
            self._cache.release(start.lease)
        self._sessions.starting(())

    def _take_over(self, starts: Sequence[Start], slots: int) -> int:
        """Lets requests take over the cached states that they matched, if slots are short.

        Such a request needs one slot less, because the slot of the state becomes its own.

        Returns:
            Number of requests that take a state over.
        """
        if slots <= self._file.allocator.free:
            return 0
        short, taken = slots - self._file.allocator.free - self._room.states, 0
        users = Counter(start.lower.state.key for start in starts if start.lower)
        for start in starts:
            if taken < short and start.lower and users[start.lower.state.key] == 1:  # no other starts from it
                start.taken, taken = True, taken + 1
            elif taken < short and start.lease and self._cache.take_over(start.lease):
                start.taken, taken = True, taken + 1
                start.origin = start.origin._replace(moves=True)
        return taken

    def make_room(self, rows: int, pages: int, slots: int) -> Lack | None:
        """Makes sure that enough rows, pages and slots are free. Cached states and idle sessions make way.

        Returns:
            What to raise if rows, pages or slots are too few; otherwise None. If a policy of the caller offers too few
            victims, those that it offered are evicted. In all other cases with an error, nothing has changed.
        """
        if rows > self._table.free:
            return OutOfRows(rows, self._table.free, self._table.rows)
        allocator, room = self._file.allocator, self._room
        allocator.confirm(slots)
        missing = pages - self._pages.allocator.free
        if missing <= 0 and slots <= allocator.free:
            return None
        if missing > 0 and not room.can_free_pages(missing):
            return self._pages.short_of(pages)
        if slots > allocator.free + room.states:
            evictable = self._holdings.evictable + self._cache.evictable_states
            return OutOfSlots(slots, allocator.free, evictable, allocator.capacity, self._sessions.held)
        if missing > 0:
            room.free_pages(pages)
            if (lack := self._pages.short_of(pages)) is not None:  # a caller's policy can evict fewer than needed
                return lack
        room.free_slots(slots)
        return OutOfSlots(slots, allocator.free, 0, allocator.capacity) if slots > allocator.free else None

    def claim(self, rows: Longs, moved: Sequence[int]) -> None:
        """Claims the registers that new rows start with, except the first ones that a move fills: `moved` of each."""
        registers = rows[:, None] * PER_ROW + np.arange(self.per_request)
        if any(moved):
            self._commands.claim(registers[np.arange(self.per_request) >= np.array(moved, np.int64)[:, None]])
        else:
            self._commands.claim(registers.reshape(-1))

    def _move(self, rows: Longs, starts: Sequence[Start]) -> None:
        """Moves the registers kept by sessions, and states that are taken over, to new rows."""
        for row, start in zip(rows.tolist(), starts, strict=True):
            if start.taken and start.lease is not None:
                self._cache.take(start.lease, row)
            if start.session is not None:
                if start.lease is not None:
                    start.lease.own = start.session.own
                if start.session.lease is not None:
                    self._cache.release_suspended(start.session.lease)
                length = start.origin.length
                self._sessions.begin(start.session, row, start.turn, length, start.prompt)
                if start.turn.length and start.lease is not None:
                    self._cache.shorten(start.lease, length)

    def start(self, rows: Longs, source: Longs, length: Longs, tracked: Longs) -> None:
        """Fills the columns and the states of new rows.

        Each state becomes zeros or a copy of its source, or the first step of the row reads the source itself. A state
        that was moved to its row stays as it is.

        Args:
            rows: the new rows.
            source: for each row, the register of the state to continue from; 0 = none.
            length: for each row, the tokens that it starts with.
            tracked: for each row, the length up to which no boundary is due: its prompt, at least.
        """
        file, live, hit = self._file, rows * PER_ROW, source > 0
        file.tracked[rows] = tracked
        file.source[rows] = source if self._direct_hits else 0
        self._table.confirmed[rows] = length
        cells = [file.address(column, rows) for column in ("tracked", "source")]
        values = tracked, file.source[rows]
        self._commands.write(np.concatenate(cells), np.concatenate(values))
        self._commands.zero(live[~hit & (length == 0)])
        if self._direct_hits:
            for register in source[hit].tolist():
                self._holdings.begin_read(register)
        elif hit.any():
            self._commands.copy(live[hit], source[hit])

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """See `StateManager.arrived`."""
        numbers = self._table.indices(rows)
        tokens = counts("lengths", lengths, len(numbers))
        live = numbers * PER_ROW
        begun = self._file.labels[live].astype(bool) | self._file.source[numbers].astype(bool)
        busy = self._table.unsettled[numbers].astype(bool) | self._table.finished[numbers]
        if (begun | busy).any() or (tokens < 1).any():
            raise InvalidArgument(
                f"rows {numbers.tolist()} with lengths {tokens.tolist()}: a state arrives in a row that has folded no "
                "token, is in no step and not finished, and stands for at least 1"
            )
        self._pages.require_room(numbers, tokens)
        with self._guard.changing("arrived"):
            self._commands.label(live, tokens)
            self._marks.arrived(numbers, tokens)
            self._table.confirmed[numbers] = tokens
