"""Says what tiers will allocate, on the device and in host memory. It computes with whole numbers only."""

from typing import NamedTuple

from memstate.state.layout import StateLayout
from memstate.tiers.host.packing import in_records
from memstate.tiers.host.transfers import device_bytes
from memstate.tiers.records import DIGEST_BYTES, Kind, RecordFormat

KV_STAGING = 2**25  # bytes at least for each staged state: where states are small, pages are most of what moves


def pages_in_proportion(host_slots: int, slots: int, pages: int) -> int:
    """Returns the KV pages of host memory in the device's proportion of pages to slots."""
    return max(1, host_slots * pages // slots)


def staged_pages(staging: int, state: int, page: int, host_pages: int) -> int:
    """Returns the KV pages that fit each staging buffer on the device.

    Args:
        staging: States that fit each of the buffers for states.
        state: Bytes of a state in a record.
        page: Bytes of a page in a record.
        host_pages: KV pages that host memory has room for.
    """
    staged = staging * max(state, KV_STAGING) // page
    return max(min(staged, host_pages), 1)


class TierBytes(NamedTuple):
    """Bytes of tiers without int8 planes or a store.

    Attributes:
        state_record: Of a state in host memory, header included.
        page_record: Of a KV page in host memory, header included; 0 where KV is the caller's.
        host: Of all records.
        device: Of staging buffers, tables and upload buffers on the device.
    """

    state_record: int
    page_record: int
    host: int
    device: int


def tier_bytes(
    layout: StateLayout, kv: StateLayout | None, *, host_slots: int, host_pages: int, staging: int
) -> TierBytes:
    """Returns the bytes of tiers.

    Args:
        layout: Layout of a state.
        kv: Layout of a KV page as if it were a slot. None where KV is the caller's.
        host_slots: States that host memory has room for.
        host_pages: KV pages that host memory has room for.
        staging: States that fit each of the two staging buffers on the device.
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
