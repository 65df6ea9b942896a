"""Stands in for `sgl_kernel`: has, in plain torch, the six of its compiled kernels that a hybrid calls on a CPU.

The wheels of `sgl_kernel` need the libraries of a GPU, or a processor with AMX. Shapes are SGLang's: states
`slot head value key`, windows `slot channel width-1`. A row with a negative slot is padding.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

CHUNK = 64  # number of tokens between two states that a prefill returns, as in SGLang's kernels for GPUs


def convolve(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, active: bool) -> tuple[Tensor, Tensor]:
    """Returns the convolved tokens, `channel token`, and the window after the last one."""
    whole = torch.cat([window.to(x.dtype), x], 1)
    out = (whole.unfold(1, weight.shape[1], 1) * weight[:, None]).sum(-1)
    out = out if bias is None else out + bias[:, None]
    return (silu(out) if active else out), whole[:, x.shape[1] :]


def causal_conv1d_fn_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, conv_states: Tensor,
    has_initial_state: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """Convolves a packed batch of prompts, `channel token`. Leaves the last inputs of each prompt in its window."""
    out, starts = torch.zeros_like(x), query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        if slot >= 0:
            tokens = slice(starts[row], starts[row + 1])
            before = conv_states[slot] if has_initial_state[row] else torch.zeros_like(conv_states[slot])
            out[:, tokens], conv_states[slot] = convolve(x[:, tokens], before, weight, bias, activation is not None)
    return out


def causal_conv1d_update_cpu(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *,
    conv_state_indices: Tensor,
) -> Tensor:  # fmt: skip
    """Convolves one token per row, `row channel`."""
    out = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            y, conv_state[slot] = convolve(x[row, :, None], conv_state[slot], weight, bias, activation is not None)
            out[row] = y[:, 0]
    return out


def fused_gdn_gating_cpu(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logarithm of the decay, and beta (the strength of the update). Both have axes `1 token head`."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid().to(b.dtype)[None]


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs the gated delta rule token by token: Yang, Kautz, Hatamizadeh, arXiv 2412.06464, equation 10.

    Returns:
        Three results: the outputs (axes `token head value`), the state after the last token, and the state before each
        chunk.
    """
    groups = v.shape[1] // k.shape[1]
    q, k = (each.float() / (each.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each.repeat_interleave(groups, 1) for each in (q * q.shape[-1] ** -0.5, k))
    state, outs, before = state.float(), [], []
    for t in range(len(q)):
        if t % CHUNK == 0:
            before.append(state)
        state = state * decay[t].float().exp()[:, None, None]
        change = (v[t].float() - (state * k[t, :, None]).sum(-1)) * beta[t].float()[:, None]
        state = state + change[..., None] * k[t, :, None]
        outs.append((state * q[t, :, None]).sum(-1))
    return torch.stack(outs).to(v.dtype), state, before


def chunk_gated_delta_rule_cpu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, cu_seqlens: Tensor,
    initial_state_indices: Tensor, **_: Any,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """Runs a packed batch of prompts, and leaves the state of each in its slot.

    Returns:
        Three results: the outputs, None, and the states before each chunk of each prompt (axes
        `1 chunk head value key`).
    """
    out, chunks, starts = torch.zeros_like(v), [], cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot >= 0 and starts[row] < starts[row + 1]:
            tokens = (0, slice(starts[row], starts[row + 1]))
            out[tokens], last, before = delta_rule(initial_state[slot], *(each[tokens] for each in (q, k, v, g, beta)))
            initial_state[slot] = last
            chunks += before
    return out, None, torch.stack(chunks)[None] if chunks else initial_state[None, :0]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    initial_state_source: Tensor, initial_state_indices: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    """Runs one token per row. Inputs have the axes `1 row head ...`, the returned outputs `1 row head value`."""
    decay, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out = torch.zeros_like(v)
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot >= 0:
            one = (0, slice(row, row + 1))
            given = (each[one] for each in (q, k, v, decay, beta))
            out[one], initial_state_source[slot], _ = delta_rule(initial_state_source[slot], *given)
    return out


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    *_: Any,
) -> None:  # fmt: skip
    """Writes the KV places of new tokens into SGLang's table, in the row of each token's request."""
    at = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


KERNELS = (
    causal_conv1d_fn_cpu, causal_conv1d_update_cpu, fused_gdn_gating_cpu, chunk_gated_delta_rule_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu, assign_req_to_token_pool_cpu,
)  # fmt: skip


def other(name: str) -> Any:
    """Returns a stand-in for a kernel that SGLang imports but the proof never calls. A call raises an error."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: write it into {__file__}")

    return refuse


def install() -> None:
    """Installs the stand-ins as module `sgl_kernel`. Call it before SGLang is imported."""
    named = {kernel.__name__: kernel for kernel in KERNELS}
    for name in ("sgl_kernel", "sgl_kernel.mamba"):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(named, __getattr__=other)
    torch.ops.sgl_kernel = SimpleNamespace(**named)
