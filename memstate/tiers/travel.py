"""Writes parked requests to a store, and reads them from there, in threads, while the loop goes on.

A trip has a deadline, and can be cancelled at any moment. It keeps its records until its thread is done with them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from memstate.requests.handles import Parked
from memstate.tiers.host.cache import CachedRecord
from memstate.tiers.host.parking import ParkedRequests
from memstate.tiers.host.tier import RecordSet
from memstate.tiers.parcel import Recorded, digest_of, pack
from memstate.tiers.prefetch.reading import Chunk, read
from memstate.tiers.stores.base import Outcome, Store, answered, why_of
from memstate.tiers.workers import Job, Workers
from memstate.tiers.writeback import BATCH, write
from memstate.tokens import SaltedTokens

Records = Mapping[RecordSet, Sequence[CachedRecord]]


class Trip:
    """A parked request on its way to a store or from there, as `mem.tiers.write` and `mem.tiers.read` return it.

    Attributes:
        done: Whether it is over. `poll` says so.
        why: Why it failed; "" while it is under way, and if it succeeded.
        manifest: Of a write that succeeded, the bytes from which `mem.tiers.read` makes the request again.
        parked: Of a read that succeeded, the handle of the request.
    """

    def __init__(self, of: Parked, prompt: SaltedTokens, until: float, shared: bytes) -> None:
        self.done, self.why = False, ""
        self.manifest: bytes | None = None
        self.parked: Parked | None = None
        self.of, self.prompt, self.until, self.shared = of, prompt, until, shared
        self.job: Job | None = None
        self.kept: Parked | None = None  # a handle that keeps the records while the thread works

    def __repr__(self) -> str:
        return f"Trip({self.why or ('done' if self.done else 'under way')})"

    def cancel(self, why: str = "cancelled") -> None:
        """Ends the trip, if it is not over. Its records become free once its thread has noticed.

        Args:
            why: The reason to note.
        """
        if not self.done:
            self.done, self.why = True, why


class Trips:
    """The trips of parked requests that are under way.

    Args:
        parked: The parked requests.
        fingerprint: Stands for model, layout and rank.
        store: The store.
        workers: Threads that write and read.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self, parked: ParkedRequests, fingerprint: bytes, store: Store, workers: Workers, clock: Callable[[], float]
    ) -> None:
        self._parked, self._fingerprint, self._store = parked, fingerprint, store
        self._workers, self._clock = workers, clock
        self._trips: list[Trip] = []

    @property
    def idle(self) -> bool:
        """Whether `advance` has nothing to do."""
        return not self._trips

    def write(self, parked: Parked, prompt: SaltedTokens, seconds: float, shared: bytes) -> Trip:
        """Begins to write a parked request; see `TierManager.write`."""
        self._trips.append(trip := Trip(parked, prompt, self._clock() + seconds, shared))
        return trip

    def read(self, parked: Parked, listed: Mapping[str, Sequence[Recorded]], seconds: float, shared: bytes) -> Trip:
        """Begins to read a parked request; see `TierManager.read`."""
        records = self._parked.expect(parked, {kind: len(of_kind) for kind, of_kind in listed.items()})
        trip = self.write(parked, parked.prompt, seconds, shared)
        trip.kept, trip.job = parked, self._workers.submit(_get, self._store, records, listed, trip)
        return trip

    def advance(self) -> None:
        """Begins writes whose records have arrived in host memory, and ends trips that are done or late."""
        for trip in list(self._trips):
            if self._clock() > trip.until:
                trip.cancel("late")
            if trip.job is None and not self._parked.has(trip.of):
                trip.cancel("the request went on or was dropped before its bytes were in host memory")
            if trip.job is None and not trip.done and self._parked.arrived(trip.of):
                trip.kept = self._parked.hold(trip.of)
                records = self._parked.records(trip.kept)
                trip.job = self._workers.submit(_put, self._store, records, bool(trip.shared), trip)
            if trip.done if trip.job is None else trip.job.done:
                self._trips.remove(trip)
                self._land(trip)

    def _land(self, trip: Trip) -> None:
        """Ends a trip that is over, or whose thread is done."""
        job, kept = trip.job, trip.kept
        if job is not None and (job.error is not None or job.cancelled):
            trip.cancel(why_of(job.error) if job.error is not None else "cancelled")
        if trip.done and kept is not None:
            self._parked.drop([kept])
        elif job is not None and kept is trip.of:
            trip.done, trip.parked = True, kept
        elif job is not None and kept is not None:
            parcel = replace(kept, prompt=trip.prompt)
            trip.done, trip.manifest = True, pack(self._fingerprint, parcel, job.result, trip.shared)
            self._parked.drop([kept])

    def reset(self) -> None:
        """Forgets all trips. The caller waits for the threads, and forgets all parked requests."""
        for trip in self._trips:
            trip.cancel("lost in recover() or clear()")
        self._trips.clear()


def _put(store: Store, records: Records, digests: bool, trip: Trip) -> dict[str, list[Recorded]]:
    """Writes records that the store does not have. Runs in a thread.

    What it has written stays there if it fails: an earlier write of the request may have a manifest that names it.

    Returns:
        Kind -> its records in order, with digests if asked for.

    Raises:
        OSError: The store failed or took only a part, or the trip was ended.
    """
    listed = dict[str, list[Recorded]]()
    for of, entries in records.items():
        form, of_kind = of.cache.form, listed.setdefault(of.cache.form.kind, [])
        for at in range(0, len(entries), BATCH):
            part = entries[at : at + BATCH]
            there = answered(store.exists([form.name(entry.key) for entry in part]), len(part))
            outcomes, why = write(store, of.cache, [entry for entry, has in zip(part, there, strict=True) if not has])
            if trip.done or set(outcomes) - {Outcome.DONE}:
                raise OSError(f"storage took a part only: {why or 'refused'}")
            for entry in part:
                buffer = of.cache.pool.buffer(entry.record)
                if digests:
                    form.seal(buffer, entry.key, entry.length)
                of_kind.append(Recorded(entry.key, digest_of(buffer) if digests else b""))
    return listed


def _get(store: Store, records: Records, listed: Mapping[str, Sequence[Recorded]], trip: Trip) -> None:
    """Reads records into host memory and checks them. Runs in a thread.

    Raises:
        OSError: The store failed, or a record is missing or has a flaw.
    """
    for of, entries in records.items():
        form, pool = of.cache.form, of.cache.pool
        for at in range(0, len(entries), BATCH):
            part = list(zip(listed[form.kind][at : at + BATCH], entries[at : at + BATCH], strict=True))
            pieces = [Chunk(one.key, entry.length, entry.record) for one, entry in part]
            found = read(store, form, pool.buffer, pieces, lambda: trip.done)
            for one, entry in part if not found.flaw else ():
                if one.digest and digest_of(pool.buffer(entry.record)) != one.digest:
                    raise OSError(f"record {form.name(one.key)} has other bytes than its manifest says")
            if found.flaw:
                raise OSError(f"record {form.name(pieces[found.arrived].key)} is {found.flaw} {found.why}".strip())
