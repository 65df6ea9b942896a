"""What ops ask of their tensors before anything moves, checked by kernel and reference alike. Knows no Triton.

Plain comparisons of attributes: these run once per op, where a microsecond counts, and read nothing from a device.
"""

from collections.abc import Mapping
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import Accepted, Registers, StepRecord

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.checks, not kernels.checks: a second copy would duplicate it")

INTS = (torch.int32, torch.int64)
INT32 = (torch.int32,)


def check_tensors(tensors: Mapping[str, Tensor | None], *optional: str) -> None:
    """Raises: ValueError unless each is a tensor, or None where that is allowed."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in optional):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")


def check_memory(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raises: ValueError unless the tensor is on a device, and its values are those that its memory holds."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected on {device}, got {tensor.device}")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{name}: a negated or conjugated view: use .resolve_neg() or .resolve_conj()")


def check_sizes(**sizes: int) -> None:
    """Raises: ValueError naming the first size that is 0: there would be nothing to compute."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected a size of at least 1, got {size}")


def check_columns(
    device: torch.device, batch: int | None, kinds: tuple[torch.dtype, ...] = INTS, /, **columns: Tensor
) -> None:
    """Raises: ValueError unless every column has one integer of these kinds per entry, contiguous, on a device.

    batch: entries, None for those of the first column.
    """
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise ValueError(f"{name}: expected a tensor of integers, got {type(column).__name__}")
        batch = column.numel() if batch is None else batch
        fits = column.shape == (batch,) and column.is_contiguous() and column.device == device
        if not fits or column.dtype not in kinds:
            known = " or ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise ValueError(
                f"{name}: expected contiguous {known} `batch` = ({batch},) on {device}, got "
                f"{column.dtype} {tuple(column.shape)} with strides {column.stride()} on {column.device}"
            )


def check_record(device: torch.device, batch: int, record: StepRecord | Accepted) -> None:
    """Raises: ValueError unless every column of a record has one int32 per batch row, contiguous, on a device."""
    shape = (batch,)
    try:
        fits = True
        for column in record:
            fits &= column.shape == shape and column.dtype is torch.int32
            fits &= column.is_contiguous() and column.device == device
    except AttributeError:  # not a tensor
        fits = False
    if not fits:
        check_columns(device, batch, INT32, **record._asdict())


def check_plan(registers: Registers, rows: Tensor, tokens: Tensor, record: StepRecord) -> None:
    """Raises: ValueError naming the first column of a plan that does not fit the others."""
    check_columns(registers.cells.device, None, INT32, rows=rows, tokens=tokens)
    check_record(registers.cells.device, rows.numel(), record)


def check_settle(registers: Registers, record: StepRecord, results: Tensor | None) -> None:
    """Raises: ValueError naming the first column of a settle that does not fit the others."""
    check_columns(
        registers.cells.device, None, INT32, rows=record.rows, after=record.after, generation=record.generation
    )
    if results is not None:
        check_columns(registers.cells.device, record.rows.numel(), INT32, results=results)


def check_accept(registers: Registers, accepted: Tensor, record: StepRecord, outcome: Accepted) -> None:
    """Raises: ValueError naming the first column of an accept that does not fit the others."""
    device = registers.cells.device
    check_columns(device, None, INT32, accepted=accepted)
    check_record(device, accepted.numel(), record)
    check_record(device, accepted.numel(), outcome)


def check_count(n: int) -> None:
    """Raises: ValueError for a number of slots below 0."""
    if n < 0:
        raise ValueError(f"n: expected at least 0 slots to claim, got {n}")


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements of these strides lie one behind the other, the last axis fastest."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


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
    """Where the dense blocks of a tensor lie; axes: how many of its first ones count them."""
    size, shape, strides = plane.element_size(), plane.shape, plane.stride()
    counted = tuple((shape[i], strides[i] * size) for i in range(axes))
    return Blocks(plane.data_ptr(), prod(shape[axes:]) * size, counted)


def check_distinct(name: str, blocks: Blocks) -> None:
    """Raises: ValueError where blocks along one or two axes share bytes: what one slot stores would change another."""
    size, shared = blocks.size, False
    for count, stride in blocks.axes:
        shared |= count > 1 and stride < size
    if len(blocks.axes) == 2 and not shared:
        (inner, near), (outer, far) = sorted(blocks.axes, key=itemgetter(1))
        if inner > 1 and outer > 1 and far < (inner - 1) * near + size:  # no axis fits into one stride of the other
            shared = any(
                0 < j < inner and abs(i * far - j * near) < size
                for i in range(1, outer)
                for j in (i * far // near, i * far // near + 1)
            )
    if shared and all(count for count, _ in blocks.axes):
        raise ValueError(
            f"{name}: slots share bytes: blocks of {size} bytes lie {blocks.axes} (count, bytes apart): use .clone()"
        )


def check_apart(name: str, blocks: Blocks, others: Mapping[str, Tensor | None], *written: str) -> None:
    """Raises: ValueError where a plane shares bytes with another tensor, or one of `written` with any of the others.

    others: contiguous tensors, the plane itself or None. Programs run in any order: what one of them stores there,
    another may read, or may have stored already.
    """
    low, high = blocks.start, blocks.end()
    stores = []
    for out in written:
        tensor = others[out]
        if tensor is not None:
            stores.append((out, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    for other, tensor in others.items():
        if tensor is None or other == name:
            continue
        start = tensor.data_ptr()
        end = start + tensor.nbytes
        if start < high and low < end and blocks.meets(start, end):
            _refuse(other, (start, end), name, (low, high))
        for out, first, last in stores:
            if start < last and first < end and start < end and first < last and other != out:
                _refuse(out, (first, last), other, (start, end))


def _refuse(name: str, span: tuple[int, int], other: str, its: tuple[int, int]) -> None:
    raise ValueError(
        f"{name}: bytes {span[0]:#x}..{span[1]:#x} are shared with {other} at {its[0]:#x}..{its[1]:#x}: "
        f"give {name} memory of its own"
    )
