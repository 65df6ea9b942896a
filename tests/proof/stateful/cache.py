"""Models the prefix cache as one list of entries, and the sessions: what they keep between requests, and evict.

There is no tree: each look-up searches the list. An entry has the KV of a text, from the first token on, and perhaps
the state at its end. If its text begins with the text of another entry, the two share pages. The order of eviction
follows from the times of uses alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from tests.proof.stateful.ledger import Kept, Ledger, Row, Text

if TYPE_CHECKING:
    from tests.proof.stateful.below import Below, Hit
    from tests.proof.stateful.parked import Away


@dataclass(eq=False)
class Entry:
    """KV of a text, with or without the state at its end.

    pages: ids of all pages from the first token on. used: time of the last prompt that matched its KV. uses: number of
    requests that started from its state. last: time at which its state was stored or last used. newer: time at which a
    newer state superseded its state, 0 for none.
    """

    salt: Hashable
    tokens: Text
    pages: list[int]
    used: int = 0
    state: Kept | None = None
    evicted: bool = False
    uses: int = 0
    last: int = 0
    newer: int = 0

    def begins_with(self, other: "Entry") -> bool:
        return self.salt == other.salt and self.tokens[: len(other.tokens)] == other.tokens


@dataclass(eq=False)
class Lease:
    """Keeps an entry, and all entries that its text begins with, for an owner: a row or a session.

    own: for each entry whose state comes from this owner, how often the owner used the state. decoded: the last cached
    state that the row computed beyond its prompt.
    """

    entry: Entry | None
    salt: Hashable
    own: dict[Entry, int] = field(default_factory=dict)
    decoded: Kept | None = None


@dataclass
class Found:
    """What the cache has for a prompt.

    tokens: length of the prompt. length: length of its longest cached state. kv: length of its cached KV. gone: length
    of its longest evicted state, at least `length`. stated: entry of the state. reached: entry where the KV ends.
    """

    tokens: int
    length: int = 0
    kv: int = 0
    gone: int = 0
    stated: Entry | None = None
    reached: Entry | None = None

    def lost(self) -> tuple[int, int, int]:
        """Returns the numbers of tokens to compute, by reason: never cached, state evicted, no state kept."""
        return self.tokens - self.kv, self.gone - self.length, self.kv - self.gone


@dataclass(eq=False)
class Talk:
    """A session.

    text: tokens that the states and pages of the session stand for; while a turn runs, the tokens from which the turn
    started. told: all tokens that the caller gave. kept: states of the session, longest first. own: as in `Lease`.
    start: length from which the turn started. asked: length of the turn's prompt. parted: number of turns in a row,
    up to the newest, whose prompts did not repeat the answer before. since: time when the last turn ended. turn: the
    count `Cache.turns` at that time. closing: whether the session closes when its turn ends.
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
    asked: int = 0
    parted: int = 0
    priority: int = 0
    ttl: float | None = None
    opened: float = 0
    since: float = 0
    turn: int = 0
    closing: bool = False


@dataclass(eq=False)
class Start:
    """What a new row begins with.

    size: tokens that the row has pages for. wants: (length, kind) of all marks. asked: (length, kind) of the marks that
    the request names. origin: the snapshot or row whose state the new row reads or copies. taken: whether the new row
    takes over the slot of the origin. moved: states that a session hands over to the row. reads: a state of the session
    that a fork of it has, too, so that the row reads it and does not take it. shared: pages of the prefix.
    hit: a longer state in host memory, which is loaded first. away: the session of the request, if the session makes
    way for its own turn. given: the part of the prompt that the request names. reach: tokens whose KV the caller has;
    None if the caller does not say. parked: the parked request that goes on; 0 in `shared` is a page that it loads.
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
    reads: Kept | None = None
    shared: Sequence[int] = ()
    match: Found | None = None
    lease: Lease | None = None
    taken: bool = False
    asked: Sequence[tuple[int, str]] = ()
    hit: "Hit | None" = None
    away: Talk | None = None
    given: Text = ()
    reach: int | None = None
    parked: "Away | None" = None


class Cache(Ledger):
    """Entries, leases and sessions.

    below: host memory and storage. seconds: the clock of sessions. turns: number of openings and ends of turns so far.
    starting: sessions whose turn is about to begin.
    """

    below: "Below | None" = None
    seconds = 0.0
    turns = 0

    def clear(self) -> None:
        super().clear()
        before = vars(self)  # the figures stay, and all cached states count as evicted
        self.figures: Counter[str] = before.get("figures", Counter())
        self.figures["evicted_states"] += len(before.get("stated", ()))
        self.entries: list[Entry] = []
        self.stated: list[Entry] = []  # entries with a state, in the order in which they got it
        self.leases: list[Lease] = []
        self.time = 0
        self._attached: list[tuple[int, int]] = []  # (holder, register) of moves that are recorded together
        self.talks: list[Talk] = []
        self.starting: list[Talk] = []

    def nameable(self, n: int) -> int:
        """Returns how many of n tokens can be named: with keys, those of whole pages."""
        return self.floor(n) if self.settings.keyed else n

    def beyond(self, entry: Entry) -> list[Entry]:
        return [one for one in self.entries if one is not entry and one.begins_with(entry)]

    def before(self, entry: Entry) -> Entry | None:
        """Returns the longest other entry whose text is the beginning of the text of this entry."""
        shorter = [one for one in self.entries if one is not entry and entry.begins_with(one)]
        return max(shorter, key=lambda one: len(one.tokens), default=None)

    def own_pages(self, entry: Entry) -> list[int]:
        before = self.before(entry)
        return entry.pages[len(before.pages) :] if before else entry.pages

    def own_size(self, entry: Entry) -> int:
        """Returns the number of pages of an entry beyond `before`, from its tokens: memstate may have no pages."""
        before = self.before(entry)
        return (len(entry.tokens) - (len(before.tokens) if before else 0)) // self.settings.page_size

    def leased(self, entry: Entry) -> int:
        return sum(lease.entry is not None and lease.entry.begins_with(entry) for lease in self.leases)

    def ending_at(self, tokens: Text, salt: Hashable) -> Entry | None:
        return next((one for one in self.entries if one.salt == salt and one.tokens == tokens), None)

    def reach(self, tokens: Text, salt: Hashable) -> int:
        """Returns the length up to which the KV of these tokens is cached, in whole pages."""
        most = 0
        for entry in self.entries:
            if entry.salt == salt:
                same = 0
                while same < min(len(tokens), len(entry.tokens)) and tokens[same] == entry.tokens[same]:
                    same += 1
                most = max(most, self.floor(same))
        return most

    def within(self, tokens: Text, salt: Hashable) -> list[Entry]:
        """Returns the entries whose texts begin with these tokens."""
        return [one for one in self.entries if one.salt == salt and one.tokens[: len(tokens)] == tokens]

    def find(self, tokens: Text, salt: Hashable, most: int | None = None) -> Found:
        """Returns what the cache has for a prompt; the last token of the prompt is always computed.

        most: tokens whose KV the caller has; None: the cache has the KV.
        """
        end = max(0, len(tokens) - 1)
        head = tokens[: self.floor(end if most is None else min(end, most))]
        kv = self.reach(head, salt)
        inside = [one for one in self.entries if one.salt == salt and head[: len(one.tokens)] == one.tokens]
        stated = max((one for one in inside if one.state), key=lambda one: len(one.tokens), default=None)
        length = len(stated.tokens) if stated else 0
        gone = max((len(one.tokens) for one in inside if one.evicted and not one.state), default=0)
        reached = min(self.within(head[:kv], salt) if kv else [], key=lambda one: len(one.tokens), default=None)
        return Found(len(tokens), length, kv if most is None else len(head), max(length, gone), stated, reached)

    @property
    def evictable_states(self) -> int:
        return sum(not self.pins[one.state.register] for one in self.stated if one.state)

    @property
    def superseded_states(self) -> int:
        return sum(one.newer > 0 and not self.pins[one.state.register] for one in self.stated if one.state)

    def prefix_stats(self) -> dict[str, int]:
        """Returns the statistics of the cache, named as in `mem.stats()`."""
        ours = self.entries if self.settings.pages else []  # without pages, the caller has the KV
        leased, sizes = sum(self.own_size(one) for one in ours if self.leased(one)), sum(map(self.own_size, ours))
        return {"states": len(self.stated), "nodes": len(self.entries), "pages": sizes, "leased_pages": leased,
                **self.figures}  # fmt: skip

    # Insertions, uses, evictions

    def use(self, match: Found, lease: Lease) -> None:
        """Notes that a request starts from a match: changes the figures and the order of eviction."""
        self.figures["lookups"] += 1
        self.figures["prompt_tokens"] += match.tokens
        self.figures["hit_tokens"] += match.length
        for name, lost in zip(("no_sharing", "evicted", "no_snapshot"), match.lost(), strict=True):
            self.figures[f"lost_{name}"] += lost
        if match.reached in self.entries:
            self._touch(match.reached)
        if match.stated:
            match.stated.uses += 1
            if match.stated in lease.own:
                lease.own[match.stated] += 1
            self._rank(match.stated)
            if self.below:
                self.below.used(match.stated)

    def _rank(self, entry: Entry, superseded: bool = False) -> None:
        self.time += 1
        entry.last, entry.newer = (entry.last, self.time) if superseded else (self.time, 0)

    def leaves(self, talk: Talk, length: int) -> None:
        """Supersedes the cached states of a session up to `length`, because the session has a state of this length.

        There are two other cases. If `length` is 0, the newest state is the longest cached one: it stays, and all
        shorter ones are superseded. If the last two turns did not repeat the answers before them, supersedes the states
        beyond the prompt, because no turn will start from them.
        """
        if talk.parted > 1:
            self.supersede(talk.own, lambda one: one > talk.asked)
        elif talk.parted == 0:
            stated = [entry for entry in talk.own if entry.state]
            longest = max((len(entry.tokens) for entry in stated), default=0)
            self.supersede(talk.own, lambda one: one <= length if length else one < longest)
            for entry in stated if not length else ():
                if len(entry.tokens) == longest:
                    entry.newer = 0

    def supersede(self, own: dict[Entry, int], gone: Callable[[int], bool]) -> None:
        """Lets states be evicted first: those that only their session has used, if `gone(length)` is true."""
        for entry in [entry for entry in own if not entry.state]:
            del own[entry]
        for entry, uses in own.items():
            if gone(len(entry.tokens)) and entry.uses == uses:
                self._rank(entry, superseded=True)

    def forget(self, texts: Sequence[Text]) -> None:
        """Puts the states of these texts first in the order of eviction, under every salt."""
        for text in texts:
            for entry in [entry for entry in self.stated if entry.tokens == text]:
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
        """Returns the shortest entry with the first `length` tokens of an entry, rounded down to whole pages."""
        end = self.floor(length)
        if not entry or not end:
            return None
        holding = [one for one in self.entries if entry.begins_with(one) and len(one.tokens) >= end]
        return min(holding, key=lambda one: len(one.tokens), default=entry)

    def shorten(self, lease: Lease, length: int) -> None:
        """Reduces a lease to the first `length` tokens, rounded down to whole pages."""
        entry, end = self.up(lease.entry, length), self.floor(length)
        longer = entry is not None and len(entry.tokens) > end
        self._move_lease(lease, self._cut(entry.tokens[:end], entry.salt) if entry and longer else entry)

    def _move_lease(self, lease: Lease, entry: Entry | None) -> None:
        before, lease.entry = lease.entry, entry
        self.prune(before)

    def insert(
        self, row: Row, key: Text, pages: Sequence[int], register: int, mark: Kept | None, decoded: bool
    ) -> Kept | None:
        """Adds the KV of whole pages to the cache, with a state of the row. Returns the cached state.

        register: register of the state, 0 for none. mark: the state, if it is a kept mark. decoded: whether the
        state lies beyond the prompt.
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
                if self.settings.keyed:
                    there.newer = 0
                if not mark:
                    self.record_releases([register])
            else:
                kept = self._attach(self._grow(head, pages, salt), row, register, mark)
            if kept and decoded:
                self._outlive(row.lease, kept)
            if mark and kept is not mark:
                self.drop([mark])
        if not mark:  # only the last call for a row moves its lease
            self._move_lease(row.lease, self._shared(self._grow(key, pages, salt), pages))
        return kept

    def _outlive(self, lease: Lease, newer: Kept) -> None:
        """Lets the previous decoded state of a row be evicted first, unless another owner has used it."""
        older, lease.decoded = lease.decoded, newer
        for entry in self.stated if older and older is not newer else ():
            if entry.state is older and lease.own.get(entry) == entry.uses:
                self._rank(entry, superseded=True)

    def _shared(self, entry: Entry, pages: Sequence[int]) -> Entry | None:
        """Returns the longest entry, at most `entry`, whose last page is one of `pages`, which are those of a row.

        Other rows may have cached the remaining pages of `entry`.
        """
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
        if end and not (end.state or end.evicted or self.beyond(end)):  # no state, and no longer entry
            end.tokens, end.pages = key, end.pages + fresh
            return end
        self.entries.append(new := Entry(salt, key, (end.pages if end else []) + fresh))
        self._touch(new)
        return new

    def _cut(self, tokens: Text, salt: Hashable) -> Entry:
        """Returns the entry of exactly these tokens, whose KV is cached. Adds one if there is none."""
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
        assert row.text[:length] == entry.tokens, f"{entry} gets another state"
        if mark:
            mark.owner, entry.state = "cached", mark
        else:
            entry.state = self.hold(self.next_holder(length), length, entry.tokens, owner="cached")
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
        """Evicts states until there are at most `most_states`."""
        self.record_attached()
        if self.settings.most_states is not None:
            self.evict_states(len(self.stated) - self.settings.most_states)

    def record_attached(self) -> None:
        pairs, self._attached = self._attached, []
        self.record_moves(pairs)

    def evict_states(self, n: int) -> int:
        """Evicts the n least recently used states that are not pinned. Returns the number of evicted states."""
        order = sorted(self.stated, key=lambda one: (not one.newer, one.newer or one.last))
        chosen = [one for one in order if one.state and not self.pins[one.state.register]][: max(0, n)]
        self.record_attached()
        if self.below:
            self.below.given_up(chosen)
        self.drop([self.give_up(one) for one in chosen])
        for one in chosen:
            self.prune(one)
        return len(chosen)

    def evict_pages(self, n: int) -> int:
        """Evicts the least recently used entries until n more pages are free. Returns the number of freed pages.

        Evicts only entries that have no lease and are not the beginning of a longer entry. Of an entry without a state,
        evicts only as many pages as needed, from the end of the entry.
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
        """Adds a state from host memory. Returns the state, the number of its cached pages, and its new pages."""
        had, fresh = self.reach(tokens, salt) // self.settings.page_size, []
        if self.settings.pages:
            free = [page for page in range(1, self.settings.pages + 1) if not self.page_users[page]]
            fresh = free[: len(tokens) // self.settings.page_size - had]
        entry, length = self._grow(tokens, [0] * had + fresh, salt), len(tokens)
        entry.state = self.hold(self.next_holder(length), length, tokens, owner="cached")
        entry.evicted = False
        self.stated.append(entry)
        self._rank(entry)
        self.record_claims([entry.state.register])
        self.record_labels([(entry.state.register, length)])
        self.figures["loaded"] += 1
        return entry.state, had, fresh

    def clear_cache(self) -> None:
        """Evicts everything without a lease. Nothing of it is saved to host memory."""
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
        """Removes an entry if it can serve no hit. Then does so with the entry before it, and so on."""
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
        """Cuts the last n pages off an entry. The rest is a new entry that keeps only the time of use."""
        gone = entry.pages[-n:]
        left = Entry(entry.salt, entry.tokens[: -n * self.settings.page_size], entry.pages[:-n], entry.used)
        self.entries[self.entries.index(entry)] = left
        self.page_users -= Counter(gone)
        self.figures["evicted_pages"] += n

    # What stays after `recover`

    def survivor(self, talk: Talk, sure: Collection[Kept]) -> Talk:
        """Ends the turn of a session, and empties it as far as its states are not certain. Returns the session."""
        kept = [one for one in talk.kept if one in sure and not talk.row]
        if talk.row:
            talk.since = self.seconds
        talk.row, talk.lease, talk.start, talk.kept = None, None, 0, kept
        talk.pages = talk.pages[: self.pages_for(kept[0].length)] if kept else []
        talk.text = talk.text if kept else ()
        talk.own.clear()
        return talk

    def grow_again(self, entries: Sequence[Entry], sure: Collection[Kept]) -> None:
        """Fills the empty cache with these entries, shorter ones first. Their states stay if they are certain."""
        for old in entries:
            entry, state = self._grow(old.tokens, old.pages, old.salt), old.state
            entry.evicted, entry.uses = old.evicted or (state is not None and state not in sure), old.uses
            if state in sure:
                entry.state = state
                self.stated.append(entry)
        self.figures["evicted_states"] -= len(self.stated)
        for entry in [one for one in self.entries if not self.beyond(one)]:
            self.prune(entry)

    def rank_again(self, ranks: Callable[[Entry], tuple[int, int]]) -> None:
        """Sets when KV and state of each entry count as used. No rule says in which order they go after `recover`."""
        for entry in self.entries:
            entry.used, entry.last = ranks(entry)
            self.time = max(self.time, entry.used, entry.last)
        self.stated.sort(key=lambda entry: entry.last)

    # Turns of sessions

    def open_talk(self, name: Hashable, priority: int, ttl: float | None) -> Talk:
        self.turns += 1
        now = self.seconds
        talk = Talk(name, priority=priority, ttl=ttl, opened=now, since=now, turn=self.turns)
        self.talks.append(talk)
        return talk

    # Evictions, and sessions that make way

    def expired(self, talk: Talk) -> bool:
        return talk.ttl is not None and self.seconds - talk.since > talk.ttl

    def idle(self) -> list[Talk]:
        there = [talk for talk in self.talks if talk.kept and not talk.row and talk not in self.starting]
        return sorted(there, key=lambda talk: (not self.expired(talk), talk.priority, talk.turn))

    @property
    def in_talks(self) -> int:
        return len({one.register for talk in self.talks for one in talk.kept})

    def shared(self, talk: Talk, one: Kept) -> bool:
        """Says whether a fork of a session has this state, too."""
        return any(one in other.kept for other in self.talks if other is not talk)

    def stays(self, talk: Talk, one: Kept) -> bool:
        """Says whether a state stays when its session lets go of it: a fork has it, or a row will read it."""
        return self.pins[one.register] > 0 or self.shared(talk, one)

    def fork_pages(self, talk: Talk) -> int:
        """Returns the number of pages that a fork of a session copies."""
        return max(0, len(talk.pages) - (talk.kept[0].length // self.settings.page_size if talk.kept else 0))

    def fork_talk(self, talk: Talk, name: Hashable) -> tuple[Talk, list[tuple[int, int]]]:
        """Opens a session with the newest state of another. Returns it, and (to, of) of the page to copy."""
        whole = len(talk.pages) - self.fork_pages(talk)
        shared, partial = talk.pages[:whole], talk.pages[whole:]
        self.starting = [talk]
        self.free_some_pages(len(partial))
        self.starting = []
        fresh = [page for page in range(1, self.settings.pages + 1) if not self.page_users[page]][: len(partial)]
        twin = self.open_talk(name, talk.priority, talk.ttl)
        twin.text, twin.told, twin.salt, twin.kept = talk.text, talk.told, talk.salt, talk.kept[:1]
        twin.pages, twin.asked, twin.parted = shared + fresh, talk.asked, talk.parted
        self.page_users.update(twin.pages)
        if talk.lease:
            self.leases.append(lease := Lease(talk.lease.entry, talk.lease.salt))
            twin.lease = lease
        return twin, list(zip(fresh, partial, strict=True))

    def _let_go(self, talk: Talk, states: Sequence[Kept]) -> None:
        """Releases states of a session, except those of a fork. A state that a row will read goes after this."""
        alone = [one for one in states if not self.shared(talk, one)]
        gone = [one for one in alone if not self.pins[one.register]]
        self.record_releases([one.register for one in gone])  # those that a row has taken hold nothing
        for one in alone:
            one.dropped = one not in gone
        for one in gone:
            del self.kept[one.register]
            self.free_holders.append({one.register})

    @property
    def ready_to_go(self) -> int:
        """Number of states that can make way when slots are short."""
        given = {one.register for talk in self.idle() for one in talk.kept if not self.pins[one.register]}
        return self.evictable_states + len(given - {one.register for talk in self.starting for one in talk.kept})

    @property
    def pages_ready_to_go(self) -> int:
        """Number of pages that become free if all idle sessions make way and all unleased entries are evicted."""
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
        """Evicts up to n superseded states; they go before any session makes way."""
        self.evict_states(min(n, self.superseded_states))

    def free_some_holders(self, n: int) -> None:
        self._evict_superseded(n - sum(map(len, self.free_holders)))
        self._free(lambda: n - sum(map(len, self.free_holders)), self.evict_states)

    def free_some_pages(self, n: int) -> None:
        self._free(lambda: n - self.free_pages, self.evict_pages)

    def _free(self, lacking: Callable[[], int], evict: Callable[[int], object]) -> None:
        """Makes room until `lacking()` is 0.

        The order is: expired sessions and those beyond the share of sessions; cached states or pages; other sessions.
        """
        for everyone in (False, True):
            for talk in self.idle():
                beyond = self.in_talks > self.settings.share * self.settings.slots
                if lacking() > 0 and (everyone or self.expired(talk) or beyond):
                    self.give_way(talk)
                    evict(max(0, lacking()))
            evict(max(0, lacking()))

    def give_way(self, talk: Talk) -> None:
        """Empties a session. Its states of whole pages move to the cache; its other states are released."""
        handed = []
        if self.settings.prefix and not self.expired(talk):
            whole = [one for one in reversed(talk.kept) if self.floor(one.length) == one.length]
            for one in [one for one in whole if not self.stays(talk, one)]:
                if entry := self._adopt(one, talk):
                    handed.append(one)
                    talk.own[entry] = entry.uses
            self.leaves(talk, 0)
        talk.kept = [one for one in talk.kept if one not in handed]
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
        """Returns the numbers of slots and pages that a session gives back before its turn takes any."""
        if not start.talk:
            return 0, 0
        alone = sum(self.page_users[page] == 1 for page in start.talk.pages[self._resumed(start) :])
        given = [one for one in start.talk.kept if one not in start.moved and not self.stays(start.talk, one)]
        return len(given), alone

    def _resumed(self, start: Start) -> int:
        """Returns the number of pages that a turn keeps of its session."""
        return self.pages_for(start.length) if start.moved or start.reads else 0

    def give_back(self, start: Start) -> None:
        talk = start.talk
        assert talk
        used = [*start.moved, *([start.reads] if start.reads else [])]
        self._let_go(talk, [one for one in talk.kept if one not in used])
        talk.kept = used
        self._release_pages(talk, self._resumed(start))

    def _release_pages(self, talk: Talk, left: int) -> None:
        self.page_users -= Counter(talk.pages[left:])
        talk.pages = talk.pages[:left]

    def begin_turn(self, row: Row, talk: Talk, start: Start) -> None:
        """Moves the states of a session to the row of its turn. The row already has the lease."""
        assert start.prompt is not None
        if talk.lease:
            self.prune(talk.lease.entry)
        self.record_moves([(row.live + k, one.register) for k, one in enumerate(start.moved)])
        self._empty(talk)
        if start.salt != talk.salt:
            talk.own.clear()
        self._compare(talk, start, start.prompt)
        talk.row, row.talk = row, talk
        talk.start, talk.text, talk.salt = start.length, start.prompt[: start.length], start.salt
        self.starting = [other for other in self.starting if other is not talk]

    def _compare(self, talk: Talk, start: Start, prompt: Text) -> None:
        """Counts the turns that part from the last answer of the session. A turn that repeats it resets the count."""
        pairs = zip(talk.text, prompt, strict=False) if start.salt == talk.salt else ()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        whole = same == len(talk.text)
        answered = min(same, start.length) > talk.asked
        if answered or (whole and len(prompt) > talk.asked and same >= talk.asked):
            if talk.parted:
                talk.own.clear()
            talk.parted = 0
        elif not whole and same < len(prompt):
            talk.parted += 1
            self.supersede(talk.own, lambda one: one != start.length)
        talk.asked = len(prompt)

    def to_talk(self, row: Row) -> bool:
        """Says whether a session keeps the states of a row that ends."""
        talk = row.talk
        return bool(talk) and not (talk.closing or (talk.parted > 1 and self.settings.prefix))

    def end_turn(self, row: Row, talk: Talk, known: int, key: Text | None) -> None:
        known = min(known, talk.start if key is None else len(key))
        if key is not None:
            talk.text = talk.told = key
        talk.text = talk.text[:known]
        registers = [row.live + k for k in range(1 + self.settings.lanes)]
        real = [r for r in registers if 1 <= self.known.get(r, 0) <= known and self._whole(row, self.known[r])]
        real = [r for r in real if self.known[r] % self.settings.alone == 0]
        longest = sorted(real, key=lambda r: -self.known[r])
        kept = self.to_talk(row) or (key is None and not talk.closing)
        for register in longest[: self.settings.per_session] if kept else []:
            if not self.free_holders and talk.kept:
                self.evict_states(1)
            elif not self.free_holders:
                self.free_some_holders(1)
            self.refused += not self.free_holders
            if self.free_holders:
                length = self.known[register]
                one = self.hold(self.next_holder(length), length, row.text[:length], owner="session")
                talk.kept.append(one)
                self.record_moves([(one.register, register)])
        if self.settings.prefix:
            self.leaves(talk, talk.kept[0].length if talk.kept else 0)
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
        """Says whether no other owner has the page to which the row writes its next tokens."""
        page, filled = divmod(length, self.settings.page_size)
        return not filled or not self.settings.pages or self.page_users[row.pages[page]] == 1

    def _empty(self, talk: Talk) -> None:
        self._let_go(talk, talk.kept)
        self._release_pages(talk, 0)
        talk.kept, talk.lease = [], None

    def close_talk(self, talk: Talk) -> None:
        if talk.row:
            talk.closing = True
            return
        self.talks.remove(talk)
        lease = talk.lease
        self._empty(talk)
        if lease:
            self.end_lease(lease)
