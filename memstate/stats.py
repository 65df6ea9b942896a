"""Figures of a running manager, as one typed record. All from the host's mirror: taking them never waits for the
device.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Slots unless said otherwise.

    held_by_live, held_by_lanes, held_by_snapshots: owners by kind; with `free` they add up to `capacity` (slots in hand
    apart).
    snapshots, degraded: boundaries with and without one, since the start. published, dropped, refused: published
    snapshots; refused for want of a holder register. copied_bytes, zeroed_bytes: moved by memstate's own launches.
    uploads, launches, syncs, upload_waits: counts.
    """

    capacity: int
    free: int
    held_by_live: int
    held_by_lanes: int
    held_by_snapshots: int
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
