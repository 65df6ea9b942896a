"""Prepares SGLang's HiCache to run on a CPU, with a `FileStore` as its storage."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash
from sglang.srt.mem_cache.pool_host import common, mamba, mha
from torch import Tensor

from memstate import FileStore
from memstate.integrations.sglang import StoreStorage
from tests.proof.engines.sglang.scenarios import Pair, tracked
from tests.proof.engines.sglang.traffic import talks


class Storage(StoreStorage):
    """The storage that SGLang creates for its setting `dynamic`."""

    def __init__(self, config: Any, _: Any) -> None:
        super().__init__(config, FileStore(Path(config.extra_config["folder"])))


def to_device(
    src_ptrs: list[Tensor], dst_ptrs: list[Tensor], src_indices: Tensor, dst_indices: Tensor, layer_id: int,
    page_size: int,
) -> None:  # fmt: skip
    """Copies tokens of a layer from host memory (axes `page layer token ...`) to the device (`token ...`)."""
    at = src_indices.long()
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        tokens = host[at // page_size, layer_id, at % page_size]
        device[dst_indices.long()] = tokens.reshape(len(at), *device.shape[1:])


def to_host(
    src_ptrs: Sequence[Tensor], dst_ptrs: list[Tensor], src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:  # fmt: skip
    """Copies tokens of all layers from the device to host memory, where one tensor has all layers of a page."""
    layers, at = len(src_ptrs) // len(dst_ptrs), dst_indices.long()
    for n, device in enumerate(src_ptrs):
        place = at // page_size, n % layers, at % page_size
        host = dst_ptrs[n // layers]
        host[place] = device[src_indices.long()].reshape(len(at), *host.shape[3:])


def prepare() -> None:
    """Replaces kernels by copies in torch, keeps memory from being registered with CUDA, and compiles SGLang's hash."""
    get_native_hash([1], None)  # compiles now, because this takes longer than the steps of a run
    common._cuda_host_register = lambda *_, **__: None
    for pools in (mha, mamba):
        pools.transfer_kv_per_layer_direct_pf_lf, pools.transfer_kv_all_layer_direct_lf_pf = to_device, to_host


def over_store(folder: Path) -> Pair:
    """Returns a pair whose pages and states SGLang keeps in a store.

    Args:
        folder: folder of the store.
    """
    extra = {"backend_name": "memstate", "module_path": __name__, "class_name": "Storage", "folder": str(folder)}
    settings = tracked(
        enable_hierarchical_cache=True, hicache_io_backend="direct", hicache_mem_layout="page_first_direct",
        hicache_storage_backend="dynamic", hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps(extra | {"prefetch_threshold": 1}),
    )  # fmt: skip
    return Pair("HiCache over a store, started again", settings, talks(3, 5))
