"""Models the records of one kind (states or KV pages) in host memory.

A key is a pair: the salt, and all tokens up to the end of the record. The library has a digest of them instead.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

Key = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False)
class Item:
    """A record under its key.

    fetched: whether it came from the store. stored: whether the store has it or a write to the store is under way.
    filled: whether its bytes have arrived or are on their way. once: the shelf, if the item goes with its last pin.
    """

    key: Key
    record: int
    pins: int = 0
    fetched: bool = False
    stored: bool = False
    filled: bool = True
    once: "Shelf | None" = None


class Shelf:
    """Items of one kind, the least recently used first. reserve: number of records that prefetches leave free."""

    def __init__(self, kind: str, records: int, reserve: int) -> None:
        self.kind, self.records, self.reserve = kind, records, reserve
        self.free = set(range(records))
        self.written: set[int] = set()  # records to which a thread writes
        self.waiting: set[int] = set()  # freed records to which a thread still writes
        self.items: list[Item] = []
        self.evicted = 0

    def get(self, key: Key) -> Item | None:
        return next((item for item in self.items if item.key == key), None)

    @property
    def loose(self) -> list[Item]:
        return [item for item in self.items if not item.pins]

    def room(self) -> int:
        return max(0, len(self.free) + len(self.loose) - self.reserve)

    def claim(self, n: int) -> list[int]:
        """Claims the `n` lowest free records."""
        records = sorted(self.free)[:n]
        assert len(records) == n
        self.free -= set(records)
        return records

    def take(self, n: int) -> list[int]:
        """Claims `n` records, and evicts the least recently used items for them. Returns [] if there is no room."""
        if n > len(self.free) + len(self.loose):
            return []
        self.evict(n - len(self.free))
        return self.claim(n)

    def evict(self, n: int) -> None:
        gone = self.loose[: max(0, n)]
        for item in gone:
            self.items.remove(item)
            self.give(item.record)
        self.evicted += len(gone)

    def give(self, record: int) -> None:
        (self.waiting if record in self.written else self.free).add(record)

    def use(self, records: Iterable[int]) -> None:
        self.written.update(records)

    def unuse(self, records: Iterable[int]) -> None:
        for record in records:
            self.written.remove(record)
            if record in self.waiting:
                self.waiting.remove(record)
                self.free.add(record)

    def add(self, key: Key, record: int, fetched: bool = False) -> Item:
        """Adds a record as the newest item. If the key has an item already, frees the record and returns that item."""
        if there := self.get(key):
            self.give(record)
            self.touch([key])
            return there
        self.items.append(item := Item(key, record, fetched=fetched, stored=fetched))
        return item

    def touch(self, keys: Sequence[Key]) -> None:
        """Makes the items of these keys the most recently used, the item of the first key most of all."""
        for key in reversed(keys):
            if there := self.get(key):
                self.items.remove(there)
                self.items.append(there)

    @staticmethod
    def pin(items: Iterable[Item], by: int = 1) -> None:
        for item in items:
            item.pins += by
            assert item.pins >= 0
            if item.once and not item.pins:
                item.once.items.remove(item)
                item.once.give(item.record)
