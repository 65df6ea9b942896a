"""Checks the arguments of gather, scatter and the ops on records. Knows no Triton.

Each check raises a ValueError that names the first argument that does not fit.
"""

import torch
from torch import Tensor

from memstate.kernels.blocks import PlaneBlocks, blocks_of, is_dense, taps_are_fastest
from memstate.kernels.checks import (
    INT32,
    INTS,
    check_apart,
    check_columns,
    check_contiguous,
    check_distinct,
    check_float,
    check_marks,
    check_memory,
    check_shape,
    check_tensors,
    check_written,
)
from memstate.kernels.tables import RECORD_ALIGNMENT, RecordMap, ScaledMap, StepMarks


def check_plane(plane: Tensor, beside: dict[str, Tensor]) -> PlaneBlocks:
    """Returns where the blocks of a plane lie; refuses a plane that is not `layer slot ...` with contiguous blocks.

    Args:
        plane: the tensor of the plane, `layer slot ...`.
        beside: the other tensors of the call, by name.
    """
    check_tensors({"plane": plane} | beside)
    check_memory("plane", plane, plane.device)
    if plane.dim() < 2:
        raise ValueError(f"plane: expected `layer slot ...`, got {tuple(plane.shape)}")
    _require_dense(plane)
    return blocks_of(plane, 2)


def _require_dense(plane: Tensor) -> None:
    if not is_dense(plane.shape[2:], plane.stride()[2:]):
        raise ValueError(
            f"plane: one layer of one slot must be contiguous, got {tuple(plane.shape)} with strides {plane.stride()}"
        )


def check_beside(plane: Tensor, name: str, tensor: Tensor, pattern: str, shape: tuple[int, ...]) -> None:
    """Refuses a tensor unless it is contiguous, and has this shape and the device and dtype of the plane."""
    check_shape(name, tensor, pattern, shape)
    if tensor.dtype != plane.dtype:
        raise ValueError(f"{name}: expected {plane.dtype} as the plane, got {tensor.dtype}")
    check_memory(name, tensor, plane.device)
    check_contiguous(name, tensor, pattern)


def check_gather(plane: Tensor, slots: Tensor, out: Tensor) -> None:
    """Refuses arguments of `gather_slots` that do not fit each other."""
    blocks = check_plane(plane, {"slots": slots, "out": out})
    check_columns(plane.device, None, slots=slots)
    check_beside(plane, "out", out, "layer batch ...", (plane.shape[0], slots.numel(), *plane.shape[2:]))
    check_written({"out": out}, "out")
    check_apart("plane", blocks, {"out": out})
    check_apart("slots", blocks_of(slots, 1), {"out": out})


def check_scatter(plane: Tensor, slots: Tensor, batch: Tensor) -> None:
    """Refuses arguments of `scatter_slots` that do not fit each other."""
    beside = {"slots": slots, "batch": batch}
    blocks = check_plane(plane, beside)
    check_columns(plane.device, None, slots=slots)
    check_beside(plane, "batch", batch, "layer batch ...", (plane.shape[0], slots.numel(), *plane.shape[2:]))
    check_distinct("plane", blocks)
    check_written({"plane": plane}, "plane")
    check_apart("plane", blocks, beside)


def check_windows(name: str, plane: Tensor) -> None:
    """Refuses windows `layer slot tap-1 channel` that are dense in neither order."""
    if not is_dense(plane.shape[2:], plane.stride()[2:]) and not taps_are_fastest(plane):
        raise ValueError(
            f"{name}: one layer of one slot must be dense, as `tap channel` or `channel tap`, got "
            f"{tuple(plane.shape)} with strides {plane.stride()}"
        )


def check_scatter_states(
    marks: StepMarks, starts: Tensor, read: Tensor, write: Tensor, plane: Tensor | None, h: Tensor | None,
    first: Tensor | None, chunk: int, transposed: bool, conv: Tensor | None, inputs: Tensor | None,
) -> None:  # fmt: skip
    """Refuses arguments of `scatter_states` that do not fit each other."""
    if not isinstance(marks, StepMarks):
        raise ValueError(f"marks: expected StepMarks, got {type(marks).__name__}")
    if not isinstance(chunk, int) or isinstance(chunk, bool) or not 1 <= chunk < 2**31:
        raise ValueError(f"chunk: expected a whole number of tokens from 1 on, got {chunk!r}")
    if not isinstance(transposed, bool):
        raise ValueError(f"transposed: expected True or False, got {transposed!r}")
    if plane is None and conv is None:
        raise ValueError("plane: expected a plane of states, of windows, or both")
    beside = {"starts": starts, "read": read, "write": write, "first": first, "h": h, "inputs": inputs}
    check_tensors({"plane": plane, "conv": conv} | beside, "plane", "conv", "first", "h", "inputs")
    device = starts.device
    check_columns(device, None, write=write)
    batch = write.numel()
    check_columns(device, batch, read=read)
    check_columns(device, batch + 1, INTS, "`batch+1` with the number of tokens last", starts=starts)
    if first is not None:
        check_columns(device, batch + 1, INTS, "`batch+1` with the number of pieces last", first=first)
    check_marks(device, marks)
    if plane is not None:
        check_states(plane, h, transposed, device)
    elif h is not None:
        raise ValueError("h: expected None without a plane of states")
    if conv is not None:
        check_packed(conv, inputs, device)
    elif inputs is not None:
        raise ValueError("inputs: expected None without a plane of windows")
    if plane is not None and conv is not None and plane.shape[:2] != conv.shape[:2]:
        raise ValueError(f"conv: expected {tuple(plane.shape[:2])} layers and slots, got {tuple(conv.shape[:2])}")
    others = beside | marks._asdict()
    for name, changed in (("plane", plane), ("conv", conv)):
        if changed is not None:
            check_written({name: changed}, name)
            held = blocks_of(changed, 2)
            check_distinct(name, held)
            check_apart(name, held, others)


def check_states(plane: Tensor, h: Tensor | None, transposed: bool, device: torch.device) -> None:
    """Refuses a plane of states that is not `layer slot ...`, and states `h` that do not fit the plane."""
    check_memory("plane", plane, device)
    if plane.dim() < (4 if transposed else 3):
        raise ValueError(f"plane: expected `layer slot ...`{' with two axes or more' * transposed}, got {plane.shape}")
    _require_dense(plane)
    if h is not None:  # without `h`, bytes are copied
        check_float("plane", plane)
        block = (*plane.shape[2:-2], plane.shape[-1], plane.shape[-2]) if transposed else tuple(plane.shape[2:])
        check_float("h", h)
        check_memory("h", h, device)
        if h.dim() != plane.dim() or (h.shape[0], *h.shape[2:]) != (plane.shape[0], *block):
            raise ValueError(f"h: expected `layer piece ...` = {(plane.shape[0], '..', *block)}, got {tuple(h.shape)}")
        check_contiguous("h", h, "layer piece ...")


def check_packed(conv: Tensor, inputs: Tensor | None, device: torch.device) -> None:
    """Refuses a plane of windows that is not `layer slot tap-1 channel`, and packed inputs that do not fit it."""
    check_memory("conv", conv, device)
    check_float("conv", conv)
    if conv.dim() != 4:
        raise ValueError(f"conv: expected `layer slot tap-1 channel`, got {tuple(conv.shape)}")
    check_windows("conv", conv)
    if inputs is not None:
        check_float("inputs", inputs)
        check_memory("inputs", inputs, device)
        if inputs.dim() != 3 or (inputs.shape[0], inputs.shape[2]) != (conv.shape[0], conv.shape[3]):
            expected = (conv.shape[0], "..", conv.shape[3])
            raise ValueError(f"inputs: expected `layer token channel` = {expected}, got {tuple(inputs.shape)}")
        check_contiguous("inputs", inputs, "layer token channel")


def check_pack(
    records: RecordMap, slots: Tensor | None, index: Tensor, places: Tensor, name: str, held: Tensor
) -> None:
    """Refuses arguments of `pack_slots` and `unpack_slots` that do not fit each other.

    Args:
        records: where the bytes of slots lie in planes and in records.
        slots: slot of each register, or None.
        index: register of each entry; without `slots`, the slot itself or the page.
        places: number of the record of each entry.
        name: what the op calls `held`: "out" or "source".
        held: the records, `record byte`.
    """
    _check_entries(records.tiles.device, slots, index, places, name, held, records.nbytes)
    _check_outside(name, held, records.blocks)


def check_int8(planes: ScaledMap, slots: Tensor | None, index: Tensor, places: Tensor, name: str, held: Tensor) -> None:
    """Refuses arguments of `pack_int8` and `unpack_int8` that do not fit each other."""
    check_float("planes", planes.tensors[0])
    _check_entries(planes.layers.device, slots, index, places, name, held, planes.nbytes)
    _check_outside(name, held, planes.tensors)


def _check_entries(
    device: torch.device, slots: Tensor | None, index: Tensor, places: Tensor, name: str, held: Tensor, nbytes: int
) -> None:
    """Refuses columns on another device, and records of a wrong size, that overlap, or that the device cannot reach."""
    columns = {"slots": slots, "index": index, "places": places}
    check_tensors(columns | {name: held}, "slots")
    if slots is not None:
        check_columns(device, None, INT32, slots=slots)
    check_columns(device, None, index=index, places=places)
    if held.dtype is not torch.uint8 or held.dim() != 2 or held.shape[1] != nbytes:
        got = f"{held.dtype} {tuple(held.shape)}"
        raise ValueError(f"{name}: expected uint8 `record byte` = (records, {nbytes}), got {got}")
    if held.device.type == "cpu" != device.type:
        if held.numel() and not held.is_pinned():
            raise ValueError(f"{name}: host memory that {device} cannot reach: allocate it with pin_memory=True")
    else:
        check_memory(name, held, device)
    stride = held.stride(0) if len(held) > 1 else 0  # the stride of a single record can be any number
    if held.numel() and ((held.stride(1) != 1 and nbytes > 1) or (held.data_ptr() | stride) % RECORD_ALIGNMENT):
        raise ValueError(
            f"{name}: expected records of contiguous bytes, at multiples of {RECORD_ALIGNMENT}, got address "
            f"{held.data_ptr():#x} and strides {held.stride()}"
        )
    if name == "out" and held.numel() and len(held) > 1 and stride < nbytes:
        raise ValueError(f"out: records of {nbytes} bytes lie {stride} bytes apart: what one stores another has")
    check_apart(name, blocks_of(held, 1), columns)


def _check_outside(name: str, held: Tensor, planes: tuple[Tensor, ...]) -> None:
    """Refuses records that share bytes with planes `layer slot ...`."""
    if not held.numel() or (planes and planes[0].device != held.device):
        return
    start, nbytes, step = held.data_ptr(), held.shape[1], held.stride(0)
    end = start + (len(held) - 1) * step + nbytes
    for plane in planes:
        blocks = blocks_of(plane, 2)
        if blocks.start < end and start < blocks.end():
            for place in range(len(held)):
                if blocks.meets(start + place * step, start + place * step + nbytes):
                    raise ValueError(f"{name}: record {place} shares bytes with a plane: give it memory of its own")
