"""What is refused changes nothing, here or in host memory; salts keep prompts apart; settings and their errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes
from memstate.tiers import FileStore, Prefetch, Tiers
from tests.support.build import build
from tests.support.planes import LAYOUT, every_strategy
from tests.support.tiered import KV, NEEDS, T, Tiered, everything, settle, whole

pytest_plugins = ["tests.support.tiered_fixtures"]

ONE = whole(1)


def below(backend: Backend, name: str = "redirect", pages: int = 12, **more: object) -> Tiered:
    at = Tiered(backend, name, **({"slots": 12, "pages": pages} | more))  # type: ignore[arg-type]
    at.cache_prompts(ONE, T[:16])
    settle(at)
    at.give_up(pages=pages)
    at.look(idle=True)
    return at


@every_strategy
def test_an_admission_that_lacks_slots_changes_nothing(name: str, plain: Backend) -> None:
    at = below(plain, name, slots=2 * NEEDS[name] + 1)
    held = at.admit(ms.Request("held", tokens=[1]))
    before = everything(at)
    with pytest.raises(ms.OutOfSlots) as caught:
        at.mem.admit([ms.Request(n, tokens=[*ONE, n]) for n in range(3)])
    assert caught.value.requested == 3 * NEEDS[name]
    assert everything(at) == before
    at.look()
    at.mem.abort(held)
    settle(at)
    at.empty()


def test_an_admission_that_lacks_pages_changes_nothing(plain: Backend) -> None:
    at = below(plain)
    before = everything(at)
    for requests in (
        [ms.Request(0, tokens=[*T[:16], *range(40)])],  # 14 pages of 12
        [ms.Request(0, tokens=[*T[:16], 1]), ms.Request(1, tokens=range(500, 532))],  # 5 + 8
    ):
        with pytest.raises(ms.OutOfPages):
            at.mem.admit(requests)
        assert everything(at) == before
    at.look(idle=True)
    at.empty()


def test_an_admission_that_lacks_rows_changes_nothing(plain: Backend) -> None:
    at = below(plain, rows=2)
    before = everything(at)
    with pytest.raises(ms.OutOfRows):
        at.mem.admit([ms.Request(n, tokens=[*ONE, n]) for n in range(3)])
    assert everything(at) == before
    at.empty()


@pytest.mark.parametrize("bad", [{"snapshot_at": 3}, {"length": -1}, {"resume": "x"}, {"session": "x"}, {"salt": []}])
def test_an_admission_that_makes_no_sense_changes_nothing(bad: dict[str, object], plain: Backend) -> None:
    at = below(plain)
    before = everything(at)
    with pytest.raises(ms.InvalidArgument):
        at.mem.admit([ms.Request(0, tokens=[*ONE, 1]), ms.Request(1, tokens=[*T[:16], 1], **bad)])  # type: ignore
    assert everything(at) == before
    at.empty()


def test_where_only_the_admission_without_the_hit_fits_it_is_taken(plain: Backend) -> None:
    """Two start from one state: three slots with it, two without."""
    at = below(plain, slots=2)
    requests = [ms.Request(n, tokens=[*ONE, n]) for n in range(2)]
    rows = at.admit(*requests)
    assert [at.mem.length(row) for row in rows] == [0, 0] and at.mem.stats().prefix.loaded == 0  # type: ignore
    assert all(not entry.pins for cache in at.caches for entry in cache.entries())
    at.prefill(rows[0], publish=False)
    at.mem.abort(rows)
    settle(at)
    at.look(idle=True)
    at.empty()


def test_a_hit_makes_room_for_itself(plain: Backend) -> None:
    """What is cached on the device gives way to what comes up, states and pages, and goes to host memory."""
    at = below(plain, slots=2, pages=6)
    at.cache_prompts(whole(5), whole(6, 3))
    settle(at)
    assert (at.mem.free_slots, at.mem.free_pages) == (0, 1)
    row = at.start([*T[:16], 1])
    assert at.mem.length(row) == 16 and at.keeps() == {tuple(p) for p in (ONE, T[:16], whole(5), whole(6, 3))}
    at.run([row], publish=False)
    at.look()
    at.mem.abort([row])
    settle(at)
    at.empty()


def test_making_room_for_a_hit_does_not_cost_the_hit(plain: Backend) -> None:
    """Host memory is full of it: what the device gives up finds no room there."""
    at = Tiered(plain, slots=1, pages=5, tiers={"write": "back", "host_slots": 1, "host_pages": 4})
    at.cache_prompts(T[:16])
    at.give_up(pages=5)
    at.cache_prompts(whole(5))
    assert at.keeps() == {tuple(T[:16])} and at.mem.free_slots == 0
    row = at.start([*T[:16], 1])
    assert at.mem.length(row) == 16 and at.tiers.refused == 1 and at.keeps() == {tuple(T[:16])}
    at.run([row], publish=False)
    at.look()
    at.mem.abort([row])
    settle(at)
    at.empty()


SALTS = [None, 0, 1, "", "a", b"a", ("a",), ("a", None), (("a",),), 2**70, -1]


def test_equal_tokens_under_another_salt_never_hit(plain: Backend) -> None:
    for mine in SALTS:
        at = Tiered(plain, slots=6)
        at.cache_prompts(ONE, salt=mine)
        settle(at)
        at.give_up(pages=60)
        hits = {salt: at.mem.match([*ONE, 1], salt=salt).host_length for salt in SALTS}
        assert hits == dict.fromkeys(SALTS, 0) | {mine: 8}
        assert at.turn([*ONE, 1], salt="another") == 0 and at.turn([*ONE, 1], salt=mine) == 8
        at.empty()


def test_without_tiers_poll_does_nothing(plain: Backend) -> None:
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


WRONG: list[tuple[dict[str, object], str]] = [
    ({"model": ""}, "names the weights"),
    ({"model": 3}, "names the weights"),
    ({"host_slots": None}, "whole number from 1 to"),
    ({"host_slots": 0}, "whole number from 1 to"),
    ({"host_slots": 1.5}, "whole number from 1 to"),
    ({"host_pages": True}, "whole number from 1 to"),
    ({"host_pages": 0}, "whole number from 1 to"),
    ({"load_threshold": -1}, "whole number from 0 to"),
    ({"staging": -1}, "whole number from 0 to"),
    ({"threads": 0}, "whole number from 1 to"),
    ({"ranks": 0}, "whole number from 1 to"),
    ({"layer_groups": 0}, "whole number from 1 to"),
    ({"reserve": 1}, "share from 0"),
    ({"reserve": -0.1}, "share from 0"),
    ({"reserve": "none"}, "share from 0"),
    ({"write": "never"}, "through, selective, back"),
    ({"rank": 1}, "ranks count from 0"),
    ({"ranks": 2}, "torch.distributed group"),
    ({"group": object()}, "torch.distributed group"),
    ({"kv": KV}, "expected Planes"),
    ({"prefetch": None}, "a Prefetch"),
    ({"layerwise": 1}, "True or False"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=[",".join(map(str, wrong)) for wrong, _ in WRONG])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ms.ConfigurationError, match=says):
        Tiers(**({"model": "toy", "host_slots": 4} | wrong))  # type: ignore[arg-type]


def manager(plain: Backend, pages: int = 8, tiers: object = None, **more: object) -> ms.StateManager:
    usual = {"slots": 4, "max_requests": 2, "prefix": ms.Prefix(), "pages": pages, "page_size": 4}
    usual |= {"pages_per_row": 4 if pages else 0}
    return build(LAYOUT, **(usual | more), tiers=tiers)  # type: ignore[arg-type]


def kv(plain: Backend, pages: int = 8) -> Planes:
    return Planes(KV, pages, plain)


MISFITS: dict[str, tuple[Callable[[Backend], dict[str, object]], str]] = {
    "no tiers": (lambda b: {"tiers": "host"}, "Tiers"),
    "no prefix cache": (lambda b: {"tiers": Tiers("toy", 4, kv=kv(b)), "prefix": None}, "prefix=ms.Prefix"),
    "pages without planes": (lambda b: {"tiers": Tiers("toy", 4)}, "8 KV pages"),
    "planes without pages": (lambda b: {"pages": 0, "tiers": Tiers("toy", 4, kv=kv(b))}, "0 KV pages"),
    "too few pages": (lambda b: {"tiers": Tiers("toy", 4, kv=kv(b, 7))}, "8 KV pages"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_tiers_that_do_not_fit_the_manager_are_refused(what: str, plain: Backend) -> None:
    make, says = MISFITS[what]
    with pytest.raises(ms.ConfigurationError, match=says):
        manager(plain, **make(plain))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "records"),
    [
        ({"host_slots": 6}, (6, 12)),
        ({"host_slots": 6, "host_pages": 5}, (6, 5)),
        ({"host_slots": 1}, (1, 2)),
    ],
    ids=str,
)
def test_sizes_of_the_host_tier(size: dict[str, object], records: tuple[int, int], plain: Backend) -> None:
    stats = manager(plain, tiers=Tiers("toy", kv=kv(plain), **size)).stats().tiers  # type: ignore[arg-type]
    assert stats and (stats.host_state_records, stats.host_page_records) == records


def test_states_alone_need_no_pages_in_host_memory(plain: Backend, tmp_path: Path) -> None:
    mem = manager(plain, pages=0, tiers=Tiers("toy", 3, store=FileStore(tmp_path), prefetch=Prefetch(0)))
    stats = mem.stats().tiers
    assert stats and (stats.host_state_records, stats.host_page_records) == (3, 0)
    mem.close()
