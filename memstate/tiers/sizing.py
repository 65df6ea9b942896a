"""Computes the bytes that tiers will allocate, on the device and in host memory. It allocates nothing."""

from typing import NamedTuple

from memstate.state.layout import StateLayout
from memstate.tiers.host.packing import in_records
from memstate.tiers.host.transfers import device_bytes
from memstate.tiers.records import DIGEST_BYTES, Kind, RecordFormat

KV_STAGING = 2**25  # least bytes of staging for pages, per staged state: if states are small, most bytes are pages


def pages_in_proportion(host_slots: int, slots: int, pages: int) -> int:
    """Returns how many KV pages host memory gets: in proportion to its slots, as many as on the device."""
    return max(1, host_slots * pages // slots)


def staged_pages(staging: int, state: int, page: int, host_pages: int) -> int:
    """Returns for how many KV pages each of the staging buffers for pages on the device has room.

    Args:
        staging: States for which each staging buffer for states has room.
        state: Bytes of a state in a record.
        page: Bytes of a page in a record.
        host_pages: KV pages for which host memory has room.
    """
    staged = staging * max(state, KV_STAGING) // page
    return max(min(staged, host_pages), 1)


class TierBytes(NamedTuple):
    """Bytes of tiers without int8 planes or a store.

    Attributes:
        state_record: Bytes of the record of a state, header included.
        page_record: Bytes of the record of a KV page, header included; 0 if the caller manages KV.
        host: Bytes of all records in host memory.
        device: Bytes of staging buffers, tables and upload buffers on the device.
    """

    state_record: int
    page_record: int
    host: int
    device: int


def tier_bytes(
    layout: StateLayout, kv: StateLayout | None, *, host_slots: int, host_pages: int, staging: int
) -> TierBytes:
    """Returns the bytes that tiers take.

    Args:
        layout: Layout of a state.
        kv: Layout of a KV page as if it were a slot. None if the caller manages KV.
        host_slots: States for which host memory has room.
        host_pages: KV pages for which host memory has room.
        staging: States for which each of the two staging buffers on the device has room.
    """
    body = in_records(layout, {})
    state = _record("state", body)
    device = device_bytes(layout, state, staging)
    if kv is None:
        return TierBytes(state, 0, host_slots * state, device)
    page, one = _record("kv", kv), in_records(kv, {}).bytes_per_slot
    device += device_bytes(kv, page, staged_pages(staging, body.bytes_per_slot, one, host_pages))
    return TierBytes(state, page, host_slots * state + host_pages * page, device)


def _record(kind: Kind, layout: StateLayout) -> int:
    return RecordFormat(kind, layout, bytes(DIGEST_BYTES)).nbytes
