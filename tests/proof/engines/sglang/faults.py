"""Plants faults into memstate's pools. FAULTS has a word for each fault: the proof's complaint must contain it."""

from typing import Any


def swapped(pool: Any, batch: Any) -> bool:
    """Exchanges the slots of two running requests."""
    rows = batch.req_pool_indices[:2]
    if len(rows) < 2 or not batch.forward_mode.is_decode():
        return False
    pool.req_index_to_mamba_index_mapping[rows] = pool.req_index_to_mamba_index_mapping[rows.flip(0)]
    return True


def lost(pool: Any, _: Any) -> bool:
    """Claims a slot, and forgets it."""
    return pool.mamba_allocator.alloc(1) is not None


def doubled(pool: Any, _: Any) -> bool:
    """Frees a slot twice."""
    slot = pool.mamba_allocator.alloc(1)
    pool.mamba_allocator.free(slot)
    pool.mamba_allocator.free(slot)
    return True


FAULTS = {
    "two slots exchanged": (swapped, "logits"), "a slot lost": (lost, "leak"),
    "a slot freed twice": (doubled, "DoubleRelease"),
}  # fmt: skip
