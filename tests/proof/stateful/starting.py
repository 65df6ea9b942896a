"""Rows that begin and end: from zeros, a snapshot, what the cache has, or what a session kept."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from tests.proof.stateful.cache import Found, Lease, Text
from tests.proof.stateful.history import EMPTY, fold
from tests.proof.stateful.marking import Mark, Marking
from tests.proof.stateful.rows import Kept, Row
from tests.proof.stateful.talking import Start, Talk


class Starting(Marking):
    """Admissions, forks and endings. holders_left: for states from below, beside what starts that were weighed read."""

    holders_left = 0

    # What a request finds

    def look_up(self, start: Start) -> None:
        """The longest state for a prompt: its session's, or one of the cache."""
        s, prompt, talk = self.settings, start.prompt, start.talk
        assert prompt
        found, start.asked = self.find(prompt, start.salt) if s.prefix else None, start.wants
        serving = self.serving(talk, prompt, start.salt) if talk else []
        if talk and serving and not (found and found.length > serving[0].length):
            start.moved, start.length = serving, serving[0].length
            start.shared = talk.pages[: self.pages_for(start.length)]
        self._go_on_from(start, found)

    def from_elsewhere(self, start: Start) -> Start:
        """The same request where its session makes way first."""
        other = replace(
            start, talk=None, away=start.talk, origin=None, length=0, moved=(), shared=(), wants=start.asked
        )
        self.look_up(other)
        return other

    def serving(self, talk: Talk, prompt: Text, salt: Hashable) -> Sequence[Kept]:
        """States of a session that a prompt begins with."""
        same = 0
        while same < min(len(talk.text), len(prompt) - 1) and talk.text[same] == prompt[same]:
            same += 1
        serving = [one for one in talk.kept if one.length <= same][: 1 + self.settings.lanes]
        return serving if talk.salt == salt else []

    def _go_on_from(self, start: Start, found: Found | None) -> None:
        s, prompt = self.settings, start.prompt
        assert prompt
        if found and found.stated and not start.moved:
            start.origin, start.length = found.stated.state, found.length
            start.shared = found.stated.pages
        if found and start.moved:
            far = start.length
            found = Found(found.tokens, far, max(found.kv, far), max(found.gone, far))
        start.found = found
        if found:
            size = self.floor(len(prompt) - 1)
            distance = -(-s.placed // s.page_size) * s.page_size or len(prompt) + 1
            more = dict.fromkeys(range(distance, size + 1, distance), "every") if s.lanes else {}
            more |= {found.kv: "branch", size: "prompt"} if s.lanes else {}
            start.wants = sorted({**more, **dict(start.asked)}.items())

    def from_host(self, start: Start) -> Start | None:
        """The same request where it starts from host memory, if that has more."""
        if not (self.below and start.prompt):
            return None
        found = self.find(start.prompt, start.salt)
        serving = self.serving(start.talk, start.prompt, start.salt) if start.talk else []
        known = max(found.length, serving[0].length if serving else 0)
        hit = self.below.worth(self.below.find(start.prompt, start.salt, found), known)
        if not hit:
            return None
        shared = [0] * self.pages_for(hit.length)
        return replace(start, hit=hit, found=found, origin=None, length=0, moved=(), shared=shared, wants=start.asked)

    def _bring_up(self, starts: Sequence[Start]) -> None:
        """What lies below becomes cached, and is found like anything else. What is cached meanwhile is not brought."""
        if not self.below:
            return
        self.free_some_holders(len({start.hit.state.key for start in starts if start.hit}))
        for start in starts:
            if start.hit and self.find(start.prompt or (), start.salt).length >= start.hit.length:
                start.taken = False
                self._start_cached(start)
        promoted = [start for start in starts if start.hit]
        if not promoted:
            return
        registers, brought, ids, pages = [], [], [], []
        distinct = {start.hit.state.key: start for start in promoted if start.hit}
        for start in sorted(distinct.values(), key=lambda start: start.hit.length if start.hit else 0):
            assert start.hit and start.prompt
            state, had, fresh = self.plant(start.prompt[: start.hit.length], start.salt)
            registers.append(state.register)
            brought.append(start.hit)
            ids += fresh
            pages += start.hit.pages[had - start.hit.first :] if fresh else []
        self.below.bring(registers, brought, ids, pages)
        for start in promoted:
            assert start.hit and start.found and start.prompt
            more = start.hit.length - start.found.length
            self.below.figures[f"{'storage' if start.hit.state.fetched else 'host'} hit"] += more
        for start in promoted:
            length = start.hit.length if start.hit else 0
            self._start_cached(start)
            assert start.length == length

    def _start_cached(self, start: Start) -> None:
        """The same request, which starts from the cache instead of from below."""
        hit, lease = start.hit, start.lease
        assert hit and lease and self.below
        start.hit = None
        self._go_on_from(start, self.find(start.prompt or (), start.salt))
        self._hold([start])
        self.below.hold(hit, -1)
        self.leases.remove(lease)

    def _hold(self, starts: Sequence[Start]) -> None:
        """What was found stays while room is made for the rest; of what sessions share, only what they go on with."""
        for start in starts:
            if start.hit and start.found and self.below:
                self.below.hold(start.hit)
                self.leases.append(lease := Lease(start.found.reached, start.salt))
                start.lease = lease
            elif start.found:
                kept = start.talk.lease if start.talk else None
                start.lease = Lease(start.found.stated, start.salt)
                if kept:
                    self.leases.remove(kept)
                if kept and start.moved:
                    start.lease = Lease(self.up(kept.entry, start.length), start.salt)
                if start.talk:
                    start.lease.own = start.talk.own
                self.leases.append(start.lease)
                if state := self._read(start):
                    self.pins[state.register] += 1

    @staticmethod
    def _read(start: Start) -> Kept | None:
        return start.origin if start.found and start.found.stated and isinstance(start.origin, Kept) else None

    def _unpin(self, start: Start) -> None:
        if state := self._read(start):
            self.pins[state.register] -= 1

    def _demand(self, starts: Sequence[Start]) -> tuple[int, int]:
        """Pages and slots that have to be found, where it is known what is held; says whose origin is taken."""
        each = 1 + self.settings.lanes_at_admission
        pages = sum(max(0, self.pages_for(start.size) - len(start.shared)) - self.surplus(start)[1] for start in starts)
        slots = sum(max(0, each - len(start.moved)) - self.surplus(start)[0] for start in starts)
        users = Counter(start.hit.state.key for start in starts if start.hit)
        slots += len(users)
        pages += len({item.key for start in starts if start.hit for item in start.hit.pages})
        short = slots - self.free_count - self.ready_to_go
        for start in starts:
            state = self._read(start)
            alone = users[start.hit.state.key] == 1 if start.hit else state and self.pins[state.register] == 1
            start.taken = bool(short > 0 and alone)
            short -= start.taken
        return pages, slots - sum(start.taken for start in starts)

    def weigh(self, starts: Sequence[Start]) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Pages and slots that are needed and that can be had while what the starts found stays, and snapshots that can
        be dropped.
        """
        self.starting = [start.talk for start in starts if start.talk]
        self._hold(starts)
        need = self._demand(starts)
        self.holders_left = sum(map(len, self.free_holders)) + self.ready_to_go
        room = self.free_pages + self.pages_ready_to_go, self.free_count + self.ready_to_go
        found = need, room, self.evictable
        for start in starts:
            self._unpin(start)
            if start.lease:
                self.leases.remove(start.lease)
                if start.hit and self.below:
                    self.below.hold(start.hit, -1)
                elif start.talk and start.talk.lease:
                    self.leases.append(start.talk.lease)
        self.starting = []
        return found

    def make_room(self, pages: int, slots: int) -> None:
        self.free_some_pages(pages)
        self.free_slots(slots)

    # Rows

    def admit(self, starts: Sequence[Start]) -> list[Row]:
        self.starting = [start.talk for start in starts if start.talk]
        self._hold(starts)
        self.make_room(*self._demand(starts))
        for start in starts:
            if start.talk:
                self.give_back(start)
            elif start.away:
                start.talk = start.away
                if start.talk.kept:
                    self.give_way(start.talk)
                if start.lease:
                    start.lease.own = start.talk.own
        self._bring_up(starts)
        rows = self.start(starts)
        for row, start in zip(rows, starts, strict=True):
            if start.lease and start.found:
                row.lease = start.lease
                self._unpin(start)
                if start.taken and (state := self._read(start)):
                    del self.kept[state.register]
                    self.free_holders.append({state.register})
                self.use(start.found, start.lease)
        return rows

    def start(self, starts: Sequence[Start]) -> list[Row]:
        """The lowest free rows with their slots and pages."""
        s = self.settings
        rows = [
            Row(number, self.generation[number], start.name)
            for number, start in zip(self.free_rows, starts, strict=False)
        ]
        assert len(rows) == len(starts)
        for row, start in zip(rows, starts, strict=True):
            self.rows[row.number] = row
            self.append_pages(row, start.shared)
            self.add_pages(row, max(0, self.pages_for(start.size) - len(start.shared)))
        for row, start in zip(rows, starts, strict=True):
            if start.taken and start.found and start.found.stated:
                state = self.give_up(start.found.stated)
                state.dropped = True
                self.record_moves([(row.live, state.register)])
            if start.talk:
                self.begin_turn(row, start.talk, start)
                if start.moved and start.lease:
                    self.shorten(start.lease, start.length)
        self.record_claims(
            [row.live + k for row, one in zip(rows, starts, strict=True)
             for k in range(one.taken or len(one.moved), 1 + s.lanes_at_admission)]
        )  # fmt: skip
        copies, direct = [], []
        for row, start in zip(rows, starts, strict=True):
            register = self._restore(row, start)
            if register and s.direct:
                row.source = register
                direct.append((row, register))
            elif register:
                copies.append((row.live, register))
            row.coming = [(at, kind) for at, kind in start.wants if at > start.length]
            row.floor = row.tracked = row.confirmed = start.length
            if start.found and start.prompt:
                row.tracked = max(row.tracked, len(start.prompt))
            elif isinstance(origin := start.origin, Row):
                row.tracked = max(row.tracked, origin.tracked)
            for column in ("tracked", "source"):
                self.record_write(column, row.number, getattr(row, column))
        fresh = [row.live for row, start in zip(rows, starts, strict=True) if not (start.length or start.origin)]
        self.record_zeros(fresh)
        for row, register in direct:
            self.pin(row, register)
        self.record_copies(copies)
        return rows

    def _restore(self, row: Row, start: Start) -> int:
        """What the row knows of itself; returns the register that it reads first or is a copy of, 0 for none."""
        origin, length = start.origin, start.length
        row.prompt = start.prompt
        if origin:
            row.text = origin.text[:length]
            row.truth = {length: origin.truth if isinstance(origin, Kept) else origin.truth[length]}
        elif start.moved:
            row.text = start.moved[0].text
            row.truth = {one.length: one.truth for one in start.moved}
        if row.prompt and length:
            assert row.text == row.prompt[:length] and row.truth[length] == fold(EMPTY, row.text), "another prefix"
        if not origin or start.taken:
            return 0
        return origin.register if isinstance(origin, Kept) else origin.source or origin.live

    def fork(self, row: Row, names: Sequence[object], holder: int) -> tuple[list[Row], list[tuple[int, int]]]:
        """holder: the register that the state was moved to, where it was."""
        if not names:
            return [], []
        length, n = self.length(row), len(names)
        kept = self.pages_for(self.floor(length))
        partial = self.pages_for(length) - kept
        moved = self.settings.direct and not row.source
        self.make_room(partial * n, n * (1 + self.settings.lanes_at_admission) + moved)
        shared: Kept | None = None
        at_mark = moved and row.end is not None
        if moved:
            self.free_some_holders(1)
        if at_mark and row.end:
            self.keep_marks([Mark(0, row, 0, *row.end[:2])])
            row.floor = row.end[0]
            row.end = None
        elif moved:
            shared = self.hold(holder, length, (), row.truth[length], row.text[:length])
            self.record_moves([(holder, row.live)])
            self.record_claims([row.live])
            row.source = holder
            self.record_write("source", row.number, holder)
            self.pin(row, holder)
        assert partial == (length % self.settings.page_size > 0 and bool(self.settings.pages))
        starts = [Start(name, length, origin=row, length=length, shared=row.pages[:kept]) for name in names]
        rows = self.start(starts)
        for new in rows:
            new.prompt, new.taste = row.prompt, row.taste
            if row.lease:
                self.leases.append(lease := Lease(row.lease.entry, row.lease.salt))
                new.lease = lease
        if shared:
            shared.dropped = True  # goes with its last reader
        copies = [(new.pages[kept], row.pages[kept]) for new in rows] if partial else []
        return rows, copies

    def keep(self, rows: Sequence[Row], bounds: Sequence[int], keys: Sequence[Text], ended: bool) -> list[Kept | None]:
        """KV and the newest snapshot of each row, for the cache. bounds: what is real of each."""
        if not self.settings.prefix:
            return [None] * len(rows)
        offers = []
        last = []
        for row, bound, key in zip(rows, bounds, keys, strict=True):
            known = self.floor(min(bound, len(key)))
            for kept, _ in [one for one in row.marks if one[0].length <= min(bound, len(key))]:
                row.marks = [one for one in row.marks if one[0] is not kept]
                pages = row.pages[: kept.length // self.settings.page_size]
                offers.append((row, key[: kept.length], pages, kept.register, kept, False))
            register = 0 if ended and row.talk and not row.talk.closing else self.answer(row, known, ended)
            decoded = not row.end or row.end[0] != self.known.get(register)
            offers.append((row, key[:known], row.pages[: known // self.settings.page_size], register, None, decoded))
            last.append(len(offers))
        found = [self.insert(*offer) for offer in offers]
        self.trim()
        there = [entry.state for entry in self.stated]
        states = [one if one in there else None for one in found]
        return [
            next((one for one in reversed(states[first:end]) if one), None)
            for first, end in zip([0, *last], last, strict=False)
        ]

    def end(
        self, rows: Sequence[Row], registers: Sequence[int] | None, bounds: Sequence[int],
        keys: Sequence[Text] | None = None,
    ) -> list[Kept | None]:  # fmt: skip
        """registers: holders for those who have something to publish up to their bound; None publishes nothing. keys:
        for the cache and the sessions instead.
        """
        kept: list[Kept | None] = [None] * len(rows)
        self.unpin(rows)
        if keys is not None:
            kept = self.keep(rows, bounds, keys, ended=True)
        elif registers is not None:
            kept = self.publish(rows, bounds, registers, ended=True)
        for i, row in enumerate(rows):
            if row.talk:
                self.end_turn(row, row.talk, bounds[i] if keys is not None else row.confirmed, keys and keys[i])
        self.record_releases([row.live + k for row in rows for k in range(3)])
        for row in rows:
            if row.lease:
                self.end_lease(row.lease)
        marked = [row for row in rows if row.marks]
        for row in rows:
            for at in range(len(row.pages)):
                self.record_write("page", row.number, 0, at)
            self.page_users -= Counter(row.pages)
            del self.rows[row.number]
            self.generation[row.number] += 1
        self.end_marks(marked)
        for row in rows:
            for column in ("tracked", "source"):
                self.record_write(column, row.number, 0)
        return kept
