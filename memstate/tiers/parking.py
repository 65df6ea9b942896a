"""Keeps what parked requests have: records in host memory, and KV pages that are still on the device.

park    row or idle session --pack--> records of a state, of the memory of a row, and of KV pages
load    records --unpack--> the slot, the memory and the pages of another row
write   records --thread--> a store, and a manifest
read    a manifest, and the store --thread--> records of another parked request

A whole page of known tokens has the record that prompts find, so a page that is below is not copied. Every other record
belongs to one parked request: nobody finds it, and it is dropped with its last pin.
"""

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice, takewhile
from secrets import token_bytes

from memstate import logs
from memstate.checks import shown
from memstate.errors import InvalidArgument, OutOfRecords, StaleHandle
from memstate.guard import Guard
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Parked
from memstate.requests.pages import PageAllocator
from memstate.tiers.host.cache import CachedRecord
from memstate.tiers.host.tier import Due, HostTier, Part
from memstate.tiers.keys import Keys
from memstate.tiers.parcel import LONGEST_KEY, MOST_BYTES, digest_of, unpack
from memstate.tiers.records import DIGEST_BYTES
from memstate.tiers.settings import Tiers
from memstate.tiers.stores.base import NoStore, why_of
from memstate.tiers.travel import Trip, get, put
from memstate.tiers.workers import Workers
from memstate.tokens import NUMBER, Tokens, encode

LOG = logs.logger("parking")
CENTURY_S = 3e9  # limit of the seconds of a trip, because a larger whole number perhaps fits no float


class ParkedRequests:
    """The parked requests of a manager.

    Args:
        host: Host memory below the prefix cache.
        keys: Computes the digests of known pages.
        allocator: The KV pages of the device.
        settings: Settings of the tiers.
        workers: Threads that write to the store and read from it.
        guard: Guards the calls that change something.

    Attributes:
        above: The KV pages that parked requests have on the device, those of the oldest request first.
        trips: The trips that are under way.
    """

    def __init__(
        self, host: HostTier, keys: Keys, allocator: PageAllocator, settings: Tiers, workers: Workers, guard: Guard
    ) -> None:
        self._host, self._keys, self._allocator = host, keys, allocator
        self._store, self._clock = settings.store or NoStore(), settings.clock
        self._workers, self._guard = workers, guard
        self._serial = count(int.from_bytes(token_bytes(DIGEST_BYTES // 2), "little"))
        self._of: dict[object, list[Part]] = {}  # by handle, oldest first; by trip, too, while a request travels
        self.above: dict[Part, None] = {}
        self.trips = list[Trip]()
        layout = digest_of(b"".join(of.cache.form.fingerprint for of in host.sets)).hex()
        rank = f"rank={settings.rank} of {settings.ranks}"
        self._mark = f"model={settings.model!r}\npage size={keys.page_tokens}\n{rank}\nlayout={layout}"

    def __len__(self) -> int:
        return len(self._of)

    @property
    def below(self) -> dict[Part, CachedRecord]:
        """The parts in host memory, and their records. Those of a request and of its trip are the same."""
        return {part: part.entry for parts in self._of.values() for part in parts if part.entry}

    def reset(self) -> None:
        """Forgets all parked requests, and releases their KV pages. The caller empties host memory."""
        if lost := len(self) - len(self.trips):
            logs.event(LOG, logging.WARNING, "parked requests lost", requests=lost)
        for trip in self.trips:
            trip.cancel("lost in recover() or clear()")
            _tell(trip)
        self.trips.clear()
        while self.above:  # an interrupted `recover` calls this again
            self._allocator.release([self.above.popitem()[0].index])
        self._of.clear()

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
        return [0 if part.entry else part.index for part in self._of[parked] if part.of is self._host.of_kv]

    def parts(self, parked: Parked, register: int = 0, row: int = 0, pages: Sequence[int] = ()) -> Iterator[Part]:
        """Yields the parts that a request must have: KV pages, of which the first ones have keys, then all others.

        Args:
            parked: Its handle.
            register: The register of its state.
            row: Its row; 0 for a session.
            pages: Its KV pages; empty if none is on the device.

        Raises:
            InvalidArgument: It has tokens in a tail, and rows have no memory for them.
        """
        host, length, size = self._host, parked.length, self._keys.page_tokens
        if parked.memory and host.of_rows is None:
            raise InvalidArgument(f"{parked.pending} tokens in a tail of your own: run a step of 0 tokens, then park")
        if host.of_kv is not None:
            keys = self._keys.of(parked.prompt.head(length))
            for at in range(-(-length // size)):
                key = keys[at] if at < len(keys) else b""
                yield Part(host.of_kv, at, (at + 1) * size, key, pages[at] if pages else 0)
        if length:
            yield Part(host.of_states, 0, length, index=register)
        if parked.memory and host.of_rows is not None:
            yield Part(host.of_rows, 0, length, index=row)

    def require_room(self, parts: Sequence[Part]) -> None:
        """Raises an error unless there is room for parts, and for states and the memory of rows in staging, too.

        Raises:
            OutOfRecords: Back-pressure; nothing changed.
        """
        for of in self._host.sets:
            n, room = sum(part.of is of for part in parts), of.cache.pool.free + of.cache.evictable
            if of is not self._host.of_kv:
                room = min(room, of.transfers.room)
            if n > room:
                raise OutOfRecords(n, room, of.cache.pool.records, of.cache.form.kind)

    def park(self, leaving: Mapping[Parked, list[Part]]) -> None:
        """Copies states, the memory of rows and KV pages to host memory, after all that is recorded so far.

        If a forward is planned that writes one of these states, the copies come after it. The slots and pages may get
        other owners right after this call. Call `require_room` before, for all parts but KV pages.

        Syncs: no.
        """
        due, parts = Due(list), [part for one in leaving.values() for part in one]
        self._of.update(leaving.items())
        self._host.parting = True
        for part in self._lower(parts, due):
            self.above[part] = None
            self._allocator.share([part.index])
        registers = [part.index for part in parts if part.of is self._host.of_states]
        self._host.fill(due, registers, behind=True)
        logs.event(LOG, logging.INFO, "parked", requests=len(leaving), tokens=sum(one.length for one in leaving))

    def load(self, going: Sequence[tuple[Parked, int, Sequence[int]]]) -> None:
        """Copies parked requests to rows, after all that is recorded so far. Their handles end.

        Args:
            going: For each request its handle, its row, and the pages of the row.

        Syncs: no.
        """
        host, due = self._host, Due(list)
        for parked, row, pages in going:
            to = {host.of_states: [REGISTERS_PER_ROW * row], host.of_rows: [row], host.of_kv: pages}
            for part in self._of[parked]:
                if part.entry is not None:
                    due[part.of].append((to[part.of][part.at], part.entry))
        host.load(due)
        self.drop([parked for parked, _, _ in going])
        logs.event(LOG, logging.INFO, "resumed", requests=len(going), tokens=sum(one.length for one, _, _ in going))

    def drop(self, handles: Sequence[object]) -> None:
        """Ends the handles of parked requests, which must be valid and distinct, or the trips of requests."""
        for parts in map(self._of.pop, handles):
            if any(self._of.get(one) is parts for trip in self.trips for one in (trip, trip.of)):
                continue
            for part in parts:
                if part.entry is not None:
                    part.of.cache.unpin(part.entry)
                else:
                    del self.above[part]
                    self._allocator.release([part.index])

    def advance(self) -> None:
        """Copies KV pages that are still on the device, those of the oldest request first, up to one without room.

        Call it only while no forward is to be launched that writes one of these pages.

        Syncs: no.
        """
        due = Due(list)
        next(self._lower(self.above, due), None)
        for part in list(takewhile(lambda part: part.entry is not None, self.above)):
            del self.above[part]
            self._allocator.release([part.index])
        self._host.fill(due, ())

    def _lower(self, parts: Iterable[Part], due: Due) -> Iterator[Part]:
        """Gives parts their records, and adds the copies that this takes. Yields those for which there is no room."""
        room = {of: of.transfers.room for of in self._host.sets}
        for part in parts:
            cache, copies = part.of.cache, due[part.of]
            if part.key and (entry := cache.get(part.key)) is not None:
                cache.pin(entry)
                part.entry = entry
            elif len(copies) < room[part.of] and cache.pool.free + cache.evictable:
                cache.pin(entry := self._claim(part, part.key))  # until the bytes have arrived
                copies.append((part.index, entry))
            else:
                yield part

    def _claim(self, part: Part, key: bytes) -> CachedRecord:
        """Claims a record for a part. Without a key, only this request has it."""
        cache = part.of.cache
        (record,) = cache.claim(1)
        name = key or next(self._serial).to_bytes(DIGEST_BYTES, "little")
        part.entry = entry = cache.add(name, record, part.length)
        entry.once = entry.stored = not key
        cache.pin(entry)
        return entry

    # Parked requests that travel

    def write(self, parked: Parked, tokens: Tokens | None, key: bytes, seconds: float) -> Trip:
        """See `TierManager.write`."""
        until = self._until(key, seconds)
        if not isinstance(parked, Parked):
            raise InvalidArgument(f"{shown(parked)} is no parked request: park() returns them")
        self.require([parked])
        prompt, parts = parked.prompt, self._of[parked]
        told = prompt if tokens is None else prompt._replace(key=encode(tokens))
        if told.key[: len(prompt.key)] != prompt.key:
            raise InvalidArgument(f"the {prompt.tokens} tokens that are known do not come first in those given")
        most = 2**10 + len(self._mark) + 2 * DIGEST_BYTES * len(parts) + NUMBER * told.tokens + len(parked.user)
        if most > MOST_BYTES:
            raise InvalidArgument(f"a manifest of {told.tokens} tokens, up to {most} bytes: {MOST_BYTES} at most")
        work = partial(put, self._store, parts, self._mark, replace(parked, prompt=told), key)
        trip = Trip(parked, until, work)
        with self._guard.changing("write"):
            self.trips.append(trip)
            self._of[trip] = parts
        return trip

    def read(self, manifest: bytes, salt: Hashable, key: bytes, seconds: float) -> Trip:
        """See `TierManager.read`."""
        until = self._until(key, seconds)
        parked, own = unpack(manifest, self._mark, salt, key)
        known = parked.prompt.tokens // self._keys.page_tokens  # more parts than keys are wrong, however many
        parts = list(islice(self.parts(parked), known + len(own) + 1))
        for part, name in zip(parts[::-1], own[::-1], strict=False):
            part.key = name
        if len(own) > len(parts) or not all(part.key for part in parts):
            raise InvalidArgument(f"{parked} with {len(own)} records of its own: it needs others")
        self.require_room(parts)
        trip = Trip(parked, until, partial(get, self._store, parts))
        with self._guard.changing("read"):
            self.trips.append(trip)
            self._of[trip] = parts
            for part in parts:
                self._claim(part, b"")
        return trip

    def _until(self, key: bytes, seconds: float) -> float:
        """Returns the deadline of a trip, in seconds of the clock. Raises InvalidArgument for a wrong argument."""
        if not isinstance(key, bytes) or len(key) > LONGEST_KEY:
            raise InvalidArgument(f"key= of {type(key).__name__}: expected at most {LONGEST_KEY} bytes")
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise InvalidArgument(f"seconds={shown(seconds)}: expected seconds from 0 on")
        return self._clock() + min(seconds, CENTURY_S)

    def travel(self) -> None:
        """Begins trips whose records are in host memory, and ends those that are done or late."""
        for trip in list(self.trips):
            if self._clock() > trip.until:
                held = "" if trip.job else ", before it began: poll more often, or take more host_pages"
                trip.cancel(f"late{held}")
            if trip.job is None and not trip.done and self._arrived(trip):
                trip.job = self._workers.submit(trip.work, trip)
            if trip.done if trip.job is None else trip.job.done:
                self._land(trip)

    def _arrived(self, trip: Trip) -> bool:
        """Returns whether all bytes of a request are in host memory, or the records that will get them."""
        entries = {part.entry for part in self._of[trip]}
        return None not in entries and entries.isdisjoint(self._host.coming())

    def _land(self, trip: Trip) -> None:
        """Ends a trip that is over, or whose thread is done."""
        if (job := trip.job) is not None:
            if job.error is not None or job.cancelled:
                trip.cancel(why_of(job.error) if job.error is not None else "cancelled")
            if not trip.done:
                trip.done, trip.manifest = True, job.result
                if trip.manifest is None:  # a read
                    trip.parked, self._of[trip.of] = trip.of, self._of[trip]
        _tell(trip)
        self.drop([trip])
        self.trips.remove(trip)


def _tell(trip: Trip) -> None:
    """Writes a line of the log if a trip that is over has failed."""
    if trip.why:
        logs.event(LOG, logging.WARNING, "trip failed", tokens=trip.of.length, why=trip.why)
