"""What the ops on states in fewer bits ask of their arguments. Knows no Triton.

Each check raises ValueError naming the first argument that does not fit.
"""

import torch
from torch import Tensor

from memstate.kernels.blocks import blocks_of, is_dense
from memstate.kernels.checks import (
    check_apart,
    check_columns,
    check_contiguous,
    check_distinct,
    check_memory,
    check_shape,
    check_tensors,
    check_written,
)
from memstate.kernels.decode_checks import check_address, check_grid
from memstate.kernels.tables import ACCESS_BYTES, BITS_BLOCK, BITS_TOP


def check_bits(
    values: Tensor, scales: Tensor, slots: Tensor, name: str, batch: Tensor, residual: Tensor | None,
    numbers: Tensor | None = None,
) -> None:  # fmt: skip
    """Refuses planes of one layer, a batch and its columns that do not fit each other.

    Args:
        values: see `Backend.load_bits`.
        scales: see `Backend.load_bits`.
        slots: see `Backend.load_bits`.
        name: of the argument `batch`: "out" if the op writes it, and otherwise it writes the planes.
        batch: the states in fp32.
        residual: see `Backend.load_bits`.
        numbers: see `Backend.store_bits`.
    """
    beside: dict[str, Tensor | None] = {name: batch, "slots": slots, "numbers": numbers}
    check_tensors({"values": values, "scales": scales, "residual": residual} | beside, "residual", "numbers")
    device, shape, last = values.device, values.shape, values.shape[-1] if values.dim() > 1 else 0
    if values.dtype not in BITS_TOP or not values.numel() or last % BITS_BLOCK:
        raise ValueError(
            f"values: expected `slot ... element` of {', '.join(map(str, BITS_TOP))} with a multiple of {BITS_BLOCK} "
            f"elements, got {values.dtype} {tuple(shape)}"
        )
    if residual is not None and values.dtype != torch.int8:
        raise ValueError(f"residual: expected None beside values of {values.dtype}; only int8 has one")
    check_columns(device, None, slots=slots)
    if numbers is not None:
        check_columns(device, slots.numel(), numbers=numbers)
    check_shape(name, batch, "batch ... element", (slots.numel(), *shape[1:]))
    if batch.dtype != torch.float32:
        raise ValueError(f"{name}: expected torch.float32, got {batch.dtype}")
    check_memory(name, batch, device)
    check_contiguous(name, batch, "batch ... element")
    check_address(name, batch)
    check_grid(name, batch=slots.numel())
    if name == "out":
        check_written(beside, name)
        check_apart("slots", blocks_of(slots, 1), {name: batch})
    for plane, tensor, pattern, dtype, width in (
        ("values", values, "slot ... element", values.dtype, last),
        ("scales", scales, "slot ... block", torch.uint8, last // BITS_BLOCK),
        ("residual", residual, "slot ... pair", torch.uint8, last // 2),
    ):
        if tensor is None:
            continue
        check_shape(plane, tensor, pattern, (*shape[:-1], width))
        check_memory(plane, tensor, device)
        apart = tensor.stride(0) * tensor.element_size()
        dense = is_dense(tensor.shape[1:], tensor.stride()[1:])
        if tensor.dtype != dtype or not dense or (apart | tensor.data_ptr()) % ACCESS_BYTES:
            raise ValueError(
                f"{plane}: expected {dtype} with contiguous slots at multiples of {ACCESS_BYTES} bytes, got "
                f"{tensor.dtype} with strides {tensor.stride()} at address {tensor.data_ptr():#x}"
            )
        if name == "batch":
            check_written({plane: tensor}, plane)
            check_distinct(plane, blocks_of(tensor, 1))
        check_apart(plane, blocks_of(tensor, 1), beside)


def check_draws(seed: int, first: int) -> None:
    """Refuses a seed, or a number of blocks, that is not a whole number of 31 bits."""
    for name, number in (("seed", seed), ("first", first)):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
            raise ValueError(f"{name}: expected a whole number from 0 to 2**31-1, got {number!r}")
