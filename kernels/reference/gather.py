"""Gathering slots entry by entry: the oracle of `memstate.kernels.gather` and the path without Triton."""

from torch import Tensor

from memstate.kernels.blocks import as_bytes, check_beside, check_plane
from memstate.kernels.checks import blocks_of, check_apart, check_columns

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.reference.gather, not kernels.reference.gather: it would be there twice")


def gather_slots(plane: Tensor, slots: Tensor, out: Tensor) -> None:
    """Copies slots side by side; see `memstate.kernels.gather`. Syncs: yes, off the CPU."""
    check_arguments(plane, slots, out)
    source, target = as_bytes(plane), as_bytes(out)  # bytes, because a copy of floats may change a NaN
    for entry, slot in enumerate(slots.tolist()):
        target[:, entry] = source[:, slot] if 0 < slot < plane.shape[1] else 0


def check_arguments(plane: Tensor, slots: Tensor, out: Tensor) -> None:
    """Raises: ValueError naming the first argument that does not fit."""
    beside = {"slots": slots, "out": out}
    blocks = check_plane(plane, beside)
    check_columns(plane.device, None, slots=slots)
    check_beside(plane, "out", out, "layer batch ...", (plane.shape[0], slots.numel(), *plane.shape[2:]))
    check_apart("plane", blocks, {"out": out})
    check_apart("slots", blocks_of(slots, 1), {"out": out})
