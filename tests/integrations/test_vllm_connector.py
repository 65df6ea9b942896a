"""Tests the connector under vLLM's own scheduler and cache manager; workers without a model check all bytes read."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM cannot be imported: see docs/vllm.md", exc_type=ImportError)

import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from memstate.errors import ConfigurationError
from memstate.integrations.vllm import VERSIONS, connector, naming
from memstate.integrations.vllm.connector import MemstateConnector
from memstate.integrations.vllm.settings import Settings
from memstate.tiers.host.transfers import Transfers
from tests.support import vllm_engine
from tests.support.virtual import MemoryStore
from tests.support.vllm_engine import Engine

HYBRID = ("attention", "state")
KINDS = [
    ("attention",), HYBRID, ("attention", "window", "state"), ("attention", "state", "state", "state"), ("window",),
    ("window", "window", "attention"),
]  # fmt: skip
# indexed by the number of window groups: numbers of blocks; vLLM begins a chunk only if all of it fits in each group
POOLS = ([22, 30, 60], [22, 30, 60], [44, 60])
PROMPT = list(range(30))
FAULTS = ("vanished", "half", "garbage", "denied", "raises")
Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A function that makes engines; at the end nothing is pinned, claimed or held."""
    engines: list[Engine] = []

    def engine(*kinds: str, **options: Any) -> Engine:
        engines.append(Engine(tmp_path, kinds or HYBRID, **options))
        return engines[-1]

    yield engine
    for each in engines:
        each.require_clean()
        each.close()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store that all engines share."""
    shared = MemoryStore()
    monkeypatch.setattr(Settings, "open_store", lambda settings: shared)
    return shared


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_second_request_loads_what_the_first_saved(make: Make, kinds: tuple[str, ...], ranks: int) -> None:
    engine = make(*kinds, ranks=ranks)
    engine.serve("a", PROMPT, 3)
    engine.forget()
    assert engine.serve("b", [*PROMPT, 7, 7], 3) == 28  # the tokens of whole blocks are hits
    assert engine.counts.loaded >= (7 if "attention" in kinds else 3)  # windows load only their last blocks


def test_states_alone_are_saved_at_the_ends_of_chunks_and_null_blocks_never(make: Make) -> None:
    engine = make(max_num_batched_tokens=12)
    engine.serve("a", PROMPT, 1)
    keys = [entry.key for entry in engine.connector.scheduler.cache.entries()]
    states = sorted(engine.connector.scheduler.cache.get(key).length for key in keys if key.endswith(b"\1"))
    assert states == [12, 24, 28]  # saved states: at the ends of two chunks, and of the prompt's last whole block
    assert len(keys) == len(states) + 7  # the other seven are KV blocks


def test_the_store_outlives_the_engine(make: Make, store: MemoryStore) -> None:
    extra = {"store_tokens": 4}
    first = make(ranks=2, extra=extra)
    first.serve("a", PROMPT, 1)
    assert first.counts.written == first.counts.saved
    assert len(store.records) == 2 * first.counts.written  # each rank writes a record of its own
    second = make(ranks=2, extra=extra)
    assert second.serve("b", PROMPT, 1) == 28
    assert second.counts.fetched == 8
    second.forget()
    asked = len(store.calls)
    assert second.serve("c", PROMPT, 1) == 28  # loaded from host memory
    assert len(store.calls) == asked


def test_new_weights_of_an_adapter_at_the_same_path_find_nothing(
    make: Make, store: MemoryStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    extra, lora = {"store_tokens": 4}, tmp_path_factory.mktemp("adapter")
    (lora / "adapter_model.safetensors").write_text("")
    make(extra=extra).serve("a", PROMPT, 1, lora=lora)
    engine = make(extra=extra)
    assert [engine.serve("b", PROMPT, 1, lora=lora), engine.serve("c", PROMPT, 1)] == [28, 0]
    (lora / "adapter_model.safetensors").write_text("")
    engine = make(extra=extra)
    assert [engine.serve("d", PROMPT, 1, lora=lora), engine.serve("e", PROMPT, 1)] == [0, 28]


def test_weights_that_nothing_tells_apart_are_refused_with_a_store(make: Make, store: MemoryStore) -> None:
    def loads_nothing(config: Any) -> None:
        config.load_config.load_format = "dummy"

    with pytest.raises(ConfigurationError, match=r"load_format='dummy'; .* set 'model'"):
        make(change=loads_nothing)
    make(extra={"model": "dummies"}, change=loads_nothing)


def test_weights_without_files_need_no_name_without_a_store(make: Make) -> None:
    engine = make(change=lambda config: setattr(config.load_config, "load_format", "dummy"))
    engine.serve("a", PROMPT, 1)
    engine.forget()
    assert engine.serve("b", PROMPT, 1) == 28


CHANGES: dict[str, Callable[[Any, Any], None]] = {
    "revision": lambda config, caches: setattr(config.model_config, "revision", "v2"),
    "format": lambda config, caches: setattr(config.load_config, "load_format", "bitsandbytes"),
    "attention": lambda config, caches: setattr(config.attention_config, "backend", "TRITON_ATTN"),
    "state kernels": lambda config, caches: setattr(config.mamba_config, "backend", "flashinfer"),
    "dtype": lambda config, caches: setattr(config.model_config, "dtype", "bfloat16"),
    "quantization": lambda config, caches: setattr(config.model_config, "quantization", "fp8"),
    "KV dtype": lambda config, caches: setattr(config.cache_config, "cache_dtype", "fp8"),
    "state dtype": lambda config, caches: setattr(config.cache_config, "mamba_ssm_cache_dtype", "bfloat16"),
    "ranks": lambda config, caches: setattr(config.parallel_config, "tensor_parallel_size", 2),
    "hash": lambda config, caches: setattr(config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "block size": lambda config, caches: object.__setattr__(caches.kv_cache_groups[0].kv_cache_spec, "block_size", 8),
    "layers": lambda config, caches: caches.kv_cache_groups[0].layer_names.append("more"),
    "overrides": lambda config, caches: setattr(config.model_config.hf_config, "rope_theta", 1e6),
    "layout": lambda config, caches: setattr(caches, "kv_cache_layout", "LBHNC"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_names_tell_configurations_apart(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(
        change: Callable[[Any, Any], None] | None, blocks: int, runs_on: str = "H200", weights: str = "w"
    ) -> bytes:
        config, caches = vllm_engine.vllm_config(tmp_path, {}), vllm_engine.cache_config(HYBRID, blocks, own=True)
        if change:
            change(config, caches)
        return naming.configuration(config, caches, "0.33.0", [runs_on], weights)

    def moved(config: Any, caches: Any) -> None:
        config.model_config.hf_config.name_or_path = "/elsewhere"

    assert digest(moved, 8) == digest(None, 8)  # `weights` names the weights, so the path does not count
    assert digest(None, 8) == digest(None, 16)  # the number of device blocks does not count
    assert digest(CHANGES[what], 8) != digest(None, 8)
    assert len({digest(None, 8), digest(None, 8, "H100"), digest(None, 8, weights="v")}) == 3


def test_names_tell_ranks_and_seeds_apart() -> None:
    names = {
        naming.record_key(naming.with_seed(bytes(32), seed), rank, b"k") for seed in (b"a", b"b") for rank in (0, 1)
    }
    assert len(names) == 4


def test_what_cannot_be_found_by_content_is_refused(tmp_path: Path) -> None:
    caches = vllm_engine.cache_config(HYBRID, 8, own=True)
    config = vllm_engine.vllm_config(tmp_path, {})
    object.__setattr__(caches.kv_cache_groups[1].kv_cache_spec, "mamba_cache_mode", "none")
    with pytest.raises(ConfigurationError, match="group 1 with mamba_cache_mode='none'"):
        connector.require_supported(config, caches)
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigurationError, match="without prefix caching"):
        connector.require_supported(config, caches)


@pytest.mark.parametrize("role", list(connector.KVConnectorRole))
def test_the_policy_that_ends_requests_is_refused(tmp_path: Path, role: Any) -> None:
    """vLLM's default policy fails a request if one of its records is damaged."""
    config, caches = vllm_engine.vllm_config(tmp_path, {"host_blocks": 8}), vllm_engine.cache_config(HYBRID, 8)
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    with pytest.raises(ConfigurationError, match=r"kv_load_failure_policy='fail': .* set it to 'recompute'"):
        connector.MemstateConnector(config, role, caches)


@pytest.mark.parametrize("drops", [True, False])
def test_a_drafter_that_computes_the_last_block_again(tmp_path: Path, drops: bool) -> None:
    """vLLM 0.32 lacks `num_hash_lookahead_tokens` of vLLM 0.33, so `use_eagle_block_drop` decides about the
    last block.
    """
    config, caches = vllm_engine.vllm_config(tmp_path, {"host_blocks": 8}), vllm_engine.cache_config(HYBRID, 8)
    config.speculative_config = SimpleNamespace(use_eagle_block_drop=lambda: drops)
    assert not getattr(config, "num_hash_lookahead_tokens", 0)
    made = connector.MemstateConnector(config, connector.KVConnectorRole.SCHEDULER, caches)
    assert made.scheduler._drop is drops
    made.shutdown()


def test_this_version_is_one_of_those_that_work() -> None:
    assert vllm.__version__.rpartition(".")[0] in VERSIONS


def test_host_memory_in_bytes(make: Make) -> None:
    """There are two layers, and a block has one page of each."""
    engine = make(extra={"host_bytes": f"{20 * 2 * vllm_engine.PAGE}B"})
    assert engine.connector.scheduler.cache.pool.records == 20
    assert engine.workers[0].connector.worker._cache.pool.records == 20
    engine.serve("a", PROMPT, 1)
    engine.forget()
    assert engine.serve("b", PROMPT, 1) == 28


def test_ranks_of_a_pipeline_have_blocks_of_several_sizes(tmp_path: Path) -> None:
    config, caches = vllm_engine.vllm_config(tmp_path, {"host_bytes": "1GiB"}), vllm_engine.cache_config(HYBRID, 8)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigurationError, match="host_bytes with pipeline parallelism"):
        connector.require_supported(config, caches)


def test_sleep_mode_where_vllm_does_not_say_that_it_wakes_up(tmp_path: Path) -> None:
    config, caches = vllm_engine.vllm_config(tmp_path, {"host_blocks": 8}), vllm_engine.cache_config(HYBRID, 8)
    config.model_config.enable_sleep_mode = True
    if hasattr(connector.KVConnectorBase_V1, "restore_kv_caches"):
        connector.require_supported(config, caches)
        return
    with pytest.raises(ConfigurationError, match="sleep mode with vLLM"):
        connector.require_supported(config, caches)


def test_an_engine_that_slept_serves_again(make: Make) -> None:
    engine = make()
    engine.serve("a", PROMPT, 1)
    engine.forget()
    for worker in engine.workers:
        worker.connector.unregister_kv_caches()
        worker.memory[:] = vllm_engine.POISON
        worker.connector.restore_kv_caches()
    assert engine.serve("b", PROMPT, 1) == 28


def recorded(made: Any, name: str) -> list[Any]:
    """Replaces a method by one that records its results; returns the list of them."""
    method, told = getattr(made, name), []

    def tell(*args: Any) -> Any:
        told.append(method(*args))
        return told[-1]

    setattr(made, name, tell)
    return told


def test_counts_are_statistics_and_metrics_of_vllm(make: Make) -> None:
    registry = CollectorRegistry()
    engine = make()
    metrics = MemstateConnector.build_prom_metrics(
        engine.config, dict.fromkeys((Gauge, Counter, Histogram), partial(Counter, registry=registry)),
        ["engine"], {0: ["first"]},
    )  # fmt: skip
    told = recorded(engine.connector, "get_kv_connector_stats")
    for name in "ab":
        engine.serve(name, PROMPT, 1)
        engine.forget()
    assert len(told) > 2
    total = MemstateConnector.build_kv_connector_stats()
    for stats in told:  # vLLM reads statistics in each step
        metrics.observe(stats.to_dict())
        total = total.aggregate(MemstateConnector.build_kv_connector_stats(stats.to_dict()))
    assert total.to_dict() == vars(engine.counts)
    assert total.reduce()["memstate loaded"] == engine.counts.loaded > 0
    for name, count in vars(engine.counts).items():
        assert registry.get_sample_value(f"vllm:memstate_{name}_total", {"engine": "first"}) == count
    assert engine.connector.get_kv_connector_stats().is_empty()
    assert engine.workers[0].connector.get_kv_connector_stats() is None


def test_hits_name_their_source(make: Make, store: MemoryStore) -> None:
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM has it from 0.32 on")
    extra = {"store_tokens": 4}
    make(extra=extra).serve("a", PROMPT, 1)
    second = make(extra=extra)
    told = recorded(second.connector, "get_external_cache_hit_sources")
    for name in "bc":
        second.serve(name, PROMPT, 1)
        second.forget()
    disk, host = sources.CacheHitSource.DISK, sources.CacheHitSource.HOST
    assert told == [{disk: 28}, {host: 28}]


@pytest.mark.parametrize("seed", range(60))
def test_random_legal_schedules(make: Make, store: MemoryStore, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive, end, fail and are forgotten in random steps; each forward reads the right bytes."""
    draw = random.Random(seed)
    extra = {"host_blocks": draw.choice([6, 20, 60, 60]), "store_tokens": 4}
    rooms = draw.choice([[1], [4], [0, 0, 1], [0, 2, 9]])  # free blocks of staging: each query gives a number of these
    monkeypatch.setattr(Transfers, "room", property(lambda transfers: draw.choice(rooms)))
    store.broken = draw.random() < 0.3
    kinds = draw.choice(KINDS)
    engine = make(
        *kinds, extra=extra, ranks=draw.choice([1, 1, 2]), blocks=draw.choice(POOLS[kinds.count("window")]),
        unit=draw.choice([None, 2]) if len(kinds) > 1 else None,
        max_num_batched_tokens=draw.choice([8, 13, 40]), max_num_seqs=draw.choice([2, 4]),
        async_scheduling=draw.random() < 0.5,
    )  # fmt: skip
    names, stems = list[str](), [[draw.randrange(50) for _ in range(draw.randrange(12, 30))] for _ in range(3)]
    for _ in range(120):
        action, live = draw.random(), [name for name in names if name in engine.scheduler.requests]
        if action < 0.25 and len(live) < 6:
            stem = draw.choice(stems)
            prompt = stem[: draw.choice([len(stem), draw.randrange(4, 12)])]
            prompt += [draw.randrange(50) for _ in range(draw.randrange(1, 12))]
            names.append(str(len(names)))
            engine.add(names[-1], prompt, draw.randrange(1, 16), salt=draw.choice([None, None, "tenant"]))
        elif action < 0.29 and live:
            engine.abort(draw.choice(live))
        elif action < 0.37 and engine.quiet():  # vLLM refuses a reset during a load or a step
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=draw.random() < 0.3)
        elif action < 0.39 and store.records:
            store.faults[draw.choice(sorted(store.records))] = draw.choice(FAULTS)
        elif action < 0.40:
            store.broken = not store.broken
        else:
            engine.step()
    engine.run()
    assert all(request.is_finished() for request in engine.requests.values())
    print(engine.counts, sum(request.num_preemptions for request in engine.requests.values()), "preemptions")
