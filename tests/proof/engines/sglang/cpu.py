"""What SGLang wants before its scheduler runs on a CPU. Nothing here decides anything about slots."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from memstate_tools.bench.no_torchvision import leave_out_torchvision
from tests.proof.engines.sglang import kernels

SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",  # SGLang refuses a CPU otherwise
    "SGLANG_MAMBA_CONV_DTYPE": "float32",  # windows in bfloat16 would round the tokens of a float32 model
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",  # its own check of leaks in every step, not only in idle ones
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


def prepare() -> None:
    """Imports SGLang, with what a CPU lacks in torch."""
    os.environ.update(SETTINGS)
    torch.set_num_threads(1)
    kernels.install()
    leave_out_torchvision()
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend
    from sglang.srt.managers import scheduler  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401  # imports every model: once, before runs fork

    # It asks for the name of a GPU; track buffers need none.
    mamba_hook.get_platform = lambda: SimpleNamespace(is_cuda=True)
    FusedRMSNormGated.forward = normalise  # a Triton kernel
    backend.track_mamba_states_all_layers = track  # a Triton kernel
    Tensor.pin_memory = lambda tensor, *_: tensor  # without CUDA, torch cannot pin
    torch.empty, torch.zeros, torch.tensor = map(unpinned, (torch.empty, torch.zeros, torch.tensor))


def unpinned(make: Any) -> Any:
    """Returns a function of torch that ignores `pin_memory`."""
    return lambda *args, pin_memory=False, **named: make(*args, **named)


def normalise(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """The norm of a layer's output times its gate."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight * silu(gate)


def track(conv: Tensor, ssm: Tensor, live: Tensor, mask: Tensor, track: Tensor, rows: int, **_: Any) -> None:
    """Copies the live states of rows at a boundary to their track slots, in all layers: `layer slot ...`."""
    due = mask[:rows] & (track[:rows] >= 0)
    for states in (conv, ssm):
        states[:, track[:rows][due].long()] = states[:, live[:rows][due].long()]
