"""A pytest plugin that runs fla's tests of its recurrent delta rules over `gated_delta_step`, on a CPU.

The kernels of fla need a GPU, so a test runs with memstate alone, beside fla's naive version.
"""

import warnings
from typing import Any

import fla.ops.gated_delta_rule as gdn
import fla.ops.kda as kda
import fla.utils
import torch
from notes import INSIDE

from memstate.kernels.dispatch import Backend

BACKEND = Backend("reference", torch.device("cpu"))
CHUNK = 64  # tokens of a step
INSIDE.alone = True


def fused(
    q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool | None = None, transpose_state_layout: bool | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Takes what fla's recurrent functions take, and computes it with `gated_delta_step`, some tokens a step."""
    if transpose_state_layout is not None:  # fla's old name of the argument
        if state_v_first is not None:
            raise ValueError("both names of one argument")
        warnings.warn("transpose_state_layout", DeprecationWarning, stacklevel=2)
        state_v_first = transpose_state_layout
    q, k, v, g, beta = (each.detach() for each in (q, k, v, g, beta))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    batch, length, heads, dim = v.shape
    state = torch.zeros(batch, heads, q.shape[-1], dim) if initial_state is None else initial_state.detach()
    if state_v_first and initial_state is not None:
        state = state.transpose(-1, -2)
    slots = torch.cat([torch.full_like(state[:1], 1e30), state]).contiguous()  # the null slot is never read
    live = torch.arange(1, batch + 1, dtype=torch.int32)
    outs = []
    for start in range(0, length, CHUNK):
        part = [each[:, start : start + CHUNK].contiguous() for each in (q, k, v, g, beta)]
        tokens = torch.full_like(live, part[0].shape[1])
        outs.append(
            BACKEND.gated_delta_step(
                *part, slots, live, live, torch.zeros_like(live), tokens, scale=scale, normalize=use_qk_l2norm_in_kernel
            )
        )
        INSIDE.used += 1
    return torch.cat(outs, 1), slots[1:].transpose(-1, -2) if state_v_first else slots[1:]


fla.utils.device = "cpu"
kda.fused_recurrent_kda = gdn.fused_recurrent_gated_delta_rule = fused
