"""Runs SGLang's bookkeeping of recurrent states on a CPU, as a peer: its requests, pool, allocator and scheduler code.

The functions of SGLang 0.5.23 run: `alloc_req_slots` of an admission, `ScheduleBatch.prepare_for_decode` of a step and
the handling of each result, the hand-over of a tracked state to the prefix cache, the end of a request, and the return
of slots that the cache evicted. KV, prompts, sampling, the tree and the model are left out. SGLang is no dependency: it
is imported when the first peer is made.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from memstate.integrations.sglang import MambaSlotAllocator
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Count
from memstate_tools.bench.radix_peer import NAME, imported

__all__ = ["NAME", "SglangStates", "load"]

NAMES = {
    "Req": "managers.schedule_batch",
    "ScheduleBatch": "managers.schedule_batch",
    "Session": "session.session_controller",
    "StreamingSession": "session.streaming_session",
    "SchedulerBatchResultProcessor": "managers.scheduler_components.batch_result_processor",
    "SamplingParams": "sampling.sampling_params",
    "SpeculativeAlgorithm": "speculative.spec_info",
    "HybridReqToTokenPool": "mem_cache.memory_pool",
    "ReqToTokenPool": "mem_cache.memory_pool",
    "MambaComponent": "mem_cache.unified_cache.components.mamba",
    "FreeComponentDeviceSlot": "mem_cache.unified_cache.cache_action",
    "InsertParams": "mem_cache.base_prefix_cache",
    "alloc_req_slots": "mem_cache.allocation",
    "Mamba2CacheParams": "configs.mamba_utils",
    "Mamba2StateShape": "configs.mamba_utils",
    "GenerationBatchResult": "managers.utils",
    "prepare_mamba_track_for_verify": "speculative.spec_utils",
    "get_exec": "runtime_context",
    "get_schedule": "runtime_context",
    "get_spec": "runtime_context",
}  # name of the object -> its module in sglang.srt
LEFT_OUT = (
    "managers.schedule_batch.alloc_for_decode", "mem_cache.allocation.alloc_token_slots",
    "mem_cache.allocation.write_cache_indices", "managers.schedule_batch.SamplingBatchInfo.from_schedule_batch",
)  # fmt: skip

Timer = Callable[[str, Callable[[], object]], object]


@lru_cache
def load() -> SimpleNamespace:
    """Returns the objects of SGLang that this module uses.

    Raises:
        ImportError: SGLang cannot be used. The message is one line.
    """
    return imported(NAMES)


VIEWS = {"slice", "select", "unsqueeze", "lift_fresh", "detach", "alias", "view"}  # operations that launch nothing


class LaunchCounter(TorchDispatchMode):
    """Counts the operations that would launch or wait on a GPU, although all tensors are on the host.

    Args:
        host: Tensors that stay on the host even with a GPU.
    """

    def __init__(self, *host: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = self.syncs = 0
        self._host = list(host)  # kept, so that no new tensor gets the memory of these

    def _on_host(self, given: object) -> bool:
        if isinstance(given, torch.Tensor):
            return any(given.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in self._host)
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it."""
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if args and self._on_host(args[0]):
            self._host += [result] if isinstance(result, torch.Tensor) else []
        elif name == "_local_scalar_dense":
            self.syncs += 1
        elif name not in VIEWS:
            self.launches += 1
        return result


class SglangStates:
    """Requests of SGLang, each with its state and its tracked states.

    Args:
        size: Number of requests.
        every: Tokens between two tracked states.
        lazy: True: a request gets its second slot for tracked states at a boundary. False: it always holds both slots,
            which is SGLang's default.
        due: Requests of a decode step that are at a boundary. None: each turn is a life from admission to end.
        adapted: Whether the pool is that of `memstate.integrations.sglang`, under SGLang's own scheduler code.
        states: False: requests have no states, and the pool has only rows, as for a model without states.
        idle: Sessions that hold rows and slots while they have no turn.

    Raises:
        ImportError: SGLang cannot be used.
    """

    def __init__(
        self, size: int, every: int, lazy: bool, due: int | None = None, adapted: bool = False, states: bool = True,
        idle: int = 0,
    ) -> None:  # fmt: skip
        self._sgl = sgl = load()
        self._size, self._every, self._lazy, self._due, self._states = size, every, lazy, due, states
        shape = sgl.Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=2, state_size=2, conv_kernel=2
        )
        self._rows, self._slots = size + idle, 5 * size + idle
        self._kept: deque[Any] = deque()  # states in the cache
        kind = import_module("memstate.integrations.sglang.rows") if adapted else sgl
        with self._here():
            rows = {"size": self._rows, "max_context_len": 1, "device": "cpu", "enable_memory_saver": False}
            self._pool = sgl.ReqToTokenPool(**rows) if not states else kind.HybridReqToTokenPool(
                **rows, mamba_size=self._slots, mamba_spec_state_size=0, mamba_layer_ids=[0],
                cache_params=sgl.Mamba2CacheParams(shape=shape, layers=[0]), enable_mamba_extra_buffer=True,
                enable_mamba_extra_buffer_lazy=lazy,
            )  # fmt: skip
        tree = SimpleNamespace(
            page_size=1, enable_mamba_extra_buffer=True, req_to_token_pool=self._pool, supports_swa=lambda: False,
            supports_mamba=lambda: False, maybe_hand_to_session=lambda req: None,
        )  # fmt: skip
        self._component = object.__new__(sgl.MambaComponent)  # made without its constructor, which needs a tree
        self._component.cache = tree
        self._processor = object.__new__(sgl.SchedulerBatchResultProcessor)  # the constructor needs a scheduler
        object.__setattr__(self._processor, "tree_cache", tree)
        self._batch = sgl.ScheduleBatch(
            reqs=[], req_to_token_pool=self._pool, tree_cache=tree, enable_overlap=True, device="cpu",
            model_config=SimpleNamespace(is_encoder_decoder=False, hf_text_config=None, vocab_size=0),
            spec_algorithm=sgl.SpeculativeAlgorithm.NONE,
            sampling_info=SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False)),
        )  # fmt: skip
        if due is not None:
            with self._here():
                self._begin()
                self._admit(self._reqs)

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Sets SGLang's switches. Without a device, no memory is pinned. KV is not allocated, as on our side."""
        switches = self._sgl.get_exec().mamba.override(
            enable_mamba_extra_buffer=self._states, enable_mamba_extra_buffer_lazy=self._states and self._lazy,
            mamba_track_interval=self._every,
        )  # fmt: skip
        with ExitStack() as stack:
            for name in LEFT_OUT:
                stack.enter_context(patch(f"sglang.srt.{name}", lambda *_, **__: None))
            stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
            stack.enter_context(switches)
            yield

    def turn(self, timer: Timer) -> None:
        """Makes one decode step, or one life of all requests. Each operation is one call of the timer."""
        with self._here():
            if self._due is None:
                self._live(timer)
            else:
                self._place(self._due)
                timer("decode", self._decode)

    def counted(self, act: Callable[[], object]) -> NDArray[np.int64]:
        """Makes a call. Returns how many launches, uploads and waits it would need on a GPU."""
        uploads, to = 0, torch.Tensor.to

        def sent(*given: Any, **named: Any) -> torch.Tensor:
            nonlocal uploads
            uploads += "non_blocking" in named
            return to(*given, **named)

        host = self._pool.req_generation, self._batch.seq_lens_cpu
        ours = self._ours.counts if self._ours else None
        before = (ours.total_launches, ours.uploads, ours.syncs) if ours else (0, 0, 0)
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch.Tensor, "to", sent))
            counts = stack.enter_context(LaunchCounter(*(tensor for tensor in host if tensor is not None)))
            act()
        result = np.array([counts.launches, uploads, counts.syncs], np.int64)
        return result + np.subtract((ours.total_launches, ours.uploads, ours.syncs), before) if ours else result

    @property
    def _ours(self) -> Backend | None:
        """The backend of our launches; None if the pool is SGLang's."""
        slots = getattr(self._pool, "mamba_allocator", None)
        return slots.slots.backend if isinstance(slots, MambaSlotAllocator) else None

    def silence(self) -> None:
        """Makes our launches do nothing but count. They still count slots, because the host compares the counts."""
        if backend := self._ours:
            some = torch.arange(1, self._slots + 1, dtype=torch.int32, device="cpu")

            def claim(bitmap: torch.Tensor, n: int, counters: torch.Tensor) -> torch.Tensor:
                counters.numpy()[Count.FREE] -= n
                return some[:n]

            def release(bitmap: torch.Tensor, ids: torch.Tensor, capacity: int, counters: torch.Tensor) -> None:
                counters.numpy()[Count.FREE] += ids.numel()

            vars(backend).update(claim=claim, release=release)

    def _request(self, name: int) -> Any:
        return self._sgl.Req(str(name), "", array("q", [1]), self._sgl.SamplingParams())

    def _begin(self) -> None:
        self._reqs = self._batch.reqs = [self._request(i) for i in range(self._size)]

    def _admit(self, reqs: list[Any]) -> None:
        """Gives requests their rows and slots, and makes the list of the states that must be zeroed."""
        self._sgl.alloc_req_slots(self._pool, reqs, None)
        if self._states:
            self._batch._collect_deferred_mamba_cow_and_clear(reqs)

    def _place(self, due: int) -> None:
        """Sets lengths so that a step takes `due` requests to a boundary. The KV length includes the step's token."""
        lengths = [self._every - 1] * due + [self._every // 2] * (self._size - due)
        for req, length in zip(self._reqs, lengths, strict=True):
            req.origin_input_ids, req.output_ids = array("q", bytes(8 * length)), array("q", [1, 1])
            req.kv.kv_committed_len = length + 1
        batch = self._batch
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in self._reqs], device="cpu")
        batch.seq_lens = torch.tensor(lengths, device="cpu")
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.orig_seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")

    def _decode(self) -> None:
        """Makes the calls of a step before the forward, and for each request when its result is known."""
        batch, processor = self._batch, self._processor
        batch.prepare_for_decode()
        for i, req in enumerate(self._reqs):
            processor._handle_finish_state_updated_req(req, batch, None, i, None)

    def _live(self, timer: Timer) -> None:
        self._begin()
        given: list[Any] = []
        timer("admit", lambda: self._admit(self._reqs))
        for req in self._reqs:
            req.kv.mamba_last_track_seqlen = self._every
            req.kv.kv_committed_len = self._every
        timer("publish", lambda: given.extend(self._publish(req) for req in self._reqs))
        timer("release", self._release)
        timer("drop", lambda: self._drop(given))

    def _publish(self, req: Any) -> Any:
        """Moves the newest tracked state to the cache. The request gets a new slot."""
        params = self._sgl.InsertParams()
        self._component.prepare_for_caching_req(req, params, self._every, is_finished=False)
        self._component.cleanup_after_caching_req(req, False, SimpleNamespace(mamba_exist=False), params)
        return params.mamba_value

    def _release(self) -> None:
        for req in self._reqs:
            self._component.cleanup_after_caching_req(req, is_finished=True)
            self._pool.free(req)

    def _drop(self, slots: list[Any]) -> None:
        """Returns the slots of evicted states to the allocator."""
        self._component.apply_component_action(self._sgl.FreeComponentDeviceSlot(slots, component_type=None))

    def wrong(self) -> str:
        """Returns a text if a slot is lost or is free twice; empty if nothing is wrong."""
        if not self._states:
            return ""
        free = self._pool.mamba_allocator.free_slots.tolist()
        held = len(self._kept) + (0 if self._due is None else self._rows * (2 if self._lazy else 3))
        if len(set(free)) != len(free) or len(free) + held != self._slots:
            return f"{len(free)} free slots, {len(set(free))} distinct, {held} held, of {self._slots}"
        return ""
