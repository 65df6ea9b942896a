"""Scatters a batch to slots in plain torch.

Tests compare `memstate.kernels.scatter` with this reference, which replaces the kernels where Triton is missing.
"""

from torch import Tensor

from memstate.kernels.blocks import as_integers
from memstate.kernels.move_checks import check_scatter


def scatter_slots(plane: Tensor, slots: Tensor, batch: Tensor, trusted: bool = False) -> None:
    """Copies the entries of a batch to slots of a plane, bit for bit: plane[:, slots[b]] = batch[:, b].

    Lanes move 16 bytes at a time if address, strides and block of the plane and the address of `batch` are multiples of
    16, otherwise fewer.

    Args:
        plane: `layer slot ...`, any dtype; one layer of one slot is contiguous, any strides between layers and slots.
            Changed.
        slots: int32 or int64 `batch`, distinct; entries with an id outside 1..slot-1 are skipped.
        batch: `layer batch ...`, contiguous, of the plane's dtype.
        trusted: whether the caller knows that the arguments fit, so that nothing is checked.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, slots share bytes, or the plane requires grad.

    Syncs: no (the reference: yes, off the CPU).
    """
    if not trusted:
        check_scatter(plane, slots, batch)
    source, target, into = as_integers(batch), as_integers(plane), slots.tolist()
    if into and not 0 < min(into) <= max(into) < plane.shape[1]:
        kept = [entry for entry, slot in enumerate(into) if 0 < slot < plane.shape[1]]
        slots, source = slots[kept], source[:, kept]
    target.index_copy_(1, slots.long(), source)
