"""Arithmetic whose result for one row cannot depend on the batch around it, bit for bit.

A sum of floats depends on its order, and libraries order their additions by the shape of the batch. Here every sum is
exact, so that no order matters: terms are rounded to a fixed grid first, coarse enough that all partial sums fit the
53 bits of a float64. What is not a sum uses only operations that IEEE 754 rounds exactly (+ - * / sqrt, comparisons):
they come out the same wherever an element lies in a vector register, which `exp` need not.
"""

import math

import torch
from torch import Tensor

LIMIT = 64.0  # magnitude at which terms are clipped: 6 bits before the point
TERM_BITS = 20  # after the point: a term of a sum, next to weights
WEIGHT_BITS = 16  # weights are below 8: 6 + 20 + 3 + 16 bits a product leave 8 for 256 terms
SQUARE_BITS = 16  # both factors are terms: 2 (6 + 16) bits leave 9
SHARE_BITS = 18  # attention: shares are at most 1, values have 14 bits: 18 + 6 + 14 leave 15 for 32768 tokens
VALUE_BITS = 14
SQUARINGS = 8


def fixed(x: Tensor, bits: int) -> Tensor:
    """Rounds x to multiples of 2 ** -bits within -LIMIT..LIMIT, float64; products by powers of two are exact.

    Syncs: no.
    """
    return (x.double().clamp(-LIMIT, LIMIT) * 2.0**bits).round() * 2.0**-bits


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies x `... in` by a weight `in out` made by `fixed(.., WEIGHT_BITS)`; returns float32 `... out`.

    Syncs: no.
    """
    product: Tensor = fixed(x, TERM_BITS) @ weight
    return product.float()


def mean_square(x: Tensor) -> Tensor:
    """Returns the mean of x squared over `channel`: `... channel` -> `... 1`.

    Syncs: no.
    """
    return (fixed(x, SQUARE_BITS).square().sum(-1, keepdim=True) / x.shape[-1]).float()


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divides x `... channel` by its root mean square, without gain (Zhang, Sennrich 2019, arXiv:1910.07467).

    Syncs: no.
    """
    return x / torch.sqrt(mean_square(x) + eps)


def unit_norm(x: Tensor) -> Tensor:
    """Scales x `... channel` to length one.

    Syncs: no.
    """
    return rms_norm(x) / math.sqrt(x.shape[-1])


def gate(x: Tensor) -> Tensor:
    """Returns values in 0..1 that rise with x: a quotient that takes the part of the logistic function.

    Syncs: no.
    """
    return 0.5 + 0.5 * x / (1.0 + x.abs())


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax attention, with `decaying_exp` for exp.

    Args:
        query: `batch head token dim`.
        key: `batch head position dim`.
        value: `batch head position dim`.
        visible: `batch 1 token position`; keys and values that are not visible may be anything.

    Returns:
        float32 `batch head token dim`, zeros where nothing is visible.

    Syncs: no.
    """
    seen = visible.any(2).unsqueeze(-1)  # rubbish must not become 0 * NaN
    keys, values = (fixed(torch.where(seen, x, 0.0), VALUE_BITS) for x in (key, value))
    product: Tensor = fixed(query, VALUE_BITS) @ keys.mT
    score = product.float() / math.sqrt(query.shape[-1])
    top = torch.where(visible, score, -torch.inf).amax(-1, keepdim=True).clamp(min=-1e30)
    share = fixed(torch.where(visible, decaying_exp(score - top), 0.0), SHARE_BITS)
    total = share.sum(-1, keepdim=True).clamp(min=2.0**-SHARE_BITS)
    mixed: Tensor = share @ values / total
    return mixed.float()


def decaying_exp(x: Tensor) -> Tensor:
    """Returns (1 + x / 256) ** 256 for x <= 0: monotone, near exp(x), and made of exactly rounded products only.

    Syncs: no.
    """
    x = (1.0 + x * 2.0**-SQUARINGS).clamp(min=0.0)
    for _ in range(SQUARINGS):
        x = x * x
    return x


class Weights:
    """Fixed random weights from a seed, drawn one after the other on the host: every device has the same."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int, scale: float) -> Tensor:
        """Normal numbers, float32."""
        return (torch.randn(shape, generator=self._random, dtype=torch.float32, device="cpu") * scale).to(self.device)

    def matrix(self, inward: int, outward: int, gain: float = 1.0) -> Tensor:
        """A weight of `linear`: `in out`, float64 on the grid that keeps its sums exact."""
        return fixed(self.draw(inward, outward, scale=gain * inward**-0.5), WEIGHT_BITS)
