"""What a row of a decode step reads, writes and snapshots. Knows no plane and no op."""

import triton
import triton.language as tl


@triton.jit
def known_slot(slot, last):
    """Slot ids of any width as int64, null for those outside 1..last."""
    return tl.where(slot <= last, tl.maximum(slot, 0), 0).to(tl.int64)


@triton.jit
def row_slots(read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last, STORES: tl.constexpr):
    """Whether a row is real, its slots, and how many of its tokens are real; zeros where it writes no slot.

    STORES: whether slots are stored at all; if not, `write` says only whether the row is real.
    """
    write = tl.load(write_ptr + row)
    real = write > 0
    write = known_slot(write, last)
    if STORES:
        real = write > 0
    read = tl.where(real, known_slot(tl.load(read_ptr + row), last), 0)
    snapshot = tl.where(real, known_slot(tl.load(snapshot_ptr + row), last), 0)
    # Within bounds before it becomes 32 bits wide.
    tokens = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), max_tokens).to(tl.int32)
    return real, read, write, snapshot, tl.where(real, tokens, 0)
