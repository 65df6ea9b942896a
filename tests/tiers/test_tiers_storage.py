"""Storage under a manager: another process goes on from its records, and a fault at most loses a hit."""

from pathlib import Path

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.tiers import FileStore
from tests.support.planes import every_strategy
from tests.support.tiered import T, Tiered, filled, settle, whole
from tests.support.virtual import MemoryStore
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)


@every_order_and_strategy
def test_another_process_goes_on_from_files(name: str, overlap: bool, plain: Backend, tmp_path: Path) -> None:
    filled(plain, FileStore(tmp_path), T[:16], ONE, name=name, overlap=overlap)
    at = Tiered(plain, name, slots=14, overlap=overlap, tiers={"store": FileStore(tmp_path)})
    assert at.mem.match([*ONE, 1]).host_length == 0
    assert [at.fetch(tokens).length for tokens in ([*ONE, 1], [*T[:16], 1, 2])] == [8, 16]
    rows = at.admit(*[ms.Request(n, tokens=tokens) for n, tokens in enumerate(([*ONE, 1], [*T[:16], 1, 2]))])
    assert [at.mem.info(row).length for row in rows] == [8, 16]
    at.run(rows)
    at.look()
    at.end(rows)
    assert (at.tiers.storage_hit_tokens, at.tiers.host_hit_tokens) == (24, 0)
    settle(at)
    at.below.flush()
    assert at.tiers.written == at.moved[0] + at.moved[2], "what came from storage is not written again"


@pytest.mark.parametrize("other", [{"model": "other"}, {"salt": "b"}, {"page": True}])
def test_records_of_others_are_never_found(other: dict[str, object], plain: Backend, tmp_path: Path) -> None:
    filled(plain, FileStore(tmp_path), ONE)
    settings = {"page": 8, "pages": 0} if "page" in other else {}  # the KV planes here have pages of 4 tokens
    tiers = {"store": FileStore(tmp_path), "model": other.get("model", "toy")}
    at = Tiered(plain, slots=6, tiers=tiers, **settings)  # type: ignore[arg-type]
    fetch = at.fetch([*ONE, *whole(2)], other.get("salt"))
    assert fetch.length == 0 and at.mem.match([*ONE, 1], other.get("salt")).host_length == 0


@every_strategy
def test_B64_a_fetched_state_is_attached_to_a_node_that_had_lost_its_own(name: str, plain: Backend) -> None:
    store = MemoryStore()
    filled(plain, store, ONE, name=name)
    at = Tiered(plain, name, slots=8, tiers={"store": store, "host_slots": 1, "write": "back"})
    at.cache_prompts(ONE)
    at.give_up()
    at.below.clear()
    (node,) = [node for _, node in at.cache.tree.walk()]
    assert node.evicted and at.mem.match([*ONE, 1]).host_length == 0
    store.calls.clear()
    assert at.fetch([*ONE, 1]).length == 8
    assert [name.split("-")[0] for name in store.asked("get")] == ["state"], "its KV is on the device"
    row = at.start([*ONE, 1])
    assert at.mem.info(row).length == 8 and node.snapshot is not None and not node.evicted
    assert [each for _, each in at.cache.tree.walk()] == [node] and at.moved[3] == 0
    at.checked([row])


@pytest.mark.parametrize("fault", ["vanished", "half", "garbage", "denied", "raises"])
@pytest.mark.parametrize("kind", ["kv", "state"])
def test_B67_a_record_that_is_no_good_is_a_miss(kind: str, fault: str, plain: Backend) -> None:
    store = MemoryStore()
    filled(plain, store, T[:16])
    names = [name for name in store.records if name.startswith(kind)]
    store.faults = {names[-1]: fault}
    at = Tiered(plain, slots=6, tiers={"store": store})
    assert at.fetch([*T[:16], 1]).length == 0 and at.keeps() == set()
    assert at.turn([*T[:16], 1], goal=3) == 0
    assert at.tiers.storage_hit_tokens == 0
    figures = at.tiers.prefetch
    assert sum(figures.flaws.values()) + figures.failures >= 1
    store.faults = {}
    at.cache.clear()
    at.below.clear()
    assert at.fetch([*T[:16], 1]).length == 16 and at.turn([*T[:16], 1], goal=3) == 16


@pytest.mark.parametrize(("write", "tokens"), [("through", 64), ("back", 128)])
def test_S10_a_manager_limits_prefetches_by_its_host_memory(
    write: str, tokens: int, plain: Backend, tmp_path: Path
) -> None:
    """Host memory has 40 pages.

    If it must also hold copies of the device's pages, only 20 of them count. Prefetches get 0.8 of those that count.
    """
    settings = {"store": FileStore(tmp_path), "prefetch": ms.Prefetch(threshold=4, stop="wait_complete")}
    at = Tiered(plain, slots=14, tiers=settings | {"write": write})
    assert at.mem.prefetch(T[:150]).tokens == tokens
    assert at.mem.prefetch(T[:150]).outcome == "limited"
