"""Prepares SGLang to run on a CPU. Changes nothing in how SGLang assigns slots."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from memstate_tools.bench.no_torchvision import leave_out_torchvision
from tests.proof.engines.sglang import kernels

SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",  # otherwise SGLang refuses a CPU
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # in bfloat16, windows would round the inputs of a float32 model
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",  # SGLang looks for leaks in every step, not only in idle ones
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


def prepare() -> None:
    """Imports SGLang, and replaces what needs a GPU."""
    os.environ.update(SETTINGS)
    torch.set_num_threads(1)
    kernels.install()
    leave_out_torchvision()
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend
    from sglang.srt.managers import scheduler  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401  # imports every model, before runs are forked

    # mamba_hook asks for the name of a GPU, although track buffers need no GPU.
    mamba_hook.get_platform = lambda: SimpleNamespace(is_cuda=True)
    FusedRMSNormGated.forward = normalise  # replaces a Triton kernel
    backend.track_mamba_states_all_layers = track  # replaces a Triton kernel
    Tensor.pin_memory = lambda tensor, *_: tensor  # without CUDA, torch cannot pin
    torch.empty, torch.zeros, torch.tensor = map(unpinned, (torch.empty, torch.zeros, torch.tensor))


def unpinned(make: Any) -> Any:
    """Returns a function of torch, changed so that it ignores `pin_memory`."""
    return lambda *args, pin_memory=False, **named: make(*args, **named)


def normalise(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Returns the normalised output of a layer, times its gate."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight * silu(gate)


def track(conv: Tensor, ssm: Tensor, live: Tensor, mask: Tensor, track: Tensor, rows: int, **_: Any) -> None:
    """Copies the live states of rows that are at a boundary to their track slots, in all layers.

    conv, ssm: planes with the axes `layer slot ...`.
    """
    due = mask[:rows] & (track[:rows] >= 0)
    for states in (conv, ssm):
        states[:, track[:rows][due].long()] = states[:, live[:rows][due].long()]
