"""Starts rows for new requests, and notes states that arrive from elsewhere.

A call gets everything that it needs, or it changes nothing. This module does not know steps.
"""

import logging
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace

from memstate import logs
from memstate.checks import counts, is_count, numbers_of, sequence
from memstate.engine.world import Verbs, World
from memstate.errors import ConfigurationError, InvalidArgument, OutOfPages, OutOfRows, OutOfSlots
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import Match
from memstate.prefix.conversation import Conversation
from memstate.prefix.lease import NO_MATCH, NO_NODE, Lease
from memstate.prefix.tree import Node
from memstate.requests.handles import ZEROS, Parked, Request, Row, Rows, Session, Snapshot, Source
from memstate.requests.holdings import PUBLISHED
from memstate.requests.marks import require_lengths
from memstate.tiers.host.tier import Hit
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tokens import BYTES, EMPTY, SaltedTokens, Tokens

PER_ROW = REGISTERS_PER_ROW
Origin = tuple[int, int, int, int]  # (register to start from, length, `tracked`, states that a move brought)
NEW: Origin = 0, 0, 0, 0
Lack = OutOfRows | OutOfPages | OutOfSlots
LOG = logs.logger("admission")


@dataclass(slots=True)
class Start:
    """The start of one request: its prompt, and where its state comes from.

    Attributes:
        request: what the caller passed to `admit`.
        tokens: number of tokens that the row gets KV pages for.
        prompt: the prompt, empty if the request has no tokens.
        source: where the state of the row comes from.
        hit: the state in host memory that the row starts from; None if it starts from another source.
        session: the session, if the request is one of its turns. None while the session makes way for this admission.
        shared: number of tokens that the prompt shares with the last turn of the session.
        leaves: the session, if the turn leaves states of it behind. Otherwise the turn leaves no pages either.
        match: the match of the prompt in the prefix cache.
        lease: the lease that keeps the matched path from eviction.
        wanted: lengths at which states are kept, each with its kind, ascending.
    """

    request: Request
    tokens: int
    prompt: SaltedTokens
    source: Source = ZEROS
    hit: Hit | None = None
    session: Conversation | None = None
    shared: int = 0
    leaves: Conversation | None = None
    match: Match | None = None
    lease: Lease | None = None
    wanted: list[tuple[int, str]] = field(default_factory=list)


class Admission(Verbs):
    """Gives requests their rows, slots and pages.

    A request can start from a snapshot, a session, the prefix cache or the tiers. So this part changes every table
    except the log of steps.

    Args:
        world: the tables of the manager.

    Attributes:
        per_request: slots that a new row claims.
        lacks: kind of error -> number of calls refused with it since the start.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._of_rows, self._admitting = world.layout.rows is not None, world.guard.changing("admit")
        self.per_request, self._tracks = 1 + world.mirror.lanes_at_admission, world.mirror.lanes > 0
        self._keeps_kv = self._tiers is not None or self._pages.allocator.pages > 0
        self.lacks: Counter[type[Lack]] = Counter()
        self._told = logs.Repeats(LOG)

    def admit(self, requests: Sequence[Request]) -> Rows:
        """See `StateManager.admit`."""
        given = requests if type(requests) is list else sequence("requests", requests, "admit([request])")
        below = self._tiers is not None
        away: list[Session] = []
        if self._cache.heard:  # policies must learn of earlier requests before this call asks them
            with self._admitting:
                self._cache.learn()
        while True:
            starts = [self._start_of(request, below, away) for request in given]
            rows = self._admit(starts)
            if isinstance(rows, Rows):
                return rows
            # Try again without loads. Then let the sessions make way, first those from which no turn of this call
            # starts.
            loads = below and any(start.hit is not None for start in starts)
            kept = [start for start in starts if start.session is not None and start.session.kept]
            if not loads:
                if not kept:
                    self.refuse("admit", rows)
                    raise rows
                idle = [start for start in kept if start.source.of is not start.session]
                away += [start.request.session for start in idle or kept if start.request.session is not None]
            below = False

    def expire(self, call: str) -> None:
        """Empties the idle sessions whose time to live is over.

        Args:
            call: the public call in which this happens.
        """
        if self._sessions.any_expired:
            with self._guard.changing(call):
                self._room.expire()

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """See `StateManager.extend`."""
        numbers = self._table.indices(rows)
        tokens = numbers_of("lengths", lengths, len(numbers))
        missing = self._pages.missing(numbers, tokens)
        needed = self._pages.allocator.free + missing
        with self._guard.changing("extend"):
            if missing and self._room.can_free_pages(missing):
                self._room.free_pages(needed)
            if (lack := self._pages.short_of(needed)) is not None:
                self.refuse("extend", lack)
                raise self._guard.orderly(lack)
            self._pages.extend(numbers, tokens)

    def snapshot_at(self, row: Row, lengths: object) -> None:
        """See `StateManager.snapshot_at`."""
        number = self._table.index(row)
        lease = self._cache.leases.get(number)
        # The tokens of a fork can differ from its prompt.
        prompt = max(lease.prompt.tokens, lease.match.tokens) if lease and lease.given is not None else 0
        named = require_lengths(self._table.ids[number], lengths, self._pages.unit, prompt)
        self._marks.add(number, named, self._file.length(number), self._file.tracked_at[number])

    def match(self, request: Request) -> Match:
        """See `StateManager.match`."""
        if request.tokens is None and request.keys is None:
            raise InvalidArgument("match what? Give tokens=[...], or keys=[...] and length=")
        match, length = self._matched(self._cache.names.prompt(request, self._keeps_kv), request.session)
        return match.instead(length) if length >= match.length and length else match

    def prefetch(self, tokens: Tokens, salt: Hashable, session: Session | None) -> Fetch:
        """See `StateManager.prefetch`."""
        if self._tiers is None:
            raise ConfigurationError("there is no storage to fetch from: build the manager with tiers=ms.Tiers(...)")
        prompt = self._cache.names.prompt(Request(None, tokens=tokens, salt=salt))
        match, length = self._matched(prompt, session)
        # With several ranks, host memory does not count: the other ranks can have other contents.
        own = match.host_length if self._tiers.settings.group is None else 0
        return self._tiers.prefetch(prompt, match, max(length, match.length, own))

    def _matched(self, prompt: SaltedTokens, session: Session | None) -> tuple[Match, int]:
        """Returns the match of a prompt in cache and host memory, and the length of the state that its session has."""
        if not self._cache.enabled:
            raise ConfigurationError("there is no prefix cache: build the manager with prefix=ms.Prefix()")
        match = self._cache.match(prompt)
        length = self._sessions.find(self._sessions.get(session), prompt).length if session is not None else 0
        if self._tiers is not None and (hit := self._tiers.find(prompt, match, max(length, match.length))):
            match = replace(match, host_length=hit.length)
        return match, length

    def refuse(self, call: str, lack: Lack) -> None:
        """Counts and logs a refused call.

        Args:
            call: name of the public call.
            lack: the error that the call raises.
        """
        self.lacks[type(lack)] += 1
        self._told.event(logging.INFO, "refused", call=call, error=type(lack).__name__, why=str(lack))

    def _admit(self, starts: Sequence[Start]) -> Rows | Lack:
        """Returns a row for each start, or the error that says what is lacking. In that case nothing is started.

        Raises:
            InvalidArgument: two starts are turns of the same session, or a request has too many tokens.
        """
        # Starts with a prompt, a source or wanted lengths. All others need only a row, pages and slots.
        special: list[Start] = []
        turns: list[Conversation] = []
        for start in starts:
            request = start.request
            if (
                request.tokens is not None or start.source is not ZEROS or start.match is not None or start.wanted
                or request.fetch is not None
            ):  # fmt: skip
                special.append(start)
                if start.session:
                    turns.append(start.session)
        if len(turns) > 1 and len(set(turns)) < len(turns):
            raise InvalidArgument(f"a session is named twice in {[turn.handle for turn in turns]}: one turn at a time")
        if self._tiers is not None and len(self._tiers.parked):
            self._tiers.parked.require([start.source.of for start in starts if isinstance(start.source.of, Parked)])
        pages = sum(self._fresh(starts)) if self._pages.allocator.pages else 0
        with self._admitting:
            slots, emptied = self.per_request * len(starts), self._sessions.emptied
            if not special:
                lack = self.make_room(len(starts), pages, slots)
                return self._carry_out(starts, special) if lack is None else lack
            self._sessions.starting = turns
            for start in special if self._cache.enabled else ():
                self._hold(start)
            slots, holders, pages = self._needs(special, slots, pages)
            if slots > self._file.allocator.free:
                slots -= self._take_over(special, slots)
            lack = self._short_of_holders(holders) if holders else None
            if (lack := lack or self.make_room(len(starts), pages, slots)) is not None:
                self._undo(special)
                return lack
            for start in special:
                if start.leaves:
                    self._sessions.give_up(start.leaves, start.source)
                elif not start.session and start.request.session is not None:
                    start.session = self._sessions.get(start.request.session)
                    if start.session.kept:
                        self._room.give_way(start.session)
            if holders:
                if holders > self._holdings.free:
                    self._room.free_registers(holders)
                self._fill(special, look_again=self._sessions.emptied > emptied)
            return self._carry_out(starts, special)

    def _needs(self, starts: Sequence[Start], slots: int, pages: int) -> tuple[int, int, int]:
        """Returns the slots, holders and pages that starts need, without those that their sources give.

        Args:
            starts: the starts that can have a source.
            slots: slots that the rows of the call need.
            pages: new pages that the rows of the call need.
        """
        hits: list[Hit] = []
        for start in starts:
            source = start.source
            if isinstance(source.of, Parked):
                pages += list(source.pages).count(0)
            if source.takes:
                slots -= min(self.per_request, len(source.states))
            if start.leaves:
                of_states, of_pages = self._sessions.surplus(start.leaves, source)
                slots, pages = slots - of_states, pages - of_pages
            if start.hit:
                hits.append(start.hit)
        if not hits:
            return slots, 0, pages
        states = len({hit.state.key for hit in hits})  # keys, because starts can share a record
        return slots + states, states, pages + len({page.key for hit in hits for page in hit.pages})

    def _fresh(self, starts: Sequence[Start]) -> list[int]:
        """Returns the number of new pages of each start. The number changes with the source of the start.

        Raises:
            InvalidArgument: the tokens of a request need more pages than a row can have.
        """
        return [max(0, self._pages.count(start.tokens) - len(start.source.pages)) for start in starts]

    def _fill(self, starts: Sequence[Start], look_again: bool) -> None:
        """Loads states from host memory to the prefix cache, where the starts read them or take them over.

        If a session has made way, the prefix cache can have got a state from it that serves a prompt as well as the
        state in host memory. Then the request reads the state in the cache, and loads nothing.

        Args:
            starts: the starts that can have a source.
            look_again: whether a session has made way.
        """
        loads = list[tuple[Start, Match, Hit]]()
        for start in starts:
            if (hit := start.hit) is not None and start.match is not None:
                if look_again and (match := self._cache.match(start.prompt)).length >= hit.length:
                    self._filled(start, hit, match, takes=False)
                else:
                    loads.append((start, start.match, hit))
        if loads and self._tiers is not None:
            self._cache.loaded(self._tiers.bring([(start.prompt, match, hit) for start, match, hit in loads]))
        for start, _, hit in loads:
            match = self._cache.match(start.prompt)
            # If another request of this call has loaded a longer state, keep to this one: only its slot is counted.
            if match.length > hit.length:
                match = self._cache.match(start.prompt, hit.length)
            self._filled(start, hit, match, start.source.takes)

    def _filled(self, start: Start, hit: Hit, match: Match, takes: bool) -> None:
        """Makes a start use the state that was loaded to the prefix cache, and moves its lease to that state."""
        reach, session = start.lease, start.session
        start.source, start.match, start.hit = self._cached(match)._replace(takes=takes), match, None
        start.lease = self._cache.hold(match, start.prompt)
        if reach is not None:
            self._cache.tree.unlease(reach.node)
        if session is not None:
            self._cache.tree.unlease(session.path)
        if self._tiers is not None:
            self._tiers.host.unpin(hit)

    def _short_of_holders(self, n: int) -> Lack | None:
        """Returns the error to raise unless n holders, one for each loaded state, are free or can become free.

        Cached states that these requests will read are pinned, so they cannot make way.
        """
        free, evictable = self._holdings.free, self._room.states
        return OutOfSlots(n, free, evictable) if n > free + evictable else None

    def _carry_out(self, starts: Sequence[Start], special: Sequence[Start]) -> Rows:
        """Gives rows their pages, registers and states. The caller has made sure that there are enough of each."""
        rows = self._table.claim([start.request.id for start in starts])
        pairs = list(zip(rows, starts, strict=True)) if special or self._cache.enabled else []
        if self._pages.allocator.pages:
            self._pages.start(rows, [start.source.pages for start in starts], self._fresh(starts))
        if not special:
            self.start(rows, [NEW] * len(rows))
        else:
            self._holdings.take([(row, start.source.states) for row, start in pairs if start.source.takes])
            origins: list[Origin] = []
            for row, start in pairs:
                (length, states, _, of, takes), match = start.source, start.match
                if takes or start.session is not None:
                    self._begin(row, start)
                known = match.tokens if match is not None else length
                if isinstance(of, Parked):  # up to the end of its prompt, no snapshot is due
                    known = start.prompt.tokens
                read, moved = (0, len(states)) if takes else (states[0].register if states else 0, 0)
                origins.append((read, length, max(length, known), moved))
            self.start(rows, origins)
        for row, start in pairs:
            source, lease = start.source, start.lease
            if source.states and not source.takes:
                self._reads(source)
            if start.match is not None and lease is not None:
                self._cache.use(lease)
            if self._cache.enabled or start.session is not None:  # for later comparisons of tokens with the prompt
                lease = self._cache.leases[row] = lease or Lease(NO_NODE, start.prompt, NO_MATCH)
                lease.given = start.request.keys if start.request.tokens is None else start.request.tokens
            if start.wanted:
                known = len(start.prompt.key) // BYTES if start.match is None else start.match.tokens
                self._marks.start(row, start.wanted, source.length, known)
        if self._tiers is not None:
            self._go_on([(start.source.of, row) for row, start in pairs if isinstance(start.source.of, Parked)])
            self._tiers.admitted([start.request.fetch for start in special if start.request.fetch is not None])
        return self._table.handles(rows)

    def _go_on(self, going: Sequence[tuple[Parked, int]]) -> None:
        """Loads parked requests to their rows, and gives the rows their lengths."""
        if not going or self._tiers is None:
            return
        begun = [(one, row) for one, row in going if one.length]
        self._commands.label([PER_ROW * row for _, row in begun], [one.length - one.pending for one, _ in begun])
        for one, row in going:
            if one.pending:
                self._file.pending_at[row] = one.pending
                self._commands.write([self._file.starts["pending"] + row], [one.pending])
        self._tiers.parked.load([(one, row, self._pages.of(row)) for one, row in going])

    def _begin(self, row: int, start: Start) -> None:
        """Moves to the row the states that its start takes over, and begins the turn of its session."""
        source, session = start.source, start.session
        if source.takes:
            if isinstance(source.of, Node):
                self._holdings.end_read(source.states[0].register)
                self._cache.detach(source.of, "taken")
        elif source.of is session is not None:
            self._holdings.begin_read(source.states[0].register)  # before `begin` ends the session's states
        if session is not None:
            path = self._sessions.begin(session, row, start.prompt, start.shared, source, self._cache)
            if path is not NO_NODE:
                self._cache.drop_bare(path)
            if start.lease is not None:
                start.lease.own = session.own
                if source.of is session:
                    self._cache.shorten(start.lease, source.length)

    def _reads(self, source: Source) -> None:
        """Counts a row as a reader of its source or, if the state is copied instead, ends the read.

        A state of the prefix cache or of a session has this reader since the start of the admission. So it gets none
        here, and without direct reads the copy ends the read.
        """
        held, register = source.of is not PUBLISHED, source.states[0].register
        if self._direct_hits and not held:
            self._holdings.begin_read(register)
        elif held and not self._direct_hits:
            self._holdings.end_read(register)

    def _start_of(self, request: Request, below: bool, away: Collection[Session]) -> Start:
        if not isinstance(request, Request):
            raise InvalidArgument(f"{request!r} is no Request: admit([Request(id, ...), ...])")
        prompt, length, keys = EMPTY, request.length, request.keys
        named = request.tokens is not None or keys is not None
        if named or request.salt is not None or request.kind is not None or request.reach is not None:
            prompt = self._cache.names.prompt(request, self._keeps_kv)
        if length is None:
            length = len(prompt.key) // BYTES
        elif not is_count(length):
            raise InvalidArgument(f"request {request.id!r}: length={length!r}: expected a whole number from 0 on")
        wanted = []
        if not isinstance(request.snapshot_at, tuple) or request.snapshot_at:
            known = prompt.tokens if keys is None else length
            lengths = require_lengths(request.id, request.snapshot_at, self._pages.unit, known)
            wanted = [(at, "named") for at in lengths]
        if request.fetch is not None:
            if self._tiers is None:
                raise InvalidArgument(
                    f"fetch={request.fetch!r}: this manager has no storage to fetch from: Tiers(store=) names one"
                )
            self._tiers.require_own(request.fetch)
        start = Start(request, length, prompt, wanted=wanted)
        if isinstance(request.resume, Parked):
            self._resume_parked(start, request.resume, away)
        elif request.resume is not None:
            self._resume(start, request.resume)
        elif named:
            self._look(start, below, away)
        elif request.session is not None:
            raise InvalidArgument(f"request {request.id!r}: a turn of a session needs tokens, to see where it goes on")
        if turn := start.session:
            given = start.source.states if start.source.of is turn else ()
            start.leaves = turn if len(given) < len(turn.kept) else None
        return start

    def _resume(self, start: Start, snapshot: Snapshot) -> None:
        request = start.request
        if request.session is not None:
            raise InvalidArgument(f"request {request.id!r}: resume a snapshot or a session, not both")
        self._holdings.require([snapshot])
        self._holdings.require_foreign([snapshot])
        start.source = Source(snapshot.length, [snapshot], snapshot.pages, PUBLISHED)

    def _resume_parked(self, start: Start, parked: Parked, away: Collection[Session]) -> None:
        request, known, prompt = start.request, parked.prompt, start.prompt
        if self._tiers is None:
            raise ConfigurationError(f"request {request.id!r}: a parked request needs tiers=ms.Tiers(...)")
        pages, tail = self._tiers.parked.pages(parked), self._mirror.rules.tail
        if parked.pending >= max(1, 2 * tail):  # a step leaves fewer there
            raise InvalidArgument(f"request {request.id!r}: {parked.pending} tokens in a tail, Forward(tail={tail})")
        other = request.tokens is not None and prompt.key[: len(known.key)] != known.key
        if other or request.salt not in (None, known.salt):
            why = f"let the {known.tokens} tokens that the parked request knows come first, and give its salt or none"
            raise InvalidArgument(f"request {request.id!r} with {prompt.tokens} tokens: {why}")
        start.prompt = known if request.tokens is None else prompt._replace(salt=known.salt)
        start.prompt = start.prompt._replace(kind=request.kind or known.kind)
        start.tokens = max(start.tokens, parked.length)
        start.source = Source(parked.length, (), pages, parked)
        if request.session is not None:
            session = self._sessions.get(request.session)
            start.shared = self._sessions.shared(session, start.prompt)
            start.lease = Lease(NO_NODE, start.prompt, NO_MATCH)
            if request.session not in away:
                start.session = session

    def _look(self, start: Start, below: bool, away: Collection[Session]) -> None:
        """Finds the longest state for a prompt: in its session, in the prefix cache or in host memory.

        Also adds to the wanted lengths of the request the lengths at which the placement wants states.
        """
        request, prompt = start.request, start.prompt
        if not prompt.key and request.keys is None:
            raise InvalidArgument(f"request {request.id!r}: no tokens; a prompt has at least one")
        if request.session is not None:
            session = self._sessions.get(request.session)
            start.shared = self._sessions.shared(session, prompt)
            if request.session not in away:
                start.session, start.source = session, self._sessions.find(session, prompt, start.shared)
        if self._cache.enabled:
            start.match = match = self._cache.match(prompt)
            known = start.source.length
            if below and self._tiers is not None:
                start.hit = self._tiers.offer(request.fetch, prompt, match, known)
            if (hit := start.hit) is not None:
                start.source = Source(hit.length, pages=[0] * self._pages.count(hit.length))
            elif match.length > known:
                start.source = self._cached(match)
            if self._tracks:
                elsewhere = start.source.length and not isinstance(start.source.of, Node)
                seen = match.instead(start.source.length) if elsewhere else match
                start.wanted = sorted((dict(self._cache.marks(seen)) | dict(start.wanted)).items())

    def _cached(self, match: Match) -> Source:
        """Returns the source for the cached state of a match."""
        assert match.snapshot is not None and match.found is not None and match.found.stated is not None
        return Source(match.length, [match.snapshot], self._cache.tree.pages_to(match.found.stated), match.found.stated)

    def _hold(self, start: Start) -> None:
        """Keeps the source of a request from making way, until the request has its row or `_undo` is called."""
        source, match, session = start.source, start.match, start.session
        if match is None:
            if session is not None and start.lease is not None:  # a parked request goes on as a turn
                self._cache.tree.unlease(session.path)
            return
        if (hit := start.hit) is not None:
            assert match.found is not None and self._tiers is not None
            self._tiers.host.pin(hit)
            start.lease = Lease(match.found.reach, start.prompt, match)
            self._cache.tree.lease(start.lease.node)
        elif source.of is session and session is not None:
            node = self._cache.up(session.path, source.length)
            start.lease = Lease(node, start.prompt, match.instead(source.length))
            self._cache.tree.lease(node)
            self._cache.tree.unlease(session.path)
        else:
            start.lease = self._cache.hold(match, start.prompt)
            if session is not None:
                self._cache.tree.unlease(session.path)

    def _undo(self, starts: Sequence[Start]) -> None:
        """Takes back what `_hold` did, after the admission found too little room."""
        tree = self._cache.tree
        for start in starts:
            source, lease, session = start.source, start.lease, start.session
            if lease is None:
                continue
            if (hit := start.hit) is not None and self._tiers is not None:
                self._tiers.host.unpin(hit)
            elif session is not None:
                if tree.has(session.path):
                    tree.lease(session.path)
                else:  # the caller's policy has evicted this path, and still freed too little
                    session.path = NO_NODE
            if isinstance(source.of, Node):
                self._holdings.end_read(source.states[0].register)
            tree.unlease(lease.node)
        self._sessions.starting = []

    def _take_over(self, starts: Sequence[Start], slots: int) -> int:
        """Lets requests take over the cached states that they matched, if slots are short.

        Such a request needs one slot less, because the slot of the state becomes its own. A state that several requests
        start from is not taken over.

        Returns:
            Number of requests that take a state over.
        """
        short, taken = slots - self._file.allocator.free - self._room.states, 0
        loads = Counter(start.hit.state.key for start in starts if start.hit is not None)
        for start in starts if short > 0 else ():
            hit = start.hit
            alone = (hit is not None and loads[hit.state.key] == 1) or (
                isinstance(start.source.of, Node) and self._holdings.readers[start.source.states[0].register] == 1
            )
            if alone and taken < short:
                start.source, taken = start.source._replace(takes=True), taken + 1
        return taken

    def make_room(self, rows: int, pages: int, slots: int) -> Lack | None:
        """Makes sure that enough rows, pages and slots are free. Cached states and idle sessions make way.

        Returns:
            The error to raise if rows, pages or slots are too few; otherwise None. With an error nothing has changed,
            except if the caller's policy offered too few victims: those are evicted.
        """
        if rows > self._table.free:
            return OutOfRows(rows, self._table.free, self._table.rows)
        allocator, room = self._file.allocator, self._room
        if allocator.unconfirmed:
            allocator.confirm(slots)
        missing = pages - self._pages.allocator.free if pages else 0
        if missing <= 0 and slots <= allocator.free:
            return None
        if missing > 0 and not room.can_free_pages(missing):
            return self._pages.short_of(pages)
        if slots > allocator.free + room.states:
            evictable = self._holdings.evictable("snapshot") + self._cache.evictable_states
            return OutOfSlots(slots, allocator.free, evictable, allocator.capacity, self._sessions.held)
        if missing > 0:
            room.free_pages(pages)
            if (lack := self._pages.short_of(pages)) is not None:  # a caller's policy can free too few pages
                return lack
        room.free_slots(slots)
        return OutOfSlots(slots, allocator.free, 0, allocator.capacity) if slots > allocator.free else None

    def start(self, rows: Sequence[int], origins: Sequence[Origin], of_rows: Sequence[int] = ()) -> None:
        """Claims slots for new rows, and records their columns and states.

        With direct reads, the first step of a row reads its source, and the caller has counted this reader. Otherwise
        the state is a copy of the source. Without a source and a length it is zeros. A state that a move has brought to
        the row stays as it is.

        Args:
            rows: the new rows.
            origins: for each row, what it starts from.
            of_rows: for each row, the row that it is forked from; empty if the rows are no forks.
        """
        file, confirmed, commands = self._file, self._table.confirmed_at, self._commands
        tracked_at, first_tracked, first_source = file.tracked_at, file.starts["tracked"], file.starts["source"]
        claimed: list[int] = []
        cells: dict[int, int] = {}
        fresh: list[int] = []
        copies: dict[int, int] = {}
        for row, (of, length, tracked, moved) in zip(rows, origins, strict=True):
            live = PER_ROW * row
            claimed += range(live + moved, live + self.per_request)
            if moved > 2:
                self._mirror.doubled = True
            if tracked_at[row] != tracked:  # the device has this value already if the host has
                tracked_at[row] = cells[first_tracked + row] = tracked
            confirmed[row] = length
            if of and self._direct_hits:
                file.source_at[row] = cells[first_source + row] = of
            elif of:
                copies[live] = of
            elif not length:
                fresh.append(live)
        for row, of in zip(rows, of_rows, strict=False) if file.tails else ():
            if kept := file.pending_at[of]:
                file.pending_at[row] = cells[file.starts["pending"] + row] = kept
        commands.claim(claimed, zeroed=fresh)
        if cells:
            commands.write([*cells], [*cells.values()])
        if copies:
            commands.copy([*copies], [*copies.values()])
        if self._of_rows and of_rows and not self._fills:  # without pending tokens, nobody reads the ring of a row
            pairs = [(row, of) for row, of in zip(rows, of_rows, strict=True) if file.pending_at[of]]
            rows, of_rows = [row for row, _ in pairs], [of for _, of in pairs]
        if self._of_rows and rows and (of_rows or self._fills):
            commands.start_rows(rows, of_rows)

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """See `DeviceCalls.arrived`."""
        numbers, table = self._table.indices(rows), self._table
        known = counts("lengths", lengths, len(numbers))
        tokens = known.tolist()
        begun = [row for row in numbers if self._file.length(row) or self._file.source_at[row]]
        if begun or 0 in tokens or table.finished[numbers].any() or self._log.times(table)[numbers].any():
            raise InvalidArgument(
                f"rows {numbers} with lengths {tokens}: a state arrives in a row that has folded no "
                "token, is in no step and not finished, and stands for at least 1"
            )
        self._pages.require_room(numbers, known)
        with self._guard.changing("arrived"):
            self._commands.label([PER_ROW * row for row in numbers], tokens)
            self._marks.arrived(numbers, tokens)
            table.confirmed[numbers] = tokens
