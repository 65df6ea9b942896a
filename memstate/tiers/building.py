"""The records that a manager's tiers consist of: how many, how large, where. Moves nothing."""

from typing import NamedTuple

from memstate.errors import ConfigurationError
from memstate.requests.page_table import PageTable
from memstate.state.planes import Planes
from memstate.tiers.host.cache import RecordCache
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.tier import Tier
from memstate.tiers.host.transfers import Transfers
from memstate.tiers.keys import fingerprint
from memstate.tiers.records import RecordFormat
from memstate.tiers.settings import Tiers


class Built(NamedTuple):
    """Where states and KV pages go, what their records look like, and the fingerprint in all of them."""

    mark: bytes
    states: Tier
    of_state: RecordFormat
    kv: Tier | None
    of_kv: RecordFormat | None
    dense: Tier | None


def build(settings: Tiers, planes: Planes, pages: PageTable) -> Built:
    """Makes the pools, and what moves records. storage: the device's states. Raises: ConfigurationError."""
    kv, on_device = settings.kv, pages.allocator.pages
    if (kv is not None) != (on_device > 0) or (kv is not None and kv.slots != on_device):
        raise ConfigurationError(
            f"tiers with kv={kv} for {on_device} KV pages: give the planes of all pages, or manage pages elsewhere "
            "(pages=0)"
        )
    packing = Packing(planes, settings.int8)
    mark = fingerprint(
        settings.model, packing.layout, kv.layout if kv else None, pages.page_size, settings.rank, settings.ranks
    )
    of_state = RecordFormat("state", packing.layout, mark)
    of_kv = RecordFormat("kv", kv.layout, mark) if kv else None
    slots, host_pages = sizes(settings, planes.slots, of_state, on_device, of_kv)
    pinned, groups = planes.device.type == "cuda", settings.layer_groups

    def tier(packing: Packing, form: RecordFormat, records: int, staging: int, groups: int) -> Tier:
        pool = RecordPool(records, form.nbytes, pinned=pinned)
        transfers = Transfers(planes, packing, pool, form.header_bytes, staging, groups)
        return Tier(RecordCache(pool, int(records * settings.reserve)), transfers)

    states, of_pages, dense = tier(packing, of_state, slots, settings.staging, groups), None, None
    if kv is not None and of_kv is not None:
        staged = max(settings.staging * packing.nbytes // of_kv.body_bytes, min(settings.staging, 1))
        of_page = Packing(kv)
        of_page.backend = planes.backend  # which counts what the manager launches
        of_pages = tier(of_page, of_kv, host_pages, staged, 1)  # parts of pages would be thousands of copies
    if settings.dense_slots:
        pool = RecordPool(settings.dense_slots, packing.nbytes, device=planes.device)
        dense = Tier(RecordCache(pool), Transfers(planes, packing, pool, 0, 0, groups))
    return Built(mark, states, of_state, of_pages, of_kv, dense)


def sizes(settings: Tiers, slots: int, state: RecordFormat, pages: int, kv: RecordFormat | None) -> tuple[int, int]:
    """Host records for states and for KV pages. slots, pages: of the device. Raises: ConfigurationError."""
    page_bytes = kv.nbytes if kv else 0
    ratio = settings.host_ratio
    if settings.host_bytes is not None:
        ratio = settings.host_bytes / (slots * state.nbytes + pages * page_bytes)
    if ratio is None:
        assert settings.host_slots is not None
        ratio = settings.host_slots / slots
    states = int(slots * ratio + 1e-9)
    of_kv = int(pages * ratio + 1e-9) if settings.host_pages is None else settings.host_pages
    if states < 1 or (kv and of_kv < 1):
        raise ConfigurationError(
            f"a host tier of {states} states ({state.nbytes} bytes each) and {of_kv} KV pages ({page_bytes} bytes "
            f"each) for {slots} slots and {pages} pages: it needs at least one of each"
        )
    return states, of_kv if kv else 0
