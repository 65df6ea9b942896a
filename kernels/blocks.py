"""Says where blocks of bytes lie in memory, and cuts them into words for the kernels. Knows no Triton.

A block is one layer of one slot. Kernels move it as integers, so that a NaN keeps its payload:

    unit   what one lane moves at a time: the largest number of bytes, at most 16, that divides every address and stride
    word   the element to which the kernel's pointers point: a whole unit, or 4 bytes of a larger unit
    tile   what one program moves at a time: LANES words of a block
"""

from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import ACCESS_BYTES

LANES = 4096
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # bytes -> dtype
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype


class PlaneBlocks(NamedTuple):
    """Where the bytes of a plane lie: in blocks of `size` bytes, of which the first begins at address `start`.

    Along each axis there are `count` blocks, and `stride` bytes from the start of one to the start of the next.
    """

    start: int
    size: int
    axes: tuple[tuple[int, int], ...]  # (count, stride in bytes) of each axis

    def end(self) -> int:
        """Returns the address behind the last byte."""
        end = self.start + self.size
        for count, stride in self.axes:
            end += (count - 1) * stride
        return end

    def meets(self, start: int, end: int) -> bool:
        """Returns whether a block has any byte at the addresses start..end-1."""
        if self.size == 0 or start >= end or start >= self.end() or self.start >= end:
            return False
        (count, stride), *inner = self.axes
        if inner:
            layers = (PlaneBlocks(self.start + i * stride, self.size, tuple(inner)) for i in range(count))
            return any(layer.meets(start, end) for layer in layers)
        # `first` is the number of the first block whose end lies beyond `start`.
        first = max(0, (start - self.start - self.size) // stride + 1) if stride else 0
        return first < count and self.start + first * stride < end


def blocks_of(plane: Tensor, axes: int) -> PlaneBlocks:
    """Returns where the dense blocks of a tensor lie; its first `axes` axes count the blocks."""
    size, shape, strides = plane.element_size(), plane.shape, plane.stride()
    counted = tuple((shape[i], strides[i] * size) for i in range(axes))
    return PlaneBlocks(plane.data_ptr(), prod(shape[axes:]) * size, counted)


def tokens_of(tensor: Tensor) -> PlaneBlocks:
    """Returns where the tokens of a tensor `batch token ..` lie, which may be a slice of a wider tensor.

    A contiguous tensor is one block. If there are gaps between the rows but none between the tokens of a row, as in the
    rings of a tail, each row is a block. Otherwise each token is a block.
    """
    if tensor.is_contiguous():
        return PlaneBlocks(tensor.data_ptr(), tensor.nbytes, ((1, 1),))
    size, (batch, token, *rest) = tensor.element_size(), tensor.shape
    apart = tensor.stride(1) if token > 1 else tensor.stride(0)
    if batch > 1 and tensor.stride(0) != token * apart:
        return PlaneBlocks(tensor.data_ptr(), prod(tensor.shape[1:]) * size, ((batch, tensor.stride(0) * size),))
    return PlaneBlocks(tensor.data_ptr(), prod(rest) * size, ((batch * token, apart * size),))


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns whether elements with these strides lie one behind the other, the last axis fastest."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def is_transposed(tensor: Tensor) -> bool:
    """Returns whether the last two axes are swapped in memory and dense; False if both orders are the same."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    if (columns == 1 or column == 1) and (rows == 1 or row == columns):
        return False
    return (rows == 1 or row == 1) and (columns == 1 or column == rows)


def taps_are_fastest(windows: Tensor) -> bool:
    """Returns whether windows `.. tap channel` lie in memory as `channel tap` instead."""
    return is_transposed(windows)


def stride_unit(state: Tensor) -> int:
    """Returns how many elements a lane can move at a time: at most 16 bytes, and a divisor of the slot stride."""
    return gcd(state.stride(0), ACCESS_BYTES // state.element_size())


class Cut(NamedTuple):
    """How the blocks of a plane are cut into words, units and tiles."""

    word: torch.dtype
    word_bytes: int
    unit_words: int  # words of a unit
    tiles: int  # tiles of a block, of LANES words each
    layer_units: int  # units between layers
    slot_units: int  # units between slots
    block_units: int  # units of a block


def cut(plane: Tensor, *multiples: int) -> Cut:
    """Returns how the blocks of a plane are cut into words. The plane must not be empty.

    Args:
        plane: `layer slot ...`.
        multiples: further numbers that the unit must divide, such as the address of another tensor.
    """
    size = plane.element_size()
    # The stride of an axis of size 1 can be any number, and must not make the unit smaller.
    layer, slot = (plane.stride(axis) * size if plane.shape[axis] > 1 else 0 for axis in (0, 1))
    block = block_bytes(plane)
    unit = gcd(ACCESS_BYTES, plane.data_ptr(), layer, slot, block, *multiples)
    word = gcd(unit, 4)
    return Cut(WORDS[word], word, unit // word, -(-block // (LANES * word)), layer // unit, slot // unit, block // unit)


def key_sizes(words: Cut) -> tuple[int, int]:
    """Returns the sizes that make the key of a gather or scatter: bytes of a unit, and tiles of a block."""
    return words.unit_words * words.word_bytes, words.tiles


def tiles_of(words: Cut, lanes: int) -> int:
    """Returns the number of tiles of a block if a tile has `lanes` words; `Cut.tiles` is for `LANES` words."""
    return -(-words.block_units * words.unit_words // lanes)


def block_bytes(plane: Tensor) -> int:
    """Returns the bytes of one layer of one slot."""
    return prod(plane.shape[2:]) * plane.element_size()


def as_integers(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor as integers, because a copy of floats may change a NaN.

    Elements of 16 bytes become bytes, as in `as_bytes`.
    """
    integers = INTEGERS.get(tensor.element_size())
    return as_bytes(tensor) if integers is None else tensor.view(integers)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor of any strides as uint8, with one more axis: the bytes of an element."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), strides)
