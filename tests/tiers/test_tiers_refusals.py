"""What is refused changes nothing, here or in host memory; salts keep prompts apart; settings and their errors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import FileStore, Prefetch, Tiers
from memstate.tiers.host.pool import RecordPool
from tests.support.build import build
from tests.support.planes import LAYOUT, every_strategy
from tests.support.tiered import KV, NEEDS, T, Tiered, below, everything, settle, whole

pytestmark = pytest.mark.sample

ONE = whole(1)


BOTH = (ONE, T[:16])


@every_strategy
def test_an_admission_that_lacks_slots_changes_nothing(name: str, plain: Backend) -> None:
    at = below(plain, name, *BOTH, pages=12, slots=2 * NEEDS[name] + 1)
    at.admit(ms.Request("held", tokens=[1]))
    before = everything(at)
    with pytest.raises(ms.OutOfSlots) as caught:
        at.mem.admit([ms.Request(n, tokens=[*ONE, n]) for n in range(3)])
    assert caught.value.requested == 3 * NEEDS[name]
    assert everything(at) == before


def test_an_admission_that_lacks_pages_changes_nothing(plain: Backend) -> None:
    """Or rows."""
    at = below(plain, "redirect", *BOTH, pages=12, rows=2)
    before = everything(at)
    for error, requests in (
        (ms.OutOfPages, [ms.Request(0, tokens=[*T[:16], *range(40)])]),  # 14 pages of 12
        (ms.OutOfPages, [ms.Request(0, tokens=[*T[:16], 1]), ms.Request(1, tokens=range(500, 532))]),  # 5 + 8
        (ms.OutOfRows, [ms.Request(n, tokens=[*ONE, n]) for n in range(3)]),
    ):
        with pytest.raises(error):
            at.mem.admit(requests)
        assert everything(at) == before


def test_a_hit_makes_room_for_itself(plain: Backend) -> None:
    """What is cached on the device gives way to what comes up, states and pages, and goes to host memory."""
    at = below(plain, "redirect", *BOTH, slots=2, pages=6)
    at.cache_prompts(whole(5), whole(6, 3))
    settle(at)
    assert (at.mem.free_slots, at.mem.free_pages) == (0, 1)
    row = at.start([*T[:16], 1])
    assert at.mem.info(row).length == 16 and at.keeps() == {tuple(p) for p in (ONE, T[:16], whole(5), whole(6, 3))}
    at.checked([row])


def test_making_room_for_a_hit_does_not_cost_the_hit(plain: Backend) -> None:
    """Host memory is full of it: what the device gives up finds no room there."""
    at = Tiered(plain, slots=1, pages=5, tiers={"write": "back", "host_slots": 1, "host_pages": 4})
    at.cache_prompts(T[:16])
    at.give_up(pages=5)
    at.cache_prompts(whole(5))
    assert at.keeps() == {tuple(T[:16])} and at.mem.free_slots == 0
    row = at.start([*T[:16], 1])
    assert at.mem.info(row).length == 16 and at.tiers.refused == 1 and at.keeps() == {tuple(T[:16])}
    at.checked([row])


class Five:
    """A store that cannot be told of memory."""

    exists = get = put = discard = close = lambda self: None


def test_without_tiers_poll_does_nothing() -> None:
    mem = ms.StateManager(LAYOUT, slots=2, max_requests=2, pages=ms.Pages(size=4), prefix=ms.Prefix())
    mem.admit([ms.Request(0, tokens=ONE)])
    before = mem.stats()
    mem.poll()
    mem.close()
    mem.close()
    assert mem.stats() == before and mem.stats().tiers is None and mem.tiers is None
    with pytest.raises(ms.ConfigurationError, match="tiers="):
        mem.prefetch(ONE)


def test_without_a_storage_there_is_nothing_to_fetch_from(plain: Backend) -> None:
    at = Tiered(plain, slots=2)
    for call in (at.mem.prefetch, at.below.ready, at.below.cancel):
        with pytest.raises(ms.ConfigurationError, match="store="):
            call(ONE)
    assert at.tiers.prefetch is None


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


def test_states_alone_need_no_pages_in_host_memory(tmp_path: Path) -> None:
    mem = manager(0, Tiers("toy", 3, store=FileStore(tmp_path), prefetch=Prefetch(0)))
    stats = mem.stats().tiers
    assert stats and (stats.host_state_records, stats.host_page_records) == (3, 0)
    mem.close()
