"""Requests, snapshots, pages: who has what, and what a row is known to be. Knows no plan and no settle."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.proof.stateful.history import EMPTY, History
from tests.proof.stateful.ledger import Ledger
from tests.proof.stateful.settings import Settings

if TYPE_CHECKING:
    from tests.proof.stateful.cache import Lease
    from tests.proof.stateful.talking import Talk

INT32_MAX = 2**31 - 1


@dataclass(eq=False)
class Row:
    """One tenancy of a row; a later tenant is another object. truth: what a state of so many tokens has to hold.

    text: the tokens folded in so far. prompt: tokens to begin with; taste: says which tokens come after it. coming:
    lengths where states are to be kept, and why; floor: the last one that was; end: the live state is for one;
    marks: those that the row has, ascending.
    """

    number: int
    generation: int
    name: object
    coming: list[tuple[int, str]] = field(default_factory=list)
    floor: int = 0
    end: tuple[int, str, int] | None = None
    marks: "list[tuple[Kept, str]]" = field(default_factory=list)
    tracked: int = 0
    source: int = 0  # register that the next step reads instead of live
    confirmed: int = 0
    unsettled: int = 0
    finished: bool = False
    pages: list[int] = field(default_factory=list)
    pin: int = 0  # register that waits for this row's first step
    truth: dict[int, History] = field(default_factory=lambda: {0: EMPTY})
    text: tuple[int, ...] = ()
    prompt: tuple[int, ...] | None = None
    taste: int = 0
    lease: "Lease | None" = None
    talk: "Talk | None" = None

    @property
    def live(self) -> int:
        return 3 * self.number


@dataclass(eq=False)
class Kept:
    """A snapshot in a holder. owner: as `owners` names its kind."""

    register: int
    length: int
    pages: tuple[int, ...]
    truth: History
    text: tuple[int, ...] = ()
    owner: str = "snapshot"
    dropped: bool = False


class Tenants(Ledger):
    """Rows, holders and pages on a ledger."""

    def __init__(self, settings: Settings, generations: Sequence[int]) -> None:
        self.published = self.dropped = self.refused = self.missed = 0
        self.choose: Callable[[set[int], int], int] = lambda free, length: min(free)  # one of those that came at once
        super().__init__(settings, generations)

    def clear(self) -> None:
        super().clear()
        self.rows: dict[int, Row] = {}
        self.kept: dict[int, Kept] = {}
        holders = range(self.first_holder, self.register_count)
        self.free_holders = [{register} for register in holders]  # oldest first; those of one set came at once
        self.pins: Counter[int] = Counter()
        self.page_users: Counter[int] = Counter()

    # Pages: lowest first, free with their last user.

    @property
    def free_pages(self) -> int:
        return self.settings.pages - sum(users > 0 for users in self.page_users.values())

    def pages_for(self, length: int) -> int:
        return -(-length // self.settings.page_size) if self.settings.pages else 0

    def too_wide(self, length: int) -> bool:
        return self.pages_for(length) > self.settings.pages_per_row

    def room(self, row: Row) -> int:
        """Tokens that the row has pages for."""
        return len(row.pages) * self.settings.page_size if self.settings.pages else INT32_MAX

    def add_pages(self, row: Row, n: int) -> None:
        fresh = [page for page in range(1, self.settings.pages + 1) if not self.page_users[page]][:n]
        assert len(fresh) == n
        self.append_pages(row, fresh)

    def append_pages(self, row: Row, pages: Sequence[int]) -> None:
        self.page_users.update(pages)
        for page in pages:
            self.record_write("page", row.number, page, len(row.pages))
            row.pages.append(page)

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.add_pages(row, max(0, self.pages_for(length) - len(row.pages)))

    # Rows

    @property
    def free_rows(self) -> list[int]:
        return [number for number in range(1, self.row_count + 1) if number not in self.rows]

    def lanes(self, row: Row) -> list[int]:
        return [row.live + 1 + lane for lane in range(self.settings.lanes)]

    def length(self, row: Row) -> int:
        return self.known[row.source or row.live]

    def arrive(self, rows: Sequence[Row], states: Sequence[History], texts: Sequence[tuple[int, ...]]) -> None:
        """States of so many tokens are in the live slots."""
        for row, state, text in zip(rows, states, texts, strict=True):
            row.confirmed = state[0]
            row.truth, row.text = {state[0]: state}, text
        self.record_labels([(row.live, state[0]) for row, state in zip(rows, states, strict=True)])

    # Snapshots

    def floor(self, length: int) -> int:
        return length - length % self.settings.page_size

    def answer(self, row: Row, bound: int, ended: bool) -> int:
        """The register with the largest label in 1..bound, live before a lane of the same label; 0 for none."""
        bound = self.floor(bound)
        best = 0
        for register in [*([row.live] if ended else []), *self.lanes(row)]:
            if 1 <= self.known.get(register, 0) <= bound and (not best or self.known[register] > self.known[best]):
                best = register
        return best

    def marked(self, row: Row, bound: int, ended: bool) -> Kept | None:
        """The row's newest state at a mark, where no lane has a newer one."""
        there = max((kept for kept, _ in row.marks if kept.length <= bound), key=lambda kept: kept.length, default=None)
        answer = self.answer(row, bound, ended)
        return there if there and not (answer and self.known[answer] > there.length) else None

    def publishable(self, rows: Sequence[Row], bounds: Sequence[int], ended: bool) -> list[bool]:
        """Which of the rows get a snapshot from their own registers."""
        left, found = sum(map(len, self.free_holders)), []
        for row, bound in zip(rows, bounds, strict=True):
            mine = bool(self.answer(row, bound, ended)) and not self.marked(row, bound, ended)
            found.append(mine and left > 0)
            left -= found[-1]
        return found

    def publish(
        self, rows: Sequence[Row], bounds: Sequence[int], registers: Sequence[int], ended: bool
    ) -> list[Kept | None]:
        """registers: the holders that were used, in order."""
        marks = [self.marked(row, bound, ended) for row, bound in zip(rows, bounds, strict=True)]
        unused, kept, pairs = list(registers), [], []
        for row, bound, gets, mark in zip(rows, bounds, self.publishable(rows, bounds, ended), marks, strict=True):
            if mark:
                unused.remove(mark.register)
                row.marks = [one for one in row.marks if one[0] is not mark]
                mark.owner, mark.pages = "snapshot", tuple(row.pages[: mark.length // self.settings.page_size])
                self.page_users.update(mark.pages)
                kept.append(mark)
                continue
            answer = self.answer(row, bound, ended)
            self.refused += bool(answer) and not gets
            if not gets:
                kept.append(None)
                continue
            length = self.known[answer]
            assert length <= row.confirmed and self.floor(length) == length
            pages = tuple(row.pages[: length // self.settings.page_size])
            self.page_users.update(pages)
            snapshot = self.hold(unused.pop(0), length, pages, row.truth[length], row.text[:length])
            pairs.append((snapshot.register, answer))
            kept.append(snapshot)
        assert not unused
        self.record_moves(pairs)
        self.published += len(pairs)
        return kept

    def next_holder(self, length: int) -> int:
        """The holder that a snapshot of so many tokens gets where no answer says which."""
        return self.choose(self.free_holders[0], length)

    def hold(
        self, register: int, length: int, pages: tuple[int, ...], truth: History, text: tuple[int, ...],
        owner: str = "snapshot",
    ) -> Kept:  # fmt: skip
        """Uses a holder: the one that is free for longest."""
        assert register in self.free_holders[0], f"holder {register}, but {self.free_holders} are free, oldest first"
        self.free_holders[0].remove(register)
        self.free_holders = [group for group in self.free_holders if group]
        self.kept[register] = Kept(register, length, pages, truth, text, owner)
        return self.kept[register]

    def drop(self, kept: Sequence[Kept]) -> None:
        gone = []
        for one in kept:
            one.dropped = True
            if not self.pins[one.register]:
                self.free_holders.append({one.register})
                gone.append(one)
        self._forget(gone)
        self.dropped += len(kept)

    def _forget(self, gone: Sequence[Kept]) -> None:
        self.record_releases([one.register for one in gone])
        for one in gone:
            del self.kept[one.register]
            self.page_users -= Counter(one.pages)

    @property
    def evictable(self) -> int:
        """Snapshots that a caller can drop, or the cache."""
        idle = [one for one in self.kept.values() if not one.dropped and not self.pins[one.register]]
        return sum(one.owner not in ("session", "mark") for one in idle)

    def pin(self, row: Row, register: int) -> None:
        self.pins[register] += 1
        row.pin = register

    def unpin(self, rows: Sequence[Row]) -> None:
        """Their first step has read what they waited for, or never will."""
        together: set[int] = set()
        for row in rows:
            register, row.pin = row.pin, 0
            if register:
                self.pins[register] -= 1
                one = self.kept[register]
                if not self.pins[register] and one.dropped:
                    self._forget([one])
                    together.add(register)
        if together:
            self.free_holders.append(together)
