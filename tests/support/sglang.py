"""Runs SGLang's own scheduler code, with its pools and requests, on a machine without a GPU."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch


class Engine:
    """Requests that decode under SGLang's own scheduler code, on SGLang's pool or memstate's, on a CPU.

    A state is the number of tokens that it stands for. There is no KV, no tree and no model.

    Args:
        kind: The class of the pool.
        rows: Most requests at a time.
        slots: Slots of the pool.
        every: Tokens between two tracked states.
        lazy: Whether the second track slot is claimed at boundaries only.
        overlap: Whether a step is prepared before the result of the last step is known.

    Attributes:
        active: Running requests by name.
        lengths: Slot -> number of tokens that its state stands for.
        kept: Name of an ended request -> (slot that a cache would own, length of its state).
    """

    def __init__(self, kind: Any, rows: int, slots: int, every: int, lazy: bool, overlap: bool) -> None:
        from memstate_tools.bench.host_peer import load

        self.sgl = sgl = load()
        self.every, self.lazy, self.overlap = every, lazy, overlap
        self._tracks = 2 if overlap and not lazy else 1
        self.pool = make_pool(kind, rows, slots, lazy=lazy, overlap=overlap)
        tree = SimpleNamespace(page_size=1, enable_mamba_extra_buffer=True, req_to_token_pool=self.pool)
        self._component = object.__new__(sgl.MambaComponent)
        self._component.cache = tree
        unused = (
            "_maybe_collect_routed_experts", "_maybe_collect_indexer_topk", "_prepare_kv_cache_release",
            "_maybe_collect_customized_info",
        )  # fmt: skip
        kind = type("Processor", (sgl.SchedulerBatchResultProcessor,), dict.fromkeys(unused, lambda *_: None))
        self._processor: Any = object.__new__(kind)
        for name, value in (("tree_cache", tree), ("draft_worker", None), ("model_worker", None)):
            object.__setattr__(self._processor, name, value)
        self._batch = sgl.ScheduleBatch(
            reqs=[], req_to_token_pool=self.pool, tree_cache=tree, enable_overlap=overlap, device="cpu",
            model_config=SimpleNamespace(is_encoder_decoder=False), spec_algorithm=sgl.SpeculativeAlgorithm.NONE,
            sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        )  # fmt: skip
        self.active: dict[str, Any] = {}
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64)
        self.kept: dict[str, tuple[Any, int]] = {}
        self._before: Any = None  # the last batch and its finished requests, while its result is not handled yet

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Sets SGLang's switches during the block, where lengths of KV grow without allocations."""

        def grow(batch: Any, **_: Any) -> None:
            for req in batch.reqs:
                req.kv.kv_committed_len += 1

        kv = patch.object(import_module("sglang.srt.managers.schedule_batch"), "alloc_for_decode", grow)
        make = torch.tensor
        pin = patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor)
        pinned = patch.object(torch, "tensor", lambda *given, pin_memory=False, **named: make(*given, **named))
        switches = self.sgl.get_exec().mamba.override(
            enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=self.lazy, mamba_track_interval=self.every
        )
        results = import_module(self.sgl.SchedulerBatchResultProcessor.__module__)
        end = patch.object(results, "release_kv_cache", lambda req, _, **keeps: self._end(req, all(keeps.values())))
        with kv, pin, pinned, switches, end:
            yield

    def admit(self, names: list[str]) -> None:
        """Admits requests with prompts of one token, and computes the prompts."""
        reqs = [self.sgl.Req(name, "", array("q", [1]), self.sgl.SamplingParams()) for name in names]
        with self._here():
            assert self.pool.alloc(reqs) is not None
            self._next(None)
        for name, req in zip(names, reqs, strict=True):
            req.output_ids = array("q", [1])
            req.kv.kv_committed_len = req.kv.kv_allocated_len = 1
            self.lengths[req.kv.mamba_pool_idx] = 1
            self.active[name] = req

    def step(self, finished: set[str]) -> None:
        """Runs one step of all requests. Requests in `finished` end with it, or with overlap one step later."""
        with self._here():
            batch = self._batch
            batch.reqs = list(self.active.values())
            if batch.reqs:
                lengths = torch.tensor([req.kv.kv_committed_len for req in batch.reqs])
                batch.seq_lens, batch.seq_lens_cpu, batch.orig_seq_lens = lengths, lengths.clone(), lengths.int()
                batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in batch.reqs])
                batch.prepare_for_decode()
                self._forward()
            self._next((copy(batch), finished) if batch.reqs else None)

    def _next(self, now: tuple[Any, set[str]] | None) -> None:
        """Handles the result of a batch: with overlap that of the last batch, otherwise that of batch `now`."""
        due, self._before = (self._before, now) if self.overlap else (now, None)
        if due is not None:
            self._results(*due)

    def _forward(self) -> None:
        batch = self._batch
        live = self.pool.get_mamba_indices(batch.req_pool_indices).long()
        self.lengths[live] += 1
        tracked = batch.mamba_track_mask & (batch.mamba_track_indices >= 0)
        self.lengths[batch.mamba_track_indices[tracked]] = self.lengths[live][tracked]

    def _results(self, batch: Any, finished: set[str]) -> None:
        for i, req in enumerate(batch.reqs):
            if req.finished_reason is not None:
                continue
            req.output_ids.append(1)
            if req.rid in finished:
                req.finished_reason = SimpleNamespace()
            result = SimpleNamespace(num_correct_drafts_per_req_cpu=None)
            self._processor._handle_finish_state_updated_req(req, batch, result, i, None)

    def _end(self, req: Any, keeps: bool) -> None:
        """Ends a request. keeps: whether `kept` gets the newest state that SGLang's tree can take."""
        params, real = self.sgl.InsertParams(), len(req.output_ids)
        length = self._component.prepare_for_caching_req(req, params, real, is_finished=True) if keeps else 0
        result = SimpleNamespace(mamba_exist=False) if length else None
        self._component.cleanup_after_caching_req(req, True, result, params)
        self.pool.free(req)
        del self.active[req.rid]
        if length:
            self.kept[req.rid] = params.mamba_value, length

    def room(self) -> int:
        """Returns how many requests can be admitted."""
        requests: int = self.pool.mamba_allocator.available_size() // (1 + self._tracks)
        return requests

    def drop(self, name: str) -> None:
        """Frees the kept state of a request, as an eviction from the tree does."""
        self.pool.mamba_allocator.free(self.kept.pop(name)[0])

    def owned(self) -> list[int]:
        """Returns all slots that a request or `kept` owns."""
        slots = [int(slot) for slot, _ in self.kept.values()]
        for req in self.active.values():
            slots += [
                int(req.kv.mamba_pool_idx),
                *(at for at in req.kv.mamba_ping_pong_track_buffer.tolist() if at > 0),
            ]
        return slots


def make_pool(kind: Any, rows: int, slots: int, *, lazy: bool = False, overlap: bool = True, **named: Any) -> Any:
    """Makes a pool of class `kind` for two layers of a tiny state. With `pre_alloc_size`: that of a decode server."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=2, state_size=2, conv_kernel=2
    )
    settings = {
        "size": rows, "mamba_size": slots, "max_context_len": 4, "device": "cpu", "enable_memory_saver": False,
        "cache_params": Mamba2CacheParams(shape=shape, layers=[0, 2]), "mamba_layer_ids": [0, 2],
        "enable_mamba_extra_buffer": True, "enable_overlap_schedule": overlap, "speculative_num_draft_tokens": None,
    }  # fmt: skip
    if "pre_alloc_size" not in named:
        settings |= {"mamba_spec_state_size": 0, "enable_mamba_extra_buffer_lazy": lazy}
    return kind(**settings | named)
