"""Runs vLLM's own scheduler and cache manager with workers that have no model, but move real bytes on a CPU.

For each token, a forward writes bytes that depend on all tokens up to it. Before it writes, the worker checks all bytes
that the request reads, so it notices a block that was loaded, saved or reused at the wrong moment. Each step poisons
the blocks that no request holds and that belong to no cached prefix.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from memstate.integrations.vllm.connector import MemstateConnector
from memstate.integrations.vllm.scheduler import ConnectorCounts

BLOCK, PAGE, POISON = 4, 64, 0xEE
TINY = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 2048, "ffn_dim": 64,
    "word_embed_proj_dim": 64,
}  # fmt: skip
EMPTY = "\2" + "\0" * 7 + "{}"  # the content of a safetensors file without tensors
ATTENTION = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, head_size_v=2, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=1, head_size=2, head_size_v=2, dtype=torch.float32, sliding_window=10
)
STATE = MambaSpec(block_size=BLOCK, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align")
SPECS = {"attention": ATTENTION, "state": STATE, "window": WINDOW}


def vllm_config(folder: Path, extra: dict[str, Any], **scheduling: Any) -> VllmConfig:
    """Returns a configuration of a model without weights. Writes the model's files to `folder`, unless they exist."""
    for name, text in (("config.json", json.dumps(TINY)), ("model.safetensors", EMPTY)):
        if not (folder / name).exists():
            (folder / name).write_text(text)
    chosen = {
        "async_scheduling": False,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 256,
        **scheduling,
    }
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=256),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True, mamba_cache_mode="align"),
        scheduler_config=SchedulerConfig(
            enable_chunked_prefill=True, is_encoder_decoder=False, **chosen
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="MemstateConnector", kv_connector_module_path="memstate.integrations.vllm.connector",
            kv_role="kv_both", kv_connector_extra_config=extra, kv_load_failure_policy="recompute",
        ),
    )  # fmt: skip
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.mamba_cache_mode = "align"
    return config


def cache_config(kinds: Sequence[str], blocks: int, own: bool = False) -> KVCacheConfig:
    """Returns a group of two layers for each kind. All first layers share one tensor, all second layers another.

    own: whether each group has its own copy of its spec, so that a test can change it.
    """
    groups = [
        KVCacheGroupSpec([f"{kind}.{at}.{layer}" for layer in range(2)], replace(SPECS[kind]) if own else SPECS[kind])
        for at, kind in enumerate(kinds)
    ]
    tensors = [
        KVCacheTensor(
            size=2 * blocks * PAGE,
            layers=[group.layer_names[layer]],
            layer_stride=blocks * PAGE,
            block_stride=PAGE,
            offset=layer * blocks * PAGE,
        )
        for layer in range(2)
        for group in groups
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def written(layer: str, tokens: Sequence[int], size: int) -> np.ndarray:
    """Returns the `size` bytes that a layer writes for the last of these tokens."""
    digest = blake2b(repr((layer, tuple(tokens))).encode(), digest_size=32).digest()
    return np.resize(np.frombuffer(digest, np.uint8), size)


class Worker:
    """One rank: its memory, its connector, and a forward that checks and writes bytes."""

    def __init__(self, config: VllmConfig, caches: KVCacheConfig, rank: int) -> None:
        config.parallel_config.rank = rank
        self.rank, self.caches = rank, caches
        self.connector = MemstateConnector(config, KVConnectorRole.WORKER, caches)
        self.memory = np.full((2, caches.num_blocks, PAGE), POISON, np.uint8)  # one allocation, as in vLLM
        whole = torch.from_numpy(self.memory).view(torch.float32)
        named = dict[str, Any]()
        for group in caches.kv_cache_groups:
            for layer, name in enumerate(group.layer_names):
                named[name] = [whole[layer]] if isinstance(group.kv_cache_spec, MambaSpec) else whole[layer]
        self.connector.register_kv_caches(named)

    def forward(self, name: str, tokens: list[int], before: int, blocks: Sequence[list[int]]) -> None:
        """Checks the state and KV of the first `before` tokens of a request, then writes those of the other tokens."""
        for group, ids in zip(self.caches.kv_cache_groups, blocks, strict=True):
            for layer, called in enumerate(group.layer_names):
                self._layer(
                    f"{called} of {self.rank}", group.kv_cache_spec, self.memory[layer], tokens, before, ids, name
                )

    def _layer(
        self, called: str, spec: Any, memory: Any, tokens: list[int], before: int, ids: list[int], name: str
    ) -> None:
        if isinstance(spec, MambaSpec):
            if before:
                at = ids[(before - 1) // spec.block_size]
                assert at, f"{name}: the state after {before} tokens is in the null block"
                assert (memory[at] == written(called, tokens[:before], PAGE)).all(), f"{name} {called} @{before}"
            at = ids[(len(tokens) - 1) // spec.block_size]
            assert at, f"{name}: the state after {len(tokens)} tokens goes to the null block"
            memory[at] = written(called, tokens, PAGE)
            return
        size = PAGE // BLOCK
        first = max(0, before - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        for place in range(first, len(tokens)):
            at, cell = ids[place // BLOCK], slice(place % BLOCK * size, (place % BLOCK + 1) * size)
            if place < before:
                assert at, f"{name}: KV of token {place} is in the null block"
                assert (memory[at, cell] == written(called, tokens[: place + 1], size)).all(), (
                    f"{name} {called} [{place}]"
                )
            else:
                memory[at, cell] = written(called, tokens[: place + 1], size)

    def begin(self, output: Any) -> None:
        """Starts the connector's loads for a step. vLLM calls this before or after the forward."""
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        self.connector.start_load_kv(None)

    def end(self, output: Any, saves: bool) -> KVConnectorOutput:
        """Ends the connector's part of a step after its forward. Returns what the connector tells the scheduler."""
        if saves:
            self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        done = KVConnectorOutput(
            finished_recving=results.finished_recving, failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )  # fmt: skip
        self.connector.clear_connector_metadata()
        return done


class Engine:
    """vLLM's scheduler with memstate's connector, and its workers."""

    def __init__(
        self, folder: Path, kinds: Sequence[str] = ("attention", "state"), blocks: int = 40, ranks: int = 1,
        unit: int | None = None,
        extra: dict[str, Any] | None = None, change: Callable[[VllmConfig], object] = lambda config: None,
        **scheduling: Any,
    ) -> None:  # fmt: skip
        size = {} if extra and "host_bytes" in extra else {"host_blocks": 64}
        self.config = vllm_config(folder, {**size, **(extra or {})}, **scheduling)
        change(self.config)
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.parallel_config.tensor_parallel_size = self.config.parallel_config.world_size = ranks
        self.config.cache_config.prefix_match_unit = unit
        self.caches = cache_config(kinds, blocks)
        block, unit = resolve_kv_cache_block_sizes(self.caches, self.config)
        hashing = get_hash_fn_by_name("sha256")
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(unit, hashing)
        self.ahead = bool(
            scheduling.get("async_scheduling")
        )  # whether a step is scheduled before the outcome of the last one is known
        self.scheduler = (AsyncScheduler if self.ahead else Scheduler)(
            self.config,
            self.caches,
            StructuredOutputManager(self.config),
            block_size=block,
            hash_block_size=unit,
            log_stats=True,
        )
        self.workers = [Worker(self.config, self.caches, rank) for rank in range(ranks)]
        self.aggregator = KVOutputAggregator(ranks)
        self.requests = dict[str, Request]()
        self.random = random.Random(0)
        self.loaded_tokens = 0
        self.tokens = dict[str, list[int]]()  # request -> its tokens as the workers know them
        self.pending: tuple[Any, Any] | None = None

    @property
    def connector(self) -> MemstateConnector:
        """The connector that runs in the scheduler's process."""
        return self.scheduler.connector

    def add(
        self, name: str, prompt: Sequence[int], answer: int = 1, salt: str | None = None, lora: Path | None = None
    ) -> Request:
        """Adds a request that generates `answer` tokens, and returns it."""
        request = Request(
            name, list(prompt), SamplingParams(max_tokens=answer, ignore_eos=True), None,
            block_hasher=self.hasher, cache_salt=salt,
            lora_request=LoRARequest("ours", 1, str(lora)) if lora else None,
        )  # fmt: skip
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """Aborts a request."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def counts(self) -> ConnectorCounts:
        """The connector's counters."""
        return self.connector.counts

    def quiet(self) -> bool:
        """Calls `drain`. Returns true if no load is under way and no waiting request holds blocks."""
        self.drain()
        live, blocks = self.scheduler.requests, self.scheduler.kv_cache_manager.get_block_ids
        waiting = [name for name, request in live.items() if request.status != RequestStatus.RUNNING]
        return not (self.connector.scheduler._loads or any(any(blocks(name)) for name in waiting))

    def forget(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def serve(
        self, name: str, prompt: Sequence[int], answer: int, salt: str | None = None, lora: Path | None = None
    ) -> int:
        """Runs one request to its end. Returns the number of tokens whose states or KV were loaded for it."""
        before = self.loaded_tokens
        self.add(name, prompt, answer, salt, lora)
        self.run()
        return self.loaded_tokens - before

    def step(self) -> bool:
        """Runs one step, and returns whether it computed tokens."""
        output = self.scheduler.schedule()
        self.execute(output)
        return bool(output.total_num_scheduled_tokens)

    def execute(self, output: Any) -> None:
        """Runs the forward of a step on each rank, and gives the scheduler the outcome."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        loose = [block.block_id for block in pool.blocks if not block.ref_cnt and block.block_hash is None]
        for memory in (memory for worker in self.workers for memory in worker.memory):
            memory[loose] = POISON
            for source, target in output.kv_cache_block_copies or ():
                memory[target] = memory[source]
        # vLLM starts loads before a forward or after it.
        early, forward = self.random.random() < 0.5, bool(output.num_scheduled_tokens)
        for worker in self.workers if early else ():
            worker.begin(output)
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            after = request.num_computed_tokens  # already includes the tokens of this step
            if name not in self.tokens or name in output.scheduled_cached_reqs.resumed_req_ids:
                self.tokens[name] = list(request.all_token_ids)
            blocks = scheduler.kv_cache_manager.get_block_ids(name)
            for worker in self.workers:
                worker.forward(name, self.tokens[name][:after], after - count, blocks)
        for worker in () if early else self.workers:
            worker.begin(output)
        saves = forward or self.random.random() < 0.5  # vLLM 0.30 calls wait_for_save only after a forward
        outputs = [worker.end(output, saves) for worker in self.workers]
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(name) for name in names]
        places = {name: at for at, name in enumerate(names)}
        runner = [
            ModelRunnerOutput(
                req_ids=names, req_id_to_index=places, sampled_token_ids=sampled, kv_connector_output=each
            )
            for each in outputs
        ]  # fmt: skip
        merged = self.aggregator.aggregate(runner, 0)
        loading = set(merged.kv_connector_output.finished_recving or ())
        lost = merged.kv_connector_output.failed_recving
        self.loaded_tokens += sum(self.requests[name].num_computed_tokens for name in loading - lost)
        before, self.pending = self.pending if self.ahead else (output, merged), (output, merged)
        if before is not None:
            scheduler.update_from_output(*before)

    def drain(self) -> None:
        """Gives the scheduler the outcome of the step that is under way."""
        pending, self.pending = self.pending, None
        if self.ahead and pending is not None:
            self.scheduler.update_from_output(*pending)

    def _sample(self, name: str) -> list[int]:
        if self.requests[name].num_computed_tokens < len(self.tokens[name]):
            return []
        self.tokens[name].append(self.random.randrange(100))
        return self.tokens[name][-1:]

    def run(self, most: int = 400) -> None:
        """Runs steps until no request is left. most: limit of the steps that compute tokens."""
        steps, end = 0, time.monotonic() + 60
        while self.scheduler.has_requests():
            assert steps < most and time.monotonic() < end, f"{steps} steps, and there are still requests"
            computed = self.step()
            steps += computed
            if not self.scheduler.has_unfinished_requests():
                self.drain()
            time.sleep(0 if computed else 0.0005)  # lets threads ask, read and write the store

    def require_clean(self) -> None:
        """Checks that nothing holds a block of vLLM, a record or a pin."""
        side, pool = self.connector.scheduler, self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert side.cache.miscounts(Counter(), 0) == []
        assert not (side._saving or side._saves or side._writes or side._loads or side._known)
        for worker in (worker.connector.worker for worker in self.workers):
            assert not (worker._waiting or worker._packed or worker._left)
            assert not (worker._reading or worker._loading or worker._writing or worker._failed)

    def close(self) -> None:
        """Ends the threads of all connectors."""
        for connector in (self.connector, *(worker.connector for worker in self.workers)):
            connector.shutdown()
