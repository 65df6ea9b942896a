"""Gathers slots in plain torch.

Tests compare `memstate.kernels.gather` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
from torch import Tensor

from memstate.kernels.blocks import as_integers
from memstate.kernels.move_checks import check_gather


def gather_slots(plane: Tensor, slots: Tensor, out: Tensor, pattern: int = 0) -> None:
    """Copies slots of a plane side by side, bit for bit: out[:, b] = plane[:, slots[b]].

    Lanes move 16 bytes at a time if the address, strides and block of the plane and the address of `out` are multiples
    of 16, otherwise fewer.

    Args:
        plane: `layer slot ...`, any dtype; one layer of one slot is contiguous, any strides between layers and slots.
        slots: int32 or int64 `batch`; an id outside 1..slot-1 gives `pattern`; an id may occur twice.
        out: `layer batch ...`, contiguous, of the plane's dtype. Changed.
        pattern: 64 bits, repeated to fill the output of an id outside 1..slot-1, see `Plane.pattern`.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, or `out` requires grad.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_gather(plane, slots, out)
    source, target, wanted = as_integers(plane), as_integers(out), slots.tolist()
    if wanted and 0 < min(wanted) <= max(wanted) < plane.shape[1]:
        torch.index_select(source, 1, slots, out=target)
        return
    known = (slots > 0) & (slots < plane.shape[1])
    target[:, ~known] = int(torch.tensor([pattern], dtype=torch.int64, device="cpu").view(target.dtype)[0])
    target[:, known] = source[:, slots[known].long()]
