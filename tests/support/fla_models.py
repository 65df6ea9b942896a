"""Makes models of flash-linear-attention with random weights, whose kernels run in Triton's interpreter on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.peers import module

WORDS = 50


class SaidToBeOnCuda(nn.Module):
    """A projection that says it is on a GPU, for a layer that refuses all other devices."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = projection, SimpleNamespace(device=torch.device("cuda"))

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.inner(x)
        return projected


def fla_model(patch: pytest.MonkeyPatch, name: str, device: torch.device, **config: Any) -> Any:
    """Returns a model of the class with this name. Its autotuned kernels use their largest blocks, unmeasured."""
    models = module("fla.models")
    patch.setattr("triton.runtime.autotuner.Autotuner._bench", _small)
    plain = {"vocab_size": WORDS, "fuse_norm": False, "fuse_cross_entropy": False, "dtype": "float32"}
    made = getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**plain | config))
    return made.eval().requires_grad_(False).to(device)


def _small(tuner: Any, *args: Any, config: Any, **kwargs: Any) -> int:
    """Returns a false time for a configuration: smaller for larger blocks, because they mean fewer programs."""
    return -sum(config.kwargs.values())


def draw(model: Any, generator: torch.Generator) -> None:
    """Draws new matrices at random. Vectors and short convolutions keep their initial values, plus noise."""
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        if weight.dim() == 2:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
        else:
            weight.add_(noise / 4)
