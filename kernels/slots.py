"""Loads the slots, tail and marks of a row, inside the kernels of decode steps. Knows no plane and no op."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.tables import Cursor, StepMarks, Tail

NEVER = tl.constexpr(2**31 - 1)  # more tokens than any step has
MARK_BLOCK = tl.constexpr(128)
NO_MARKS = (None,) * len(StepMarks._fields)  # arguments of a launch without marks


def tail_tensors(kind: type[Tail], tail: Tail | None, cursor: Cursor | None, parents: Tensor | None) -> tuple[Any, ...]:
    """Returns the tensors of a launch for a tail, its cursor and a tree."""
    if tail is None or cursor is None:
        return (None,) * (len(kind._fields) + len(Cursor._fields) + 1)
    return *tail, *cursor, parents


def tail_numbers(kind: type[Tail], tail: Tail | None, parents: Tensor | None) -> tuple[int | None, ...]:
    """Returns the numbers of a launch for a tail and a tree: strides, and sizes of rings and trees."""
    if tail is None:
        return (None,) * (len(kind._fields) + 3)
    apart = (None if ring is None else ring.stride(0) for ring in tail)
    return *apart, *tail[0].shape[:2], None if parents is None else parents.shape[1]


@triton.jit
def known_slot(slot, last):
    """Returns slot ids as int64; the null slot for ids outside 1..last."""
    return tl.where(slot <= last, tl.maximum(slot, 0), 0).to(tl.int64)


@triton.jit
def row_slots(read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last):
    """Returns (whether a row is real; read, write and snapshot slot; real tokens); zeros if the row writes no slot."""
    write = known_slot(tl.load(write_ptr + row), last)
    real = write > 0
    read = tl.where(real, known_slot(tl.load(read_ptr + row), last), 0)
    snapshot = tl.where(real, known_slot(tl.load(snapshot_ptr + row), last), 0)
    # Clamp before the cast to 32 bits, because the number can be int64.
    tokens = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), max_tokens).to(tl.int32)
    return real, read, write, snapshot, tl.where(real, tokens, 0)


@triton.jit
def row_tail(row_ptr, label_ptr, pending_ptr, store_ptr, row, rows, ring, count):
    """Returns (the row whose memory has the tail, 0 for none; place of the first pending token; pending tokens; store).

    `store` is as in `Cursor`. If no row has the tail, no tokens are pending, and the state is stored after all `count`
    tokens of the step.
    """
    memory = tl.load(row_ptr + row)
    memory = tl.where((memory > 0) & (memory < rows), memory, 0).to(tl.int64)
    pending = tl.minimum(tl.maximum(tl.load(pending_ptr + row), 0), ring).to(tl.int32)
    store = tl.load(store_ptr + row).to(tl.int32)
    place = (tl.maximum(tl.load(label_ptr + row), 0) % ring).to(tl.int32)
    return memory, place, tl.where(memory > 0, pending, 0), tl.where(memory > 0, store, count)


@triton.jit
def next_place(place, ring):
    """Returns the place that follows a place in a ring."""
    return tl.where(place + 1 == ring, 0, place + 1)


@triton.jit
def copy_token(to, of, index, SIZE: tl.constexpr):
    """Copies elements of one token: those at the indices in `index` that are below SIZE."""
    tl.store(to + index, tl.load(of + index, mask=index < SIZE, other=0.0), mask=index < SIZE)


@triton.jit
def first_mark(count_ptr, entry_ptr, row):
    """Returns the index of the first mark of a row, or the index where it would be; marks ascend by entry."""
    marks = tl.load(count_ptr)
    mark = 0
    for start in range(0, marks, MARK_BLOCK):
        index = start + tl.arange(0, MARK_BLOCK)
        entry = tl.load(entry_ptr + index, mask=index < marks, other=NEVER)
        mark += tl.sum((entry < row).to(tl.int32), 0)
    return mark


@triton.jit
def mark_offset(mark, count_ptr, entry_ptr, offset_ptr, row):
    """Returns the offset of a mark; `NEVER` if the mark is another row's, or behind the last mark.

    It loads the count again for each mark: a loop over tokens has no hardware register to spare for the count.
    """
    inside = mark < tl.load(count_ptr)
    entry = tl.load(entry_ptr + mark, mask=inside, other=-1)
    return tl.where(entry == row, tl.load(offset_ptr + mark, mask=inside, other=NEVER), NEVER)


@triton.jit
def token_start(ptr, token, distance, WIDTH: tl.constexpr):
    """Returns the pointer to the elements of a token or head, in memory whose tokens or heads are `distance` apart.

    Tokens of a multiple of 16 bytes begin on 16-byte boundaries: `check_tokens` makes sure of it. Only the shape
    decides, never an address, because bits must not depend on where a batch lies.
    """
    at = ptr + token * distance
    if WIDTH * ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
        at = tl.multiple_of(at, 16)
    return at
