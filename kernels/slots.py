"""What a row of a decode step reads, writes, snapshots and keeps at marks. Knows no plane and no op."""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.tables import Cursor, Marks, Tail

NEVER = tl.constexpr(2**31 - 1)  # tokens that no step has
MARK_BLOCK = tl.constexpr(128)
NO_MARKS = (None,) * len(Marks._fields)  # arguments of a launch without marks
TREE = ("parents_ptr", "nodes")  # arguments of a step that runs trees
MARK_ARGS = tuple(f"mark_{name}_ptr" for name in Marks._fields)


def mark_types(stores: str) -> dict[str, str]:
    """Types of the columns of marks, of a compile case that stores the slots of marks ("_marks")."""
    return dict.fromkeys(MARK_ARGS, "*i32") if stores == "_marks" else {}


def tail_args(kind: type[Tail]) -> tuple[str, ...]:
    """Names of a kernel's arguments about a tail of this kind, its cursor and a tree, in order."""
    rings = [f"tail_{name}" for name in kind._fields]
    apart = (f"{ring}_apart" for ring in rings)
    cursor = (f"cursor_{name}_ptr" for name in Cursor._fields)
    return *(f"{ring}_ptr" for ring in rings), "tail_rows", "ring", *apart, *cursor, *TREE


def tail_values(
    kind: type[Tail], tail: Tail | None, cursor: Cursor | None, parents: Tensor | None
) -> tuple[Any, ...]:  # fmt: skip
    """Values of `tail_args` in a launch."""
    if tail is None or cursor is None:
        return (None,) * len(tail_args(kind))
    apart = (None if ring is None else ring.stride(0) for ring in tail)
    return *tail, *tail[0].shape[:2], *apart, *cursor, parents, None if parents is None else parents.shape[1]


def tail_types(stores: str, rings: Mapping[str, str]) -> dict[str, str]:
    """Types of `tail_args`, of a compile case with a tail of these rings ("_tail"), and a tree ("_tree")."""
    if stores not in ("_tail", "_tree"):
        return {}
    types = {f"tail_{name}_ptr": ring for name, ring in rings.items()} | {"tail_rows": "i32", "ring": "i32"}
    types |= dict.fromkeys((f"tail_{name}_apart" for name in rings), "i32")
    types |= dict.fromkeys((f"cursor_{name}_ptr" for name in Cursor._fields), "*i32")
    return types | ({"parents_ptr": "*i32", "nodes": "i32"} if stores == "_tree" else {})


def absent(stores: str, kind: type[Tail] | None = None, *rings: str) -> dict[str, None]:
    """Arguments that are None, of a compile case that stores slots ("") or marks too, or has a tail of rings."""
    given = mark_types(stores) | tail_types(stores, dict.fromkeys(rings, ""))
    names = (*MARK_ARGS, *(tail_args(kind) if kind else ()))
    return dict.fromkeys(name for name in names if name not in given)


@triton.jit
def known_slot(slot, last):
    """Slot ids of any width as int64, null for those outside 1..last."""
    return tl.where(slot <= last, tl.maximum(slot, 0), 0).to(tl.int64)


@triton.jit
def row_slots(read_ptr, write_ptr, snapshot_ptr, tokens_ptr, row, max_tokens, last):
    """Whether a row is real, its slots, and how many of its tokens are real; zeros where it writes no slot."""
    write = known_slot(tl.load(write_ptr + row), last)
    real = write > 0
    read = tl.where(real, known_slot(tl.load(read_ptr + row), last), 0)
    snapshot = tl.where(real, known_slot(tl.load(snapshot_ptr + row), last), 0)
    # Within bounds before it becomes 32 bits wide.
    tokens = tl.minimum(tl.maximum(tl.load(tokens_ptr + row), 0), max_tokens).to(tl.int32)
    return real, read, write, snapshot, tl.where(real, tokens, 0)


@triton.jit
def row_tail(row_ptr, label_ptr, pending_ptr, store_ptr, row, rows, ring, count):
    """Where a row's tail lies: its memory, 0 for none; the place of its next token; pending tokens; and where to store.

    Without memory nothing is pending, and the state is stored behind the last of the `count` tokens of the step.
    """
    memory = tl.load(row_ptr + row)
    memory = tl.where((memory > 0) & (memory < rows), memory, 0).to(tl.int64)
    pending = tl.minimum(tl.maximum(tl.load(pending_ptr + row), 0), ring).to(tl.int32)
    store = tl.load(store_ptr + row).to(tl.int32)
    place = (tl.maximum(tl.load(label_ptr + row), 0) % ring).to(tl.int32)
    return memory, place, tl.where(memory > 0, pending, 0), tl.where(memory > 0, store, count)


@triton.jit
def next_place(place, ring):
    """The place in a ring behind another."""
    return tl.where(place + 1 == ring, 0, place + 1)


@triton.jit
def copy_token(to, of, index, SIZE: tl.constexpr):
    """Copies the elements of one token that a block has."""
    tl.store(to + index, tl.load(of + index, mask=index < SIZE, other=0.0), mask=index < SIZE)


@triton.jit
def first_mark(count_ptr, entry_ptr, row):
    """The first mark of a row, or where it would be: marks ascend by entry."""
    marks = tl.load(count_ptr)
    mark = 0
    for start in range(0, marks, MARK_BLOCK):
        index = start + tl.arange(0, MARK_BLOCK)
        entry = tl.load(entry_ptr + index, mask=index < marks, other=NEVER)
        mark += tl.sum((entry < row).to(tl.int32), 0)
    return mark


@triton.jit
def mark_offset(mark, count_ptr, entry_ptr, offset_ptr, row):
    """Tokens of the row up to a mark; `NEVER` if it is another row's, or behind the last.

    The count is loaded again for each mark: a loop over tokens has no register to spare for it.
    """
    inside = mark < tl.load(count_ptr)
    entry = tl.load(entry_ptr + mark, mask=inside, other=-1)
    return tl.where(entry == row, tl.load(offset_ptr + mark, mask=inside, other=NEVER), NEVER)


@triton.jit
def token_start(ptr, token, distance, WIDTH: tl.constexpr):
    """Where the elements of a token begin, in a tensor whose tokens are `distance` elements apart.

    Tokens that are whole accesses wide begin on 16 bytes: `check_tokens` has seen it. The shape alone says so, never an
    address: bits may not depend on where a batch lies.
    """
    at = ptr + token * distance
    if WIDTH * ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
        at = tl.multiple_of(at, 16)
    return at
