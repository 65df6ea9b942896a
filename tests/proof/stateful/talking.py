"""Sessions: what a conversation keeps between its turns. Knows no admission."""

from collections import Counter
from collections.abc import Hashable, Sequence
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
    of it. kept: longest first. start: tokens that the turn began with.
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


@dataclass(eq=False)
class Start:
    """What a new row begins with. size: tokens that pages are taken for. origin: whose state is read or copied; moved:
    states of a session that become the row's; taken: the origin itself does. asked: wants of the request alone. hit: a
    longer state in host memory, which is brought up first.
    """

    name: object
    size: int = 0
    wants: Sequence[int] = ()
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
    asked: Sequence[int] = ()
    hit: "Hit | None" = None


class Talking(Keeping):
    """Turns that begin and end."""

    def clear(self) -> None:
        super().clear()
        self.talks: list[Talk] = []

    def open_talk(self, name: Hashable) -> Talk:
        self.talks.append(talk := Talk(name))
        return talk

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
        self.record_releases([one.register for one in talk.kept if one not in start.moved])
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

    def end_turn(self, row: Row, talk: Talk, known: int, key: Text | None) -> None:
        talk.row = row.talk = None
        known = min(known, talk.start if key is None else len(key))
        if key is not None:
            talk.text = talk.told = key
        talk.text = talk.text[:known]
        registers = [row.live + k for k in range(1 + self.settings.lanes)]
        real = [r for r in registers if 1 <= self.known.get(r, 0) <= known and self._whole(row, self.known[r])]
        for register in sorted(real, key=lambda r: -self.known[r]):
            if not self.free_holders and self.settings.prefix:
                self.evict_states(1)
            self.refused += not self.free_holders
            if self.free_holders:
                length = self.known[register]
                one = self.hold(self.next_holder(length), length, (), row.truth[length], row.text[:length], "session")
                talk.kept.append(one)
                self.record_moves([(one.register, register)])
        if self.settings.prefix:
            self.supersede(talk.own, talk.kept[0].length if talk.kept else 0)
        if talk.kept:
            assert talk.kept[0].text == talk.text[: talk.kept[0].length]
            talk.pages = row.pages[: self.pages_for(talk.kept[0].length)]
            self.page_users.update(talk.pages)
            talk.lease, row.lease = row.lease, None
            if talk.lease:
                self.shorten(talk.lease, talk.kept[0].length)

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
        self.talks.remove(talk)
        self.record_releases([one.register for one in talk.kept])
        lease = talk.lease
        self._empty(talk)
        if lease:
            self.end_lease(lease)
