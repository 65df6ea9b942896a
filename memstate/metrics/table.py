"""The table of figures: every metric that is exported, with its name, kind, labels, and the source of its value.

Prometheus, the dashboard, `memstate top` and docs/metrics.md are all made from this table. Counters count from the
start of the manager, and never become smaller. Knows no exporter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from memstate.metrics.reading import Reading
from memstate.tiers.prefetch.fetch import End

Kind = Literal["gauge", "counter", "histogram"]
Sample = tuple[tuple[str, ...], float]
Read = Callable[[Reading], Sequence[Sample]]
COMMON: Final = ("manager", "rank")  # labels of every figure
STEP: Final = "memstate_step_host_seconds"


@dataclass(frozen=True)
class Figure:
    """One metric.

    Attributes:
        name: name of the metric; for a counter, without the ending `_total`.
        kind: gauge, counter or histogram.
        help: text that says what the metric counts.
        labels: names of the labels of the metric, besides `COMMON`.
        read: function that returns the samples for a reading: pairs (values of the labels, value). There are no samples
            if the manager does not have this part.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Read


def _figure(
    kind: Kind, name: str, says: str, source: str | Read = "", /, *labels: str, **fields: Mapping[str, str]
) -> Figure:
    """Makes a figure.

    Args:
        kind: gauge, counter or histogram.
        name: name of the metric without the prefix `memstate_`.
        says: text that says what the metric counts.
        source: the path of a field of `Stats`, such as `tiers.prefetch.late`; or a function that returns the samples.
            If a field is a mapping, each of its entries is a sample.
        *labels: names of the labels of the metric.
        **fields: instead of `source`, the name of the one label, and for each of its values the path of a field.
    """
    if callable(source):
        return Figure(f"memstate_{name}", kind, says, labels, source)
    paths: dict[tuple[str, ...], str] = {
        (value,): path for values in fields.values() for value, path in values.items()
    } or {(): source}

    def read(reading: Reading) -> Sequence[Sample]:
        samples: list[Sample] = []
        for values, path in paths.items():
            value = _field(reading.stats, path)
            if isinstance(value, Mapping):
                samples += [((entry,), count) for entry, count in sorted(value.items())]
            elif value is not None:
                samples.append((values, value))
        return samples

    return Figure(f"memstate_{name}", kind, says, (*labels, *fields), read)


def _field(record: Any, path: str) -> Any:
    """Returns the field at a path of a record; None if a record on the path is missing."""
    for name in path.split("."):
        record = getattr(record, name) if record else None
    return record


_gauge, _counter = partial(_figure, "gauge"), partial(_figure, "counter")


def _slots(reading: Reading) -> Sequence[Sample]:
    """Returns the number of slots of each kind of owner. The sum is the capacity."""
    stats = reading.stats
    cached = stats.prefix.states if stats.prefix else 0
    held = {
        "live": stats.held_by_live, "lane": stats.held_by_lanes, "mark": stats.held_by_marks, "cached": cached,
        "session": stats.held_by_sessions, "snapshot": stats.held_by_snapshots - cached - stats.held_by_marks,
        "free": stats.free,
    }  # fmt: skip
    held["by_id"] = max(0, stats.capacity - sum(held.values()))
    return [((owner,), count) for owner, count in held.items()]


def _used(used: int, whole: int, *labels: str) -> list[Sample]:
    return [((*labels, "used"), used), ((*labels, "free"), whole - used)] if whole else []


def _records(reading: Reading) -> Sequence[Sample]:
    if not (tiers := reading.stats.tiers):
        return []
    states = _used(tiers.host_states, tiers.host_state_records, "host", "state")
    return [*states, *_used(tiers.host_pages, tiers.host_page_records, "host", "page")]


def _copies(reading: Reading, in_bytes: bool = False) -> Sequence[Sample]:
    if not (tiers := reading.stats.tiers):
        return []
    state, page = (tiers.state_bytes, tiers.page_bytes) if in_bytes else (1, 1)
    return [
        (("state", "out"), tiers.states_out * state), (("state", "in"), tiers.states_in * state),
        (("page", "out"), tiers.pages_out * page), (("page", "in"), tiers.pages_in * page),
    ]  # fmt: skip


def _tenants(what: str) -> Read:
    return lambda reading: [((tenant,), getattr(held, what)) for tenant, held in reading.tenants.items()]


ABOUT: Final = ("version", "strategy", "backend", "device", "slot_bytes")
CHAOS: Final = ("claims", "admissions", "store_fails", "store_late", "polls")
GONE: Final = ("superseded", "room", "pages", "limit", "taken", "cleared")

FIGURES: Final[tuple[Figure, ...]] = (
    _gauge(
        "info",
        "1; the labels say what the manager is.",
        lambda reading: [(tuple(reading.about[name] for name in ABOUT), 1)],
        *ABOUT,
    ),
    _gauge(
        "interrupted",
        "1 after an exception in the middle of a call, until recover or reset.",
        lambda reading: [((), float(reading.interrupted))],
    ),
    _gauge(
        "reading_age_seconds",
        "Age of these figures; above 0 if the loop left no moment between two calls for this scrape.",
        lambda reading: [((), reading.age)],
    ),
    # slots, rows, pages
    _gauge("slots", "Slots by owner; all owners together are all slots.", _slots, "owner"),
    _gauge("rows", "Rows of the request table.", lambda at: _used(at.stats.rows_used, at.stats.rows), "state"),
    _gauge("row_age_seconds", "Since the oldest running request was admitted.", "oldest_row"),
    _gauge(
        "row_idle_seconds",
        "Since the length of a running request last changed, the longest of all, as scrapes saw it.",
        "idlest_row",
    ),
    _gauge("pages", "KV pages.", lambda at: _used(at.stats.pages - at.stats.pages_free, at.stats.pages), "state"),
    _gauge("sessions", "Open sessions.", "sessions"),
    _gauge("session_age_seconds", "Since the oldest session was opened.", "oldest_session"),
    _gauge("session_idle_seconds", "That a session is idle, the longest of all.", "idlest_session"),
    _counter("sessions_emptied", "Idle sessions that made way or expired.", "sessions_emptied"),
    _counter("sessions_parted", "Turns that no state of their session's last answer served.", "sessions_parted"),
    _counter("claims", "Slots that were claimed.", "claimed"),
    _counter(
        "refusals",
        "Admissions, forks and extensions refused for lack of room: back-pressure.",
        reason={"slots": "short_of_slots", "rows": "short_of_rows", "pages": "short_of_pages"},
    ),
    # snapshots
    _counter("snapshots", "Boundaries with a snapshot.", "snapshots"),
    _counter(
        "degradations",
        "Snapshots that were due and were not kept: no slot, no register, or no chunk that ended near the length.",
        reason={"no_slot": "degraded", "no_register": "refused", "no_chunk": "missed"},
    ),
    _counter("snapshots_published", "Snapshots that were published.", "published"),
    _counter("snapshots_dropped", "Published snapshots that ended.", "dropped"),
    # packets, copies and launches; host time of calls
    _counter("packets", "Packets of ownership changes that were sent.", "packets"),
    _counter("uploads", "Asynchronous copies to the device.", "uploads"),
    _counter("uploaded_bytes", "Bytes of these copies.", "upload_bytes"),
    _counter("upload_waits", "Times that the host waited for a pinned buffer.", "upload_waits"),
    _counter("launches", "Launches of memstate.", "launches"),
    _counter("syncs", "Times that the host waited for the device.", "syncs"),
    _counter(
        "moved_bytes",
        "Bytes of states that memstate copied or zeroed on the device.",
        how={"copied": "copied_bytes", "zeroed": "zeroed_bytes"},
    ),
    Figure(
        STEP,
        "histogram",
        "Host time that a step takes in calls of the manager; with steps=True only.",
        (),
        lambda _: [],
    ),
    _counter(
        "call_seconds",
        "Host time by call; with steps=True only.",
        lambda reading: [((call,), took) for call, took in reading.steps.seconds.items()] if reading.steps else [],
        "call",
    ),
    # the prefix cache
    _gauge("prefix_states", "Cached states.", "prefix.states"),
    _gauge("prefix_nodes", "Nodes of the tree of prefixes.", "prefix.nodes"),
    _gauge("prefix_pages", "KV pages in the tree.", "prefix.pages"),
    _gauge("prefix_leased_pages", "Of these, pages that requests or sessions share.", "prefix.leased_pages"),
    _counter("prefix_lookups", "Requests with tokens.", "prefix.lookups"),
    _counter("prompt_tokens", "Tokens of their prompts.", "prefix.prompt_tokens"),
    _counter("hit_tokens", "Prompt tokens that were not computed again.", "prefix.hit_tokens"),
    _counter(
        "lost_tokens",
        "Prompt tokens that were computed; hit and lost add up to all.",
        reason={why: f"prefix.lost_{why}" for why in ("no_sharing", "evicted", "no_snapshot")},
    ),
    _counter(
        "prefix_insertions",
        "States that came to the cache, by what became of them.",
        outcome={
            "inserted": "prefix.inserted",
            "duplicate": "prefix.duplicates",
            "declined": "prefix.declined",
            "refused": "prefix.refused",
        },
    ),
    _counter("prefix_loads", "States that came back from below.", "prefix.loaded"),
    _counter(
        "prefix_evictions", "Cached states that went, by reason.", reason={why: f"prefix.gone_{why}" for why in GONE}
    ),
    _counter("prefix_evicted_pages", "Cached KV pages that went.", "prefix.evicted_pages"),
    # host memory and storage
    _gauge("tier_records", "Records below the slots.", _records, "place", "kind", "state"),
    _gauge(
        "tier_bytes",
        "Memory that the tiers take.",
        memory={"host": "tiers.host_bytes", "staging": "tiers.staging_bytes"},
    ),
    _counter(
        "tier_hit_tokens",
        "Of the hit tokens, those beyond what the device had, by where their state was.",
        place={"host": "tiers.host_hit_tokens", "storage": "tiers.storage_hit_tokens"},
    ),
    _counter("tier_copies", "States and pages copied between device and host.", _copies, "kind", "direction"),
    _counter("tier_copied_bytes", "Bytes of these copies.", lambda at: _copies(at, True), "kind", "direction"),
    _counter(
        "tier_lost_saves",
        "Evicted states that host memory did not get.",
        reason={"no_room": "tiers.refused", "no_staging": "tiers.unstaged"},
    ),
    _counter(
        "tier_evictions",
        "Records evicted from host memory.",
        kind={"state": "tiers.evicted_states", "page": "tiers.evicted_pages"},
    ),
    _gauge(
        "tier_leaked_records", "Host records without an owner; 0, or memstate has a defect.", "tiers.leaked_records"
    ),
    _gauge("parked_requests", "Requests that are parked.", "tiers.parked"),
    _gauge("parked_bytes", "Bytes of them in host memory.", "tiers.parked_bytes"),
    _gauge("parked_pages", "KV pages of them that wait on the device.", "tiers.parked_pages"),
    _counter(
        "storage_writes",
        "Records for storage, by what became of them.",
        outcome={"written": "tiers.written", "failed": "tiers.write_failed", "missed": "tiers.write_missed"},
    ),
    _gauge("storage_writes_pending", "Records that wait for storage or are being written.", "tiers.writes_pending"),
    _counter("storage_failures", "What storage could not do, by reason.", "tiers.failures", "reason"),
    _counter("storage_evictions", "Records that the store deleted to make room.", "tiers.store_evicted"),
    _counter("prefetch_failures", "Calls for prefetches that raised.", "tiers.prefetch.failures"),
    _counter("storage_flaws", "Records that were not what was asked for, by flaw.", "tiers.prefetch.flaws", "flaw"),
    _counter("prefetches_started", "Prefetches that began.", "tiers.prefetch.started"),
    _counter(
        "prefetches",
        "Prefetches that are over, by end.",
        outcome={end.value: f"tiers.prefetch.{end.value}" for end in End},
    ),
    _counter("prefetches_late", "Requests that were admitted before their prefetch was over.", "tiers.prefetch.late"),
    _counter(
        "prefetches_truncated",
        "Prefetches that were cut to the host memory that was there.",
        "tiers.prefetch.truncated",
    ),
    _counter("prefetch_truncated_tokens", "Tokens that were cut off.", "tiers.prefetch.truncated_tokens"),
    _counter("prefetch_tokens", "Tokens that prefetches made available.", "tiers.prefetch.tokens"),
    _gauge("prefetches_in_flight", "Prefetches under way.", "tiers.prefetch.in_flight"),
    _gauge("prefetch_tokens_in_flight", "Tokens that they are after.", "tiers.prefetch.in_flight_tokens"),
    _counter("prefetch_read", "Records that came whole.", "tiers.prefetch.read"),
    _counter(
        "prefetch_kept",
        "Of these, records that were kept.",
        kind={"state": "tiers.prefetch.states", "page": "tiers.prefetch.pages"},
    ),
    _counter("agreements", "Agreements with other ranks.", "tiers.prefetch.rounds"),
    _counter("agreement_waits", "Agreements that this rank had to wait for.", "tiers.prefetch.waits"),
    # tenants, faults
    _gauge("tenant_slots", "Slots that a tenant holds.", _tenants("slots"), "tenant"),
    _gauge("tenant_pages", "KV pages that a tenant holds.", _tenants("pages"), "tenant"),
    _gauge("tenant_tokens", "Tokens whose KV a tenant holds.", _tenants("tokens"), "tenant"),
    _counter("injected_faults", "Faults of chaos.", kind={name: f"chaos.{name}" for name in CHAOS}),
)
