"""Arithmetic whose result for one row does not depend on the other rows of the batch, bit for bit.

A sum of floats depends on its order, and libraries choose the order by the shape of the batch. Here every sum is exact,
so its order does not matter: terms are first rounded to a fixed grid, so coarse that all partial sums fit into the 53
bits of a float64. All other operations are ones that IEEE 754 rounds exactly (+ - * / sqrt, comparisons). They give the
same result at every place of a vector register; `exp` may not.
"""

import math

import torch
from torch import Tensor

LIMIT = 64.0  # terms are clipped to this magnitude: 6 bits before the point
TERM_BITS = 20  # bits after the point of a term that is multiplied by a weight
WEIGHT_BITS = 16  # weights are below 8: a product has 6 + 20 + 3 + 16 bits, which leaves 8 for 256 terms
SQUARE_BITS = 16  # both factors are terms: 2 (6 + 16) bits, which leaves 9
# attention: shares are at most 1, values have 14 bits: 18 + 6 + 14 bits, which leaves 15 for 32768 tokens
SHARE_BITS = 18
VALUE_BITS = 14
SQUARINGS = 8


def fixed(x: Tensor, bits: int) -> Tensor:
    """Rounds x to multiples of 2 ** -bits within -LIMIT..LIMIT, float64. Scaling by a power of two is exact.

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
    """Returns values in 0..1 that rise with x: a quotient in place of the logistic function.

    Syncs: no.
    """
    return 0.5 + 0.5 * x / (1.0 + x.abs())


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax attention, with `decaying_exp` for exp.

    Args:
        query: Queries, `batch head token dim`.
        key: Keys, `batch head position dim`.
        value: Values, `batch head position dim`.
        visible: `batch 1 token position`; keys and values that are not visible may hold any numbers.

    Returns:
        float32 `batch head token dim`, zeros if no position is visible.

    Syncs: no.
    """
    seen = visible.any(2).unsqueeze(-1)  # unwritten memory may hold NaN, and 0 * NaN is NaN
    keys, values = (fixed(torch.where(seen, x, 0.0), VALUE_BITS) for x in (key, value))
    product: Tensor = fixed(query, VALUE_BITS) @ keys.mT
    score = product.float() / math.sqrt(query.shape[-1])
    top = torch.where(visible, score, -torch.inf).amax(-1, keepdim=True).clamp(min=-1e30)
    share = fixed(torch.where(visible, decaying_exp(score - top), 0.0), SHARE_BITS)
    total = share.sum(-1, keepdim=True).clamp(min=2.0**-SHARE_BITS)
    mixed: Tensor = share @ values / total
    return mixed.float()


def decaying_exp(x: Tensor) -> Tensor:
    """Returns (1 + x / 256) ** 256 for x <= 0: monotone, near exp(x), and a chain of exactly rounded products.

    Syncs: no.
    """
    x = (1.0 + x * 2.0**-SQUARINGS).clamp(min=0.0)
    for _ in range(SQUARINGS):
        x = x * x
    return x


class Weights:
    """Fixed random weights from a seed, drawn in order on the host, so that all devices have the same."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int, scale: float) -> Tensor:
        """Returns normal numbers, float32."""
        return (torch.randn(shape, generator=self._random, dtype=torch.float32, device="cpu") * scale).to(self.device)

    def matrix(self, inward: int, outward: int, gain: float = 1.0) -> Tensor:
        """Returns a weight of `linear`, float64 `in out`, on the grid that keeps its sums exact."""
        return fixed(self.draw(inward, outward, scale=gain * inward**-0.5), WEIGHT_BITS)
