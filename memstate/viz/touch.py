"""Computes exactly, from a layout, which bytes and pages an access to slots touches.

A page is any unit of memory, such as the bytes of one TLB entry. It is assumed that every arena starts on a page, as
large allocations do.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate import checks
from memstate.state.layout import StateLayout
from memstate.viz import inputs


class ByteRange(NamedTuple):
    """Contiguous bytes of one arena: `nbytes` of them, from byte `start` on."""

    arena: int
    start: int
    nbytes: int


def blocks(layout: StateLayout, slots: int, ids: Sequence[int], layers: Iterable[int] | None = None) -> list[ByteRange]:
    """Returns the blocks that a forward reads: one for each plane, layer and slot, without padding.

    Args:
        layout: The layout.
        slots: Number of slots.
        ids: Slots that are read, 1..slots.
        layers: Layers that are read (default: all).

    Raises:
        InvalidArgument: An id is not a slot, or a layer does not exist.

    Syncs: no.
    """
    ids = inputs.ids("slots", ids, range(1, checks.whole("slots", slots) + 1))
    most = max(map(layout.layers_of, layout.planes))
    chosen = inputs.ids("layers", range(most) if layers is None else layers, range(most))
    return [
        ByteRange(place.arena, place.offset + layer * place.layer_stride + slot * place.slot_stride, plane.nbytes)
        for plane, place in zip(layout.planes, layout.placements(slots), strict=True)
        for layer in chosen
        if layer < layout.layers_of(plane)
        for slot in ids
        if plane.nbytes
    ]


def runs(layout: StateLayout, slots: int, ids: Sequence[int]) -> list[ByteRange]:
    """Returns the blocks that a copy of whole slots reads or writes, with padding: the runs of the layout.

    Args:
        layout: The layout.
        slots: Number of slots.
        ids: Slots to copy, 1..slots.

    Raises:
        InvalidArgument: An id is not a slot.

    Syncs: no.
    """
    ids = inputs.ids("slots", ids, range(1, checks.whole("slots", slots) + 1))
    return [
        ByteRange(run.arena, run.offset + slot * run.slot_stride, run.nbytes)
        for slot in ids
        for run in layout.runs(slots)
    ]


def joined(pieces: Iterable[ByteRange]) -> list[ByteRange]:
    """Returns as few blocks as possible that contain the same bytes, each byte once, in the order of memory.

    Example:
        >>> joined([ByteRange(0, 8, 8), ByteRange(0, 0, 8), ByteRange(0, 12, 8)])
        [ByteRange(arena=0, start=0, nbytes=20)]
    """
    merged: list[ByteRange] = []
    for piece in sorted(pieces):
        last = merged[-1] if merged else None
        if last and last.arena == piece.arena and piece.start <= last.start + last.nbytes:
            end = max(last.start + last.nbytes, piece.start + piece.nbytes)
            merged[-1] = last._replace(nbytes=end - last.start)
        else:
            merged.append(piece)
    return merged


def touched(pieces: Iterable[ByteRange], page_bytes: int) -> int:
    """Returns the number of pages on which these bytes lie.

    Example:
        >>> touched([ByteRange(0, 0, 1), ByteRange(0, 4000, 200)], page_bytes=4096)
        2

    Raises:
        InvalidArgument: `page_bytes` is not a size.
    """
    page_bytes = checks.whole("page_bytes", page_bytes)
    numbers = (
        ByteRange(arena, start // page_bytes, -(-(start + nbytes) // page_bytes) - start // page_bytes)
        for arena, start, nbytes in pieces
        if nbytes
    )
    return sum(run.nbytes for run in joined(numbers))  # these blocks are ranges of pages: `nbytes` counts pages


def shares(pieces: Iterable[ByteRange], page_bytes: int, arena_bytes: Sequence[int]) -> list[NDArray[np.float64]]:
    """Returns for each arena a vector `page`: which part of each page, 0..1, these bytes take.

    Raises:
        InvalidArgument: `page_bytes` is not a size.
    """
    page_bytes = checks.whole("page_bytes", page_bytes)
    vectors = []
    for arena, size in enumerate(arena_bytes):
        starts = np.arange(0, size, page_bytes)
        ends = np.minimum(starts + page_bytes, size)
        used = np.zeros(len(starts))
        for piece in joined(piece for piece in pieces if piece.arena == arena):
            first, last = piece.start // page_bytes, -(-(piece.start + piece.nbytes) // page_bytes)
            own = slice(first, last)
            used[own] += np.minimum(ends[own], piece.start + piece.nbytes) - np.maximum(starts[own], piece.start)
        vectors.append(used / (ends - starts))
    return vectors
