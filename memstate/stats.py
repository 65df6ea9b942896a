"""Figures of a running manager, as typed records. The host knows them all: reading never waits for the device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from memstate.absent import Absent
from memstate.sheet import Bar, Sheet, SheetSection, Shown, bar, figures, of_slots, of_tokens, of_use, sheet
from memstate.sizes import format_bytes

LOST: Final = {"no sharing": "lost_no_sharing", "evicted": "lost_evicted", "no snapshot": "lost_no_snapshot"}


@dataclass(frozen=True)
class PrefixStats(Shown):
    """Figures of the prefix cache. The first four count what it holds now, the others events since the start.

    Attributes:
        states: cached states.
        nodes: nodes of the tree.
        pages: KV pages in the tree.
        leased_pages: pages of nodes that rows or sessions share.
        lookups: requests with tokens.
        prompt_tokens: prompt tokens of these requests: the hit tokens and the three `lost_` figures.
        hit_tokens: prompt tokens that need not be computed.
        lost_no_sharing: prompt tokens that the cache has never had, or whose KV is gone.
        lost_evicted: prompt tokens whose state has been evicted.
        lost_no_snapshot: prompt tokens whose KV is cached, but for which no state was ever kept.
        inserted: states that came to the cache.
        duplicates: states that came when the cache had a state of these tokens already.
        declined: states that the policy did not keep.
        refused: states for which no register was free.
        loaded: states that came back from host memory.
        evicted_states: states that left the cache: the sum of the six `gone_` figures.
        evicted_pages: pages that left the cache.
        gone_superseded: states of a row or session that had left a newer state, and states whose KV was forgotten.
        gone_room: states that the policy chose, because slots or registers were short.
        gone_pages: states that went with the KV pages of a leaf, because pages were short.
        gone_limit: states beyond `Prefix(most_states=)`.
        gone_taken: states that moved to the row that matched them: no loss.
        gone_cleared: states that `clear` or `recover` ended.
    """

    states: int = 0
    nodes: int = 0
    pages: int = 0
    leased_pages: int = 0
    lookups: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    lost_no_sharing: int = 0
    lost_evicted: int = 0
    lost_no_snapshot: int = 0
    inserted: int = 0
    duplicates: int = 0
    declined: int = 0
    refused: int = 0
    loaded: int = 0
    evicted_states: int = 0
    evicted_pages: int = 0
    gone_superseded: int = 0
    gone_room: int = 0
    gone_pages: int = 0
    gone_limit: int = 0
    gone_taken: int = 0
    gone_cleared: int = 0

    def prompts(self) -> Bar:
        """Returns a bar of the prompt tokens: hits, and losses by reason."""
        parts = [of_tokens("hit", self.hit_tokens, "hit")]
        parts += [of_tokens(reason, getattr(self, name), reason) for reason, name in LOST.items()]
        return bar(f"{self.prompt_tokens:,} prompt tokens of {self.lookups:,} requests", parts)

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        title = f"PrefixStats({self.states:,} states, {self.hit_tokens:,} of {self.prompt_tokens:,} tokens hit)"
        return sheet(title, [self.prompts()], [figures("figures", self)])


class NoPrefix(Absent):
    """Stands for the figures of a missing prefix cache."""

    _record, _why = PrefixStats, "this manager has no prefix cache: build it with prefix=ms.Prefix()"


NO_PREFIX: Final[Any] = NoPrefix()


@dataclass(frozen=True)
class PrefetchStats(Shown):
    """Figures of prefetches from storage. The first two count those under way now, the others events since the start.

    The eleven figures from `complete` to `lost` count prefetches by how they ended. Their sum is the number of
    prefetches that are over.

    Attributes:
        in_flight: prefetches under way.
        in_flight_tokens: tokens that these prefetches fetch.
        started: all prefetches.
        complete: all agreed records came.
        partial: a part of the agreed records came.
        short: too few tokens were missing to begin.
        limited: other prefetches were fetching too many tokens already.
        missed: storage had too little.
        no_room: host memory had too little room.
        stopped: stopped before any record had come.
        failed: storage failed.
        disagreed: another rank could not fetch.
        cancelled: cancelled by a caller.
        lost: ended because another rank was lost.
        late: requests that were admitted before their prefetch was over.
        truncated: prefetches that were cut to the free host memory.
        truncated_tokens: tokens that were cut off from these prefetches.
        tokens: tokens that need not be computed, thanks to prefetches.
        read: records that came whole.
        pages: pages that were kept.
        states: states that were kept.
        flaws: for each flaw, the number of records that had it.
        failures: calls to storage that failed.
        rounds: agreements with other ranks.
        waits: agreements that this rank had to wait for.
    """

    in_flight: int = 0
    in_flight_tokens: int = 0
    started: int = 0
    complete: int = 0
    partial: int = 0
    short: int = 0
    limited: int = 0
    missed: int = 0
    no_room: int = 0
    stopped: int = 0
    failed: int = 0
    disagreed: int = 0
    cancelled: int = 0
    lost: int = 0
    late: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    tokens: int = 0
    read: int = 0
    pages: int = 0
    states: int = 0
    flaws: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    rounds: int = 0
    waits: int = 0

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        return _of_figures(self)


class NoPrefetch(Absent):
    """Stands for the prefetch figures of tiers without storage."""

    _record, _why = PrefetchStats, "these tiers have no storage to fetch from: build them with ms.Tiers(store=)"


NO_PREFETCH: Final[Any] = NoPrefetch()


@dataclass(frozen=True)
class TierStats(Shown):
    """Figures of host memory and storage: what is held now, and what has moved since the start.

    Attributes:
        host_states: states in host memory now.
        host_state_records: states for which host memory has room.
        host_pages: pages in host memory now.
        host_page_records: pages for which host memory has room.
        host_bytes: bytes of host memory that the tiers take.
        staging_bytes: bytes of device memory that staging takes.
        host_hit_tokens: hit tokens covered by no state on the device, but by a state that was saved to host memory.
        storage_hit_tokens: hit tokens covered by no state on the device, but by a state that a prefetch had brought.
        states_out: states copied from the device to host memory.
        states_in: states copied from host memory to the device.
        pages_out: pages copied from the device to host memory.
        pages_in: pages copied from host memory to the device.
        refused: states for which host memory had no room.
        unstaged: states that were evicted while staging was full, and so not saved.
        evicted_states: states evicted from host memory.
        evicted_pages: pages evicted from host memory.
        written: records written to storage.
        write_failed: records that storage did not take.
        write_missed: records that host memory evicted before they were written.
        writes_pending: records that wait for storage or are being written.
        state_bytes: bytes copied for each state that goes out or comes in.
        page_bytes: bytes copied for each page that goes out or comes in.
        leaked_records: host records without an owner. If it is not 0, memstate has a defect.
        parked: requests that are parked.
        parked_bytes: bytes of their records in host memory, and of those on their way to a store or from there.
        parked_pages: KV pages of them that wait on the device for room in host memory.
        failures: number of failures of storage for each reason: the counts of `store.faults`, and calls that raised.
        store_evicted: records that the store deleted to make room, if the store counts them.
        prefetch: figures of prefetches; without storage `NoPrefetch`, which is falsy.
    """

    host_states: int
    host_state_records: int
    host_pages: int
    host_page_records: int
    host_bytes: int
    staging_bytes: int
    host_hit_tokens: int
    storage_hit_tokens: int
    states_out: int
    states_in: int
    pages_out: int
    pages_in: int
    refused: int
    unstaged: int
    evicted_states: int
    evicted_pages: int
    written: int
    write_failed: int
    write_missed: int
    writes_pending: int
    state_bytes: int
    page_bytes: int
    leaked_records: int
    parked: int
    parked_bytes: int
    parked_pages: int
    failures: Mapping[str, int] = field(default_factory=dict)
    store_evicted: int = 0
    prefetch: PrefetchStats = NO_PREFETCH

    def records(self) -> list[Bar]:
        """Returns a bar of used and free records for states, and one for pages."""
        sizes = {
            "records of states in host memory": (self.host_states, self.host_state_records),
            "records of KV pages in host memory": (self.host_pages, self.host_page_records),
        }
        return [bar(f"{each:,} {what}", of_use(used, each)) for what, (used, each) in sizes.items() if each]

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        sections = [figures("figures", self)]
        if self.prefetch:
            sections.append(figures("prefetches", self.prefetch))
        wrong = [f"{self.leaked_records} host records leaked"] if self.leaked_records else []
        notes = [f"{format_bytes(self.host_bytes)} of host memory, {format_bytes(self.staging_bytes)} of staging."]
        title = f"TierStats({self.host_states} of {self.host_state_records} states in host memory)"
        return sheet(title, self.records(), sections, wrong, notes)


class NoTiers(Absent):
    """Stands for the figures of missing tiers."""

    _record, _why = TierStats, "this manager has no tiers: build it with tiers=ms.Tiers()"


NO_TIERS: Final[Any] = NoTiers()


@dataclass(frozen=True)
class ChaosStats(Shown):
    """Figures of faults that were injected since the start, see `Chaos`. Each fault is one line in the log.

    Attributes:
        claims: steps in which optional claims were refused.
        admissions: admissions and forks that found too few slots.
        store_fails: calls of the store that failed, or gave a wrong answer for one record.
        store_late: calls of the store that were delayed.
        polls: polls that did nothing.
    """

    claims: int = 0
    admissions: int = 0
    store_fails: int = 0
    store_late: int = 0
    polls: int = 0

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        return _of_figures(self)


class NoChaos(Absent):
    """Stands for the figures of a manager without injected faults."""

    _record, _why = ChaosStats, "no faults are injected: call ms.testing.Faults(ms.testing.Chaos()).inject(mem)"


NO_CHAOS: Final[Any] = NoChaos()


@dataclass(frozen=True)
class Stats(Shown):
    """Figures of a manager.

    `held_by_live`, `held_by_lanes`, `held_by_snapshots`, `held_by_sessions` and `free` add up to `capacity`, apart from
    slots that are claimed by id.

    Attributes:
        capacity: all slots but the null slot.
        free: free slots.
        held_by_live: slots of the live states of rows.
        held_by_lanes: slots of snapshots in lanes of rows: not published.
        held_by_snapshots: slots of published snapshots, cached states included.
        held_by_sessions: slots of sessions.
        held_by_marks: slots of states inside the prompts of rows that still run; a part of `held_by_snapshots`.
        rows: rows of the request table.
        rows_used: rows that have a request.
        oldest_row: seconds since the oldest of these requests was admitted or forked; 0 without one.
        idlest_row: the longest time, in seconds, for which a request has had the same length. Lengths are compared only
            when figures are read.
        pages: KV pages.
        pages_free: KV pages that are free.
        sessions: open sessions.
        sessions_emptied: idle sessions that made way or expired, since the start.
        sessions_parted: turns that no state of their session's last answer served, since the start.
        oldest_session: seconds since the oldest session was opened; 0 without one.
        idlest_session: the longest time, in seconds, for which a session has been idle; 0 without an idle one.
        claimed: slots that were claimed, since the start.
        short_of_slots: admissions, forks and extensions refused for lack of slots, since the start: back-pressure.
        short_of_rows: the same, for lack of rows.
        short_of_pages: the same, for lack of KV pages.
        snapshots: boundaries with a snapshot, since the start.
        degraded: boundaries for whose snapshot no slot was free, since the start. At such a boundary,
            LazyPingPong overwrites its older snapshot.
        published: snapshots that were published, since the start.
        dropped: published snapshots that were dropped, since the start.
        refused: snapshots for which no register was free, since the start.
        missed: marks without a state, because no chunk came near their length, since the start; see
            `StateManager.chunk`.
        copied_bytes: bytes of states that memstate's launches copied, since the start.
        zeroed_bytes: bytes of states that memstate's launches zeroed, since the start.
        packets: packets that were sent, since the start. If no recorded changes conflict, at most one per step.
        uploads: asynchronous copies to the device, since the start.
        upload_bytes: bytes of these uploads.
        upload_waits: times that the host waited because the ring of upload buffers was full, since the start.
        launches: launches of all ops together, since the start.
        syncs: times that the host waited for the device, since the start.
        prefix: figures of the prefix cache; `NoPrefix` without one. Such a stand-in is falsy, and reading a figure of
            it raises `ConfigurationError`.
        tiers: figures of host memory and storage; `NoTiers` without tiers.
        chaos: figures of injected faults; `NoChaos` without any.
    """

    capacity: int
    free: int
    held_by_live: int
    held_by_lanes: int
    held_by_snapshots: int
    held_by_sessions: int
    held_by_marks: int
    rows: int
    rows_used: int
    oldest_row: float = field(compare=False)
    idlest_row: float = field(compare=False)
    pages: int
    pages_free: int
    sessions: int
    sessions_emptied: int
    sessions_parted: int
    oldest_session: float = field(compare=False)
    idlest_session: float = field(compare=False)
    claimed: int
    short_of_slots: int
    short_of_rows: int
    short_of_pages: int
    snapshots: int
    degraded: int
    published: int
    dropped: int
    refused: int
    missed: int
    copied_bytes: int
    zeroed_bytes: int
    packets: int
    uploads: int
    upload_bytes: int
    upload_waits: int
    launches: int
    syncs: int
    prefix: PrefixStats = NO_PREFIX
    tiers: TierStats = NO_TIERS
    chaos: ChaosStats = NO_CHAOS

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        cached = min(self.prefix.states, self.held_by_snapshots) if self.prefix else 0
        held = {
            "live": self.held_by_live, "lane": self.held_by_lanes, "snapshot": self.held_by_snapshots - cached,
            "cached": cached, "session": self.held_by_sessions, "free": self.free,
        }  # fmt: skip
        held["by id"] = max(0, self.capacity - sum(held.values()))
        parts = [part._replace(name="snapshot or mark") if part.kind == "snapshot" else part for part in of_slots(held)]
        bars = [bar(f"{self.capacity:,} slots", parts)]
        sections = [figures("counters", self)]
        self.add_parts(bars, sections)
        if self.chaos:
            sections.append(figures("injected faults", self.chaos))
        title = f"Stats({self.free:,} of {self.capacity:,} slots free, {self.rows_used:,} of {self.rows:,} rows used)"
        return sheet(title, bars, sections)

    def add_parts(self, bars: list[Bar], sections: list[SheetSection]) -> None:
        """Adds bars and tables of KV pages, prefix cache and tiers to a sheet of figures or of a manager."""
        if self.pages:
            bars.append(bar(f"{self.pages:,} KV pages", of_use(self.pages - self.pages_free, self.pages)))
        if self.prefix:
            bars.append(self.prefix.prompts())
            sections.append(figures("prefix cache", self.prefix))
        if self.tiers:
            bars += self.tiers.records()
            sections.append(figures("tiers", self.tiers))


def _of_figures(stats: Any) -> Sheet:
    table = figures("figures", stats)
    return sheet(f"{type(stats).__name__}{'' if table.rows else ': all figures are 0'}", sections=[table])
