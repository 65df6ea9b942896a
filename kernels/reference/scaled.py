"""Defines states of whole numbers, int8 or int16, with one fp32 scale for each row. Knows no op.

A row of a state is what one sum runs over: the keys of one value of a delta rule, the states of one `dim` of Mamba-2.
A row is stored after a token as

    peak     largest magnitude of the row
    scale    peak / TOP, rounded to fp32; TOP is 127 or 32767
    number   x * (TOP / peak), rounded to a whole number: the nearest, the even one of two, or one by chance

and is loaded as number * scale. A row whose peak is below TOP * 2**-126 is stored as zeros with scale 0, so zero bytes
are a zero state. A row with a NaN or an infinite element is stored as zeros with scale NaN.

By chance, x * (TOP / peak) is first rounded to the nearest multiple of 2**-BITS. Then a draw of BITS bits, also in
units of 2**-BITS, is added, and the sum is rounded down. So the expected number is that multiple. A draw depends on
the seed, the layer, the head, the row, the key and the length of the state after the token: not on the slot, the batch,
or how kernels cut a state into blocks.
"""

import torch
from torch import Tensor

TOP = {torch.int8: 127, torch.int16: 32767}  # dtype of a state -> largest number
BITS = {torch.int8: 8, torch.int16: 7}  # dtype of a state -> bits of a draw
SMALLEST = 2.0**-126  # smallest scale: below it, fp32 numbers have fewer digits
SHARED = 16  # neighbouring keys whose draws come from one Philox counter, one byte for each
MULTIPLIERS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of Philox4x32, Salmon et al. 2011
WORD = 0xFFFFFFFF


def loaded(numbers: Tensor, scales: Tensor, axis: int) -> Tensor:
    """Returns a state in fp32.

    Args:
        numbers: state of one slot as it is stored.
        scales: its scales, without the axis of keys.
        axis: axis of keys.
    """
    return numbers.float() * scales.unsqueeze(axis)


def stored(s: Tensor, dtype: torch.dtype, axis: int, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (numbers, scales) of a state.

    Args:
        s: state of one slot, fp32.
        dtype: int8 or int16.
        axis: axis of keys.
        drawn: draws, with the shape of the state (`draws`); None rounds to the nearest number.
    """
    peak = s.abs().amax(axis, keepdim=True)
    top = torch.full_like(peak, TOP[dtype])  # torch would multiply by the reciprocal of a number
    usable = (peak >= top * SMALLEST) & peak.isfinite()
    inverse = torch.where(usable, top / peak, 0.0)
    x = torch.where(usable, s, 0.0).double() * inverse.double()  # exact
    if drawn is None:
        numbers = x.round()
    else:
        units = 2.0 ** BITS[dtype]
        numbers = (((x * units).round() + drawn) / units).floor()
    scales = torch.where(peak.isfinite(), torch.where(usable, peak / top, 0.0), torch.nan)
    return numbers.to(dtype), scales.squeeze(axis)


class States:
    """The states of a step in the slots of a plane: floats, or whole numbers with scales.

    Whole numbers are rounded after each token. So a state is stored to the nearest numbers, because that keeps its
    numbers and scale. By chance, a number could change again.

    Args:
        plane: `slot head ..`, of any dtype.
        scales: scales of whole numbers, `slot head row`, or None.
        axis: axis of keys in a state `head ..`, 1 or 2.
        seed: seed of the draws, or None to round to the nearest number.
        layer: number of the layer.
        first_head: number of the first head in the model.
    """

    def __init__(
        self, plane: Tensor, scales: Tensor | None, axis: int, seed: int | None, layer: int, first_head: int
    ) -> None:
        self._plane, self._scales, self._axis = plane, scales, axis
        self._seed, self._layer, self._heads = seed, layer, range(first_head, first_head + plane.shape[1])

    def load(self, slot: int) -> Tensor:
        """Returns the state of a slot in fp32; zeros for slot 0."""
        s = torch.zeros(self._plane.shape[1:], dtype=torch.float32, device=self._plane.device)
        if slot:
            state = self._plane[slot]
            s.copy_(state if self._scales is None else loaded(state, self._scales[slot], self._axis))
        return s

    def rounded(self, s: Tensor, length: int) -> Tensor:
        """Returns the state as it would be loaded after a store; `length` counts its tokens."""
        if self._scales is None:
            return s.to(self._plane.dtype).float()
        return loaded(*self._stored(s, length), self._axis)

    def store(self, slots: list[int], s: Tensor) -> None:
        """Stores a state, which was rounded before if it is one of whole numbers."""
        if self._scales is None:
            self._plane[slots] = s.to(self._plane.dtype)
        elif slots:
            self._plane[slots], self._scales[slots] = self._stored(s, None)

    def _stored(self, s: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        """Returns (numbers, scales) of a state."""
        dtype, drawn = self._plane.dtype, None
        if self._seed is not None and length is not None:
            rows, keys = s.shape[3 - self._axis], s.shape[self._axis]
            drawn = draws(dtype, self._seed, self._layer, self._heads, rows, keys, length, s.device)
            drawn = drawn.movedim(2, self._axis)
        return stored(s, dtype, self._axis, drawn)


def draws(
    dtype: torch.dtype, seed: int, layer: int, heads: range, rows: int, keys: int, length: int, device: torch.device
) -> Tensor:
    """Returns the draws for the states of some heads after a token, int64 `head row key`.

    The counter of Philox with 10 rounds is ((head * rows + row) * (keys / 16) + key // 16, length, layer, 0), and its
    key is the seed. Byte key % 16 of its four words, the lowest byte of the first word first, is the draw; an int16
    takes the upper 7 of the 8 bits.

    Args:
        dtype: int8 or int16.
        seed: 0 to 2**31 - 1.
        layer: number of the layer.
        heads: numbers of the heads in the model.
        rows: rows of a head.
        keys: keys of a row, a multiple of 16.
        length: tokens of the state after the token.
        device: device of the draws.
    """
    size = rows * keys // SHARED  # counters of a head
    counter = [torch.arange(heads.start * size, heads.stop * size, dtype=torch.int64, device=device) & WORD]
    counter += [torch.full_like(counter[0], each & WORD) for each in (length, layer, 0)]
    key = [seed & WORD, seed >> 32]
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = (_product(counter[2 * i], MULTIPLIERS[i]) for i in (0, 1))
        counter = [high_b ^ counter[1] ^ key[0], low_b, high_a ^ counter[3] ^ key[1], low_a]
        key = [(each + step) & WORD for each, step in zip(key, STEPS, strict=True)]
    octets = torch.stack([(word >> shift) & 255 for word in counter for shift in (0, 8, 16, 24)], dim=-1)
    return (octets >> (8 - BITS[dtype])).view(len(heads), rows, keys)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low 32 bits of the product of unsigned 32-bit numbers."""
    low, high = (word & 0xFFFF) * factor, (word >> 16) * factor  # below 2**48
    middle = (low >> 16) + (high & 0xFFFFFFFFFFFF)
    return (middle >> 16) & WORD, ((middle << 16) | (low & 0xFFFF)) & WORD
