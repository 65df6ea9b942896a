"""Which bytes and pages an access to some slots touches, exactly, from the arithmetic of a layout. Knows no picture.

A page is any unit, such as what one entry of a TLB covers. Every arena counts as starting on a page, as a large
allocation does.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate import checks
from memstate.state.layout import StateLayout
from memstate.viz import inputs


class Block(NamedTuple):
    """Bytes that lie together: arena[start : start + nbytes]."""

    arena: int
    start: int
    nbytes: int


def blocks(layout: StateLayout, slots: int, ids: Sequence[int], layers: Iterable[int] | None = None) -> list[Block]:
    """Returns what a forward reads of these slots: every plane, a block per layer and slot, without its padding.

    Args:
        layout: The layout.
        slots: Number of slots.
        ids: Slots that are read, 1..slots.
        layers: Layers that are read (default: all).

    Raises:
        InvalidArgument: There are no such slots or layers.

    Syncs: no.
    """
    ids = inputs.ids("slots", ids, range(1, checks.whole("slots", slots) + 1))
    most = max(map(layout.layers_of, layout.planes))
    chosen = inputs.ids("layers", range(most) if layers is None else layers, range(most))
    return [
        Block(place.arena, place.offset + layer * place.layer_stride + slot * place.slot_stride, plane.nbytes)
        for plane, place in zip(layout.planes, layout.placements(slots), strict=True)
        for layer in chosen
        if layer < layout.layers_of(plane)
        for slot in ids
        if plane.nbytes
    ]


def runs(layout: StateLayout, slots: int, ids: Sequence[int]) -> list[Block]:
    """Returns what a copy of these whole slots reads or writes: the runs of the layout, padding included.

    Args:
        layout: The layout.
        slots: Number of slots.
        ids: Slots that are copied, 1..slots.

    Raises:
        InvalidArgument: There are no such slots.

    Syncs: no.
    """
    ids = inputs.ids("slots", ids, range(1, checks.whole("slots", slots) + 1))
    return [
        Block(run.arena, run.offset + slot * run.slot_stride, run.nbytes) for slot in ids for run in layout.runs(slots)
    ]


def joined(pieces: Iterable[Block]) -> list[Block]:
    """Returns the same bytes in as few blocks as can be, in the order of memory, each byte once.

    Example:
        >>> joined([Block(0, 8, 8), Block(0, 0, 8), Block(0, 12, 8)])
        [Block(arena=0, start=0, nbytes=20)]
    """
    found: list[Block] = []
    for piece in sorted(pieces):
        last = found[-1] if found else None
        if last and last.arena == piece.arena and piece.start <= last.start + last.nbytes:
            end = max(last.start + last.nbytes, piece.start + piece.nbytes)
            found[-1] = last._replace(nbytes=end - last.start)
        else:
            found.append(piece)
    return found


def touched(pieces: Iterable[Block], page_bytes: int) -> int:
    """Returns how many pages these bytes lie on, each counted once.

    Example:
        >>> touched([Block(0, 0, 1), Block(0, 4000, 200)], page_bytes=4096)
        2

    Raises:
        InvalidArgument: `page_bytes` is no size.
    """
    page_bytes = checks.whole("page_bytes", page_bytes)
    numbers = (
        Block(arena, start // page_bytes, -(-(start + nbytes) // page_bytes) - start // page_bytes)
        for arena, start, nbytes in pieces
        if nbytes
    )
    return sum(run.nbytes for run in joined(numbers))  # in pages


def shares(pieces: Iterable[Block], page_bytes: int, arena_bytes: Sequence[int]) -> list[NDArray[np.float64]]:
    """Returns the share of each page that these bytes take, 0..1: one vector `page` per arena.

    Raises:
        InvalidArgument: `page_bytes` is no size.
    """
    page_bytes = checks.whole("page_bytes", page_bytes)
    found = []
    for arena, size in enumerate(arena_bytes):
        starts = np.arange(0, size, page_bytes)
        ends = np.minimum(starts + page_bytes, size)
        used = np.zeros(len(starts))
        for piece in joined(piece for piece in pieces if piece.arena == arena):
            first, last = piece.start // page_bytes, -(-(piece.start + piece.nbytes) // page_bytes)
            own = slice(first, last)
            used[own] += np.minimum(ends[own], piece.start + piece.nbytes) - np.maximum(starts[own], piece.start)
        found.append(used / (ends - starts))
    return found
