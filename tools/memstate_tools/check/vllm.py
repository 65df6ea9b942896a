"""Offers vLLM's blocks of states as a pool to check: `BlockPool` by id, `KVCacheManager` for requests."""

import os
from typing import Any

import torch

SIZE = 16  # tokens of a block


class VllmPool:
    """A `KVCacheManager` of one group of recurrent layers, without prefix cache.

    Args:
        capacity: number of blocks, without the null block 0.

    Raises:
        ImportError: vLLM cannot be used.
    """

    def __init__(self, capacity: int = 8) -> None:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM would log to stdout
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

        spec = MambaSpec(block_size=SIZE, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="none")
        groups = [KVCacheGroupSpec(["state"], spec)]
        config = KVCacheConfig(num_blocks=capacity + 1, kv_cache_tensors=[], kv_cache_groups=groups)
        self._manager = KVCacheManager(
            config, max_model_len=SIZE, scheduler_block_size=SIZE, hash_block_size=SIZE, enable_caching=False
        )
        self._blocks = self._manager.block_pool
        self.capacity = capacity
        self._requests: list[Any] = []  # row -> the request in it, because vLLM has no table of rows

    def of_size(self, slots: int) -> "VllmPool":
        """See `Sized`."""
        return VllmPool(slots)

    def claim(self, n: int) -> list[int]:
        """See `SlotPool`."""
        return [block.block_id for block in self._blocks.get_new_blocks(n)]

    def release(self, ids: list[int]) -> None:
        """See `SlotPool`. vLLM takes blocks, not ids, so an id without a block is refused here."""
        if wrong := [slot for slot in ids if not 0 <= slot <= self.capacity]:
            raise IndexError(f"no blocks {wrong}")
        self._blocks.free_blocks([self._blocks.blocks[slot] for slot in ids])

    def free(self) -> int:
        """See `SlotPool`."""
        return int(self._blocks.get_num_free_blocks())

    def admit(self, key: str) -> int | None:
        """See `RowPool`."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        request = Request(key, [1], SamplingParams(max_tokens=1), None)
        if self._manager.allocate_slots(request, 1) is None:
            return None
        self._requests.append(request)
        return len(self._requests) - 1

    def slots_of(self, row: int) -> list[int]:
        """See `RowPool`."""
        return [*self._manager.get_block_ids(self._requests[row].request_id)[0]]

    def end(self, row: int) -> None:
        """See `RowPool`."""
        self._manager.free(self._requests[row])
