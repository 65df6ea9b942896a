"""Treats vLLM's memory as planes: a block is a slot, and vLLM's null block is slot 0.

    region    memory with bytes of all blocks at one stride: of one layer or, if blocks are packed, of all layers
    plane     one region; the bytes of a block in all regions together are one record

Layers of several groups share a region, because a block belongs to one group at a time. So a record is a whole block,
whichever group it belongs to.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.errors import LayoutMismatch
from memstate.integrations.vllm.naming import geometry, packed
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes


class VllmBlocks(NamedTuple):
    """The blocks of vLLM's memory.

    Attributes:
        planes: The bytes of the blocks.
        geometry: Digest of shapes and memory order, 32 bytes.
    """

    planes: Planes
    geometry: bytes


def blocks_of(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], backends: Mapping[str, str] | None = None
) -> VllmBlocks:
    """Returns the blocks of a worker.

    Args:
        kv_cache_config: vLLM's configuration of this worker's KV cache.
        kv_caches: Layer name -> the tensor of an attention layer, or the tensors of a recurrent layer, as vLLM
            registers them.
        backends: Layer name -> the backend that reads and writes the layer's tensors; None if unknown.

    Raises:
        LayoutMismatch: The memory of a tensor is smaller than the configuration says, or there is no tensor.
    """
    number, regions = kv_cache_config.num_blocks, list[Tensor]()
    seen = set[int]()
    for tensor in kv_cache_config.kv_cache_tensors:
        if (name := next((layer for layer in tensor.layers if layer in kv_caches), None)) is None:
            continue
        memory = _memory(kv_caches[name])
        span = number * tensor.block_stride
        ends = (0, span) if packed(tensor, number) else (tensor.offset, len(tensor.layers) * tensor.layer_stride)
        first, last = ends[0], sum(ends)
        if memory.numel() < last:
            raise LayoutMismatch(f"KV cache of {name}: {memory.numel()} bytes, the configuration has {last}")
        for start in range(first, last, span):
            region = memory[start : start + span].view(number, tensor.block_stride)
            if region.data_ptr() not in seen:
                seen.add(region.data_ptr())
                regions.append(region)
    if not regions:
        raise LayoutMismatch(f"KV caches of layers {sorted(kv_caches)}: the configuration has none of them")
    names = [f"region {at}" for at in range(len(regions))]
    planes = [Plane(name, (region.shape[1],), torch.uint8) for name, region in zip(names, regions, strict=True)]
    layout = StateLayout(tuple(planes), layers=1)
    given = {name: region.unsqueeze(0) for name, region in zip(names, regions, strict=True)}
    adopted = Planes.from_tensors(layout, given, Backend("auto", regions[0].device), slots=number - 1)
    layers = [(name, (backends or {}).get(name), *_shapes(kv_caches[name])) for name in sorted(kv_caches)]
    return VllmBlocks(adopted, geometry([region.shape[1] for region in regions], layers))


def _memory(cache: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns all bytes of the allocation in which a layer's tensors lie."""
    tensor = cache if isinstance(cache, Tensor) else cache[0]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _shapes(cache: Tensor | Sequence[Tensor]) -> list[Hashable]:
    tensors = [cache] if isinstance(cache, Tensor) else list(cache)
    blocks = {tensor.shape[0] for tensor in tensors}
    return [
        (str(tensor.dtype), *(size for size in tensor.shape if size not in blocks), *_inside(tensor))
        for tensor in tensors
    ]


def _inside(tensor: Tensor) -> list[int]:
    """Returns the order of a tensor's axes in memory. It does not depend on the number of blocks."""
    strides = [-stride for stride in tensor.stride()]
    return sorted(range(tensor.ndim), key=strides.__getitem__)
