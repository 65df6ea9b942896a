"""Tests both sides of vLLM's connector without vLLM: what they save, load, lose and refuse."""

import importlib
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memstate.errors import ConfigurationError, InvalidArgument, LayoutMismatch
from memstate.integrations.vllm import VERSIONS
from memstate.integrations.vllm.blocks import blocks_of
from memstate.integrations.vllm.messages import Plan, Report
from memstate.integrations.vllm.naming import record_key
from memstate.integrations.vllm.scheduler import SchedulerSide
from memstate.integrations.vllm.settings import Settings
from memstate.integrations.vllm.worker import WorkerSide
from memstate.state.layout import Plane, StateLayout
from memstate.tiers.host.transfers import Transfers
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Store
from tests.support.refusals import refusals
from tests.support.virtual import AtOnce, MemoryStore

SIZE, BYTES, BLOCKS = 4, 48, 12


def caches(*layers: tuple[list[str], int, int, int], blocks: int = BLOCKS) -> Any:
    """Returns a stand-in for vLLM's cache configuration.

    Args:
        layers: names, layer stride, block stride and offset of each tensor; strides and offset in bytes.
    """
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_tensors=[
            SimpleNamespace(layers=names, layer_stride=stride, block_stride=block, offset=offset)
            for names, stride, block, offset in layers
        ],
    )


def over(blocks: int) -> Any:
    """Returns the cache configuration of two groups whose layers share one tensor."""
    return caches((["a"], blocks * BYTES, BYTES, 0), (["state"], blocks * BYTES, BYTES, 0), blocks=blocks)


class Group:
    """Stands in for a cache manager of vLLM: attention reads all blocks, a recurrent layer only the last."""

    def __init__(self, number: int, recurrent: bool) -> None:
        self.kv_cache_group_id, self.recurrent, self.block_size = number, recurrent, SIZE
        self.num_cached_block: dict[str, int] = {}
        self.req_to_blocks: dict[str, list[Any]] = {}

    def get_num_skipped_tokens(self, computed: int) -> int:
        return computed - 1 if self.recurrent else 0


class Case:
    """The scheduler's side of a connector and its workers, over one group of attention and one of states."""

    def __init__(
        self, host_blocks: int = 20, ranks: int = 1, store: Store | None = None, drop: bool = False,
        adapter: Callable[[Any], bytes] = lambda request: b"", blocks: int = BLOCKS, staging: int = 2**12,
    ) -> None:  # fmt: skip
        settings = Settings(host_blocks, store_tokens=1, staging_bytes=staging)
        self.side = SchedulerSide(
            settings, host_blocks, ranks, SIZE, lambda request, size: request.hashes, lambda: bytes(32), drop, store,
            AtOnce(), adapter,
        )  # fmt: skip
        self.groups = [Group(0, False), Group(1, True)]
        self.side.bind(SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=self.groups)), (0, 1))
        self.memory = [torch.zeros(blocks, BYTES, dtype=torch.uint8) for _ in range(ranks)]
        self.workers = [WorkerSide(settings, rank, store, AtOnce()) for rank in range(ranks)]
        for worker, memory in zip(self.workers, self.memory, strict=True):
            worker.register(over(blocks), {"a": memory, "state": [memory]})

    def request(self, name: str, tokens: int) -> Any:
        hashes = [bytes([prompt]) * 32 for prompt in range(tokens // SIZE)]
        return SimpleNamespace(request_id=name, num_tokens=tokens, hashes=hashes)

    def computed(self, name: str, *tables: Sequence[int]) -> None:
        """Records that vLLM has computed a request.

        Args:
            tables: block ids of each group; 0 is the null block.
        """
        for group, ids in zip(self.groups, tables, strict=True):
            group.num_cached_block[name] = len(ids)
            group.req_to_blocks[name] = [
                SimpleNamespace(
                    block_id=block, is_null=not block, block_hash_num_tokens=(at + 1) * SIZE,
                    block_hash=bytes([at]) * 32 + group.kv_cache_group_id.to_bytes(4, "big"),
                )
                for at, block in enumerate(ids)
            ]  # fmt: skip

    def load(self, asked: Any, reach: int, *blocks: Sequence[int]) -> Plan:
        """Loads a request into blocks, as vLLM does, and returns the plan of the step.

        Args:
            reach: tokens that must be loadable.
        """
        assert self.side.matched(asked, 0) == reach
        self.side.allocated(asked, blocks, reach)
        return self.step()

    def reaches(self, asked: Any) -> list[int]:
        """Tries to load a request until a load succeeds or nothing is left to try.

        Returns how many tokens each try asked for.
        """
        reached = []
        while (reach := self.side.matched(asked, 0)) and not self.side.counts.loaded:
            blocks = range(1, reach // SIZE + 1)
            self.load(asked, reach, list(blocks), [0] * (len(blocks) - 1) + [9])
            reached.append(reach)
        return reached

    def save(self, name: str, *tables: Sequence[int]) -> Plan:
        """Computes a request, saves its filled blocks to host memory and the store; returns the plan of the save."""
        self.computed(name, *tables)
        plan = self.step(name)
        while self.side.busy:
            self.step()
        return plan

    def step(self, *scheduled: str) -> Plan:
        """Runs a step on each rank, reports its outcome to the scheduler's side, and returns its plan."""
        plan = pickle.loads(pickle.dumps(self.side.plan(scheduled, ())))
        report, finished, failed = Report(), set[str](), set[str]()
        for worker in self.workers:
            worker.begin(plan)
            worker.save(plan)
            done, lost = worker.finished()
            report.add(worker.report())
            finished, failed = finished | done, failed | lost
        self.side.reported(report)
        self.side.loaded(finished, failed)
        return plan


@pytest.fixture
def case() -> Case:
    """A case that has saved three KV blocks of a prompt, and the states after the second and the third."""
    made = Case()
    made.memory[0][1:6] = torch.arange(1, 6, dtype=torch.uint8)[:, None]
    made.save("a", [1, 2, 3], [0, 4, 5])
    return made


def test_a_state_and_its_kv_are_loaded_and_null_blocks_are_left_alone(case: Case) -> None:
    assert case.side.counts.saved == 5
    case.memory[0][:] = 0
    case.load(case.request("b", 14), 12, [6, 7, 8], [0, 0, 9])
    assert case.memory[0][:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3, 5, 0, 0]
    assert case.side.cache.evictable == 5


@pytest.mark.parametrize(
    ("tokens", "computed", "more"), [(13, 0, 12), (12, 0, 8), (9, 0, 8), (8, 0, 0), (13, 4, 8), (13, 12, 0)]
)
def test_how_far_a_prompt_can_be_loaded(case: Case, tokens: int, computed: int, more: int) -> None:
    assert case.side.matched(case.request("b", tokens), computed) == more


def test_a_drafter_computes_the_last_block_again() -> None:
    case = Case(drop=True)
    case.save("a", [1, 2, 3], [0, 4, 5])
    assert case.side.matched(case.request("b", 13), 0) == 8


def test_a_gap_in_kv_ends_what_can_be_loaded(case: Case) -> None:
    case.side.cache.drop(case.side.cache.get(bytes([1]) * 32 + bytes(4)))
    assert case.side.matched(case.request("b", 14), 0) == 0


def test_a_block_is_saved_once(case: Case) -> None:
    case.computed("b", [1, 2, 3], [0, 4, 5])
    assert case.step("a", "b").save is None


def test_a_state_inside_a_block_is_not_saved() -> None:
    """vLLM can keep the state after a token in the middle of a block. Its hash covers the tokens up to there."""
    case = Case()
    case.computed("a", [1], [2])
    case.groups[1].req_to_blocks["a"][0].block_hash_num_tokens = SIZE - 1
    assert case.step("a").save.blocks == [1]


def test_what_is_being_saved_during_a_reset_is_not_found_later() -> None:
    case = Case()
    case.computed("a", [1], [2])
    plan = case.side.plan(["a"], ())
    assert case.side.reset()
    case.side.reported(Report({plan.save.job: 1}))
    assert (len(case.side.cache), case.side.cache.pool.free, case.side.busy) == (0, 20, False)


def test_a_load_that_lost_a_record_fails_and_pins_nothing(case: Case) -> None:
    asked = case.request("b", 14)
    assert case.side.matched(asked, 0) == 12
    case.side.cache.drop(case.side.cache.get(bytes([2]) * 32 + bytes(4)))
    case.side.allocated(asked, ([6, 7, 8], [0, 0, 9]), 12)
    assert case.step().lost == ["b"]
    assert (case.side.counts.lost, case.side.cache.evictable) == (1, 4)


def test_what_is_being_loaded_is_not_evicted(case: Case) -> None:
    asked = case.request("b", 14)
    case.side.matched(asked, 0)
    case.side.allocated(asked, ([6, 7, 8], [0, 0, 9]), 12)
    assert case.side.cache.evict(9) == 1  # this save evicts the state after the second block
    case.step()
    assert case.side.cache.evict(9) == 4


def test_all_ranks_must_have_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(ranks=2)
    case.computed("a", [1], [2])
    plan = case.side.plan(["a"], ())
    first, second = (
        Report({plan.save.job: 1}),
        Report({plan.save.job: 1}, {plan.save.job: {plan.save.records[0].number}}),
    )
    case.side.reported(first)
    assert len(case.side.cache) == 0
    case.side.reported(second)
    assert [entry.record for entry in case.side.cache.entries()] == [plan.save.records[1].number]
    assert case.side.cache.pool.free == 19


def test_the_store_is_asked_once_and_read_into_host_memory() -> None:
    store = MemoryStore()
    first, second = Case(store=store), Case(store=store)
    first.memory[0][1:5] = torch.arange(1, 5, dtype=torch.uint8)[:, None]
    first.save("a", [1, 2], [3, 4])
    assert len(store.records) == 4
    second.load(first.request("b", 11), 8, [6, 7], [0, 8])
    assert second.memory[0][6:9, 0].tolist() == [1, 2, 4]
    assert (second.side.counts.fetched, len(second.side.cache)) == (3, 3)


def filled(store: MemoryStore, ranks: int = 1) -> Case:
    """Fills a store with five KV blocks of a prompt and the states after the second and the fifth; returns the case."""
    case = Case(store=store, ranks=ranks)
    for number, memory in enumerate(case.memory):
        memory[1:8] = torch.arange(1, 8, dtype=torch.uint8)[:, None] + 100 * number
    case.save("a", [1, 2, 3, 4, 5], [0, 6, 0, 0, 7])
    assert len(store.records) == 7 * ranks
    return case


def named(case: Case, prompt: int, group: int, rank: int = 0) -> str:
    """Returns the name of a block in the store."""
    key = bytes([prompt]) * 32 + group.to_bytes(4, "big")
    return case.side.cache.form.name(record_key(bytes(32), rank, key))


@pytest.mark.sample
@pytest.mark.parametrize("fault", ["vanished", "half", "garbage", "denied", "raises"])
@pytest.mark.parametrize(("prompt", "group"), [(2, 0), (3, 0), (4, 0), (4, 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_load_keeps_the_front(
    fault: str, prompt: int, group: int, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The next try loads the blocks in front of the first lost record, up to a state that still exists."""
    caplog.set_level("WARNING", "memstate")
    store = MemoryStore()
    first = filled(store, ranks)
    store.faults[named(first, prompt, group, ranks - 1)] = fault
    case, asked = Case(store=store, ranks=ranks), first.request("b", 22)
    case.load(asked, 20, [1, 2, 3, 4, 5], [0, 0, 0, 0, 6])
    assert (case.side.counts.lost, case.side.counts.loaded) == (1, 0)
    assert "load failed request='b'" in caplog.text
    assert case.side.cache.evictable == len(case.side.cache)
    if fault == "raises":  # the failing record is unknown, so all records of the call are lost
        assert case.side.matched(asked, 0) == 0
        return
    calls = len(store.calls)
    for memory in case.memory:
        memory[:] = 0
    case.load(asked, 8, [8, 9], [0, 10])
    assert len(store.calls) > calls
    for number, memory in enumerate(case.memory):
        assert memory[8:11, 0].tolist() == [1 + 100 * number, 2 + 100 * number, 6 + 100 * number]
    assert (case.side.counts.lost, case.side.counts.loaded, case.side.counts.fetched) == (1, 3, 1)


def test_each_retry_asks_for_less() -> None:
    """The store lists all records but refuses to read states: each state is tried once, the longest first."""
    store = MemoryStore()
    first = filled(store)
    for prompt in (1, 4):
        store.faults[named(first, prompt, 1)] = "denied"
    case = Case(store=store)
    assert case.reaches(first.request("b", 22)) == [20, 8]
    assert (case.side.counts.lost, len(case.side.cache)) == (2, 5)  # the KV that was read stays in host memory
    case.side.finished("b")
    assert not case.side._known


def test_a_load_that_host_memory_has_no_room_for_loads_what_fits() -> None:
    store = MemoryStore()
    first = filled(store)
    case = Case(host_blocks=4, store=store)
    assert case.reaches(first.request("b", 22)) == [20, 8]  # first 5 KV blocks and a state; then 2 and a state
    assert (case.side.counts.lost, case.side.counts.loaded) == (1, 3)


def test_a_request_that_ended_while_its_load_failed_is_forgotten() -> None:
    store = MemoryStore()
    first = filled(store)
    store.faults[named(first, 2, 0)] = "denied"
    case, asked = Case(store=store), first.request("b", 22)
    case.side.matched(asked, 0)
    case.side.allocated(asked, ([1, 2, 3, 4, 5], [0, 0, 0, 0, 6]), 20)
    case.side.finished("b")
    case.step()
    assert (case.side.counts.lost, case.side._known, case.side._loads) == (1, {}, {})
    assert case.side.cache.miscounts(Counter(), 0) == []


def test_adapters_do_not_meet() -> None:
    """Two adapters of one name and path have equal hashes in vLLM, so memstate adds a digest of the adapter."""
    store = MemoryStore()
    for adapter, reach in ((b"one", 0), (b"two", 0), (b"one", 8), (b"", 0)):
        case = Case(store=store, adapter=lambda request, adapter=adapter: adapter)
        asked = case.request("a", 9)
        assert case.side.matched(asked, 0) == reach
        if not reach:
            case.save("a", [1, 2], [3, 4])
        case.side.ended("a")  # preempted: the request keeps its adapter
        assert case.side._known["a"].adapter == adapter


def test_nothing_from_before_a_reset_is_found() -> None:
    """vLLM resets after it loads new weights. Another process still finds the records of the store."""
    store = MemoryStore()
    case = filled(store)
    asked = case.request("b", 22)
    assert case.side.matched(asked, 0) == 20
    assert case.side.reset()
    assert case.side.matched(asked, 0) == 0
    case.save("c", [1, 2], [0, 3])
    case.side.cache.evict(9)
    assert case.side.matched(case.request("d", 22), 0) == 8  # blocks of c, computed after the reset
    assert Case(store=store).side.matched(asked, 0) == 20


def test_writes_pin_a_quarter_of_host_memory() -> None:
    case = Case(host_blocks=8, store=MemoryStore())
    case.computed("a", [1, 2, 3], [4, 5, 6])
    case.step("a")
    assert [len(case.step().writes[0].records) for _ in range(3)] == [2, 2, 2]
    assert case.side.cache.evictable == 6


def test_each_rank_has_records_of_its_own() -> None:
    store = MemoryStore()
    first, second = Case(ranks=2, store=store), Case(ranks=2, store=store)
    for number, memory in enumerate(first.memory):
        memory[1:3] = number + 1
    first.save("a", [1], [2])
    assert len(store.records) == 4
    asked = first.request("b", 7)
    second.load(asked, 4, [6], [7])
    assert [memory[6:8, 0].tolist() for memory in second.memory] == [[1, 1], [2, 2]]
    del store.records[sorted(store.records)[0]]  # a block counts as missing if one rank lacks it
    assert Case(ranks=2, store=store).side.matched(asked, 0) == 0


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks of staging are free at each query.

    A step queries twice; the last number holds for all later queries.
    """
    looks = [0]
    monkeypatch.setattr(Transfers, "room", property(lambda transfers: looks.pop(0) if len(looks) > 1 else looks[0]))
    return looks


def test_what_staging_has_no_room_for_waits(room: list[int]) -> None:
    case, room[:] = Case(), [2, 1, 0, 2]
    case.memory[0][1:6] = torch.arange(1, 6, dtype=torch.uint8)[:, None]
    case.computed("a", [1, 2, 3], [0, 4, 5])
    left = []
    for scheduled in (["a"], [], []):
        case.step(*scheduled)
        left.append(len(case.workers[0]._waiting))
    assert left == [3, 2, 0]
    assert (case.side.counts.saved, case.side.counts.refused, case.side.busy) == (5, 0, False)
    case.load(case.request("b", 14), 12, [6, 7, 8], [0, 0, 9])
    assert case.memory[0][6:10, 0].tolist() == [1, 2, 3, 5]


ALONE, PROMPT = ([1], [2]), ([1, 2, 3], [0, 4, 5])
GIVEN_AWAY = {  # ranks, free staging at each query, tables, new hash, saved and refused blocks, loadable tokens
    "not packed": (1, [0, 9], PROMPT, None, (4, 1), 8), "with an equal hash": (1, [0, 9], PROMPT, b"=", (4, 1), 8),
    "packed": (1, [1, 0, 0, 9], ALONE, None, (2, 0), 4), "packed by one rank": (2, [1, 0, 9], ALONE, None, (1, 1), 0),
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "rooms", "tables", "name", "counts", "reach"), GIVEN_AWAY.values(), ids=GIVEN_AWAY)
def test_a_block_that_vllm_gives_away_before_all_ranks_have_packed_it_is_lost_alone(
    room: list[int], ranks: int, rooms: list[int], tables: Any, name: bytes | None, counts: Any, reach: int
) -> None:
    """The block is lost even if its new hash equals the old one: vLLM is writing its bytes again."""
    case, room[:], last = Case(ranks=ranks), rooms, tables[0][-1]
    case.computed("a", *tables)
    case.step("a")
    block = case.groups[0].req_to_blocks["a"][-1]
    block.block_hash = name and bytes(bytearray(block.block_hash))
    case.memory[0][last] = 99
    assert [case.step().gone, case.step().gone] == [{last - 1}, set()]
    assert (case.side.counts.saved, case.side.counts.refused, case.side.busy) == (*counts, False)
    assert case.side.matched(case.request("b", 14), 0) == reach
    assert case.side.cache.miscounts(Counter(), 0) == []


@pytest.mark.parametrize(("looks", "steps"), [(2, 5), (1, 3)])
def test_a_chunk_of_8192_tokens_is_saved_whole(monkeypatch: pytest.MonkeyPatch, looks: int, steps: int) -> None:
    """Saves 512 blocks of 2 MiB through the default staging.

    A copy takes `looks` queries of the free room; a step queries twice.
    """
    case = Case(host_blocks=512, blocks=513, staging=2**26)
    block = StateLayout((Plane("block", (2 << 20,), torch.uint8),), layers=1)
    _, outward = Settings(1).staged(RecordFormat("kv", block, bytes(32)).nbytes)
    look, leaving = 0, list[tuple[int, int]]()  # query number; (query at which a copy ends, its blocks)

    def room(transfers: Transfers) -> int:
        return outward - sum(blocks for over, blocks in leaving if over > look)

    out = Transfers.out

    def leave(transfers: Transfers, index: Sequence[int], records: Sequence[int]) -> Any:
        leaving.append((look + looks, len(index)))
        return out(transfers, index, records)

    monkeypatch.setattr(Transfers, "room", property(room))
    monkeypatch.setattr(Transfers, "out", leave)
    case.computed("a", range(1, 257), range(257, 513))
    worker, taken, plan = case.workers[0], 0, case.side.plan(["a"], ())
    while not taken or worker._waiting:
        taken += 1
        worker.begin(plan)
        look += 1
        worker.save(plan)
        look += 1
        case.side.reported(worker.report())
        plan = case.side.plan((), ())
    assert taken == steps
    assert (case.side.counts.saved, case.side.counts.refused) == (512, 0)


def test_what_waits_when_vllm_sleeps_is_lost_and_staging_is_made_again(room: list[int]) -> None:
    case, room[:] = Case(), [0, 9]
    case.computed("a", [1, 2], [3, 4])
    case.step("a")
    worker = case.workers[0]
    worker.suspend()
    worker._transfers._staged = worker._transfers._inward = None  # vLLM has freed this memory
    worker.restore()
    case.step()
    assert (case.side.counts.saved, case.side.counts.refused, case.side.busy) == (0, 4, False)
    case.memory[0][5:7] = 7
    case.save("b", [5], [6])
    case.load(case.request("c", 7), 4, [8], [9])
    assert case.memory[0][8:10].unique().tolist() == [7]


def test_what_is_given_up_is_reported_before_its_save_is_over() -> None:
    assert Report(gone={0: {1}})


test_settings_that_cannot_be_meant = refusals(
    (ConfigurationError, InvalidArgument),
    ({}, "host_blocks=None and host_bytes=None"),
    ({"host_blocks": 1, "host_bytes": "1GiB"}, "host_bytes='1GiB'"),
    ({"host_bytes": "64"}, "write 64GiB"),
    ({"host_blocks": 1, "store_capacity": "64"}, "store_capacity"),
    ({"host_blocks": 1, "staging_bytes": None}, "staging_bytes"),
    ({"host_blocks": 1, 7: 1, "x": 1}, r"has \['7', 'x'\]"),
    ({"host_blocks": 0}, "host_blocks=0"),
    ({"host_blocks": "many"}, "host_blocks='many'"),
    ({"host_blocks": 1, "threads": 0}, "threads=0"),
    ({"host_blocks": 1, "staging_bytes": -1}, "staging_bytes=-1"),
    ({"host_blocks": 1, "store": 7}, "store=7"),
    ({"host_blocks": 1, "cpu_bytes": 7}, "cpu_bytes"),
    call=Settings.read,
)


def test_host_memory_in_bytes_and_staging_in_blocks() -> None:
    """A block of this cache takes 96 bytes."""
    given = caches((["a"], BLOCKS * BYTES, BYTES, 0), (["state"], BLOCKS * BYTES, BYTES, BLOCKS * BYTES))
    for tensor in given.kv_cache_tensors:
        tensor.size = BLOCKS * 2 * BYTES
    assert Settings(host_bytes="1KiB").records(given) == 10
    assert Settings(host_blocks=1, store_capacity="1MiB").store_capacity == 1 << 20
    assert Settings(host_blocks=7).records(given) == 7
    with pytest.raises(ConfigurationError, match="host_bytes=95: a block takes 96; set 96 or more"):
        Settings(host_bytes=95).records(given)
    assert [Settings(1, staging_bytes=nbytes).staged(100) for nbytes in (200, 1600)] == [(1, 1), (2, 14)]
    with pytest.raises(ConfigurationError, match="staging_bytes=199: a block takes 100 and two must fit; set 200 or"):
        Settings(1, staging_bytes=199).staged(100)


def test_versions_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert tuple(reversed(re.findall(r"^\| (0\.\d+) \|", page, re.MULTILINE))) == VERSIONS


def test_another_version_is_refused_with_those_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "memstate.integrations.vllm.connector", raising=False)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.30, 0\.31, 0\.32, 0\.33; .* another protocol"):
        importlib.import_module("memstate.integrations.vllm.connector")


WHOLE = 2 * BLOCKS * BYTES
LAYOUTS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "a tensor a layer": lambda: (
        caches((["a"], BLOCKS * BYTES, BYTES, 0), (["b"], BLOCKS * BYTES, BYTES, 0)),
        {name: torch.zeros(BLOCKS, BYTES, dtype=torch.uint8) for name in "ab"},
    ),
    "layers in one allocation": lambda: (
        caches((["a", "b"], BLOCKS * BYTES, BYTES, 0)),
        dict(zip("ab", torch.zeros(WHOLE, dtype=torch.uint8).view(2, BLOCKS, BYTES), strict=True)),
    ),
    "all layers in a block": lambda: (
        caches((["a", "b"], BYTES, 2 * BYTES, 0)),
        dict(zip("ab", torch.zeros(WHOLE, dtype=torch.uint8).view(BLOCKS, 2, BYTES).transpose(0, 1), strict=True)),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_has_the_bytes_of_all_layers(layout: str) -> None:
    given, tensors = LAYOUTS[layout]()
    blocks = blocks_of(given, tensors)
    assert blocks.planes.slots == BLOCKS - 1
    assert blocks.planes.layout.bytes_per_slot == 2 * BYTES
    for at, tensor in enumerate(tensors.values()):
        tensor[3] = at + 1
    blocks.planes.copy(torch.tensor([7]), torch.tensor([3]))
    assert [tensor[7].unique().tolist() for tensor in tensors.values()] == [[1], [2]]
    assert [tensor[6].unique().tolist() for tensor in tensors.values()] == [[0], [0]]


def test_geometries_differ_where_layers_and_backends_do_and_not_by_blocks() -> None:
    def of(blocks: int = 5, dtype: torch.dtype = torch.float32, **backends: str) -> bytes:
        tensor = torch.zeros(blocks, BYTES, dtype=torch.uint8).view(dtype)
        return blocks_of(caches((["a"], blocks * BYTES, BYTES, 0), blocks=blocks), {"a": tensor}, backends).geometry

    assert of(9) == of()
    assert len({of(), of(dtype=torch.float16), of(a="FLASH_ATTN"), of(a="TRITON_ATTN")}) == 4


def test_memory_that_does_not_fit_the_configuration() -> None:
    with pytest.raises(LayoutMismatch, match="KV cache of a: 48 bytes"):
        blocks_of(over(BLOCKS), {"a": torch.zeros(1, BYTES, dtype=torch.uint8)})
    with pytest.raises(LayoutMismatch, match="has none of them"):
        blocks_of(over(BLOCKS), {"z": torch.zeros(BLOCKS, BYTES, dtype=torch.uint8)})


def test_a_store_is_a_folder_or_a_url(tmp_path: Path) -> None:
    folder = Settings(host_blocks=1, store=str(tmp_path), store_capacity="1MiB").open_store()
    assert repr(folder).startswith(f"FileStore('{tmp_path}', at most 1.00 MiB")
    with pytest.raises(InvalidArgument, match=r"url 's3:\*\*\*': expected s3://bucket/prefix"):
        Settings(host_blocks=1, store="s3://me:SECRET@bucket").open_store()
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]' in a checkout")
    objects = Settings(host_blocks=1, store="memory:///", store_capacity="1MiB").open_store()
    assert repr(objects) == "Objects('memory:///', at most 1.00 MiB, 0 faults)"
