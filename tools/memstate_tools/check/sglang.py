"""Offers SGLang's slots and rows as a pool to check: with the classes of SGLang 0.5.23, or with memstate's."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from memstate_tools.bench.radix_peer import imported

NAMES = {
    "HybridReqToTokenPool": "mem_cache.memory_pool",
    "Mamba2CacheParams": "configs.mamba_utils",
    "Mamba2StateShape": "configs.mamba_utils",
    "ReqKvInfo": "managers.schedule_batch",
}  # name of the object -> its module in sglang.srt


class SglangPool:
    """A `HybridReqToTokenPool` with ping-pong, and its allocator. Each request has a state and two tracked states.

    Args:
        module: module with the class; empty: SGLang's own class.
        capacity: number of slots.
        rows: number of rows.

    Raises:
        ImportError: SGLang cannot be used.
    """

    def __init__(self, module: str = "", capacity: int = 8, rows: int = 2) -> None:
        self._sgl = sgl = imported(NAMES)
        kind = import_module(module).HybridReqToTokenPool if module else sgl.HybridReqToTokenPool
        shape = sgl.Mamba2StateShape.create(
            tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=2, state_size=2, conv_kernel=2
        )
        self._pool = kind(
            size=rows, max_context_len=1, device="cpu", enable_memory_saver=False, mamba_size=capacity,
            mamba_spec_state_size=0, mamba_layer_ids=[0], enable_mamba_extra_buffer=True,
            cache_params=sgl.Mamba2CacheParams(shape=shape, layers=[0]),
        )  # fmt: skip
        self._slots = self._pool.mamba_allocator
        self._module, self.capacity, self.rows = module, capacity, rows
        self._reqs: dict[int, Any] = {}

    def of_size(self, slots: int) -> "SglangPool":
        """See `Sized`."""
        return SglangPool(self._module, slots)

    def claim(self, n: int) -> Any:
        """See `SlotPool`."""
        return self._slots.alloc(n)

    def release(self, ids: list[int]) -> None:
        """See `SlotPool`."""
        self._slots.free(torch.tensor(ids, dtype=torch.int64, device="cpu"))

    def free(self) -> int:
        """See `SlotPool`. This is the count that a scheduler plans with."""
        return int(self._slots.schedulable_available_size())

    def clear(self) -> None:
        """See `Clears`."""
        self._pool.clear()
        self._reqs.clear()

    def open_group(self, n: int) -> None:
        """See `Groups`."""
        self._slots.alloc_group_begin(n)

    def close_group(self) -> None:
        """See `Groups`."""
        self._slots.alloc_group_end()

    def admit(self, key: str) -> int | None:
        """See `RowPool`."""
        req = SimpleNamespace(rid=key, kv=self._sgl.ReqKvInfo())
        if (rows := self._pool.alloc([req])) is None:
            return None
        self._reqs[rows[0]] = req
        return int(rows[0])

    def slots_of(self, row: int) -> list[int]:
        """See `RowPool`."""
        kv = self._reqs[row].kv
        return [int(kv.mamba_pool_idx), *(slot for slot in kv.mamba_ping_pong_track_buffer.tolist() if slot != -1)]

    def end(self, row: int) -> None:
        """See `RowPool`."""
        req = self._reqs[row]
        self._pool.free_mamba_cache(req)
        self._pool.free(req)

    def generation(self, row: int) -> int:
        """See `Generations`."""
        return int(self._pool.req_generation[row])

    def track(self, row: int) -> None:
        """See `Tracks`. Sets the fields that SGLang's scheduler sets at a boundary."""
        kv = self._reqs[row].kv
        kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
        kv.mamba_last_track_seqlen = (kv.mamba_last_track_seqlen or 0) + 1
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = self._pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)

    def tracked(self, row: int) -> int | None:
        """See `Tracks`."""
        kv = self._reqs[row].kv
        if kv.mamba_last_track_seqlen is None:
            return None
        return int(kv.mamba_ping_pong_track_buffer[kv.mamba_last_track_idx])

    def publish(self, row: int) -> int | None:
        """See `Tracks`. Like SGLang's scheduler, it claims a new slot first."""
        req = self._reqs[row]
        if req.kv.mamba_last_track_seqlen is None or (new := self._slots.alloc(1)) is None:
            return None
        slot = self._pool.donate_mamba_ping_pong_slot(req, new)
        req.kv.mamba_last_track_seqlen = None
        return int(slot)
