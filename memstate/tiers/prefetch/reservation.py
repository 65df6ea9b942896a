"""Holds the host memory of one prefetch until it ends: the entries that it needs, and the records that it fills."""

from collections.abc import Iterable, Sequence

from memstate.tiers.host.cache import CachedRecord, RecordCache


class Reservation:
    """Pins entries and claims records for one prefetch.

    Pages of the prompt are numbered from 0 on. Page ends are numbered from 1 on: end n is the end of page n - 1. A
    state is named by the page end at which it stands.

    Args:
        kv: Host cache of KV pages.
        states: Host cache of states.
        keys: Digests of the prompt's whole pages.

    Attributes:
        records: For each page that is read, the host record for its KV.
        state: Host record for the state that is read, None for none.
    """

    def __init__(self, kv: RecordCache, states: RecordCache, keys: Sequence[bytes]) -> None:
        self._kv, self._states, self._keys = kv, states, keys
        self._pins: list[tuple[int, RecordCache, CachedRecord]] = []  # (first end that needs the entry, cache, entry)
        self.records: dict[int, int] = {}
        self.state: int | None = None

    def pin(self, pages: Iterable[int], ends: Iterable[int]) -> None:
        """Pins those entries of these pages and page ends that are in host memory."""
        for cache, end in [*((self._kv, page + 1) for page in pages), *((self._states, end) for end in ends)]:
            if entry := cache.get(self._keys[end - 1]):
                cache.pin(entry)
                self._pins.append((end, cache, entry))

    @property
    def pinned(self) -> list[CachedRecord]:
        """The entries that the prefetch pins, one item for each pin."""
        return [entry for _, _, entry in self._pins]

    def claim(self, pages: Sequence[int], state: bool) -> None:
        """Claims a record for each page, and one for a state if `state` is True.

        Evicts entries only if too few records are free.
        """
        self.records = dict(zip(pages, self._kv.claim(len(pages)), strict=True))
        self.state = self._states.claim(1)[0] if state else None

    def trim(self, end: int, state: bool) -> None:
        """Releases the records and pins beyond a page end, and the record for the state unless `state` is True."""
        surplus = [page for page in self.records if page >= end]
        self._kv.pool.release([self.records.pop(page) for page in surplus])
        if self.state is not None and not state:
            self._states.pool.release([self.state])
            self.state = None
        for _, cache, entry in (pin for pin in self._pins if pin[0] > end):
            cache.unpin(entry)
        self._pins = [pin for pin in self._pins if pin[0] <= end]

    def commit(self, end: int, page_size: int, state: bool) -> None:
        """Adds to the caches the records that were read up to a page end, and releases the others.

        The first page becomes the most recently used entry.

        Args:
            end: The page end.
            page_size: Tokens of a page.
            state: Whether the state at the end was read too.
        """
        self.trim(end, state)
        for page, record in self.records.items():
            self._kv.add(self._keys[page], record, (page + 1) * page_size, fetched=True)
        self._kv.touch(self._keys[:end])
        if end:
            if self.state is not None:
                self._states.add(self._keys[end - 1], self.state, end * page_size, fetched=True)
            self._states.touch([self._keys[end - 1]])
        self.records, self.state = {}, None
        self.release()

    def release(self) -> None:
        """Releases all records and pins."""
        self.trim(0, state=False)
