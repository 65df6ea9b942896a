"""Names records by content and configuration: a process uses only records of processes with an equal configuration.

    configuration ─▶ digest ─▶ + rank + vLLM's hash of a block and its group ─▶ key of the record in the store

vLLM's hash of a block stands for all tokens up to its end, the salt, a LoRA's name and the images, but not for the
model.
"""

import json
import sys
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

from memstate.salts import encode
from memstate.tiers.records import DIGEST_BYTES, VERSION

LIBRARY = "transformers_version"  # entry of a model's configuration that is no property of the model


def configuration(
    vllm_config: Any, kv_cache_config: Any, version: str, platform: Sequence[str], weights: Hashable
) -> bytes:
    """Returns a digest, 32 bytes, of everything in vLLM's configuration on which the bytes of a block depend.

    This is: the weights; the model's revision and configuration, dtypes and quantisation; attention backends, the
    platform and the ranks; the layers and block sizes of each group, and where they lie in a block; how vLLM hashes
    tokens; and vLLM's version.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's configuration of the KV cache.
        version: vLLM's version, because an update may change the layout of a block.
        platform: Names of the platform, such as those of the device and of the machine's architecture.
        weights: Result of `weights.identity`.
    """
    cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
    parts: tuple[Hashable, ...] = (
        ("memstate", VERSION, sys.byteorder, "vllm", version, *platform),
        (weights, _text(model.revision), _text(model.dtype), _text(model.quantization)),
        (_text(vllm_config.load_config.load_format), _described(model.hf_config)),
        (_text(vllm_config.attention_config), _text(vllm_config.mamba_config)),
        (_text(cache.cache_dtype), _text(cache.mamba_cache_dtype), _text(cache.mamba_ssm_cache_dtype)),
        (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.decode_context_parallel_size),
        (_text(cache.prefix_caching_hash_algo), _text(kv_cache_config.kv_cache_layout)),
        tuple(_group(group) for group in kv_cache_config.kv_cache_groups),
        tuple(
            (
                tuple(tensor.layers),
                tensor.block_stride,
                tensor.offset if packed(tensor, kv_cache_config.num_blocks) else 0,
            )
            for tensor in kv_cache_config.kv_cache_tensors
        ),
    )
    return _digest(repr(parts).encode())


def packed(tensor: Any, blocks: int) -> bool:
    """Returns whether the bytes of all layers of a block lie together, instead of in a region for each layer.

    Args:
        tensor: A `KVCacheTensor` of vLLM.
        blocks: Number of blocks on the device.
    """
    return bool(tensor.layer_stride < blocks * tensor.block_stride)


def with_seed(configured: bytes, seed: bytes) -> bytes:
    """Returns the digest of a configuration and of the seed of vLLM's hashes.

    If vLLM hashes with xxhash and PYTHONHASHSEED is not set, the seed is random: no other process can use the records.
    """
    return _digest(configured, seed)


def record_key(digest: bytes, rank: int, key: bytes) -> bytes:
    """Returns the key of a record in the store, 32 bytes.

    Args:
        digest: Result of `with_seed`.
        rank: The rank that writes and reads the record.
        key: vLLM's hash of the block, with its group.
    """
    return _digest(digest, rank.to_bytes(4, "little"), key)


def geometry(regions: Sequence[int], layers: Sequence[Hashable]) -> bytes:
    """Returns a digest, 32 bytes, of the shape of a worker's memory. It is part of the header of each record.

    Args:
        regions: Bytes of a block in each region.
        layers: For each layer, the shapes, dtypes and memory order of its tensors.
    """
    return _digest(repr((tuple(regions), tuple(layers))).encode())


def _described(model: Any) -> str:
    """Returns a model's configuration as text, after overrides, for example of position encodings."""
    fields = {name: value for name, value in model.to_dict().items() if name not in ("_name_or_path", LIBRARY)}
    return json.dumps(fields, sort_keys=True, default=str)


def _group(group: Any) -> Hashable:
    spec = group.kv_cache_spec
    return (tuple(group.layer_names), type(spec).__name__, spec.block_size, spec.page_size_bytes)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _digest(*parts: bytes) -> bytes:
    return blake2b(encode(parts), digest_size=DIGEST_BYTES).digest()
