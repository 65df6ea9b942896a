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

NAMES = {  # SGLang's name -> what an engine that is written for memstate calls instead
    ALLOCATOR: SLOTS,
    f"{ALLOCATOR}.alloc": f"{SLOTS}.claim",
    f"{ALLOCATOR}.free": f"{SLOTS}.release",
    f"{ALLOCATOR}.available_size": f"{MANAGER}.free_slots",
    f"{ALLOCATOR}.alloc_group_begin": f"{SLOTS}.group",
    f"{ALLOCATOR}.alloc_group_end": "memstate.slots.allocator:ClaimGroup.close",
    f"{ALLOCATOR}.clear": f"{SLOTS}.reset",
    POOL: PLANES,
    f"{POOL}.clear_slots": f"{PLANES}.zero",
    f"{POOL}.copy_from": f"{PLANES}.copy",
    f"{POOL}.get_cpu_copy": f"{PLANES}.save",
    f"{POOL}.load_cpu_copy": f"{PLANES}.load",
    f"{POOL}.get_contiguous_buf_infos": f"{DEVICE}.buffer_infos",
    ROWS: MANAGER,
    f"{ROWS}.alloc": f"{MANAGER}.admit",
    f"{ROWS}.free": f"{MANAGER}.end",
    f"{ROWS}.free_mamba_cache": f"{MANAGER}.end",
    f"{ROWS}.get_mamba_indices": f"{DEVICE}.live_slots",
    f"{ROWS}.donate_mamba_ping_pong_slot": f"{MANAGER}.publish",
    f"{ROWS}.set_mamba_ping_pong_slot": f"{MANAGER}.plan",
    f"{DECODE}:HybridMambaDecodeReqToTokenPool": f"{DEVICE}.arrived",
    f"{BATCH}:ScheduleBatch.prepare_for_decode": f"{MANAGER}.plan",
    f"{BATCH}:ScheduleBatch.mamba_lazy_prealloc_at_boundary": f"{MANAGER}.plan",
    f"{RESULTS}.mamba_lazy_post_decode_at_boundary": f"{MANAGER}.settle",
    f"{CACHE}.match_prefix": f"{PREFIX}.match",
    f"{CACHE}.insert": f"{PREFIX}.insert",
    f"{CACHE}.evict": f"{PREFIX}.evict",
    f"{CACHE}.inc_lock_ref": f"{PREFIX}.lock",
    f"{CACHE}.dec_lock_ref": f"{PREFIX}.unlock",
    f"{COMPONENT}.prepare_for_caching_req": f"{MANAGER}.publish",
    f"{SRT}.session.streaming_session:StreamingSession": "memstate.engine.conversations:SessionCalls.open",
    f"{SRT}.mem_cache.hicache_storage:HiCacheStorage": "memstate.tiers.stores.base:Store",
}
