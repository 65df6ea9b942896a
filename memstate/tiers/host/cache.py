"""What of one kind lies in host memory, by key: the least recently used goes first. Knows no token and no device.

A key stands for all tokens up to some length, so that equal keys mean equal bytes: nothing is ever overwritten.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memstate.tiers.host.pool import RecordPool
from memstate.tiers.records import RecordFormat


@dataclass(slots=True, eq=False)
class CachedRecord:
    """A record under its key.

    length: tokens that it stands for. pins: who needs it to stay. fetched: it came from storage, not from the device.
    stored: storage has it, or is being given it.
    """

    key: bytes
    record: int
    length: int
    pins: int = 0
    fetched: bool = False
    stored: bool = False


class RecordCache:
    """Entries of one kind, states or KV pages.

    reserve: records that `room` leaves to whoever has more right to them.
    """

    def __init__(self, pool: RecordPool, form: RecordFormat, reserve: int = 0) -> None:
        self.pool, self.form, self.reserve = pool, form, reserve
        self._entries: OrderedDict[bytes, CachedRecord] = OrderedDict()  # least recently used first
        self._pinned = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """There is a cache, also where it is empty."""
        return True

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"RecordCache({len(self)} entries, {self._pinned} pinned, {self.pool})"

    def get(self, key: bytes) -> CachedRecord | None:
        """The entry of a key, if there is one."""
        return self._entries.get(key)

    def entries(self) -> Iterable[CachedRecord]:
        """All entries, least recently used first."""
        return self._entries.values()

    @property
    def evictable(self) -> int:
        """Entries that nobody has pinned."""
        return len(self._entries) - self._pinned

    def room(self) -> int:
        """Records that could be had, evicting all that can be, with the reserve left over."""
        return max(0, self.pool.free + self.evictable - self.reserve)

    def claim(self, n: int) -> list[int]:
        """Claims records, giving up no more entries than are missing; an empty list where n cannot be had."""
        if n > self.pool.free + self.evictable:
            return []
        self.evict(n - self.pool.free)
        return self.pool.claim(n) if n <= self.pool.free else []  # some may be in use

    def evict(self, n: int) -> int:
        """Gives up the n least recently used entries that nobody has pinned or is copying, or as many as there are."""
        chosen: list[CachedRecord] = []
        for entry in self._entries.values() if n > 0 else ():
            if not entry.pins and not self.pool.in_use(entry.record):  # its record would not be free at once
                chosen.append(entry)
                if len(chosen) == n:
                    break
        for entry in chosen:
            self.drop(entry)
        self.evicted += len(chosen)
        return len(chosen)

    def drop(self, entry: CachedRecord) -> None:
        """Takes out an entry that nobody has pinned."""
        assert not entry.pins, f"{entry} is pinned"
        del self._entries[entry.key]
        self.pool.release([entry.record])

    def add(self, key: bytes, record: int, length: int, *, fetched: bool = False) -> CachedRecord:
        """Files a claimed record, as the most recently used; where the key is there already the record goes back, and
        the entry that was there is returned.
        """
        if there := self._entries.get(key):
            self.pool.release([record])
            self._entries.move_to_end(key)
            return there
        entry = self._entries[key] = CachedRecord(key, record, length, fetched=fetched, stored=fetched)
        return entry

    def touch(self, keys: Sequence[bytes]) -> None:
        """Notes a use of what is there; the first key is the most recent, so that a prefix outlives what builds on
        it.
        """
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def pin(self, entry: CachedRecord) -> None:
        """Keeps an entry until `unpin`."""
        self._pinned += not entry.pins
        entry.pins += 1

    def unpin(self, entry: CachedRecord) -> None:
        """Ends one pin."""
        assert entry.pins > 0, f"{entry} is not pinned"
        entry.pins -= 1
        self._pinned -= not entry.pins
