"""Runs mamba_ssm's step of Mamba-3 in Triton's interpreter, without its inline assembly and with products in fp32."""

from types import ModuleType
from typing import Any

import pytest
import triton
import triton.language as tl

from tests.support.peers import CUDA, inner_module


@triton.jit
def _cos(x):
    return tl.cos(x)


@triton.jit
def _sin(x):
    return tl.sin(x)


@triton.jit
def _tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


class Exact(ModuleType):
    """Triton's language with fp32 in place of bfloat16, so that products are computed in fp32."""

    def __getattr__(self, name: str) -> Any:
        return tl.float32 if name == "bfloat16" else getattr(tl, name)


def siso_step(patch: pytest.MonkeyPatch) -> Any:
    """Returns `mamba3_siso_step`. On a CPU, it computes sines, tanh and products in fp32."""
    module = inner_module("mamba_ssm.ops.triton.mamba3.mamba3_siso_step")
    if not CUDA:
        kernel = module.mamba3_siso_step_kernel.fn  # the kernel that the autotuner wraps
        exact = {"cos_approx": _cos, "sin_approx": _sin, "tanh_approx": _tanh, "tl": Exact("tl"), "language": tl}
        for name, value in {**exact, "mamba3_siso_step_kernel": kernel}.items():
            patch.setattr(module, name, value, raising=False)
    return module.mamba3_siso_step
