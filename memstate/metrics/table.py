"""The table of figures: every metric that is exported, its name, kind, labels, and where its value comes from.

Prometheus, OpenTelemetry, the dashboard, `memstate top` and docs/metrics.md all follow it. A counter is one since the
start of the manager; nothing sets it back. Knows no exporter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from memstate.metrics.reading import Reading
from memstate.stats import ChaosStats, PrefetchStats, PrefixStats, TierStats
from memstate.tiers.prefetch.fetch import End

Kind = Literal["gauge", "counter", "histogram"]
Sample = tuple[tuple[str, ...], float]
COMMON: Final = ("manager", "rank")  # labels of every figure
STEP: Final = "memstate_step_host_seconds"


@dataclass(frozen=True)
class Figure:
    """One metric.

    Attributes:
        name: its name, without the ending `_total` of counters.
        kind: gauge, counter or histogram.
        help: what it counts.
        labels: its labels, besides `COMMON`.
        read: returns its samples: values of the labels, and the value. None where there is nothing to count.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[Reading], Sequence[Sample]]

    @property
    def exposed(self) -> str:
        """The name that queries use; that of a histogram stands for its `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


Section = Callable[[Reading], Any]


def _prefix(reading: Reading) -> PrefixStats | None:
    return reading.stats.prefix


def _tiers(reading: Reading) -> TierStats | None:
    return reading.stats.tiers


def _stored(reading: Reading) -> PrefetchStats | None:
    return reading.stats.tiers.prefetch if reading.stats.tiers is not None else None


def _chaos(reading: Reading) -> ChaosStats | None:
    return reading.stats.chaos


def _stats(reading: Reading) -> Any:
    return reading.stats


def _of(section: Section, **fields: str) -> Callable[[Reading], Sequence[Sample]]:
    """Reads fields of one record. The names of the arguments are the values of the one label."""

    def read(reading: Reading) -> Sequence[Sample]:
        record = section(reading)
        return [] if record is None else [((label,), getattr(record, name)) for label, name in fields.items()]

    return read


def _one(section: Section, name: str) -> Callable[[Reading], Sequence[Sample]]:
    """Reads one field of a record, without a label."""

    def read(reading: Reading) -> Sequence[Sample]:
        record = section(reading)
        return [] if record is None else [((), getattr(record, name))]

    return read


def _slots(reading: Reading) -> Sequence[Sample]:
    """All owners together are the capacity."""
    stats = reading.stats
    cached = stats.prefix.states if stats.prefix is not None else 0
    held = {
        "live": stats.held_by_live, "lane": stats.held_by_lanes, "mark": stats.held_by_marks, "cached": cached,
        "session": stats.held_by_sessions, "snapshot": stats.held_by_snapshots - cached - stats.held_by_marks,
        "free": stats.free,
    }  # fmt: skip
    held["by_id"] = max(0, stats.capacity - sum(held.values()))
    return [((owner,), count) for owner, count in held.items()]


def _rows(reading: Reading) -> Sequence[Sample]:
    stats = reading.stats
    return [(("used",), stats.rows_used), (("free",), stats.rows - stats.rows_used)]


def _pages(reading: Reading) -> Sequence[Sample]:
    every, free = reading.stats.pages, reading.stats.pages_free
    return [(("used",), every - free), (("free",), free)] if every else []


def _traffic(reading: Reading) -> Sequence[Sample]:
    tiers = reading.stats.tiers
    if tiers is None:
        return []
    return [
        (("state", "out"), tiers.states_out * tiers.state_bytes),
        (("state", "in"), tiers.states_in * tiers.state_bytes),
        (("page", "out"), tiers.pages_out * tiers.page_bytes), (("page", "in"), tiers.pages_in * tiers.page_bytes),
    ]  # fmt: skip


def _copies(reading: Reading) -> Sequence[Sample]:
    tiers = reading.stats.tiers
    if tiers is None:
        return []
    return [
        (("state", "out"), tiers.states_out), (("state", "in"), tiers.states_in),
        (("page", "out"), tiers.pages_out), (("page", "in"), tiers.pages_in),
    ]  # fmt: skip


def _records(reading: Reading) -> Sequence[Sample]:
    tiers = reading.stats.tiers
    if tiers is None:
        return []
    places = (
        ("host", "state", tiers.host_states, tiers.host_state_records),
        ("host", "page", tiers.host_pages, tiers.host_page_records),
    )
    return [
        sample
        for place, kind, used, records in places if records
        for sample in (((place, kind, "used"), used), ((place, kind, "free"), records - used))
    ]  # fmt: skip


def _flaws(reading: Reading) -> Sequence[Sample]:
    found = _stored(reading)
    return [((flaw,), count) for flaw, count in sorted(found.flaws.items())] if found is not None else []


def _failures(reading: Reading) -> Sequence[Sample]:
    tiers = reading.stats.tiers
    return [((reason,), count) for reason, count in sorted(tiers.failures.items())] if tiers is not None else []


def _tenants(what: str) -> Callable[[Reading], Sequence[Sample]]:
    return lambda reading: [((tenant,), getattr(held, what)) for tenant, held in reading.tenants.items()]


def _call_seconds(reading: Reading) -> Sequence[Sample]:
    return [((call,), seconds) for call, seconds in reading.steps.seconds.items()] if reading.steps else []


def _about(reading: Reading) -> Sequence[Sample]:
    return [(tuple(reading.about[name] for name in ABOUT), 1)]


def _own(name: str) -> Callable[[Reading], Sequence[Sample]]:
    return lambda reading: [((), float(getattr(reading, name)))]


ABOUT: Final = ("version", "strategy", "backend", "device", "slot_bytes")
CHAOS: Final[Mapping[str, str]] = {
    name: name for name in ("claims", "admissions", "store_fails", "store_late", "polls")
}
ENDS: Final[Mapping[str, str]] = {end.value: end.value for end in End}
GONE: Final[Mapping[str, str]] = {
    why: f"gone_{why}" for why in ("superseded", "room", "pages", "limit", "taken", "cleared")
}


def _gauge(name: str, says: str, read: Callable[[Reading], Sequence[Sample]], *labels: str) -> Figure:
    return Figure(name, "gauge", says, labels, read)


def _counter(name: str, says: str, read: Callable[[Reading], Sequence[Sample]], *labels: str) -> Figure:
    return Figure(name, "counter", says, labels, read)


FIGURES: Final[tuple[Figure, ...]] = (
    _gauge("memstate_info", "1; the labels say what the manager is.", _about, *ABOUT),
    _gauge(
        "memstate_interrupted",
        "1 after an exception in the middle of a call, until recover or reset.",
        _own("interrupted"),
    ),
    _gauge(
        "memstate_reading_age_seconds",
        "Age of these figures; above 0 if the loop left no moment between two calls for this scrape.",
        _own("age"),
    ),
    # slots, rows, pages
    _gauge("memstate_slots", "Slots by owner; all owners together are all slots.", _slots, "owner"),
    _gauge("memstate_rows", "Rows of the request table.", _rows, "state"),
    _gauge("memstate_row_age_seconds", "Since the oldest running request was admitted.", _one(_stats, "oldest_row")),
    _gauge(
        "memstate_row_idle_seconds",
        "Since the length of a running request last changed, the longest of all, as scrapes saw it.",
        _one(_stats, "idlest_row"),
    ),
    _gauge("memstate_pages", "KV pages.", _pages, "state"),
    _gauge("memstate_sessions", "Open sessions.", _one(_stats, "sessions")),
    _gauge("memstate_session_age_seconds", "Since the oldest session was opened.", _one(_stats, "oldest_session")),
    _gauge(
        "memstate_session_idle_seconds", "That a session is idle, the longest of all.", _one(_stats, "idlest_session")
    ),
    _counter("memstate_sessions_emptied", "Idle sessions that made way or expired.", _one(_stats, "sessions_emptied")),
    _counter("memstate_claims", "Slots that were claimed.", _one(_stats, "claimed")),
    _counter(
        "memstate_refusals",
        "Admissions, forks and extensions refused for lack of room: back-pressure.",
        _of(_stats, slots="short_of_slots", rows="short_of_rows", pages="short_of_pages"),
        "reason",
    ),
    # snapshots
    _counter("memstate_snapshots", "Boundaries with a snapshot.", _one(_stats, "snapshots")),
    _counter(
        "memstate_degradations",
        "Snapshots that were due and were not kept: no slot, no register, or no chunk that ended near the length.",
        _of(_stats, no_slot="degraded", no_register="refused", no_chunk="missed"),
        "reason",
    ),
    _counter("memstate_snapshots_published", "Snapshots that were published.", _one(_stats, "published")),
    _counter("memstate_snapshots_dropped", "Published snapshots that ended.", _one(_stats, "dropped")),
    # what memstate asks of the device and the host
    _counter("memstate_packets", "Packets of ownership changes that were sent.", _one(_stats, "packets")),
    _counter("memstate_uploads", "Asynchronous copies to the device.", _one(_stats, "uploads")),
    _counter("memstate_uploaded_bytes", "Bytes of these copies.", _one(_stats, "upload_bytes")),
    _counter("memstate_upload_waits", "Times that the host waited for a pinned buffer.", _one(_stats, "upload_waits")),
    _counter("memstate_launches", "Launches of memstate.", _one(_stats, "launches")),
    _counter("memstate_syncs", "Times that the host waited for the device.", _one(_stats, "syncs")),
    _counter(
        "memstate_moved_bytes",
        "Bytes of states that memstate copied or zeroed on the device.",
        _of(_stats, copied="copied_bytes", zeroed="zeroed_bytes"),
        "how",
    ),
    Figure(
        STEP,
        "histogram",
        "Host time that a step takes in calls of the manager; with steps=True only.",
        (),
        lambda reading: [],
    ),
    _counter("memstate_call_seconds", "Host time by call; with steps=True only.", _call_seconds, "call"),
    # the prefix cache
    _gauge("memstate_prefix_states", "Cached states.", _one(_prefix, "states")),
    _gauge("memstate_prefix_nodes", "Nodes of the tree of prefixes.", _one(_prefix, "nodes")),
    _gauge("memstate_prefix_pages", "KV pages in the tree.", _one(_prefix, "pages")),
    _gauge(
        "memstate_prefix_leased_pages",
        "Of these, pages that requests or sessions share.",
        _one(_prefix, "leased_pages"),
    ),
    _counter("memstate_prefix_lookups", "Requests with tokens.", _one(_prefix, "lookups")),
    _counter("memstate_prompt_tokens", "Tokens of their prompts.", _one(_prefix, "prompt_tokens")),
    _counter("memstate_hit_tokens", "Prompt tokens that were not computed again.", _one(_prefix, "hit_tokens")),
    _counter(
        "memstate_lost_tokens",
        "Prompt tokens that were computed; hit and lost add up to all.",
        _of(_prefix, no_sharing="lost_no_sharing", evicted="lost_evicted", no_snapshot="lost_no_snapshot"),
        "reason",
    ),
    _counter(
        "memstate_prefix_insertions",
        "States that came to the cache, by what became of them.",
        _of(_prefix, inserted="inserted", duplicate="duplicates", declined="declined", refused="refused"),
        "outcome",
    ),
    _counter("memstate_prefix_loads", "States that came back from below.", _one(_prefix, "loaded")),
    _counter("memstate_prefix_evictions", "Cached states that went, by reason.", _of(_prefix, **GONE), "reason"),
    _counter("memstate_prefix_evicted_pages", "Cached KV pages that went.", _one(_prefix, "evicted_pages")),
    # host memory and storage
    _gauge("memstate_tier_records", "Records below the slots.", _records, "place", "kind", "state"),
    _gauge(
        "memstate_tier_bytes",
        "Memory that the tiers take.",
        _of(_tiers, host="host_bytes", staging="staging_bytes"),
        "memory",
    ),
    _counter(
        "memstate_tier_hit_tokens",
        "Of the hit tokens, those beyond what the device had, by where their state was.",
        _of(_tiers, host="host_hit_tokens", storage="storage_hit_tokens"),
        "place",
    ),
    _counter("memstate_tier_copies", "States and pages copied between device and host.", _copies, "kind", "direction"),
    _counter("memstate_tier_copied_bytes", "Bytes of these copies.", _traffic, "kind", "direction"),
    _counter(
        "memstate_tier_lost_saves",
        "Evicted states that host memory did not get.",
        _of(_tiers, no_room="refused", no_staging="unstaged"),
        "reason",
    ),
    _counter(
        "memstate_tier_evictions",
        "Records evicted from host memory.",
        _of(_tiers, state="evicted_states", page="evicted_pages"),
        "kind",
    ),
    _gauge(
        "memstate_tier_leaked_records",
        "Host records without an owner; 0, or memstate has a defect.",
        _one(_tiers, "leaked_records"),
    ),
    _counter(
        "memstate_storage_writes",
        "Records for storage, by what became of them.",
        _of(_tiers, written="written", failed="write_failed", missed="write_missed"),
        "outcome",
    ),
    _gauge(
        "memstate_storage_writes_pending",
        "Records that wait for storage or are being written.",
        _one(_tiers, "writes_pending"),
    ),
    _counter("memstate_storage_failures", "What storage could not do, by reason.", _failures, "reason"),
    _counter(
        "memstate_storage_evictions", "Records that the store deleted to make room.", _one(_tiers, "store_evicted")
    ),
    _counter("memstate_prefetch_failures", "Calls for prefetches that raised.", _one(_stored, "failures")),
    _counter("memstate_storage_flaws", "Records that were not what was asked for, by flaw.", _flaws, "flaw"),
    _counter("memstate_prefetches_started", "Prefetches that began.", _one(_stored, "started")),
    _counter("memstate_prefetches", "Prefetches that are over, by end.", _of(_stored, **ENDS), "outcome"),
    _counter(
        "memstate_prefetches_late", "Requests that were admitted before their prefetch was over.", _one(_stored, "late")
    ),
    _counter(
        "memstate_prefetches_truncated",
        "Prefetches that were cut to the host memory that was there.",
        _one(_stored, "truncated"),
    ),
    _counter("memstate_prefetch_truncated_tokens", "Tokens that were cut off.", _one(_stored, "truncated_tokens")),
    _counter("memstate_prefetch_tokens", "Tokens that prefetches made available.", _one(_stored, "tokens")),
    _gauge("memstate_prefetches_in_flight", "Prefetches under way.", _one(_stored, "in_flight")),
    _gauge("memstate_prefetch_tokens_in_flight", "Tokens that they are after.", _one(_stored, "in_flight_tokens")),
    _counter("memstate_prefetch_read", "Records that came whole.", _one(_stored, "read")),
    _counter(
        "memstate_prefetch_kept",
        "Of these, records that were kept.",
        _of(_stored, state="states", page="pages"),
        "kind",
    ),
    _counter("memstate_agreements", "Agreements with other ranks.", _one(_stored, "rounds")),
    _counter("memstate_agreement_waits", "Agreements that this rank had to wait for.", _one(_stored, "waits")),
    # tenants, faults
    _gauge("memstate_tenant_slots", "Slots that a tenant holds.", _tenants("slots"), "tenant"),
    _gauge("memstate_tenant_pages", "KV pages that a tenant holds.", _tenants("pages"), "tenant"),
    _gauge("memstate_tenant_tokens", "Tokens whose KV a tenant holds.", _tenants("tokens"), "tenant"),
    _counter("memstate_injected_faults", "Faults of chaos.", _of(_chaos, **CHAOS), "kind"),
)
