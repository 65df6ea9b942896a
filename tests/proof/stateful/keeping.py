"""What comes into the prefix cache and what goes: insertions, uses, evictions, on a list of entries."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from tests.proof.stateful.cache import Cached, Entry, Found, Lease, Text
from tests.proof.stateful.history import EMPTY, fold
from tests.proof.stateful.rows import Kept, Row


class Keeping(Cached):
    """The rules of the least recently used: times of uses are all that it remembers."""

    def clear(self) -> None:
        super().clear()
        self.time = 0
        self._attached: list[tuple[int, int]] = []  # (holder, register): recorded together

    def use(self, found: Found, lease: Lease) -> None:
        """A request starts from what was found."""
        self.figures["lookups"] += 1
        self.figures["prompt_tokens"] += found.tokens
        self.figures["hit_tokens"] += found.length
        for name, lost in zip(("no_sharing", "evicted", "no_snapshot"), found.lost(), strict=True):
            self.figures[f"lost_{name}"] += lost
        if found.reached in self.entries:
            self._touch(found.reached)
        if found.stated:
            found.stated.uses += 1
            if found.stated in lease.own:
                lease.own[found.stated] += 1
            self._rank(found.stated)
            if self.below:
                self.below.used(found.stated)

    def _rank(self, entry: Entry, superseded: bool = False) -> None:
        self.time += 1
        entry.last = 0 if superseded else self.time, self.time

    def supersede(self, own: dict[Entry, int], length: int) -> None:
        """A session has a newer state than those that it left here: they go first, unless others have used them. Where
        it has none, that is the longest of them.
        """
        for entry in [entry for entry in own if not entry.state]:
            del own[entry]
        newest = length or max((len(entry.tokens) for entry in own), default=0) - 1
        for entry, uses in own.items():
            if len(entry.tokens) <= newest and entry.uses == uses:
                self._rank(entry, superseded=True)

    def _touch(self, entry: Entry | None) -> None:
        assert entry
        self.time += 1
        entry.used = self.time

    @contextmanager
    def leasing(self, entry: Entry | None) -> Iterator[None]:
        self.leases.append(lease := Lease(entry, None))
        yield
        self.leases.remove(lease)

    def end_lease(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.prune(lease.entry)

    def up(self, entry: Entry | None, length: int) -> Entry | None:
        """What an entry begins with, no further than whole pages of the first so many tokens need."""
        end = self.floor(length)
        if not entry or not end:
            return None
        holding = [one for one in self.entries if entry.begins_with(one) and len(one.tokens) >= end]
        return min(holding, key=lambda one: len(one.tokens), default=entry)

    def shorten(self, lease: Lease, length: int) -> None:
        """What is beyond the first so many tokens is not kept any longer."""
        entry, end = self.up(lease.entry, length), self.floor(length)
        longer = entry is not None and len(entry.tokens) > end
        self._move_lease(lease, self._cut(entry.tokens[:end], entry.salt) if entry and longer else entry)

    def _move_lease(self, lease: Lease, entry: Entry | None) -> None:
        before, lease.entry = lease.entry, entry
        self.prune(before)

    def insert(
        self, row: Row, key: Text, pages: Sequence[int], register: int, mark: Kept | None, decoded: bool
    ) -> Kept | None:
        """KV for a key of whole pages, and the state in a register of the row, 0 for none; mark: it is in a holder;
        decoded: it lies beyond the prompt.
        """
        if not key:
            return None
        if row.lease is None:
            row.lease = Lease(None, None)
            self.leases.append(row.lease)
        kept, salt = None, row.lease.salt
        if register:
            head = key[: self.known[register]]
            there = self.ending_at(head, salt)
            if there and there.state:
                kept = there.state
                self.figures["duplicates"] += 1
                if not mark:
                    self.record_releases([register])
            else:
                kept = self._attach(self._grow(head, pages, salt), row, register, mark)
            if kept and decoded:
                self._outlive(row.lease, kept)
            if mark and kept is not mark:
                self.drop([mark])
        if not mark:  # the last state of the row, or none: its lease moves once
            self._move_lease(row.lease, self._shared(self._grow(key, pages, salt), pages))
        return kept

    def _outlive(self, lease: Lease, newer: Kept) -> None:
        """What a row left before, while it decoded, goes first, unless others have used it."""
        older, lease.decoded = lease.decoded, newer
        for entry in self.stated if older and older is not newer else ():
            if entry.state is older and lease.own.get(entry) == entry.uses:
                self._rank(entry, superseded=True)

    def _shared(self, entry: Entry, pages: Sequence[int]) -> Entry | None:
        """The longest entry there whose last page is the row's too; else another brought it first."""
        if not self.settings.pages:
            return entry
        ends = [one for one in self.entries if entry.begins_with(one) and one.pages[-1] == pages[len(one.pages) - 1]]
        return max(ends, key=lambda one: len(one.tokens), default=None)

    def _grow(self, key: Text, pages: Sequence[int], salt: Hashable) -> Entry:
        had = self.reach(key, salt)
        end = self._cut(key[:had], salt) if had else None
        if end and had == len(key):
            return end
        at = had // self.settings.page_size
        fresh = list(pages[at : len(key) // self.settings.page_size])
        self.page_users.update(fresh)
        if end and not (end.state or end.evicted or self.beyond(end)):  # nothing happens there: it becomes longer
            end.tokens, end.pages = key, end.pages + fresh
            return end
        self.entries.append(new := Entry(salt, key, (end.pages if end else []) + fresh))
        self._touch(new)
        return new

    def _cut(self, tokens: Text, salt: Hashable) -> Entry:
        """An entry that ends here, where there is KV."""
        if there := self.ending_at(tokens, salt):
            return there
        longer = next(one for one in self.entries if one.salt == salt and one.tokens[: len(tokens)] == tokens)
        self.entries.append(new := Entry(salt, tokens, longer.pages[: len(tokens) // self.settings.page_size]))
        return new

    def _attach(self, entry: Entry, row: Row, register: int, mark: Kept | None) -> Kept | None:
        length = self.known[register]
        if not mark and not self.free_holders:
            with self.leasing(entry):
                self.evict_states(1)
        if not mark and not self.free_holders:
            self.figures["refused"] += 1
            return None
        assert row.truth[length] == fold(EMPTY, entry.tokens), f"{entry} gets another state"
        if mark:
            mark.owner, entry.state = "cached", mark
        else:
            entry.state = self.hold(
                self.next_holder(length), length, (), row.truth[length], row.text[:length], "cached"
            )
            self._attached.append((entry.state.register, register))
            self.published += 1
        entry.evicted = False
        self.stated.append(entry)
        self._rank(entry)
        if self.below:
            self.below.added(entry)
        assert row.lease
        row.lease.own[entry] = entry.uses
        self.figures["inserted"] += 1
        return entry.state

    def trim(self) -> None:
        """As many states as there may be at most."""
        self.record_attached()
        if self.settings.most_states is not None:
            self.evict_states(len(self.stated) - self.settings.most_states)

    def record_attached(self) -> None:
        pairs, self._attached = self._attached, []
        self.record_moves(pairs)

    def evict_states(self, n: int) -> int:
        """The states least recently used, but for those that a first step is about to read."""
        order = sorted(self.stated, key=lambda one: one.last)
        chosen = [one for one in order if one.state and not self.pins[one.state.register]][: max(0, n)]
        self.record_attached()
        if self.below:
            self.below.given_up(chosen)
        self.drop([self.give_up(one) for one in chosen])
        for one in chosen:
            self.prune(one)
        return len(chosen)

    def evict_pages(self, n: int) -> int:
        """The entries least recently used that nothing goes on from and nobody leases, until n pages are free; of one
        without a state, no more than are needed, from its end on.
        """
        self.record_attached()
        before = self.free_pages
        while n > self.free_pages - before:
            ends = [one for one in self.entries if not self.beyond(one) and not self.leased(one)]
            if not ends:
                break
            entry, need = min(ends, key=lambda one: one.used), n - (self.free_pages - before)
            if entry.state or need >= len(self.own_pages(entry)):
                self._remove(entry)
            else:
                self._shorten(entry, need)
        return self.free_pages - before

    def plant(self, tokens: Text, salt: Hashable) -> tuple[Kept, int, list[int]]:
        """A state from host memory: with how many pages are here already, and pages for the rest."""
        had, fresh = self.reach(tokens, salt) // self.settings.page_size, []
        if self.settings.pages:
            free = [page for page in range(1, self.settings.pages + 1) if not self.page_users[page]]
            fresh = free[: len(tokens) // self.settings.page_size - had]
        entry, length = self._grow(tokens, [0] * had + fresh, salt), len(tokens)
        truth = fold(EMPTY, tokens)
        entry.state = self.hold(self.next_holder(length), length, (), truth, tokens, "cached")
        entry.evicted = False
        self.stated.append(entry)
        self._rank(entry)
        self.record_claims([entry.state.register])
        self.record_labels([(entry.state.register, length)])
        self.figures["loaded"] += 1
        return entry.state, had, fresh

    def clear_cache(self) -> None:
        """For good: nothing below keeps it."""
        if self.below:
            self.below.off = True
        self.evict_states(len(self.stated))
        while ends := [one for one in self.entries if not self.beyond(one) and not self.leased(one)]:
            self._remove(ends[0])
        if self.below:
            self.below.off = False

    def give_up(self, entry: Entry) -> Kept:
        state, entry.state, entry.evicted = entry.state, None, True
        assert state
        self.stated.remove(entry)
        self.figures["evicted_states"] += 1
        return state

    def prune(self, entry: Entry | None) -> None:
        """Ends that can serve no hit go, where they are to."""
        while entry and entry in self.entries and not (entry.state or self.beyond(entry) or self.leased(entry)):
            if self.settings.pages and (self.settings.tombstones or not entry.evicted):
                return
            entry = self._remove(entry)

    def _remove(self, entry: Entry) -> Entry | None:
        before, pages = self.before(entry), self.own_pages(entry)
        if entry.state:
            if self.below:
                self.below.given_up([entry])
            self.drop([self.give_up(entry)])
        self.entries.remove(entry)
        self.page_users -= Counter(pages)
        self.figures["evicted_pages"] += len(pages)
        if before:
            before.used = max(before.used, entry.used)
        return before

    def _shorten(self, entry: Entry, n: int) -> None:
        """What is left is another entry, of which nothing is known but when it was used."""
        gone = entry.pages[-n:]
        left = Entry(entry.salt, entry.tokens[: -n * self.settings.page_size], entry.pages[:-n], entry.used)
        self.entries[self.entries.index(entry)] = left
        self.page_users -= Counter(gone)
        self.figures["evicted_pages"] += n
