"""Figures of a running manager, as one typed record. All from the host's mirror: taking them never waits for the
device.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefixStats:
    """The prefix cache: what it holds now, and since the start what requests found, and what came and went.

    states, nodes, pages: held; leased_pages: of nodes that rows or sessions share. lookups: requests with tokens;
    prompt_tokens are theirs, hit_tokens need not be computed, and the three `lost_` add up to the rest: nobody has
    computed them (or their KV is gone), a state was there and given up, KV is there and never was a state.
    inserted: states; duplicates: came when one was there already; declined: by the policy; refused: for want of a
    holder register. evicted_states, evicted_pages: given up, the former also with a leaf's pages.
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
    evicted_states: int = 0
    evicted_pages: int = 0


@dataclass(frozen=True)
class Stats:
    """Slots unless said otherwise.

    held_by_live, held_by_lanes, held_by_snapshots (cached ones too), held_by_sessions: owners by kind; with `free`
    they add up to `capacity` (slots in hand apart).
    snapshots, degraded: boundaries with and without one, since the start. published, dropped, refused: published
    snapshots; refused for want of a holder register. copied_bytes, zeroed_bytes: moved by memstate's own launches.
    uploads, launches, syncs, upload_waits: counts. prefix: the prefix cache, where there is one.
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
    submits: int
    uploads: int
    upload_bytes: int
    upload_waits: int
    launches: int
    syncs: int
    prefix: PrefixStats | None = None
