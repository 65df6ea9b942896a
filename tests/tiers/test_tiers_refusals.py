"""Refused calls change nothing, on the device or in host memory; wrong settings of tiers are refused."""

from collections.abc import Callable

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import Prefetch, Tiers
from memstate.tiers.host.pool import RecordPool
from tests.support.build import build
from tests.support.planes import LAYOUT
from tests.support.tiered_small import KV, tiered, whole

pytestmark = pytest.mark.sample

ONE = whole(1)


class Five:
    """A store without `register`."""

    exists = get = put = discard = close = lambda self: None


def test_without_tiers_poll_does_nothing() -> None:
    mem = ms.StateManager(LAYOUT, slots=2, max_requests=2, pages=ms.Pages(size=4), prefix=ms.Prefix())
    mem.admit([ms.Request(0, tokens=ONE)])
    before = mem.stats()
    mem.poll()
    mem.close()
    mem.close()
    assert mem.stats() == before and not mem.stats().tiers and mem.tiers is None
    with pytest.raises(ms.ConfigurationError, match="tiers="):
        mem.prefetch(ONE)


def test_without_a_storage_there_is_nothing_to_fetch_from() -> None:
    mem = tiered()
    for call in (mem.prefetch, mem.tiers.ready, mem.tiers.cancel):
        with pytest.raises(ms.ConfigurationError, match="store="):
            call(ONE)
    figures = mem.stats().tiers
    assert figures and not figures.prefetch
    with pytest.raises(ms.ConfigurationError, match=r"in_flight: .* ms\.Tiers\(store=\)"):
        _ = figures.prefetch.in_flight


WHOLE_NUMBERS = [("host_slots", None), ("host_slots", 0), ("host_slots", 1.5), ("host_pages", True), ("host_pages", 0),
                 ("threads", 0), ("ranks", 0), ("staging", 0)]  # fmt: skip
WRONG: list[tuple[dict[str, object], str]] = [
    *(({name: value}, "whole number from 1 to") for name, value in WHOLE_NUMBERS),
    ({"ahead": -1}, "whole number from 0 to"),
    *(({"reserve": value}, "share from 0") for value in (1, -0.1, "none")),
    ({"model": ""}, "names the weights"), ({"model": 3}, "names the weights"),
    ({"write": "never"}, "through, selective, back"), ({"rank": 1}, "ranks count from 0"),
    ({"ranks": 2}, "torch.distributed group"), ({"group": object()}, "torch.distributed group"),
    ({"kv": KV}, "expected Planes"), ({"prefetch": None}, "a Prefetch"),
    ({"store": "file"}, "store='file': expected a store, .* with register, exists, get, put, discard, close"),
    ({"store": ms.FileStore}, "expected a store"), ({"store": Five()}, "expected a store"),
    ({"int8": ["ssm"]}, "int8=.'ssm'.*: expected axes by plane"), ({"executor": 3}, "executor=3"),
    ({"host_slots": 10**12}, "host_slots=1000000000000: expected a whole number from 1 to 2147483647"),
    ({"host_pages": 10}, "host_pages=10 without kv"), ({"clock": 3}, "clock=3"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=[",".join(map(str, wrong)) for wrong, _ in WRONG])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ms.ConfigurationError, match=says):
        Tiers(**({"model": "toy", "host_slots": 4} | wrong))  # type: ignore[arg-type]


def manager(pages: int = 8, tiers: object = None, layout: StateLayout = LAYOUT, **more: object) -> ms.StateManager:
    usual = {"slots": 4, "max_requests": 2, "prefix": ms.Prefix(), "pages": pages, "page_size": 4}
    usual |= {"pages_per_row": 4 if pages else 0}
    return build(layout, **(usual | more), tiers=tiers)  # type: ignore[arg-type]


def kv(pages: int = 8, layout: StateLayout = KV) -> Planes:
    return Planes(layout, pages, Backend("reference"))


EMPTY = StateLayout((Plane("empty", (0,), torch.float32),), layers=2)
MISFITS: dict[str, tuple[Callable[[], object], str]] = {
    "no tiers": (lambda: manager(tiers="host"), "Tiers"),
    "no prefix cache": (lambda: manager(tiers=Tiers("toy", 4, kv=kv()), prefix=None), "prefix=ms.Prefix"),
    "pages without planes": (lambda: manager(tiers=Tiers("toy", 4)), "8 KV pages"),
    "planes without pages": (lambda: manager(0, Tiers("toy", 4, kv=kv())), "0 KV pages"),
    "too few pages": (lambda: manager(tiers=Tiers("toy", 4, kv=kv(7))), "8 KV pages"),
    "pages of 0 bytes": (lambda: Tiers("toy", 2, kv=kv(layout=EMPTY)), "pages have 0 bytes"),
    "states of 0 bytes": (lambda: manager(0, Tiers("toy", 2), EMPTY), "states have 0 bytes"),
    "memory that is not there": (
        lambda: RecordPool(10**12, 10**6), r"1000000000000 records of 1000000 bytes are .*: ask for less"),
    "less than the threshold": (lambda: Prefetch(threshold=256, limit=10), "limit=10 below threshold=256"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISFITS)
def test_tiers_that_do_not_fit_the_manager_are_refused(what: str) -> None:
    make, says = MISFITS[what]
    with pytest.raises(ms.ConfigurationError, match=says):
        make()


SIZES = [({"host_slots": 6}, (6, 12)), ({"host_slots": 6, "host_pages": 5}, (6, 5)), ({"host_slots": 1}, (1, 2))]


@pytest.mark.parametrize(("size", "records"), SIZES, ids=str)
def test_sizes_of_the_host_tier(size: dict[str, object], records: tuple[int, int]) -> None:
    stats = manager(tiers=Tiers("toy", kv=kv(), **size)).stats().tiers  # type: ignore[arg-type]
    assert stats and (stats.host_state_records, stats.host_page_records) == records
