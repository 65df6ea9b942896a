"""Scattering to slots: the oracle of `memstate.kernels.scatter` and the path without Triton."""

from torch import Tensor

from memstate.kernels.blocks import as_bytes, as_integers
from memstate.kernels.move_checks import check_accepted, check_inputs, check_scatter


def scatter_slots(plane: Tensor, slots: Tensor, batch: Tensor, trusted: bool = False) -> None:
    """Copies the entries of a batch to slots of a plane, bit for bit: plane[:, slots[b]] = batch[:, b].

    16 bytes move at a time where the address, strides and block of the plane and the address of `batch` are multiples
    of 16, and fewer elsewhere.

    Args:
        plane: `layer slot ...`, any dtype; one layer of one slot is contiguous, layers and slots any strides apart.
            Changed.
        slots: int32 or int64 `batch`, distinct; entries with an id outside 1..slot-1 are skipped.
        batch: `layer batch ...`, contiguous, of the plane's dtype.
        trusted: whether the caller knows that they fit, so that nothing is checked.

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


def scatter_accepted(
    plane: Tensor, window: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Keeps, per entry of a speculative step, the state after the accepted tokens and the state at the boundary.

    plane[:, write[b]] = window[:, b, accepted[b] - 1] and plane[:, snapshot[b]] = window[:, b, crossed[b] - 1], bit
    for bit. A copy is skipped where its slot is outside 1..slot-1, or its count outside 1..step.

    Args:
        plane: as for `scatter_slots`. Changed.
        window: the state after each token, `layer batch step ...`, contiguous, of the plane's dtype, less than 2^31
            states a layer.
        write: slots of the accepted states, int32 or int64 `batch`, distinct.
        accepted: accepted tokens, int32 or int64 `batch`.
        snapshot: slots of the boundary's states, int32 or int64 `batch`, distinct from each other and from `write`.
        crossed: tokens up to the boundary, int32 or int64 `batch`.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, slots share bytes, or the plane requires grad.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_accepted(plane, window, write, accepted, snapshot, crossed)
    source, target = as_bytes(window), as_bytes(plane)
    for slots, counts in ((write, accepted), (snapshot, crossed)):
        for entry, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            if 0 < slot < plane.shape[1] and 1 <= count <= window.shape[2]:
                target[:, slot] = source[:, entry, count - 1]


def scatter_inputs(
    plane: Tensor, inputs: Tensor, write: Tensor, accepted: Tensor, snapshot: Tensor, crossed: Tensor
) -> None:
    """Keeps, per entry of a speculative step, the convolution windows after the accepted tokens and at the boundary.

    The window after a tokens is inputs[:, b, a : a + tap-1]. plane[:, write[b]] gets that of accepted[b], and
    plane[:, snapshot[b]] that of crossed[b], bit for bit. A copy is skipped where its slot is outside 1..slot-1, or its
    count outside 1..step.

    Args:
        plane: `layer slot tap-1 channel`, any dtype; one layer of one slot is dense, as `tap channel` or, passed as a
            transposed view, as `channel tap`; layers and slots any strides apart. Changed.
        inputs: the window that the step read and then the input of each token, `layer batch tap-1+step channel`,
            contiguous, of the plane's dtype.
        write: as for `scatter_accepted`.
        accepted: as for `scatter_accepted`.
        snapshot: as for `scatter_accepted`.
        crossed: as for `scatter_accepted`.

    Raises:
        ValueError: a shape, dtype, device or stride does not fit, slots share bytes, or the plane requires grad.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_inputs(plane, inputs, write, accepted, snapshot, crossed)
    source, target = as_bytes(inputs), as_bytes(plane)
    taps = plane.shape[2]
    for slots, counts in ((write, accepted), (snapshot, crossed)):
        for entry, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            if 0 < slot < plane.shape[1] and 1 <= count <= inputs.shape[2] - taps:
                target[:, slot] = source[:, entry, count : count + taps]
