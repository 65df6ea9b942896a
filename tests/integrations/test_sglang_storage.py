"""Tests SGLang's HiCache interface over a store, beside SGLang's own file backend."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memstate as ms
from memstate_tools.bench.no_torchvision import leave_out_torchvision

pytest.importorskip("sglang", reason="needs SGLang, see docs/sglang.md")
leave_out_torchvision()
hicache = import_module("sglang.srt.mem_cache.hicache_storage")
storage = import_module("memstate.integrations.sglang.storage")

pytestmark = pytest.mark.filterwarnings("ignore")
PAGES, STATES = hicache.PoolName.KV, hicache.PoolName.MAMBA


class HostPool:
    """A host pool with pages of 3 numbers, with the methods of SGLang's pools."""

    page_size = 1

    def __init__(self) -> None:
        self.memory = torch.zeros(8, 3)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_from_flat_data_page(self, at: int, page: torch.Tensor) -> None:
        self.memory[at] = page

    def get_data_page(self, at: int, flat: bool) -> torch.Tensor:
        return self.memory[at]


def config(rank: int = 0, mla: bool = False) -> Any:
    return hicache.HiCacheStorageConfig(
        tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="tiny",
    )  # fmt: skip


@pytest.fixture(params=["theirs", "ours"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A storage with a pool of KV and a pool of states: SGLang's or memstate's."""
    if request.param == "theirs":
        made = hicache.HiCacheFile(config(), str(tmp_path / "theirs"))
    else:
        made = storage.StoreStorage(config(), ms.FileStore(tmp_path / "ours"))
    for pool in (PAGES, STATES):
        made.register_mem_host_pool_v2(HostPool(), pool)
    return made


def moved(name: Any, keys: list[str], places: list[int], policy: Any = None) -> Any:
    return hicache.PoolTransfer(
        name=name, keys=keys, host_indices=torch.tensor(places), hit_policy=policy or hicache.PoolHitPolicy.ALL_PAGES
    )


def test_records(cache: Any) -> None:
    value, place = torch.arange(5.0), torch.zeros(5)
    assert (cache.exists("a"), cache.get("a", place)) == (False, None)
    assert cache.set("a", value) and cache.batch_set(["b", "c"], [value + 1, value + 2])
    assert cache.exists("a") and cache.batch_exists(["a", "b", "x", "c"]) == 2
    assert torch.equal(cache.get("a", place), value)
    values = cache.batch_get(["c", "x"], [torch.zeros(5), torch.zeros(5)])
    assert torch.equal(values[0], value + 2) and values[1] is None


def test_pages_and_states(cache: Any) -> None:
    """Only every second page has a state, so only prefixes of an even number of pages can be restored."""
    keys = ["k0", "k1", "k2", "k3", "k4"]
    kv, states = (cache.registered_pools[name].memory for name in (PAGES, STATES))
    kv[:5], states[:2] = torch.arange(15.0).view(5, 3), torch.tensor([[7.0, 7, 7], [9, 9, 9]])
    assert cache.batch_set_v2([moved(PAGES, keys[:4], [0, 1, 2, 3])]) == {PAGES: [True] * 4}
    assert cache.batch_set_v2([moved(STATES, ["k1", "k3"], [0, 1])]) == {STATES: [True] * 2}
    trailing = moved(STATES, ["k4"], [0], hicache.PoolHitPolicy.TRAILING_PAGES)
    hit = cache.batch_exists_v2(keys, [trailing])
    assert (hit.kv_hit_pages, dict(hit.extra_pool_hit_pages)) == (4, {PAGES: 4, STATES: 4})
    assert cache.batch_exists_v2(keys[:3], [trailing]).kv_hit_pages == 2
    assert cache.batch_exists_v2(keys[:1], [trailing]).kv_hit_pages == 0
    assert cache.batch_exists_v2(keys, [moved(STATES, keys, [0])]).kv_hit_pages == 0  # asks for a state of each page
    before = kv[:4].clone(), states[:2].clone()
    kv.zero_(), states.zero_()
    assert cache.batch_get_v2([moved(PAGES, keys, [3, 2, 1, 0, 4]), moved(STATES, ["k3", "x"], [5, 6])]) == {
        PAGES: [True] * 4 + [False], STATES: [True, False],
    }  # fmt: skip
    assert torch.equal(kv[:4].flip(0), before[0]) and torch.equal(states[5], before[1][1]) and not states[6].any()
    assert cache.batch_get_v2([moved(PAGES, keys, [0])]) == {PAGES: [False] * 5}  # five pages, but one place


def test_names_keep_ranks_and_formats_apart(tmp_path: Path) -> None:
    def names(rank: int = 0, mla: bool = False, identity: str = "") -> tuple[str, str]:
        of = storage.StoreStorage(config(rank, mla), SimpleNamespace(), identity)
        return of.name("k"), of.name("k", "mamba")

    assert len({*names(), *names(1), *names(identity="fp8")}) == 6
    (kv, state), (other, apart) = names(0, True), names(1, True)
    assert kv == other and state != apart
    cache = storage.StoreStorage(config(), ms.FileStore(tmp_path / "s"))
    assert cache.set("k", torch.zeros(4))
    assert cache.get("k", torch.zeros(3)) is None  # the record has another size
    with pytest.raises(ms.InvalidArgument, match="target_location"):
        cache.get("k")


@pytest.mark.parametrize("spoil", ["cut", "long", "changed", "foreign"])
def test_damaged_records_are_not_found(tmp_path: Path, spoil: str) -> None:
    """A failed read leaves the memory unchanged. Another process can write the record again."""
    cache, other = (storage.StoreStorage(config(), ms.FileStore(tmp_path / "s")) for _ in range(2))
    assert cache.batch_set(["a", "b"], [torch.ones(4), torch.zeros(4)])
    paths = {path.name: path for path in (tmp_path / "s").rglob("kv-*")}
    path = paths[cache.name("a")]
    raw = path.read_bytes()
    changed = raw[:-1] + bytes([raw[-1] ^ 1])
    path.write_bytes({"cut": raw[:-1], "long": raw + b"x", "changed": changed}.get(
        spoil, paths[cache.name("b")].read_bytes()
    ))  # fmt: skip
    place = torch.full((4,), 7.0)
    assert other.get("a", place) is None and place.tolist() == [7.0] * 4
    assert torch.equal(cache.get("b", place), torch.zeros(4))


class Registered(ms.FileStore):
    """A store that takes only buffers in registered memory, as Mooncake does."""

    memory: list[torch.Tensor]

    def register(self, memory: torch.Tensor) -> None:
        self.memory = [*getattr(self, "memory", []), memory]

    def get(self, names: Any, buffers: Any) -> Any:
        self.require(buffers)
        return super().get(names, buffers)

    def put(self, names: Any, buffers: Any) -> Any:
        self.require(buffers)
        return super().put(names, buffers)

    def require(self, buffers: Any) -> None:
        for buffer in buffers:
            inside = [each.data_ptr() <= buffer.ctypes.data for each in self.memory
                      if buffer.ctypes.data + buffer.size <= each.data_ptr() + each.numel()]  # fmt: skip
            assert any(inside)


def test_records_pass_through_memory_that_the_store_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records go through the staging memory in parts; a record longer than this memory gets more memory."""
    monkeypatch.setattr(import_module("memstate.integrations.sglang.staging"), "MOST", 64)
    store = Registered(tmp_path / "s")
    cache = storage.StoreStorage(config(), store)
    values = [torch.arange(n, dtype=torch.uint8) for n in (20, 30, 8, 50, 1, 200, 60)]
    keys = [str(i) for i in range(len(values))]
    assert cache.batch_set(keys[:5], values[:5]) and cache.batch_set(keys, values)
    values_read = cache.batch_get([*keys, "x"], [*(torch.zeros_like(value) for value in values), torch.zeros(3)])
    assert values_read[-1] is None and all(map(torch.equal, values_read[:-1], values))
    assert [memory.numel() for memory in store.memory] == [64, 256, 256]


def test_wrong_values_and_pools_are_refused() -> None:
    ours = storage.StoreStorage(config(), SimpleNamespace())
    for call in (
        lambda: ours.set("k"), lambda: ours.set("k", [1]), lambda: ours.batch_set(["k"]), lambda: ours.batch_get(["k"]),
        lambda: ours.batch_set(["k", "l"], [torch.zeros(1)]),
        lambda: ours.batch_get_v2([moved(PAGES, ["k"], [0])]), lambda: ours.batch_set_v2([moved(PAGES, ["k"], [0])]),
    ):  # fmt: skip
        with pytest.raises(ms.InvalidArgument):
            call()
