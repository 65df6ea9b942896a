"""Figures of a running manager, as one typed record. All from the host's mirror: taking them never waits for the
device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PrefixStats:
    """The prefix cache: what it holds now, and since the start what requests found, and what came and went.

    states, nodes, pages: held; leased_pages: of nodes that rows or sessions share. lookups: requests with tokens;
    prompt_tokens are theirs, hit_tokens need not be computed, and the three `lost_` add up to the rest: nobody has
    computed them (or their KV is gone), a state was there and given up, KV is there and never was a state.
    inserted: states; duplicates: came when one was there already; declined: by the policy; refused: for want of a
    holder register. loaded: came back from host memory. evicted_states, evicted_pages: given up, the former also with a
    leaf's pages.
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


@dataclass(frozen=True)
class TierStats:
    """Host memory and storage: what is held now, and since the start what moved.

    dense_states of dense_records: in dense records on the device. host_states of host_state_records, host_pages of
    host_page_records: in use. host_bytes, staging_bytes: memory of the host and of the device. dense_hit_tokens,
    host_hit_tokens, storage_hit_tokens: of prompts, beyond what the tree had, by where the state was found; a
    prefetched one counts as storage's. states_out, states_in, pages_out, pages_in: copied between device and host
    memory. refused: states that found no room in host memory. evicted_states, evicted_pages: of host memory. written,
    write_failed, write_missed: records to storage; missed ones were evicted before their turn. leaked_records: 0, or
    something is wrong. prefetch: of storage, where there is one.
    """

    dense_states: int
    dense_records: int
    host_states: int
    host_state_records: int
    host_pages: int
    host_page_records: int
    host_bytes: int
    staging_bytes: int
    dense_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    states_out: int
    states_in: int
    pages_out: int
    pages_in: int
    refused: int
    evicted_states: int
    evicted_pages: int
    written: int
    write_failed: int
    write_missed: int
    leaked_records: int
    prefetch: "PrefetchStats | None" = None


@dataclass(frozen=True)
class Stats:
    """Slots unless said otherwise.

    held_by_live, held_by_lanes, held_by_snapshots (cached ones too), held_by_sessions: owners by kind; with `free`
    they add up to `capacity` (slots in hand apart).
    snapshots, degraded: boundaries with and without one, since the start. published, dropped, refused: published
    snapshots; refused for want of a holder register. copied_bytes, zeroed_bytes: moved by memstate's own launches.
    packets: of recorded changes, sent: at most one a scheduler step where no two of them conflict. uploads, launches,
    syncs, upload_waits: counts. prefix: the prefix cache, where there is one.
    """

    capacity: int
    free: int
    held_by_live: int
    held_by_lanes: int
    held_by_snapshots: int
    held_by_sessions: int
    rows: int
    rows_used: int
    pages: int
    pages_free: int
    snapshots: int
    degraded: int
    published: int
    dropped: int
    refused: int
    copied_bytes: int
    zeroed_bytes: int
    packets: int
    uploads: int
    upload_bytes: int
    upload_waits: int
    launches: int
    syncs: int
    prefix: PrefixStats | None = None
    tiers: TierStats | None = None


@dataclass(frozen=True)
class PrefetchStats:
    """Prefetches from storage: what is in flight, and since the start how they ended.

    in_flight: prefetches; in_flight_tokens: that they are after. started: all of them; the next eleven add up to those
    that are over: all that was agreed on has come, a part of it; too little was missing, others were after too many
    tokens, storage had too little, host memory had, stopped before anything had come, storage failed, another rank
    could not; cancelled, lost with another rank.
    truncated, truncated_tokens: cut to the host memory that there was. tokens: that need not be computed. read: records
    that came whole; pages, states: those that were kept. flaws: records that were not what was asked for, by what was
    wrong. failures: calls that storage failed. rounds, waits: agreements with other ranks, and those that this
    one had to wait for.
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
