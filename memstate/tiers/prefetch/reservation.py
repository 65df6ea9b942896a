"""What one prefetch holds in host memory until it ends: entries that it relies on, and records that it fills. Decides
nothing; whatever is taken here goes back here, or into a cache.
"""

from collections.abc import Iterable, Sequence

from memstate.tiers.host.cache import CachedRecord, RecordCache


class Reservation:
    """Pages by their number along the prompt, from 0 on; states by the page at whose end they stand, from 1 on.

    keys: digests of the prompt's whole pages. records: page -> host record to be filled. state: the one for the state.
    """

    def __init__(self, kv: RecordCache | None, states: RecordCache | None, keys: Sequence[bytes]) -> None:
        self._kv, self._states, self._keys = kv, states, keys
        self._pages: dict[int, CachedRecord] = {}
        self._ends: dict[int, CachedRecord] = {}
        self.records: dict[int, int] = {}
        self.state: int | None = None

    def pin(self, pages: Iterable[int], ends: Iterable[int]) -> None:
        """Keeps what is in host memory where it is."""
        for cache, pinned, wanted, back in ((self._kv, self._pages, pages, 0), (self._states, self._ends, ends, 1)):
            for number in wanted if cache is not None else ():
                if cache is not None and (entry := cache.get(self._keys[number - back])):
                    cache.pin(entry)
                    pinned[number] = entry

    def claim_pages(self, pages: Sequence[int]) -> bool:
        """Claims a record for each page, evicting what is missing and no more; False where they cannot be had."""
        if not pages:
            return True
        records = [] if self._kv is None else self._kv.claim(len(pages))
        self.records = dict(zip(pages, records, strict=False))
        return bool(records)

    def claim_state(self) -> bool:
        """Claims the record for a state, evicting one if none is free; False where it cannot be had."""
        records = [] if self._states is None else self._states.claim(1)
        self.state = records[0] if records else None
        return bool(records)

    def trim(self, end: int, state: bool) -> None:
        """Gives back what lies beyond the end of a page, and the state's record unless it is needed."""
        if self._kv is not None:
            surplus = [page for page in self.records if page >= end]
            self._kv.pool.release([self.records.pop(page) for page in surplus])
        if self._states is not None and self.state is not None and not state:
            self._states.pool.release([self.state])
            self.state = None
        for cache, pinned, first in ((self._kv, self._pages, end), (self._states, self._ends, end + 1)):
            for number in [number for number in pinned if number >= first]:
                if cache is not None:
                    cache.unpin(pinned.pop(number))

    def commit(self, end: int, page_size: int, state: bool) -> None:
        """Puts into the caches what has been read up to the end of a page, the first page as the most recent, and gives
        the rest back. state: the one at that end has been read too.
        """
        self.trim(end, state)
        if self._kv is not None:
            for page, record in self.records.items():
                self._kv.add(self._keys[page], record, (page + 1) * page_size, fetched=True)
            self._kv.touch(self._keys[:end])
        if self._states is not None and end:
            if self.state is not None:
                self._states.add(self._keys[end - 1], self.state, end * page_size, fetched=True)
            self._states.touch([self._keys[end - 1]])
        self.records, self.state = {}, None
        self.release()

    def release(self) -> None:
        """Everything: records to their pools, entries to whoever evicts."""
        self.trim(0, state=False)
