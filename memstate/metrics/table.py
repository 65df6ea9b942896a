"""The table of figures: every metric that is exported, its name, kind, labels, and where its value comes from.

Prometheus, OpenTelemetry, the dashboard, `memstate top` and docs/metrics.md all follow it. A counter is one since the
start of the manager: `reset` and `recover` set some back to 0, as a new process does. Knows no exporter.
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


def _used(section: Section, all_of: str, free: str) -> Callable[[Reading], Sequence[Sample]]:
    def read(reading: Reading) -> Sequence[Sample]:
        record = section(reading)
        every, left = getattr(record, all_of), getattr(record, free)
        return [(("used",), every - left), (("free",), left)] if every else []

    return read


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
        ("device", "state", tiers.dense_states, tiers.dense_records),
    )
    return [
        sample
        for place, kind, used, records in places if records
        for sample in (((place, kind, "used"), used), ((place, kind, "free"), records - used))
    ]  # fmt: skip


def _flaws(reading: Reading) -> Sequence[Sample]:
    found = _stored(reading)
    return [((flaw,), count) for flaw, count in sorted(found.flaws.items())] if found is not None else []


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

FIGURES: Final[tuple[Figure, ...]] = (
    Figure("memstate_info", "gauge", "1; the labels say what the manager is.", ABOUT, _about),
    Figure(
        "memstate_interrupted",
        "gauge",
        "1 after an exception in the middle of a call, until recover or reset.",
        (),
        _own("interrupted"),
    ),
    Figure(
        "memstate_reading_age_seconds",
        "gauge",
        "Age of these figures; above 0 if the loop left no moment between two calls for this scrape.",
        (),
        _own("age"),
    ),
    # slots, rows, pages
    Figure("memstate_slots", "gauge", "Slots by owner; all owners together are all slots.", ("owner",), _slots),
    Figure(
        "memstate_rows",
        "gauge",
        "Rows of the request table.",
        ("state",),
        lambda reading: [
            (("used",), reading.stats.rows_used),
            (("free",), reading.stats.rows - reading.stats.rows_used),
        ],
    ),
    Figure("memstate_pages", "gauge", "KV pages.", ("state",), _used(_stats, "pages", "pages_free")),
    Figure("memstate_sessions", "gauge", "Open sessions.", (), _one(_stats, "sessions")),
    Figure(
        "memstate_sessions_emptied",
        "counter",
        "Idle sessions that made way or expired.",
        (),
        _one(_stats, "sessions_emptied"),
    ),
    Figure("memstate_claims", "counter", "Slots that were claimed.", (), _one(_stats, "claimed")),
    Figure(
        "memstate_refusals",
        "counter",
        "Admissions, forks and extensions refused for lack of room: back-pressure.",
        ("reason",),
        _of(_stats, slots="short_of_slots", rows="short_of_rows", pages="short_of_pages"),
    ),
    # snapshots
    Figure("memstate_snapshots", "counter", "Boundaries with a snapshot.", (), _one(_stats, "snapshots")),
    Figure(
        "memstate_degradations",
        "counter",
        "Snapshots that were due and were not kept: no slot, no register, or no chunk that ended near the length.",
        ("reason",),
        _of(_stats, no_slot="degraded", no_register="refused", no_chunk="missed"),
    ),
    Figure("memstate_snapshots_published", "counter", "Snapshots that were published.", (), _one(_stats, "published")),
    Figure("memstate_snapshots_dropped", "counter", "Published snapshots that ended.", (), _one(_stats, "dropped")),
    # what memstate asks of the device and the host
    Figure("memstate_packets", "counter", "Packets of ownership changes that were sent.", (), _one(_stats, "packets")),
    Figure("memstate_uploads", "counter", "Asynchronous copies to the device.", (), _one(_stats, "uploads")),
    Figure("memstate_uploaded_bytes", "counter", "Bytes of these copies.", (), _one(_stats, "upload_bytes")),
    Figure(
        "memstate_upload_waits",
        "counter",
        "Times that the host waited for a pinned buffer.",
        (),
        _one(_stats, "upload_waits"),
    ),
    Figure("memstate_launches", "counter", "Launches of memstate.", (), _one(_stats, "launches")),
    Figure("memstate_syncs", "counter", "Times that the host waited for the device.", (), _one(_stats, "syncs")),
    Figure(
        "memstate_moved_bytes",
        "counter",
        "Bytes of states that memstate copied or zeroed on the device.",
        ("how",),
        _of(_stats, copied="copied_bytes", zeroed="zeroed_bytes"),
    ),
    Figure(
        STEP,
        "histogram",
        "Host time that a step takes in calls of the manager; with steps=True only.",
        (),
        lambda reading: [],
    ),
    Figure("memstate_call_seconds", "counter", "Host time by call; with steps=True only.", ("call",), _call_seconds),
    # the prefix cache
    Figure("memstate_prefix_states", "gauge", "Cached states.", (), _one(_prefix, "states")),
    Figure("memstate_prefix_nodes", "gauge", "Nodes of the tree of prefixes.", (), _one(_prefix, "nodes")),
    Figure("memstate_prefix_pages", "gauge", "KV pages in the tree.", (), _one(_prefix, "pages")),
    Figure(
        "memstate_prefix_leased_pages",
        "gauge",
        "Of these, pages that requests or sessions share.",
        (),
        _one(_prefix, "leased_pages"),
    ),
    Figure("memstate_prefix_lookups", "counter", "Requests with tokens.", (), _one(_prefix, "lookups")),
    Figure("memstate_prompt_tokens", "counter", "Tokens of their prompts.", (), _one(_prefix, "prompt_tokens")),
    Figure(
        "memstate_hit_tokens", "counter", "Prompt tokens that were not computed again.", (), _one(_prefix, "hit_tokens")
    ),
    Figure(
        "memstate_lost_tokens",
        "counter",
        "Prompt tokens that were computed; hit and lost add up to all.",
        ("reason",),
        _of(_prefix, no_sharing="lost_no_sharing", evicted="lost_evicted", no_snapshot="lost_no_snapshot"),
    ),
    Figure(
        "memstate_prefix_insertions",
        "counter",
        "States that came to the cache, by what became of them.",
        ("outcome",),
        _of(_prefix, inserted="inserted", duplicate="duplicates", declined="declined", refused="refused"),
    ),
    Figure("memstate_prefix_loads", "counter", "States that came back from below.", (), _one(_prefix, "loaded")),
    Figure(
        "memstate_prefix_evictions", "counter", "Cached states that went, by reason.", ("reason",), _of(_prefix, **GONE)
    ),
    Figure(
        "memstate_prefix_evicted_pages", "counter", "Cached KV pages that went.", (), _one(_prefix, "evicted_pages")
    ),
    # host memory and storage
    Figure("memstate_tier_records", "gauge", "Records below the slots.", ("place", "kind", "state"), _records),
    Figure(
        "memstate_tier_bytes",
        "gauge",
        "Memory that the tiers take.",
        ("memory",),
        _of(_tiers, host="host_bytes", staging="staging_bytes"),
    ),
    Figure(
        "memstate_tier_hit_tokens",
        "counter",
        "Of the hit tokens, those beyond what the device had, by where their state was.",
        ("place",),
        _of(_tiers, device="dense_hit_tokens", host="host_hit_tokens", storage="storage_hit_tokens"),
    ),
    Figure(
        "memstate_tier_copies",
        "counter",
        "States and pages copied between device and host.",
        ("kind", "direction"),
        _copies,
    ),
    Figure("memstate_tier_copied_bytes", "counter", "Bytes of these copies.", ("kind", "direction"), _traffic),
    Figure(
        "memstate_tier_lost_saves",
        "counter",
        "Evicted states that host memory did not get.",
        ("reason",),
        _of(_tiers, no_room="refused", no_staging="unstaged"),
    ),
    Figure(
        "memstate_tier_evictions",
        "counter",
        "Records evicted from host memory.",
        ("kind",),
        _of(_tiers, state="evicted_states", page="evicted_pages"),
    ),
    Figure(
        "memstate_tier_leaked_records",
        "gauge",
        "Host records without an owner; 0, or memstate has a defect.",
        (),
        _one(_tiers, "leaked_records"),
    ),
    Figure(
        "memstate_storage_writes",
        "counter",
        "Records for storage, by what became of them.",
        ("outcome",),
        _of(_tiers, written="written", failed="write_failed", missed="write_missed"),
    ),
    Figure(
        "memstate_storage_writes_pending",
        "gauge",
        "Records that wait for storage or are being written.",
        (),
        _one(_tiers, "writes_pending"),
    ),
    Figure(
        "memstate_storage_failures",
        "counter",
        "Calls for prefetches that storage failed.",
        (),
        _one(_stored, "failures"),
    ),
    Figure(
        "memstate_storage_flaws", "counter", "Records that were not what was asked for, by flaw.", ("flaw",), _flaws
    ),
    Figure("memstate_prefetches_started", "counter", "Prefetches that began.", (), _one(_stored, "started")),
    Figure("memstate_prefetches", "counter", "Prefetches that are over, by end.", ("outcome",), _of(_stored, **ENDS)),
    Figure(
        "memstate_prefetches_late",
        "counter",
        "Requests that were admitted before their prefetch was over.",
        (),
        _one(_stored, "late"),
    ),
    Figure(
        "memstate_prefetches_truncated",
        "counter",
        "Prefetches that were cut to the host memory that was there.",
        (),
        _one(_stored, "truncated"),
    ),
    Figure(
        "memstate_prefetch_truncated_tokens",
        "counter",
        "Tokens that were cut off.",
        (),
        _one(_stored, "truncated_tokens"),
    ),
    Figure(
        "memstate_prefetch_tokens", "counter", "Tokens that prefetches made available.", (), _one(_stored, "tokens")
    ),
    Figure("memstate_prefetches_in_flight", "gauge", "Prefetches under way.", (), _one(_stored, "in_flight")),
    Figure(
        "memstate_prefetch_tokens_in_flight",
        "gauge",
        "Tokens that they are after.",
        (),
        _one(_stored, "in_flight_tokens"),
    ),
    Figure("memstate_prefetch_read", "counter", "Records that came whole.", (), _one(_stored, "read")),
    Figure(
        "memstate_prefetch_kept",
        "counter",
        "Of these, records that were kept.",
        ("kind",),
        _of(_stored, state="states", page="pages"),
    ),
    Figure("memstate_agreements", "counter", "Agreements with other ranks.", (), _one(_stored, "rounds")),
    Figure(
        "memstate_agreement_waits", "counter", "Agreements that this rank had to wait for.", (), _one(_stored, "waits")
    ),
    # tenants, faults
    Figure("memstate_tenant_slots", "gauge", "Slots that a tenant holds.", ("tenant",), _tenants("slots")),
    Figure("memstate_tenant_pages", "gauge", "KV pages that a tenant holds.", ("tenant",), _tenants("pages")),
    Figure("memstate_tenant_tokens", "gauge", "Tokens whose KV a tenant holds.", ("tenant",), _tenants("tokens")),
    Figure("memstate_injected_faults", "counter", "Faults of chaos.", ("kind",), _of(_chaos, **CHAOS)),
)
