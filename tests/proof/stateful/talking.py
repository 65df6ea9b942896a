"""Sessions: what a conversation keeps between its turns, and how it makes way. Knows no admission."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.proof.stateful.cache import Entry, Found, Lease, Text
from tests.proof.stateful.keeping import Keeping
from tests.proof.stateful.rows import Kept, Row

if TYPE_CHECKING:
    from tests.proof.stateful.hosting import Hit


@dataclass(eq=False)
class Talk:
    """A session. text: what its states and pages stand for, or what its turn began with; told: all that the caller said
    of it. kept: longest first. start: tokens that the turn began with. since: when its last turn ended. turn: the
    number of that event. closing: it closes with its turn.
    """

    name: Hashable
    text: Text = ()
    told: Text = ()
    kept: list[Kept] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    lease: Lease | None = None
    own: dict[Entry, int] = field(default_factory=dict)
    salt: Hashable = None
    row: Row | None = None
    start: int = 0
    priority: int = 0
    ttl: float | None = None
    opened: float = 0
    since: float = 0
    turn: int = 0
    closing: bool = False


@dataclass(eq=False)
class Start:
    """What a new row begins with. size: tokens that pages are taken for. origin: whose state is read or copied; moved:
    states of a session that become the row's; taken: the origin itself does. asked: wants of the request alone. hit: a
    longer state in host memory, which is brought up first. away: the session, where it makes way for its own turn.
    """

    name: object
    size: int = 0
    wants: Sequence[tuple[int, str]] = ()
    origin: Kept | Row | None = None
    length: int = 0
    prompt: Text | None = None
    salt: Hashable = None
    talk: Talk | None = None
    moved: Sequence[Kept] = ()
    shared: Sequence[int] = ()
    found: Found | None = None
    lease: Lease | None = None
    taken: bool = False
    asked: Sequence[tuple[int, str]] = ()
    hit: "Hit | None" = None
    away: Talk | None = None


class Talking(Keeping):
    """Turns that begin and end. seconds: the time. starting: sessions whose turn is about to begin."""

    seconds = 0.0
    turns = 0

    def clear(self) -> None:
        super().clear()
        self.talks: list[Talk] = []
        self.starting: list[Talk] = []

    def open_talk(self, name: Hashable, priority: int, ttl: float | None) -> Talk:
        self.turns += 1
        now = self.seconds
        talk = Talk(name, priority=priority, ttl=ttl, opened=now, since=now, turn=self.turns)
        self.talks.append(talk)
        return talk

    # Who makes way

    def expired(self, talk: Talk) -> bool:
        return talk.ttl is not None and self.seconds - talk.since > talk.ttl

    def idle(self) -> list[Talk]:
        there = [talk for talk in self.talks if talk.kept and not talk.row and talk not in self.starting]
        return sorted(there, key=lambda talk: (not self.expired(talk), talk.priority, talk.turn))

    @property
    def in_talks(self) -> int:
        return sum(len(talk.kept) for talk in self.talks)

    @property
    def ready_to_go(self) -> int:
        """States that make way where room is short."""
        return self.evictable_states + sum(len(talk.kept) for talk in self.idle())

    @property
    def pages_ready_to_go(self) -> int:
        """Pages that are free once the idle sessions are empty, and everything without a lease is gone."""
        given, idle = Counter[int](), self.idle()
        given.update(page for talk in idle for page in talk.pages)
        leases = [talk.lease for talk in idle if talk.lease]
        self.leases = [lease for lease in self.leases if lease not in leases]
        given.update(page for one in self.entries if not self.leased(one) for page in self.own_pages(one))
        self.leases += leases
        return sum(self.page_users[page] == users for page, users in given.items())

    def free_slots(self, n: int) -> None:
        self._evict_superseded(n - self.free_count)
        self._free(lambda: n - self.free_count, self.evict_states)

    def _evict_superseded(self, n: int) -> None:
        """What has a newer one goes before anybody's session."""
        self.evict_states(
            min(n, sum(not one.last[0] and not self.pins[one.state.register] for one in self.stated if one.state))
        )

    def free_some_holders(self, n: int) -> None:
        self._evict_superseded(n - sum(map(len, self.free_holders)))
        self._free(lambda: n - sum(map(len, self.free_holders)), self.evict_states)

    def free_some_pages(self, n: int) -> None:
        self._free(lambda: n - self.free_pages, self.evict_pages)

    def _free(self, lacking: Callable[[], int], evict: Callable[[int], object]) -> None:
        """Expired sessions and those beyond their share, then what is cached, then the other sessions."""
        for everyone in (False, True):
            for talk in self.idle():
                beyond = self.in_talks > self.settings.share * self.settings.slots
                if lacking() > 0 and (everyone or self.expired(talk) or beyond):
                    self.give_way(talk)
                    evict(max(0, lacking()))
            evict(max(0, lacking()))

    def give_way(self, talk: Talk) -> None:
        """Whole pages become cached, the rest is free."""
        handed = []
        if self.settings.prefix and not self.expired(talk):
            for one in [one for one in reversed(talk.kept) if self.floor(one.length) == one.length]:
                if entry := self._adopt(one, talk):
                    handed.append(one)
                    talk.own[entry] = entry.uses
            self.supersede(talk.own, 0)
        talk.kept = [one for one in talk.kept if one not in handed]
        self.record_releases([one.register for one in talk.kept])
        lease = talk.lease
        self._empty(talk)
        if lease:
            self.end_lease(lease)
        self.trim()

    def _adopt(self, one: Kept, talk: Talk) -> Entry | None:
        key = talk.text[: one.length]
        there = self.ending_at(key, talk.salt)
        if there and there.state:
            self.figures["duplicates"] += 1
            return None
        entry = self._grow(key, talk.pages[: one.length // self.settings.page_size], talk.salt)
        entry.state, entry.evicted, one.owner = one, False, "cached"
        self.stated.append(entry)
        self._rank(entry)
        if self.below:
            self.below.added(entry)
        self.figures["inserted"] += 1
        self.published += 1
        return entry

    def expire(self) -> None:
        for talk in [talk for talk in self.idle() if self.expired(talk)]:
            self.give_way(talk)

    def _hold_to_limit(self) -> None:
        most = self.settings.most_kept
        for talk in self.idle():
            if most is not None and self.in_talks > most:
                self.give_way(talk)

    def surplus(self, start: Start) -> tuple[int, int]:
        """Slots and pages that a session gives back before its turn takes any."""
        if not start.talk:
            return 0, 0
        alone = sum(self.page_users[page] == 1 for page in start.talk.pages[self._resumed(start) :])
        return len(start.talk.kept) - len(start.moved), alone

    def _resumed(self, start: Start) -> int:
        """How many of a session's pages its turn goes on with."""
        return self.pages_for(start.length) if start.moved else 0

    def give_back(self, start: Start) -> None:
        talk = start.talk
        assert talk
        left = [one for one in talk.kept if one not in start.moved]
        self.record_releases([one.register for one in left])
        for one in left:
            del self.kept[one.register]
            self.free_holders.append({one.register})
        talk.kept = list(start.moved)
        self._release_pages(talk, self._resumed(start))

    def _release_pages(self, talk: Talk, left: int) -> None:
        self.page_users -= Counter(talk.pages[left:])
        talk.pages = talk.pages[:left]

    def begin_turn(self, row: Row, talk: Talk, start: Start) -> None:
        """What is left of its states becomes the row's; the lease has gone to the row, or is gone."""
        assert start.prompt is not None
        if talk.lease:
            self.prune(talk.lease.entry)
        self.record_moves([(row.live + k, one.register) for k, one in enumerate(start.moved)])
        self._empty(talk)
        if start.salt != talk.salt:
            talk.own.clear()
        talk.row, row.talk = row, talk
        talk.start, talk.text, talk.salt = start.length, start.prompt[: start.length], start.salt
        self.starting = [other for other in self.starting if other is not talk]

    def end_turn(self, row: Row, talk: Talk, known: int, key: Text | None) -> None:
        known = min(known, talk.start if key is None else len(key))
        if key is not None:
            talk.text = talk.told = key
        talk.text = talk.text[:known]
        registers = [row.live + k for k in range(1 + self.settings.lanes)]
        real = [r for r in registers if 1 <= self.known.get(r, 0) <= known and self._whole(row, self.known[r])]
        longest = sorted(real, key=lambda r: -self.known[r])
        for register in [] if talk.closing else longest[: self.settings.per_session]:
            if not self.free_holders and talk.kept:
                self.evict_states(1)
            elif not self.free_holders:
                self.free_some_holders(1)
            self.refused += not self.free_holders
            if self.free_holders:
                length = self.known[register]
                one = self.hold(self.next_holder(length), length, (), row.truth[length], row.text[:length], "session")
                talk.kept.append(one)
                self.record_moves([(one.register, register)])
        if self.settings.prefix:
            self.supersede(talk.own, talk.kept[0].length if talk.kept else 0)
        talk.row = row.talk = None
        self.turns += 1
        talk.since, talk.turn = self.seconds, self.turns
        if talk.closing:
            self.talks.remove(talk)
        if talk.kept:
            assert talk.kept[0].text == talk.text[: talk.kept[0].length]
            talk.pages = row.pages[: self.pages_for(talk.kept[0].length)]
            self.page_users.update(talk.pages)
            talk.lease, row.lease = row.lease, None
            if talk.lease:
                self.shorten(talk.lease, talk.kept[0].length)
        self._hold_to_limit()

    def _whole(self, row: Row, length: int) -> bool:
        """Whether nobody else has the page that the next tokens would be written to."""
        page, filled = divmod(length, self.settings.page_size)
        return not filled or not self.settings.pages or self.page_users[row.pages[page]] == 1

    def _empty(self, talk: Talk) -> None:
        for one in talk.kept:
            del self.kept[one.register]
            self.free_holders.append({one.register})
        self._release_pages(talk, 0)
        talk.kept, talk.lease = [], None

    def close_talk(self, talk: Talk) -> None:
        if talk.row:
            talk.closing = True
            return
        self.talks.remove(talk)
        self.record_releases([one.register for one in talk.kept])
        lease = talk.lease
        self._empty(talk)
        if lease:
            self.end_lease(lease)
