"""SGLang's names for recurrent states, and what they are here. Data for a test and for docs/sglang.md."""

SRT = "sglang.srt"
ALLOCATOR = f"{SRT}.mem_cache.allocator.mamba:MambaSlotAllocator"
POOL = f"{SRT}.mem_cache.memory_pool:MambaPool"
ROWS = f"{SRT}.mem_cache.memory_pool:HybridReqToTokenPool"
DECODE = f"{SRT}.disaggregation.decode"
CACHE = f"{SRT}.mem_cache.unified_radix_cache:UnifiedRadixCache"
COMPONENT = f"{SRT}.mem_cache.unified_cache.components.mamba:MambaComponent"
BATCH = f"{SRT}.managers.schedule_batch"
RESULTS = f"{SRT}.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
SLOTS, PLANES = "memstate.slots.allocator:SlotAllocator", "memstate.state.planes:Planes"
PREFIX = "memstate.integrations.sglang.prefix:PrefixPart"
MANAGER = "memstate.engine.manager:StateManager"
DEVICE = "memstate.engine.device:DeviceCalls"

# Of a class that has an adapter of the same name, the module of the adapter.
ADAPTERS = {ALLOCATOR: "slots", POOL: "states", ROWS: "rows", f"{DECODE}:HybridMambaDecodeReqToTokenPool": "rows"}

class Name(NamedTuple):
    """A name of SGLang's and the one here.

    Attributes:
        theirs: `module:name` in SGLang.
        adapter: the same in `memstate.integrations.sglang`; "" where SGLang's own code runs over the adapters.
        manager: what an engine that is written for memstate calls instead.
    """

    theirs: str
    adapter: str
    manager: str


NAMES = (
    Name(ALLOCATOR, OUR_SLOTS, SLOTS),
    Name(f"{ALLOCATOR}.alloc", f"{OUR_SLOTS}.alloc", f"{SLOTS}.claim"),
    Name(f"{ALLOCATOR}.free", f"{OUR_SLOTS}.free", f"{SLOTS}.release"),
    Name(f"{ALLOCATOR}.available_size", f"{OUR_SLOTS}.available_size", f"{MANAGER}.free_slots"),
    Name(f"{ALLOCATOR}.alloc_group_begin", f"{OUR_SLOTS}.alloc_group_begin", f"{SLOTS}.group"),
    Name(f"{ALLOCATOR}.alloc_group_end", f"{OUR_SLOTS}.alloc_group_end", "memstate.slots.allocator:ClaimGroup.close"),
    Name(f"{ALLOCATOR}.clear", f"{OUR_SLOTS}.clear", f"{SLOTS}.reset"),
    Name(POOL, OUR_POOL, PLANES),
    Name(f"{POOL}.clear_slots", f"{OUR_POOL}.clear_slots", f"{PLANES}.zero"),
    Name(f"{POOL}.copy_from", f"{OUR_POOL}.copy_from", f"{PLANES}.copy"),
    Name(f"{POOL}.get_cpu_copy", f"{OUR_POOL}.get_cpu_copy", f"{PLANES}.save"),
    Name(f"{POOL}.load_cpu_copy", f"{OUR_POOL}.load_cpu_copy", f"{PLANES}.load"),
    Name(f"{POOL}.get_contiguous_buf_infos", "", f"{DEVICE}.buffer_infos"),
    Name(ROWS, OUR_ROWS, MANAGER),
    Name(f"{ROWS}.alloc", f"{OUR_ROWS}.alloc", f"{MANAGER}.admit"),
    Name(f"{ROWS}.free", f"{OUR_ROWS}.free", f"{MANAGER}.end"),
    Name(f"{ROWS}.free_mamba_cache", f"{OUR_ROWS}.free_mamba_cache", f"{MANAGER}.end"),
    Name(f"{ROWS}.get_mamba_indices", f"{OUR_ROWS}.get_mamba_indices", f"{DEVICE}.live_slots"),
    Name(f"{ROWS}.donate_mamba_ping_pong_slot", f"{OUR_ROWS}.donate_mamba_ping_pong_slot", f"{MANAGER}.publish"),
    Name(f"{ROWS}.set_mamba_ping_pong_slot", f"{OUR_ROWS}.set_mamba_ping_pong_slot", f"{MANAGER}.plan"),
    Name(
        f"{DECODE}:HybridMambaDecodeReqToTokenPool",
        f"{OURS}.rows:HybridMambaDecodeReqToTokenPool",
        f"{DEVICE}.arrived",
    ),
    Name(f"{BATCH}:ScheduleBatch.prepare_for_decode", "", f"{MANAGER}.plan"),
    Name(f"{BATCH}:ScheduleBatch.mamba_lazy_prealloc_at_boundary", "", f"{MANAGER}.plan"),
    Name(f"{RESULTS}.mamba_lazy_post_decode_at_boundary", "", f"{MANAGER}.settle"),
    Name(f"{CACHE}.match_prefix", "", f"{PREFIX}.match"),
    Name(f"{CACHE}.insert", "", f"{PREFIX}.insert"),
    Name(f"{CACHE}.evict", "", f"{PREFIX}.evict"),
    Name(f"{CACHE}.inc_lock_ref", "", f"{PREFIX}.lock"),
    Name(f"{CACHE}.dec_lock_ref", "", f"{PREFIX}.unlock"),
    Name(f"{COMPONENT}.prepare_for_caching_req", "", f"{MANAGER}.publish"),
    Name(f"{SRT}.session.streaming_session:StreamingSession", "", "memstate.engine.conversations:SessionCalls.open"),
    Name(
        f"{SRT}.mem_cache.hicache_storage:HiCacheStorage",
        f"{OURS}.storage:StoreStorage",
        "memstate.tiers.stores.base:Store",
    ),
)
