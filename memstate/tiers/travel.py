"""Writes parked requests to a store, and reads them from there, in threads, while the loop goes on.

A trip has a deadline, and can be cancelled at any moment. It keeps its records until its thread is done with them.
"""

from collections.abc import Callable, Iterator, Sequence

from memstate.requests.handles import Parked
from memstate.tiers.host.cache import CachedRecord, RecordCache
from memstate.tiers.host.tier import Part
from memstate.tiers.parcel import digest_of, pack
from memstate.tiers.records import DIGEST_BYTES
from memstate.tiers.stores.base import Outcome, Store, answered, faults_of, faults_since
from memstate.tiers.workers import Job
from memstate.tiers.writeback import BATCH, write


class Trip:
    """A parked request on its way to a store or from there, as `mem.tiers.write` and `mem.tiers.read` return it.

    Attributes:
        done: Whether it is over. `poll` says so.
        why: Why it failed; "" while it is under way, and if it succeeded.
        manifest: Of a write that succeeded, the bytes from which `mem.tiers.read` makes the request again.
        parked: Of a read that succeeded, the handle of the request.
    """

    def __init__(self, of: Parked, until: float, work: Callable[["Trip"], bytes | None]) -> None:
        self.done, self.why = False, ""
        self.manifest: bytes | None = None
        self.parked: Parked | None = None
        self.of, self.until, self.work = of, until, work  # before a read has succeeded, `of` is no valid handle
        self.job: Job | None = None

    def __repr__(self) -> str:
        return f"Trip({self.why or ('done' if self.done else 'under way')})"

    def cancel(self, why: str = "cancelled") -> None:
        """Ends the trip, if it is not over. Its records become free once its thread has noticed.

        Args:
            why: The reason to note.
        """
        if not self.done:
            self.done, self.why = True, why or "cancelled"


def _batches(parts: Sequence[Part], trip: Trip) -> Iterator[tuple[RecordCache, list[tuple[bytes, CachedRecord]]]]:
    """Yields pairs (key, record) of one kind, a few at a time, while the trip is not over."""
    for of in dict.fromkeys(part.of for part in parts):
        pairs = [(part.key, part.entry) for part in parts if part.of is of and part.entry is not None]
        for at in range(0, len(pairs), BATCH):
            if not trip.done:
                yield of.cache, pairs[at : at + BATCH]


def put(store: Store, parts: Sequence[Part], mark: str, parcel: Parked, shared: bytes, trip: Trip) -> bytes:
    """Writes records that the store does not have, and returns the manifest. Runs in a thread.

    What it has written stays there if it fails: an earlier write of the request may have a manifest that names it.

    Raises:
        OSError: The store failed, took only a part, or has deleted a part to make room.
    """
    keys = list[bytes]()
    for cache, pairs in _batches(parts, trip):
        form, entries = cache.form, [entry for _, entry in pairs]
        there = answered(store.exists([form.name(entry.key) for entry in entries]), len(entries))
        outcomes, why = write(store, cache, [entry for entry, has in zip(entries, there, strict=True) if not has])
        if set(outcomes) - {Outcome.DONE}:
            raise OSError(f"storage took a part only: {why or 'refused'}")
        for entry in entries:
            if entry.once:  # the reader computes the keys of the others
                body = cache.pool.buffer(entry.record)[form.header_bytes :]
                keys.append(entry.key + (digest_of(body) if shared else b""))
    before = faults_of(store)
    for cache, pairs in _batches(parts, trip):
        there = answered(store.exists([cache.form.name(entry.key) for _, entry in pairs]), len(pairs))
        if not all(there):
            why = faults_since(store, before) or "raise its capacity"
            raise OSError(f"storage lacks records that it had: {why}")
    return pack(mark, parcel, keys, shared)


def get(store: Store, parts: Sequence[Part], trip: Trip) -> None:
    """Reads records into host memory and checks them. Runs in a thread.

    It discards none: a manifest that anybody may have made must not delete records of others.

    Raises:
        OSError: The store failed, or a record is missing or has a flaw.
    """
    for cache, pairs in _batches(parts, trip):
        form, before = cache.form, faults_of(store)
        names = [form.name(key[:DIGEST_BYTES]) for key, _ in pairs]
        buffers = [cache.pool.buffer(entry.record) for _, entry in pairs]
        outcomes = answered(store.get(names, buffers), len(names))
        for (key, entry), name, buffer, outcome in zip(pairs, names, buffers, outcomes, strict=True):
            flaw, digest = outcome.name.lower(), key[DIGEST_BYTES:]
            if outcome is Outcome.DONE:
                flaw = form.flaw(buffer, key[:DIGEST_BYTES], entry.length)
            if flaw:
                raise OSError(f"record {name}: {flaw} {faults_since(store, before)}".strip())
            if digest and digest_of(buffer[form.header_bytes :]) != digest:
                raise OSError(f"record {name} has other bytes than its manifest says")
