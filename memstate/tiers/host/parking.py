"""Keeps what parked requests have: records in host memory, and KV pages that are still on the device.

park    row or idle session --pack--> records of a state, of the memory of a row, and of KV pages
load    records --unpack--> the slot and the pages of another row

A whole page of known tokens has the record that prompts find, so a page that is below is not copied. Every other record
belongs to one parked request: nobody finds it, and it is dropped with its last pin.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import token_bytes
from typing import NamedTuple

from memstate.errors import OutOfRecords, StaleHandle
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Parked
from memstate.requests.pages import PageAllocator
from memstate.tiers.host.cache import CachedRecord
from memstate.tiers.host.tier import Due, HostTier, RecordSet
from memstate.tiers.keys import Keys
from memstate.tiers.records import DIGEST_BYTES


class Leaving(NamedTuple):
    """What a parked request leaves on the device.

    Attributes:
        parked: its handle.
        register: the register of its state.
        row: its row, if the memory of the row is to be kept; otherwise 0.
        pages: its KV pages.
    """

    parked: Parked
    register: int
    row: int
    pages: Sequence[int]


@dataclass(slots=True)
class Belongings:
    """What a parked request has.

    Attributes:
        state: the record of its state; none at length 0.
        row: the record of the memory of its row, if there is one.
        pages: for each KV page its record, or its id while it is still on the device.
        digests: keys of the whole pages whose tokens are known.
    """

    state: list[CachedRecord] = field(default_factory=list)
    row: list[CachedRecord] = field(default_factory=list)
    pages: list[CachedRecord | int] = field(default_factory=list)
    digests: Sequence[bytes] = ()


class ParkedRequests:
    """The parked requests of a manager.

    Args:
        host: Host memory below the prefix cache.
        keys: Computes the digests of known pages.
        allocator: The KV pages of the device.

    Attributes:
        above: Number of KV pages that parked requests have on the device.
    """

    def __init__(self, host: HostTier, keys: Keys, allocator: PageAllocator) -> None:
        self._host, self._keys, self._allocator = host, keys, allocator
        self._serial = count(int.from_bytes(token_bytes(DIGEST_BYTES // 2), "little"))
        self._of: dict[Parked, Belongings] = {}  # oldest first
        self.above = 0

    def __len__(self) -> int:
        return len(self._of)

    def entries(self) -> Iterator[CachedRecord]:
        """Yields the records, once for each request that has them."""
        for has in self._of.values():
            yield from (*has.state, *has.row, *(page for page in has.pages if isinstance(page, CachedRecord)))

    def pages(self, parked: Parked) -> list[int]:
        """Returns, for each KV page of a parked request, its id on the device; 0 if it is in host memory.

        Raises:
            StaleHandle: The request went on, was dropped, or was lost.
        """
        self.require(parked)
        return [page if isinstance(page, int) else 0 for page in self._of[parked].pages]

    def on_device(self) -> Iterator[list[int]]:
        """Yields the KV pages that each parked request has on the device."""
        return (list(filter(None, self.pages(parked))) for parked in self._of)

    def require(self, parked: Parked) -> None:
        """Raises an error unless the handle is valid.

        Raises:
            StaleHandle: The request went on, was dropped, or was lost.
        """
        if parked not in self._of:
            why = "it went on, was dropped, was lost in recover() or clear(), or belongs to another manager"
            raise StaleHandle(f"parked request of {parked.length} tokens", 0, 0, why)

    def require_room(self, leaving: Sequence[Leaving]) -> None:
        """Raises an error unless there is room for states and the memory of rows. KV pages can wait on the device.

        Raises:
            OutOfRecords: Back-pressure; nothing changed.
            Asleep: The device memory of states or of KV pages is released.
        """
        self._host.require_awake("park")
        states, rows = sum(one.parked.length > 0 for one in leaving), sum(one.row > 0 for one in leaving)
        for of, n in ((self._host.of_states, states), (self._host.of_rows, rows)):
            if of is not None and n > (room := min(of.transfers.room, of.cache.pool.free + of.cache.evictable)):
                raise OutOfRecords(n, room, of.cache.pool.records, of.cache.form.kind)

    def park(self, leaving: Sequence[Leaving]) -> None:
        """Copies states, the memory of rows and KV pages to host memory, after all that is recorded so far.

        If a forward is planned that writes one of these states, the copies come after it. The slots and pages may get
        other owners right after this call. Call `require_room` before.

        Syncs: no.
        """
        host, due = self._host, Due(list)
        for parked, register, row, pages in leaving:
            has = self._of[parked] = Belongings()
            if parked.length:
                has.state = [self._add(host.of_states, register, parked.length, due)]
            if row and host.of_rows is not None:
                has.row = [self._add(host.of_rows, row, parked.length, due)]
            if host.of_kv is not None and pages:
                has.digests = self._keys.of(parked.prompt.head(parked.length))
                has.pages = [*pages]
                self._allocator.share(pages)
                self.above += len(pages)
                self._lower(host.of_kv, has, due)
        host.fill(due, [one.register for one in leaving], behind=True)

    def load(self, going: Sequence[tuple[Parked, int, Sequence[int]]]) -> None:
        """Copies parked requests to rows, after all that is recorded so far. Their handles end.

        Args:
            going: For each request its handle, its row, and the pages of the row.

        Syncs: no.
        """
        host, due = self._host, Due(list)
        for parked, row, pages in going:
            has = self._of[parked]
            due[host.of_states] += [(REGISTERS_PER_ROW * row, entry) for entry in has.state]
            for of, places, found in ((host.of_rows, [row], has.row), (host.of_kv, pages, has.pages)):
                if of is not None:
                    copies = zip(places, found, strict=False)
                    due[of] += [(at, entry) for at, entry in copies if isinstance(entry, CachedRecord)]
        host.load(due)
        for parked, _, _ in going:
            self.drop(parked)

    def drop(self, parked: Parked) -> None:
        """Ends the handle of a parked request, which must be valid."""
        has, host = self._of.pop(parked), self._host
        host.states.unpin(*has.state)
        if host.of_rows is not None:
            host.of_rows.cache.unpin(*has.row)
        host.kv.unpin(*[page for page in has.pages if isinstance(page, CachedRecord)])
        above = [page for page in has.pages if isinstance(page, int)]
        self._allocator.release(above)
        self.above -= len(above)

    def advance(self) -> None:
        """Copies KV pages that are still on the device, as far as there is room, those of the oldest request first.

        Call it only while no forward is planned and not launched.

        Syncs: no.
        """
        due = Due(list)
        for has in self._of.values():
            if self._host.of_kv is not None:
                self._lower(self._host.of_kv, has, due)
        self._host.fill(due, ())

    def reset(self) -> int:
        """Forgets all parked requests, but releases nothing. Returns how many they were."""
        lost, self._of, self.above = len(self._of), {}, 0
        return lost

    def _lower(self, of: RecordSet, has: Belongings, due: Due) -> None:
        """Replaces KV pages on the device by records, as far as there is room, and adds the copies that this takes."""
        room, freed = of.transfers.room - len(due[of]), list[int]()
        for at, page in enumerate(has.pages):
            if not isinstance(page, int):
                continue
            key = has.digests[at] if at < len(has.digests) else None
            entry = of.cache.get(key) if key is not None else None
            if entry is not None:
                of.cache.pin(entry)
            elif room > 0 and of.cache.pool.free + of.cache.evictable:
                entry, room = self._add(of, page, (at + 1) * self._keys.page_tokens, due, key), room - 1
            else:
                continue
            has.pages[at] = entry
            freed.append(page)
        self._allocator.release(freed)
        self.above -= len(freed)

    def _add(
        self, of: RecordSet, index: int, length: int, due: Due, key: bytes | None = None
    ) -> CachedRecord:  # fmt: skip
        """Claims and pins a record, and adds its copy.

        Args:
            of: The records of its kind.
            index: The register, row or page to copy.
            length: Tokens that the record stands for.
            due: The copies.
            key: The key under which others find the record. None: it belongs to one parked request.
        """
        (record,) = of.cache.claim(1)
        entry = self._host.expected(
            of.cache, key or next(self._serial).to_bytes(DIGEST_BYTES, "little"), record, length
        )
        entry.once = entry.stored = key is None
        of.cache.pin(entry)
        due[of].append((index, entry))
        return entry
