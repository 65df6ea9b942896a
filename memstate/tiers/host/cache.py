"""Finds records of one kind in host memory by key, and evicts the least recently used. Knows no token and no device.

A key stands for all tokens up to some length. So equal keys mean equal bytes, and no record is ever replaced.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from memstate.tiers.host.pool import RecordPool
from memstate.tiers.records import RecordFormat


@dataclass(slots=True, eq=False)
class CachedRecord:
    """An entry of a cache: a record under its key.

    Attributes:
        key: Digest of the tokens that the record stands for.
        record: Number of the record in the pool.
        length: Number of tokens that the record stands for.
        pins: Number of users for which the record must stay.
        fetched: Whether the record came from storage, not from the device.
        stored: Whether storage has the record, or a write of it is queued or under way.
        once: Whether only a parked request has the record. Nobody finds it, and its last `unpin` drops it.
    """

    key: bytes
    record: int
    length: int
    pins: int = 0
    fetched: bool = False
    stored: bool = False
    once: bool = False


class RecordCache:
    """Finds records of one kind, states or KV pages, by key.

    Args:
        pool: The memory of the records.
        form: The format of the records.
        reserve: Number of records that `room` leaves for saves from the device.
    """

    def __init__(self, pool: RecordPool, form: RecordFormat, reserve: int = 0) -> None:
        self.pool, self.form, self.reserve = pool, form, reserve
        self._entries: OrderedDict[bytes, CachedRecord] = OrderedDict()  # least recently used first
        self._pinned = 0
        self.evicted = 0

    def reset(self) -> None:
        """Evicts all entries, pinned or not. Call it only while nothing reads or writes the records."""
        self.evicted += len(self._entries)
        self._entries, self._pinned = OrderedDict(), 0
        self.pool.reset()

    def miscounts(self, pins: Counter[CachedRecord], claimed: int) -> list[str]:
        """Returns a text for each wrong count of pins and claimed records.

        Args:
            pins: for each entry, the number of users for which it must stay, as the caller has counted them.
            claimed: number of claimed records that are not in the cache.
        """
        faults = [
            f"host record {entry.record} ({self.form.kind}) has {entry.pins} pins and {pins[entry]} users"
            for entry in self._entries.values()
            if entry.pins != pins[entry]
        ]
        if self._pinned != (pinned := sum(entry.pins > 0 for entry in self._entries.values())):
            faults.append(f"{self._pinned} host records ({self.form.kind}) are counted as pinned, {pinned} have pins")
        if self.pool.claimed != len(self._entries) + claimed:
            faults.append(
                f"{self.pool.claimed} host records ({self.form.kind}) are claimed; {len(self._entries)} are cached and "
                f"{claimed} are being filled"
            )
        return faults

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __repr__(self) -> str:
        return f"RecordCache({len(self)} entries, {self._pinned} pinned, {self.pool})"

    def get(self, key: bytes) -> CachedRecord | None:
        """Returns the entry of a key, None if there is none."""
        return self._entries.get(key)

    def reach(self, keys: Sequence[bytes]) -> list[CachedRecord]:
        """Returns the entries of the keys before the first key without an entry."""
        entries = []
        for key in keys:
            if (entry := self._entries.get(key)) is None:
                break
            entries.append(entry)
        return entries

    def entries(self) -> Iterable[CachedRecord]:
        """Returns all entries, least recently used first."""
        return self._entries.values()

    @property
    def evictable(self) -> int:
        """Number of entries without a pin."""
        return len(self._entries) - self._pinned

    def room(self) -> int:
        """Returns how many records prefetches may claim: the free and the evictable ones, minus the reserve."""
        return max(0, self.pool.free + self.evictable - self.reserve)

    def claim(self, n: int) -> list[int]:
        """Claims n records. It evicts entries only if too few records are free.

        Returns:
            The records; an empty list if fewer than n are free or evictable.
        """
        if n > self.pool.free + self.evictable:
            return []
        self.evict(n - self.pool.free)
        return self.pool.claim(n)

    def evict(self, n: int) -> int:
        """Evicts the n least recently used of the entries without a pin. Entries that are being copied have a pin.

        Returns:
            How many entries were evicted.
        """
        chosen = list(islice((entry for entry in self._entries.values() if not entry.pins), max(0, n)))
        for entry in chosen:
            self.drop(entry)
        self.evicted += len(chosen)
        return len(chosen)

    def drop(self, entry: CachedRecord) -> None:
        """Removes an entry without a pin, and releases its record."""
        assert not entry.pins, f"{entry} is pinned"
        del self._entries[entry.key]
        self.pool.release([entry.record])

    def add(self, key: bytes, record: int, length: int, *, fetched: bool = False) -> CachedRecord:
        """Adds a claimed record to the cache, as the most recently used one.

        Args:
            key: Digest of the tokens that the record stands for.
            record: The claimed record. If the key has an entry already, this record is released.
            length: Number of tokens that the record stands for.
            fetched: Whether the record came from storage.

        Returns:
            The entry of the key: the new one, or the one that was there.
        """
        if there := self._entries.get(key):
            self.pool.release([record])
            self._entries.move_to_end(key)
            return there
        entry = self._entries[key] = CachedRecord(key, record, length, fetched=fetched, stored=fetched)
        return entry

    def touch(self, keys: Sequence[bytes]) -> None:
        """Notes a use of the entries of these keys.

        The entry of the first key becomes the most recently used one. So a prefix is evicted after its continuations.
        """
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)

    def pin(self, *entries: CachedRecord) -> None:
        """Keeps entries from being evicted until `unpin`."""
        for entry in entries:
            self._pinned += not entry.pins
            entry.pins += 1

    def unpin(self, *entries: CachedRecord) -> None:
        """Ends one pin of each entry."""
        for entry in entries:
            assert entry.pins > 0, f"{entry} is not pinned"
            entry.pins -= 1
            self._pinned -= not entry.pins
            if entry.once and not entry.pins:
                self.drop(entry)
