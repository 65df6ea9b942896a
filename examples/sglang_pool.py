"""Runs SGLang's pool of requests over memstate. It needs SGLang: `python examples/sglang_pool.py`."""

from array import array

try:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install --no-deps -r tests/proof/engines/sglang/pins.txt") from None

from memstate.integrations.sglang import HybridReqToTokenPool


def main() -> None:
    """Admits requests, gives a tracked state to a cache, and ends the requests."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=64, n_groups=1, num_heads=2, head_dim=32, state_size=16, conv_kernel=4
    )
    pool = HybridReqToTokenPool(
        size=8, mamba_size=40, mamba_spec_state_size=0, max_context_len=64, device="cpu", enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 1]), mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=True,
    )  # fmt: skip
    reqs = [Req(str(i), "", array("q", [1, 2, 3]), SamplingParams()) for i in range(8)]
    rows = pool.alloc(reqs)
    counts = pool.mamba_allocator.slots.backend.counts
    print(f"rows {rows}: {counts.launches['claim']} claim for {len(reqs)} requests")
    state = pool.donate_mamba_ping_pong_slot(reqs[0], pool.mamba_allocator.alloc(1))  # as if a tree owned it
    for req in reqs:
        pool.free_mamba_cache(req)
        pool.free(req)
    print(f"{pool.mamba_allocator.available_size()} of 40 slots free, {counts.launches['release']} releases so far")
    pool.mamba_allocator.free(state)
    pool.mamba_allocator.check()  # checks that no slot was freed twice
    print(pool.mamba_allocator)


if __name__ == "__main__":
    main()
