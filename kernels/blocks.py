"""Where blocks of bytes lie, and how they are cut into words. Knows no Triton.

A block is one layer of one slot. Integer words move it, so that no NaN loses its payload:

    unit   the most bytes, up to 16, of which every address and stride is a multiple: what one lane moves at a time
    word   the element of the kernel's pointers, at most 4 bytes of a unit
    tile   LANES words of a block: what one program moves at a time
"""

from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import ACCESS_BYTES

LANES = 4096
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # bytes -> dtype
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
# What `cut` can come to, for compile cases: what is added to the name of a rare case, the word, words of a unit.
WIDTHS = (
    ("", "i32", 4), (", 8 bytes", "i32", 2), (", 4 bytes", "i32", 1), (", 2 bytes", "i16", 1), (", 1 byte", "i8", 1),
)  # fmt: skip


class Blocks(NamedTuple):
    """The bytes of a plane: blocks of `size` bytes from `start` on, for each axis `count` of them, `stride` apart."""

    start: int
    size: int
    axes: tuple[tuple[int, int], ...]  # count, stride

    def end(self) -> int:
        """The byte behind the last one."""
        end = self.start + self.size
        for count, stride in self.axes:
            end += (count - 1) * stride
        return end

    def meets(self, start: int, end: int) -> bool:
        """Whether a byte of start..end-1 is in a block."""
        if self.size == 0 or start >= end or start >= self.end() or self.start >= end:
            return False
        (count, stride), *inner = self.axes
        if inner:
            layers = (Blocks(self.start + i * stride, self.size, tuple(inner)) for i in range(count))
            return any(layer.meets(start, end) for layer in layers)
        first = max(0, (start - self.start - self.size) // stride + 1) if stride else 0  # the first to end behind start
        return first < count and self.start + first * stride < end


def blocks_of(plane: Tensor, axes: int) -> Blocks:
    """Where the dense blocks of a tensor lie; its first `axes` axes count them."""
    size, shape, strides = plane.element_size(), plane.shape, plane.stride()
    counted = tuple((shape[i], strides[i] * size) for i in range(axes))
    return Blocks(plane.data_ptr(), prod(shape[axes:]) * size, counted)


def tokens_of(tensor: Tensor) -> Blocks:
    """Where the tokens lie of a tensor `batch token ..` that may be a slice of a wider one; all of it if contiguous.

    Where there is more room between rows than between tokens, as in the rings of a tail: where rows lie.
    """
    if tensor.is_contiguous():
        return Blocks(tensor.data_ptr(), tensor.nbytes, ((1, 1),))
    size, (batch, token, *rest) = tensor.element_size(), tensor.shape
    apart = tensor.stride(1) if token > 1 else tensor.stride(0)
    if batch > 1 and tensor.stride(0) != token * apart:
        return Blocks(tensor.data_ptr(), prod(tensor.shape[1:]) * size, ((batch, tensor.stride(0) * size),))
    return Blocks(tensor.data_ptr(), prod(rest) * size, ((batch * token, apart * size),))


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of these strides lie one behind the other, the last axis fastest."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def is_transposed(tensor: Tensor) -> bool:
    """Whether the last two axes lie in memory the other way round, dense; False where both ways are the same."""
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    if (columns == 1 or column == 1) and (rows == 1 or row == columns):
        return False
    return (rows == 1 or row == 1) and (columns == 1 or column == rows)


def taps_are_fastest(windows: Tensor) -> bool:
    """Whether a window of `.. tap channel` lies in memory as `channel tap`, and not as `tap channel`."""
    return is_transposed(windows)


def stride_unit(state: Tensor) -> int:
    """Elements that one lane may move at a time: the most, up to 16 bytes, that divide the slot stride."""
    return gcd(state.stride(0), ACCESS_BYTES // state.element_size())


class Cut(NamedTuple):
    """The words of a plane: their dtype and bytes, words of a unit, tiles of a block; strides and block in units."""

    word: torch.dtype
    word_bytes: int
    unit_words: int
    tiles: int
    layer_units: int
    slot_units: int
    block_units: int


def cut(plane: Tensor, *multiples: int) -> Cut:
    """Cuts the blocks of a plane that has elements into words.

    Args:
        plane: `layer slot ...`.
        multiples: bytes that must be a multiple of the unit too, such as another tensor's address and stride.
    """
    size = plane.element_size()
    # Where there is one layer or slot the stride means nothing, and must not make the words narrow.
    layer, slot = (plane.stride(axis) * size if plane.shape[axis] > 1 else 0 for axis in (0, 1))
    block = block_bytes(plane)
    unit = gcd(ACCESS_BYTES, plane.data_ptr(), layer, slot, block, *multiples)
    word = gcd(unit, 4)
    return Cut(WORDS[word], word, unit // word, -(-block // (LANES * word)), layer // unit, slot // unit, block // unit)


def tiles_of(words: Cut, lanes: int) -> int:
    """Tiles of a block, of so many words each; `Cut.tiles` is for `LANES` of them."""
    return -(-words.block_units * words.unit_words // lanes)


def block_bytes(plane: Tensor) -> int:
    """Bytes of one layer of one slot."""
    return prod(plane.shape[2:]) * plane.element_size()


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers, because a copy of floats may change a NaN; elements of 16 bytes get another axis."""
    integers = INTEGERS.get(tensor.element_size())
    return as_bytes(tensor) if integers is None else tensor.view(integers)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8 with an axis for the bytes of an element, whatever the strides; nothing is copied."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), strides)
