"""The prefix cache as one list of entries. There is no tree: every question is a search through the list.

An entry says that KV is kept for its tokens, all of them from the start, and perhaps a state at their end. It shares
the pages of the longest entry that it starts with, and has the rest to itself.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.proof.stateful.rows import Kept, Tenants

if TYPE_CHECKING:
    from tests.proof.stateful.below import Below

Text = tuple[int, ...]


@dataclass(eq=False)
class Entry:
    """pages: ids from the start on. used: when a prompt was last followed to here, or to what was beyond. uses:
    requests that went on from its state; last: when one did, 0 for a state that its session has a newer one of.
    """

    salt: Hashable
    tokens: Text
    pages: list[int]
    used: int = 0
    state: Kept | None = None
    evicted: bool = False
    uses: int = 0
    last: tuple[int, int] = (0, 0)

    def begins_with(self, other: "Entry") -> bool:
        return self.salt == other.salt and self.tokens[: len(other.tokens)] == other.tokens


@dataclass(eq=False)
class Lease:
    """Of a row or a session: the entry and what it begins with stay. own: entries that got their state from it,
    with their uses from here. decoded: the last state beyond the prompt that it left."""

    entry: Entry | None
    salt: Hashable
    own: dict[Entry, int] = field(default_factory=dict)
    decoded: Kept | None = None


@dataclass
class Found:
    """What there is for a prompt. Lengths: of the state, of KV, and of the deepest state given up beyond the state.

    reached: the entry that KV was followed into.
    """

    tokens: int
    length: int = 0
    kv: int = 0
    gone: int = 0
    stated: Entry | None = None
    reached: Entry | None = None

    def lost(self) -> tuple[int, int, int]:
        """Tokens to compute: nobody did, a state was given up, there never was one."""
        return self.tokens - self.kv, self.gone - self.length, self.kv - self.gone


class Cached(Tenants):
    """Entries and leases, and what can be asked about them. below: host memory and storage, where there are any."""

    below: "Below | None" = None

    def clear(self) -> None:
        super().clear()
        before = vars(self)  # what was counted stays, and the states of before are gone
        self.figures: Counter[str] = before.get("figures", Counter())
        self.figures["evicted_states"] += len(before.get("stated", ()))
        self.entries: list[Entry] = []
        self.stated: list[Entry] = []  # those that have a state, in no order
        self.leases: list[Lease] = []

    def beyond(self, entry: Entry) -> list[Entry]:
        return [one for one in self.entries if one is not entry and one.begins_with(entry)]

    def before(self, entry: Entry) -> Entry | None:
        """The longest that it goes on from."""
        shorter = [one for one in self.entries if one is not entry and entry.begins_with(one)]
        return max(shorter, key=lambda one: len(one.tokens), default=None)

    def own_pages(self, entry: Entry) -> list[int]:
        before = self.before(entry)
        return entry.pages[len(before.pages) :] if before else entry.pages

    def own_size(self, entry: Entry) -> int:
        """Pages' worth of tokens, whoever manages pages."""
        before = self.before(entry)
        return (len(entry.tokens) - (len(before.tokens) if before else 0)) // self.settings.page_size

    def leased(self, entry: Entry) -> int:
        return sum(lease.entry is not None and lease.entry.begins_with(entry) for lease in self.leases)

    def ending_at(self, tokens: Text, salt: Hashable) -> Entry | None:
        return next((one for one in self.entries if one.salt == salt and one.tokens == tokens), None)

    def reach(self, tokens: Text, salt: Hashable) -> int:
        """How many of the tokens, in whole pages, have KV."""
        most = 0
        for entry in self.entries:
            if entry.salt == salt:
                same = 0
                while same < min(len(tokens), len(entry.tokens)) and tokens[same] == entry.tokens[same]:
                    same += 1
                most = max(most, self.floor(same))
        return most

    def within(self, tokens: Text, salt: Hashable) -> list[Entry]:
        """Those that begin with these tokens."""
        return [one for one in self.entries if one.salt == salt and one.tokens[: len(tokens)] == tokens]

    def find(self, tokens: Text, salt: Hashable) -> Found:
        """The last token is computed in any case."""
        head = tokens[: self.floor(max(0, len(tokens) - 1))]
        kv = self.reach(head, salt)
        inside = [one for one in self.entries if one.salt == salt and head[: len(one.tokens)] == one.tokens]
        stated = max((one for one in inside if one.state), key=lambda one: len(one.tokens), default=None)
        length = len(stated.tokens) if stated else 0
        gone = max((len(one.tokens) for one in inside if one.evicted and not one.state), default=0)
        reached = min(self.within(head[:kv], salt) if kv else [], key=lambda one: len(one.tokens), default=None)
        return Found(len(tokens), length, kv, max(length, gone), stated, reached)

    @property
    def evictable_states(self) -> int:
        return sum(not self.pins[one.state.register] for one in self.stated if one.state)

    @property
    def evictable_pages(self) -> int:
        """Pages that are free once everything without a lease is gone."""
        given = Counter(page for one in self.entries if not self.leased(one) for page in self.own_pages(one))
        return sum(self.page_users[page] == users for page, users in given.items())

    def prefix_stats(self) -> dict[str, int]:
        """As the manager's own figures name them."""
        ours = self.entries if self.settings.pages else []  # else KV is the caller's
        leased, sizes = sum(self.own_size(one) for one in ours if self.leased(one)), sum(map(self.own_size, ours))
        return {"states": len(self.stated), "nodes": len(self.entries), "pages": sizes, "leased_pages": leased,
                **self.figures}  # fmt: skip
