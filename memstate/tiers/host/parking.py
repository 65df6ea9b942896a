"""Keeps what parked requests have: records in host memory, and KV pages that are still on the device.

park    row or idle session --pack--> records of a state, of the memory of a row, and of KV pages
load    records --unpack--> the slot, the memory and the pages of another row

A whole page of known tokens has the record that prompts find, so a page that is below is not copied. Every other record
belongs to one parked request: nobody finds it, and it is dropped with its last pin.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from secrets import token_bytes
from typing import NamedTuple

from memstate.errors import InvalidArgument, OutOfRecords, StaleHandle
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
        parked: Its handle.
        register: The register of its state.
        row: Its row; 0 for a session.
        memory: Whether the memory of the row is to be kept.
        pages: Its KV pages.
    """

    parked: Parked
    register: int
    row: int
    memory: bool
    pages: Sequence[int]


@dataclass(slots=True)
class Belongings:
    """What a parked request has.

    Attributes:
        pages: For each KV page its id while it is on the device; 0 once it is in host memory.
        digests: Keys of the whole pages whose tokens are known.
        records: For each kind, pairs (place, pinned record). The place of a KV page is its number.
    """

    pages: list[int]
    digests: Sequence[bytes]
    records: Due


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

    def reset(self) -> int:
        """Forgets all parked requests, but releases nothing. Returns how many they were."""
        lost, self.above = len(self._of), 0
        self._of.clear()
        return lost

    def release_pages(self) -> None:
        """Releases the KV pages on the device. Call `reset` next."""
        for pages in self.on_device():
            self._allocator.release(pages)

    def __len__(self) -> int:
        return len(self._of)

    def has(self, parked: Parked) -> bool:
        """Returns whether a handle is valid."""
        return parked in self._of

    def entries(self) -> Iterator[CachedRecord]:
        """Yields the records, once for each request that has them."""
        return (entry for has in self._of.values() for copies in has.records.values() for _, entry in copies)

    def on_device(self) -> Iterator[list[int]]:
        """Yields the KV pages that each parked request has on the device."""
        return (list(filter(None, has.pages)) for has in self._of.values())

    def require(self, parked: Sequence[Parked]) -> None:
        """Raises an error unless all handles are valid and distinct.

        Raises:
            StaleHandle: A request went on, was dropped, or was lost.
            InvalidArgument: A handle is named twice.
        """
        for one in parked:
            if one not in self._of:
                why = "it went on, was dropped, was lost in recover() or clear(), or belongs to another manager"
                raise StaleHandle(f"parked request of {one.length} tokens", 0, 0, why)
        if len(set(parked)) != len(parked):
            raise InvalidArgument(f"a parked request is named twice in {list(parked)}")

    def pages(self, parked: Parked) -> list[int]:
        """Returns, for each KV page of a parked request, its id on the device; 0 if it is in host memory.

        Raises:
            StaleHandle: The request went on, was dropped, or was lost.
        """
        self.require([parked])
        return self._of[parked].pages

    def require_room(self, leaving: Sequence[Leaving]) -> None:
        """Raises an error unless there is room for states and the memory of rows. KV pages can wait on the device.

        Raises:
            OutOfRecords: Back-pressure; nothing changed.
            Asleep: The device memory of states or of KV pages is released.
        """
        self._host.require_awake("park")
        states, rows = sum(one.parked.length > 0 for one in leaving), sum(one.memory for one in leaving)
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
        for parked, register, row, memory, pages in leaving:
            has = self._of[parked] = Belongings([], (), Due(list))
            if parked.length:
                self._copy(has, host.of_states, 0, register, parked.length, due)
            if memory and host.of_rows is not None:
                self._copy(has, host.of_rows, 0, row, parked.length, due)
            if host.keeps_kv:
                self._allocator.share(pages)
                has.pages, has.digests = [*pages], self._keys.of(parked.prompt.head(parked.length))
                self.above += len(pages)
                self._lower(has, due)
        host.fill(due, [one.register for one in leaving], behind=True)

    def load(self, going: Sequence[tuple[Parked, int, Sequence[int]]]) -> None:
        """Copies parked requests to rows, after all that is recorded so far. Their handles end.

        Args:
            going: For each request its handle, its row, and the pages of the row.

        Syncs: no.
        """
        host, due = self._host, Due(list)
        for parked, row, pages in going:
            to = {host.of_states: [REGISTERS_PER_ROW * row], host.of_rows: [row], host.of_kv: pages}
            for of, copies in self._of[parked].records.items():
                due[of] += [(to[of][place], entry) for place, entry in copies]
        host.load(due)
        self.drop([parked for parked, _, _ in going])

    def drop(self, parked: Sequence[Parked]) -> None:
        """Ends the handles of parked requests. They must be valid and distinct."""
        for has in map(self._of.pop, parked):
            for of, copies in has.records.items():
                of.cache.unpin(*[entry for _, entry in copies])
            above = list(filter(None, has.pages))
            self._allocator.release(above)
            self.above -= len(above)

    def advance(self) -> None:
        """Copies KV pages that are still on the device, as far as there is room, those of the oldest request first.

        Call it only while no forward is planned and not launched.

        Syncs: no.
        """
        due = Due(list)
        for has in self._of.values():
            self._lower(has, due)
        self._host.fill(due, ())

    def _lower(self, has: Belongings, due: Due) -> None:
        """Replaces KV pages on the device by records, as far as there is room, and adds the copies that this takes."""
        of, freed = self._host.of_kv, list[int]()
        assert of is not None
        room = of.transfers.room - len(due[of])
        for at, page in enumerate(has.pages):
            key = has.digests[at] if at < len(has.digests) else None
            if page and key is not None and (entry := of.cache.get(key)) is not None:
                of.cache.pin(entry)
                has.records[of].append((at, entry))
            elif page and room > 0 and of.cache.pool.free + of.cache.evictable:
                self._copy(has, of, at, page, (at + 1) * self._keys.page_tokens, due, key)
                room -= 1
            else:
                continue
            has.pages[at] = 0
            freed.append(page)
        self._allocator.release(freed)
        self.above -= len(freed)

    def _copy(
        self, has: Belongings, of: RecordSet, place: int, index: int, length: int, due: Due, key: bytes | None = None
    ) -> None:  # fmt: skip
        """Claims a record as `_add` does, and adds the copy of a register, row or page to it."""
        entry = self._add(has, of, place, length, key)
        of.cache.pin(entry)  # until the bytes have arrived
        due[of].append((index, entry))

    def _add(self, has: Belongings, of: RecordSet, place: int, length: int, key: bytes | None = None) -> CachedRecord:
        """Claims a record.

        Args:
            has: What gets the record.
            of: The records of its kind.
            place: The place of the record.
            length: Tokens that the record stands for.
            key: The key under which prompts find the record. None: only this parked request has it.
        """
        (record,) = of.cache.claim(1)
        entry = of.cache.add(key or next(self._serial).to_bytes(DIGEST_BYTES, "little"), record, length)
        entry.once = entry.stored = key is None
        of.cache.pin(entry)
        has.records[of].append((place, entry))
        return entry

    # Parked requests that travel

    def hold(self, parked: Parked) -> Parked:
        """Returns another handle with the records of a parked request, all of which have arrived."""
        other, has = replace(parked), self._of[parked]
        self._of[other] = Belongings(list(has.pages), has.digests, has.records.copy())
        for of, copies in has.records.items():
            of.cache.pin(*[entry for _, entry in copies])
        return other

    def arrived(self, parked: Parked) -> bool:
        """Returns whether all bytes of a parked request are in host memory."""
        has = self._of[parked]
        mine = {entry for copies in has.records.values() for _, entry in copies}
        return not any(has.pages) and mine.isdisjoint(self._host.coming())

    def records(self, parked: Parked) -> dict[RecordSet, list[CachedRecord]]:
        """Returns the records of a parked request by kind, in order."""
        has = self._of[parked]
        return {of: [dict(copies)[place] for place in sorted(dict(copies))] for of, copies in has.records.items()}

    def expect(self, parked: Parked, given: dict[str, int]) -> dict[RecordSet, list[CachedRecord]]:
        """Makes a parked request of records that are still to be read. Returns the records by kind, in order.

        Args:
            parked: The new handle.
            given: For each kind, how many records storage has.

        Raises:
            InvalidArgument: The request needs other records; nothing changed.
            OutOfRecords: Back-pressure; nothing changed.
        """
        host, size, length = self._host, self._keys.page_tokens, parked.length
        needs = {
            "state": int(length > 0),
            "kv": -(-length // size) * host.keeps_kv,
            "row": int(given.get("row", 0) > 0 or parked.pending > 0),
        }
        if needs["row"] > (host.of_rows is not None) or any(
            n != needs.get(kind, 0) for kind, n in (needs | given).items()
        ):
            raise InvalidArgument(f"a parked request of {length} tokens with records {given}: it needs {needs}")
        for of in host.sets:
            if (n := needs[of.cache.form.kind]) > (room := of.cache.pool.free + of.cache.evictable):
                raise OutOfRecords(n, room, of.cache.pool.records, of.cache.form.kind)
        has = self._of[parked] = Belongings([0] * needs["kv"], (), Due(list))
        for of in host.sets:
            for at in range(needs[of.cache.form.kind]):
                self._add(has, of, at, (at + 1) * size if of is host.of_kv else length)
        return self.records(parked)
