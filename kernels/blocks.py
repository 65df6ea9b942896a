"""How blocks of a plane are cut into words, and what the movers of blocks ask of their arguments. Knows no Triton.

A block is one layer of one slot. Integer words move it, so that no NaN loses its payload:

    unit   the most bytes, up to 16, of which every address and stride is a multiple: what one lane moves at a time
    word   the element of the kernel's pointers, at most 4 bytes of a unit
    tile   LANES words of a block: what one program moves at a time
"""

from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.kernels.checks import Blocks, blocks_of, check_memory, check_tensors, is_dense
from memstate.kernels.decode_inputs import ACCESS_BYTES

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.blocks, not kernels.blocks: a second copy would duplicate it")

LANES = 4096
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # bytes -> dtype


class Cut(NamedTuple):
    """The words of a plane: their dtype and bytes, words of a unit, tiles of a block; strides and block in units."""

    word: torch.dtype
    word_bytes: int
    unit_words: int
    tiles: int
    layer_units: int
    slot_units: int
    block_units: int


def cut(plane: Tensor, *multiples: int, word_bytes: int = 4) -> Cut:
    """Cuts the blocks of a plane `layer slot ...` that has elements.

    multiples: bytes that must be a multiple of the unit too, such as another tensor's address and stride.
    word_bytes: the widest word allowed, a power of two.
    """
    size = plane.element_size()
    # Where there is one layer or slot the stride means nothing, and must not make the words narrow.
    layer, slot = (plane.stride(axis) * size if plane.shape[axis] > 1 else 0 for axis in (0, 1))
    block = block_bytes(plane)
    unit = gcd(ACCESS_BYTES, plane.data_ptr(), layer, slot, block, *multiples)
    word = gcd(unit, word_bytes)
    return Cut(WORDS[word], word, unit // word, -(-block // (LANES * word)), layer // unit, slot // unit, block // unit)


def block_bytes(plane: Tensor) -> int:
    """Bytes of one layer of one slot."""
    return prod(plane.shape[2:]) * plane.element_size()


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8 with an axis for the bytes of an element, whatever the strides; nothing is copied."""
    size = tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), strides)


def check_plane(plane: Tensor, beside: dict[str, Tensor]) -> Blocks:
    """Where the blocks of a plane lie; beside: the other tensors of the call.

    Raises: ValueError unless the plane is `layer slot ...` and every block of it is contiguous.
    """
    check_tensors({"plane": plane} | beside)
    check_memory("plane", plane, plane.device)
    if plane.dim() < 2:
        raise ValueError(f"plane: expected `layer slot ...`, got {tuple(plane.shape)}")
    if not is_dense(plane.shape[2:], plane.stride()[2:]):
        raise ValueError(
            f"plane: one layer of one slot must be contiguous, got {tuple(plane.shape)} with strides {plane.stride()}"
        )
    return blocks_of(plane, 2)


def check_beside(plane: Tensor, name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...]) -> None:
    """Raises: ValueError unless the tensor has `shape` along `pattern`, is contiguous, and of the plane's dtype."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected `{pattern}` = {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != plane.dtype:
        raise ValueError(f"{name}: expected {plane.dtype} as the plane, got {tensor.dtype}")
    check_memory(name, tensor, plane.device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: `{pattern}` must be contiguous, got strides {tensor.stride()}: use .contiguous()")
