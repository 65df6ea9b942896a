"""A pytest plugin that runs mamba_ssm's tests of its decode kernel over `selective_step`, on a CPU.

The kernel of mamba_ssm needs a GPU, so a test runs with memstate alone, beside mamba_ssm's own reference.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from notes import INSIDE

from memstate.kernels.dispatch import Backend

for name in ("selective_scan_cuda", "causal_conv1d_cuda", "causal_conv1d"):
    sys.modules[name] = types.ModuleType(name)
spec = importlib.util.find_spec("mamba_ssm")
assert spec is not None and spec.submodule_search_locations is not None
for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):  # their __init__ import all, which needs a GPU
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [spec.submodule_search_locations[0] + name.removeprefix("mamba_ssm").replace(".", "/")]
theirs = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
BACKEND = Backend("reference", torch.device("cpu"))
INSIDE.alone = True


def _head(tensor: Any, at: int) -> Any:
    """Puts an axis for one head into a tensor; None stays None."""
    return None if tensor is None else tensor.unsqueeze(at)


def selective_state_update(
    state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, dt_bias: Any = None,
    dt_softplus: bool = False, state_batch_indices: Any = None,
) -> Any:  # fmt: skip
    """Takes what mamba_ssm's function takes, and computes it with `selective_step` on slots."""
    heads, states = state.dim() == 4, state
    if not heads:  # one head of all channels
        states, x, dt, B, C, z = (_head(each, 1) for each in (state, x, dt, B, C, z))
        A, D, dt_bias = (_head(each, 0) for each in (A, D, dt_bias))
    elif A.stride(-1) == 0 and A.stride(-2) == 0 and dt.stride(-1) == 0:  # one value a head
        A, dt, D, dt_bias = A[..., 0, 0], dt[..., 0], D[..., 0], dt_bias[..., 0]
    null = torch.full_like(states[:1], 3e4)  # is never read
    slots = torch.cat([null, states]).contiguous()
    batch = x.shape[0]
    index = torch.arange(batch) if state_batch_indices is None else state_batch_indices
    live, none = (index + 1).to(torch.int32), torch.zeros(batch, dtype=torch.int32)
    x, dt, B, C = (each[:, None].contiguous() for each in (x, dt, B, C))  # one token
    z = None if z is None else z[:, None].contiguous()
    D, dt_bias = (None if each is None else each.contiguous() for each in (D, dt_bias))
    out = BACKEND.selective_step(
        x, dt, A.contiguous(), B, C, slots, live, live, none, torch.ones_like(live), d=D, z=z, dt_bias=dt_bias,
        softplus=dt_softplus,
    )[:, 0]  # fmt: skip
    states.copy_(slots[1:])
    INSIDE.used += 1
    return out if heads else out[:, 0]


theirs.selective_state_update = selective_state_update  # type: ignore[attr-defined]
