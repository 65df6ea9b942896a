"""Scattering to slots entry by entry: the oracle of `memstate.kernels.scatter` and the path without Triton."""

from torch import Tensor

from memstate.kernels.blocks import as_bytes, check_beside, check_plane
from memstate.kernels.checks import (
    blocks_of,
    check_apart,
    check_columns,
    check_distinct,
    check_memory,
    check_tensors,
    is_dense,
)

if not __name__.startswith("memstate."):
    raise ImportError(
        "import memstate.kernels.reference.scatter, not kernels.reference.scatter: it would be there twice"
    )


def scatter_slots(plane: Tensor, slots: Tensor, batch: Tensor) -> None:
    """Copies a batch to slots; see `memstate.kernels.scatter`. Syncs: yes, off the CPU."""
    check_slots(plane, slots, batch)
    source, target = as_bytes(batch), as_bytes(plane)  # bytes, because a copy of floats may change a NaN
    for entry, slot in enumerate(slots.tolist()):
        if 0 < slot < plane.shape[1]:
            target[:, slot] = source[:, entry]


def scatter_accepted(
    plane: Tensor, window: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Keeps one state of a speculative step per slot; see `memstate.kernels.scatter`. Syncs: yes, off the CPU."""
    check_accepted(plane, window, write, accepted, snapshot, crossed)
    source, target = as_bytes(window), as_bytes(plane)
    for slots, counts in ((write, accepted), (snapshot, crossed)):
        for entry, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            if 0 < slot < plane.shape[1] and 1 <= count <= window.shape[2]:
                target[:, slot] = source[:, entry, count - 1]


def scatter_inputs(
    plane: Tensor, inputs: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Keeps one window of a speculative step per slot; see `memstate.kernels.scatter`. Syncs: yes, off the CPU."""
    check_inputs(plane, inputs, write, accepted, snapshot, crossed)
    source, target = as_bytes(inputs), as_bytes(plane)
    taps = plane.shape[2]
    for slots, counts in ((write, accepted), (snapshot, crossed)):
        for entry, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            if 0 < slot < plane.shape[1] and 1 <= count <= inputs.shape[2] - taps:
                target[:, slot] = source[:, entry, count : count + taps]


def check_slots(plane: Tensor, slots: Tensor, batch: Tensor) -> None:
    """Raises: ValueError naming the first argument of `scatter_slots` that does not fit."""
    beside = {"slots": slots, "batch": batch}
    blocks = check_plane(plane, beside)
    check_columns(plane.device, None, slots=slots)
    check_beside(plane, "batch", batch, "layer batch ...", (plane.shape[0], slots.numel(), *plane.shape[2:]))
    check_distinct("plane", blocks)
    check_apart("plane", blocks, beside)


def check_accepted(
    plane: Tensor, window: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Raises: ValueError naming the first argument of `scatter_accepted` that does not fit."""
    columns = {"write": write, "accepted": accepted, "snapshot": snapshot, "crossed": crossed}
    beside = {"window": window} | columns
    blocks = check_plane(plane, beside)
    if window.dim() < 3:
        raise ValueError(f"window: expected `layer batch step ...`, got {tuple(window.shape)}")
    batch, step = window.shape[1:3]
    check_beside(plane, "window", window, "layer batch step ...", (plane.shape[0], batch, step, *plane.shape[2:]))
    check_columns(plane.device, batch, **columns)
    check_distinct("plane", blocks)
    check_apart("plane", blocks, beside)


def check_inputs(
    plane: Tensor, inputs: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Raises: ValueError naming the first argument of `scatter_inputs` that does not fit."""
    columns = {"write": write, "accepted": accepted, "snapshot": snapshot, "crossed": crossed}
    beside = {"inputs": inputs} | columns
    check_tensors({"plane": plane} | beside)
    check_memory("plane", plane, plane.device)
    if plane.dim() != 4:
        raise ValueError(f"plane: expected `layer slot tap-1 channel`, got {tuple(plane.shape)}")
    layer, _, taps, channel = plane.shape
    if not is_dense(plane.shape[2:], plane.stride()[2:]) and not has_taps_fastest(plane):
        raise ValueError(
            f"plane: one layer of one slot must be dense, as `tap channel` or `channel tap`, got {tuple(plane.shape)} "
            f"with strides {plane.stride()}"
        )
    if inputs.dim() != 4 or inputs.shape[2] < taps:
        raise ValueError(
            f"inputs: expected `layer batch tap-1+step channel` with tap-1 = {taps}, got {tuple(inputs.shape)}"
        )
    batch, length = inputs.shape[1:3]
    check_beside(plane, "inputs", inputs, "layer batch tap-1+step channel", (layer, batch, length, channel))
    check_columns(plane.device, batch, **columns)
    blocks = blocks_of(plane, 2)
    check_distinct("plane", blocks)
    check_apart("plane", blocks, beside)


def has_taps_fastest(plane: Tensor) -> bool:
    """Whether a block of a plane `layer slot tap channel` lies in memory as `channel tap`, and as nothing else."""
    shape, strides = plane.shape[2:], plane.stride()[2:]
    return not is_dense(shape, strides) and is_dense(shape[::-1], strides[::-1])
