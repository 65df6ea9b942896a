"""States in fewer bits, to fp32 and back: the oracle of `memstate.kernels.bits` and the path without Triton."""

import torch
from torch import Tensor

from memstate.kernels.move_checks import check_bits
from memstate.kernels.tables import BITS, BITS_BLOCK, RESIDUAL

INFINITY = 0x7F800000  # bits of an infinite fp32; those of NaN are above
WORD = 0xFFFFFFFF


def load_bits(values: Tensor, scales: Tensor, slots: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
    """Copies slots that are held in fewer bits to a batch of fp32: out[b] = state of slots[b].

    Blocks of 32 neighbouring elements share a scale, a power of two: x = value * 2**(scale - 127). With a residual,
    x = (value + residual / 16) * 2**(scale - 127). All products are exact. Scale 0 means zeros, so a slot of zero bytes
    is a state of zeros. Scale 255 means NaN.

    The blocks of 32 and int8 or e4m3 values are those of MXINT8 and MXFP8 (OCP Microscaling Formats 1.0), but int8
    counts whole steps and not steps of 1/64.

    Args:
        values: one layer, `slot ... 32*block`; int16, int8 or float8_e4m3fn. A slot is contiguous, and begins at a
            multiple of 16 bytes.
        scales: `slot ... block` of uint8, as `values`.
        slots: int32 or int64 `batch`; an id outside 1..slot-1 gives zeros, and an id may occur twice.
        out: `batch ... 32*block` of fp32, contiguous, from a multiple of 16 bytes on. Changed.
        residual: `slot ... 16*block` of uint8, as `values`, beside int8 values: two signed numbers of 4 bits in each
            byte, the first element in the low bits.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit, or `out` requires grad or shares bytes with
            another tensor.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_bits(values, scales, slots, "out", out, residual)
    known = (slots > 0) & (slots < len(values))
    at = slots.where(known, 0).long()
    held = _as_integers(values)[at]
    x = held.view(values.dtype).float()
    if residual is not None:
        pairs = residual[at].int()
        x = x + ((torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2) ^ 8) - 8) / RESIDUAL
    scale = (scales[at].int() << 23).view(torch.float32)
    out.copy_((x.unflatten(-1, (-1, BITS_BLOCK)) * scale[..., None]).flatten(-2))
    out[~known] = 0


def store_bits(
    values: Tensor, scales: Tensor, slots: Tensor, batch: Tensor, residual: Tensor | None = None,
    numbers: Tensor | None = None, seed: int = 0, first: int = 0,
) -> None:  # fmt: skip
    """Copies a batch of fp32 to slots that are held in fewer bits: state of slots[b] = batch[b], rounded.

    The scale of a block is the least with which its largest element fits: at most 32767 steps of int16, 127 of int8, or
    448 of e4m3. Elements are rounded to a step; with a residual to 1/16 of a step, of which the value is the nearest
    whole one. What is a step already stays as it is. A block with an infinity or a NaN becomes NaN. Numbers
    beyond 2**127 may become infinite.

    With `numbers` rounding is stochastic: x goes up with a chance of x's distance from the number below, as far as 24
    bits say it, so that its mean is x. The bits are those of Philox-4x32-10 (Salmon et al. 2011, *Parallel random
    numbers: as easy as 1, 2, 3*) of the seed, the number of the row and the place of the element in the model. Slots,
    the order of a batch and other rows do not matter: a replay gives the same bits, and so do all ranks that hold an
    element.

    Args:
        values: as for `load_bits`. Changed.
        scales: as for `load_bits`. Changed.
        slots: int32 or int64 `batch`, distinct; entries with an id outside 1..slot-1 are skipped.
        batch: `batch ... 32*block` of fp32, contiguous, from a multiple of 16 bytes on.
        residual: as for `load_bits`. Changed.
        numbers: int32 or int64 `batch`; a number that each row has once only, such as the length of its request. None
            rounds to the nearest step, halves to even.
        seed: from 0 to 2**31-1.
        first: blocks of the model before the first one of a slot, those of earlier layers and ranks, from 0 to 2**31-1.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit, slots share bytes, a plane shares bytes with
            another tensor, or `seed` or `first` is out of range.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_bits(values, scales, slots, "batch", batch, residual, numbers, seed=seed, first=first)
    known = (slots > 0) & (slots < len(values))
    at, x = slots[known].long(), batch[known].unflatten(-1, (-1, BITS_BLOCK))
    sizes = x.view(torch.int32) & 0x7FFFFFFF
    peak = sizes.amax(-1, keepdim=True)
    top, room = BITS[values.dtype]
    scale = (((peak + room) >> 23) - top).clamp(min=1)
    finite = peak < INFINITY
    size = (x.abs() * ((254 - scale) << 23).view(torch.float32)).where(finite, 0.0)  # in steps, exact
    chance = None if numbers is None else _chances(numbers[known], seed, first, x.shape)
    if values.dtype == torch.float8_e4m3fn:
        power = (size.view(torch.int32) >> 23).clamp(min=121)  # below 2**-6 steps of e4m3 become no smaller
        code = _rounded(size * ((257 - power) << 23).view(torch.float32), chance) + 8 * (power - 121)
        held = code | ((x < 0).int() << 7)
    else:
        held = _rounded(size if residual is None else size * RESIDUAL, chance)
        held = held.where(x >= 0, -held)
    if residual is not None:
        low = held.flatten(-2).unflatten(-1, (-1, 2)) & 15
        residual[at] = (low[..., 0] | (low[..., 1] << 4)).to(torch.uint8)
        held = (held + RESIDUAL // 2) >> 4
    target = _as_integers(values)
    target[at] = held.flatten(-2).to(target.dtype)
    scales[at] = scale.where(finite, 255).squeeze(-1).to(torch.uint8)


def _as_integers(values: Tensor) -> Tensor:
    return values.view(torch.uint8) if values.dtype.is_floating_point else values


def _rounded(size: Tensor, chance: Tensor | None) -> Tensor:
    """Whole numbers near sizes: the nearest ones, or above where the chance is below the rest."""
    if chance is None:
        return size.round().int()
    low = size.floor()
    return (low + (chance < size - low)).int()


def _chances(numbers: Tensor, seed: int, first: int, shape: torch.Size) -> Tensor:
    """Multiples of 2**-24 from 0 to below 1, for elements `batch ... block 32`."""
    group = BITS_BLOCK // 4 * first + torch.arange(shape[1:].numel() // 4, device=numbers.device)
    row = numbers.long()[:, None]
    words = philox((group & WORD, group >> 32, row & WORD, (row >> 32) & WORD), seed)
    return ((torch.stack(torch.broadcast_tensors(*words), -1) >> 8).float() * 2.0**-24).view(shape)


def philox(counter: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    """Four random words for each counter of four words, uint32 in int64: Philox-4x32 with ten rounds."""
    (a, b, c, d), low, high = counter, seed & WORD, seed >> 32
    for _ in range(10):
        left, right = 0xCD9E8D57 * c, 0xD2511F53 * a  # all 64 bits, though int64 shows them with a sign
        a, b, c, d = (left >> 32 & WORD) ^ b ^ low, left & WORD, (right >> 32 & WORD) ^ d ^ high, right & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return a, b, c, d
