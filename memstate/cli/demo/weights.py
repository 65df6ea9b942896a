"""Fixed random weights from a seed."""

import torch
from torch import Tensor

from memstate.cli.demo.arithmetic import WEIGHT_BITS, fixed


class Weights:
    """Drawn one after the other on the host, so that every device has the same."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int, scale: float) -> Tensor:
        """Normal numbers, float32."""
        return (torch.randn(shape, generator=self._random) * scale).to(self.device)

    def matrix(self, inward: int, outward: int, gain: float = 1.0) -> Tensor:
        """A weight of `linear`: `in out`, float64 on the grid that keeps its sums exact."""
        return fixed(self.draw(inward, outward, scale=gain * inward**-0.5), WEIGHT_BITS)
