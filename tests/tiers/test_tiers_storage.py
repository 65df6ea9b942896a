"""Storage under a manager: another process goes on from it, and no fault of it does more than lose a hit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.tiers import Fetch, FileStore
from tests.support.planes import every_strategy
from tests.support.tiered import T, Tiered, settle, whole
from tests.support.virtual import MemoryStore
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE = whole(1)


def filled(backend: Backend, store: object, *prompts: list[int], name: str = "redirect", **more: object) -> None:
    """A process that has computed prompts, and ended."""
    at = Tiered(backend, name, slots=14, tiers={"store": store}, **more)  # type: ignore[arg-type]
    at.cache_prompts(*prompts)
    at.mem.close()
    assert at.tiers.written == at.moved[0] + at.moved[2] and at.tiers.leaked_records == 0


def fetched(at: Tiered, tokens: list[int], salt: object = None) -> Fetch:
    at.note(tokens, salt)
    fetch = at.mem.prefetch(tokens, salt)
    while not fetch.done:
        at.mem.poll()
        at.look()
    return fetch


@pytest.fixture
def managers() -> Iterator[list[Tiered]]:
    """What is to be closed."""
    made: list[Tiered] = []
    yield made
    for at in made:
        at.mem.close()


@every_order_and_strategy
def test_another_process_goes_on_from_files(
    name: str, overlap: bool, plain: Backend, tmp_path: Path, managers: list[Tiered]
) -> None:
    filled(plain, FileStore(tmp_path), T[:16], ONE, name=name, overlap=overlap)
    at = Tiered(plain, name, slots=14, overlap=overlap, tiers={"store": FileStore(tmp_path)})
    managers.append(at)
    assert at.mem.match([*ONE, 1]).host_length == 0
    assert [fetched(at, tokens).length for tokens in ([*ONE, 1], [*T[:16], 1, 2])] == [8, 16]
    rows = at.admit(*[ms.Request(n, tokens=tokens) for n, tokens in enumerate(([*ONE, 1], [*T[:16], 1, 2]))])
    assert [at.mem.length(row) for row in rows] == [8, 16]
    at.run(rows)
    at.look()
    at.end(rows)
    assert (at.tiers.storage_hit_tokens, at.tiers.host_hit_tokens) == (24, 0)
    settle(at)
    at.below.flush()
    assert at.tiers.written == at.moved[0] + at.moved[2], "what came from storage is not written again"


def test_another_process_goes_on_through_the_kernels(backend: Backend, tmp_path: Path, managers: list[Tiered]) -> None:
    filled(backend, FileStore(tmp_path), ONE)
    at = Tiered(backend, slots=6, tiers={"store": FileStore(tmp_path)})
    managers.append(at)
    fetched(at, [*ONE, 1])
    assert at.turn([*ONE, 1]) == 8


@pytest.mark.parametrize("other", [{"model": "other"}, {"salt": "b"}, {"page": True}])
def test_records_of_others_are_never_found(
    other: dict[str, object], plain: Backend, tmp_path: Path, managers: list[Tiered]
) -> None:
    filled(plain, FileStore(tmp_path), ONE)
    settings = {"page": 8} if "page" in other else {}
    if settings:
        settings["pages"] = 0  # the KV planes of this harness are of pages of 4
    tiers = {"store": FileStore(tmp_path), "model": other.get("model", "toy")}
    at = Tiered(plain, slots=6, tiers=tiers, **settings)  # type: ignore[arg-type]
    managers.append(at)
    fetch = at.mem.prefetch([*ONE, *whole(2)], other.get("salt"))
    while not fetch.done:
        at.mem.poll()
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
    assert fetched(at, [*ONE, 1]).length == 8
    assert [name.split("-")[0] for name in store.asked("get")] == ["state"], "its KV is on the device"
    row = at.start([*ONE, 1])
    assert at.mem.length(row) == 8 and node.snapshot is not None and not node.evicted
    assert [each for _, each in at.cache.tree.walk()] == [node] and at.moved[3] == 0
    at.last([row])


@pytest.mark.parametrize("fault", ["vanished", "half", "garbage", "denied", "raises"])
@pytest.mark.parametrize("kind", ["kv", "state"])
def test_B67_a_record_that_is_no_good_is_a_miss(kind: str, fault: str, plain: Backend, managers: list[Tiered]) -> None:
    store = MemoryStore()
    filled(plain, store, T[:16])
    names = [name for name in store.records if name.startswith(kind)]
    store.faults = {names[-1]: fault}
    at = Tiered(plain, slots=6, tiers={"store": store})
    managers.append(at)
    assert fetched(at, [*T[:16], 1]).length == 0 and at.keeps() == set()
    assert at.turn([*T[:16], 1], goal=3) == 0
    assert at.tiers.storage_hit_tokens == 0 and at.tiers.prefetch is not None
    figures = at.tiers.prefetch
    assert sum(figures.flaws.values()) + figures.failures >= 1
    store.faults = {}
    at.cache.clear()
    at.below.clear()
    assert fetched(at, [*T[:16], 1]).length == 16 and at.turn([*T[:16], 1], goal=3) == 16
    at.look(idle=True)
