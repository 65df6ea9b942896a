"""What one prefetch holds in host memory until it ends: entries that it relies on, and records that it fills."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from memstate.tiers.host.cache import CachedRecord, RecordCache, RecordKey


class Reservation:
    """Pins entries and claims records for one prefetch.

    Pages count along the prompt from 0 on; states are named by the page at whose end they stand, from 1 on.

    Args:
        kv: Host cache of KV pages.
        keys: Digests of the prompt's whole pages.

    Attributes:
        records: Page -> host record to fill.
        parts: What is read of a state, each with the host record to fill.
    """

    def __init__(self, kv: RecordCache, keys: Sequence[bytes]) -> None:
        self._kv, self._keys = kv, keys
        self._pins: list[tuple[int, RecordCache, CachedRecord]] = []  # with the first end that needs the entry
        self.records: dict[int, int] = {}
        self.parts: list[tuple[RecordKey, int]] = []
        self._spare: dict[RecordCache, list[int]] = {}  # for what is read of a state that is not chosen yet

    def pin(self, pages: Iterable[int], states: Iterable[tuple[int, Sequence[RecordKey]]]) -> None:
        """Pins what is in host memory of these pages, and of states with their ends."""
        wanted = [(page + 1, self._kv, self._keys[page]) for page in pages]
        wanted += [(end, part.cache, part.key) for end, parts in states for part in parts]
        for end, cache, key in wanted:
            if entry := cache.get(key):
                cache.pin(entry)
                self._pins.append((end, cache, entry))

    @property
    def pinned(self) -> list[CachedRecord]:
        """The entries that it pins."""
        return [entry for _, _, entry in self._pins]

    @property
    def held(self) -> Counter[RecordCache]:
        """The records that are claimed, of each cache."""
        held = Counter({cache: len(records) for cache, records in self._spare.items()})
        held.update(part.cache for part, _ in self.parts)
        held[self._kv] += len(self.records)
        return held

    def claim(self, pages: Sequence[int], needed: Mapping[RecordCache, int]) -> None:
        """Claims a record for each page, and so many for a state. Evicts no more than is missing."""
        self.records = dict(zip(pages, self._kv.claim(len(pages)), strict=True))
        self._spare = {cache: cache.claim(n) for cache, n in needed.items()}

    def choose(self, parts: Sequence[RecordKey]) -> None:
        """Says what is read of the state: no more of each cache than was claimed for it."""
        self.parts = [(part, self._spare[part.cache].pop()) for part in parts]

    def trim(self, end: int, state: bool) -> None:
        """Releases what lies beyond a page end, and the records of the state unless they are needed."""
        surplus = [page for page in self.records if page >= end]
        self._kv.pool.release([self.records.pop(page) for page in surplus])
        if not state:
            for part, record in self.parts:
                part.cache.pool.release([record])
            for cache, records in self._spare.items():
                cache.pool.release(records)
            self.parts, self._spare = [], {}
        for _, cache, entry in (pin for pin in self._pins if pin[0] > end):
            cache.unpin(entry)
        self._pins = [pin for pin in self._pins if pin[0] <= end]

    def commit(self, end: int, page_size: int, read: bool, state: Sequence[RecordKey]) -> None:
        """Adds what was read up to a page end to the caches, the first page as the most recent, and releases the rest.

        Args:
            end: Pages.
            page_size: Tokens of a page.
            read: Whether the state at the end was read too.
            state: What it is made of.
        """
        self.trim(end, read)
        for page, record in self.records.items():
            self._kv.add(self._keys[page], record, (page + 1) * page_size, fetched=True)
        self._kv.touch(self._keys[:end])
        for part, record in self.parts:
            part.cache.add(part.key, record, part.length, fetched=True)
        for part in state:
            part.cache.touch([part.key])
        self.records, self.parts = {}, []
        self.release()

    def release(self) -> None:
        """Releases all records and pins."""
        self.trim(0, state=False)
