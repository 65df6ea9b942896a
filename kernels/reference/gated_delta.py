"""The gated delta rule step in plain torch: oracle of `memstate.kernels.gated_delta` and the path without Triton."""

from numbers import Real

import torch
from einops import rearrange, repeat
from torch import Tensor

from memstate.kernels.checks import check_apart, check_columns, check_sizes, check_tensors
from memstate.kernels.decode_inputs import check, check_state, check_window
from memstate.kernels.reference.slots import row_slots

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.reference.gated_delta, not kernels.reference.gated_delta")


@torch.no_grad()
def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
    window: Tensor | None = None,
) -> Tensor:
    """Advances the state of every row by its tokens; see `memstate.kernels.gated_delta`. Syncs: yes."""
    check_arguments(q, k, v, decay, beta, state, read, write, snapshot, tokens, scale, out, window)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(v) if out is None else out
    out.zero_()
    rows = row_slots(state, read, write, snapshot, tokens, v.shape[1], window is None)
    for row, source, target, copy, count in rows:
        s = state[source].float() if source else torch.zeros(state.shape[1:], device=state.device)
        for t in range(count):
            s, o = advance(s, q[row, t], k[row, t], v[row, t], decay[row, t], beta[row, t])
            out[row, t] = o * scale
            if window is not None:
                window[row, t] = s
        if window is None:
            state[target] = s
            if copy:
                state[copy] = s
    return out


def advance(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One token of one row, fp32: returns the new state `head key value` and q^T S `head value`.

    decay: `head` or `head key`. One row at a time, and products summed over one axis: a matmul over the batch rounds
    differently with its size.
    """
    group = s.shape[0] // k.shape[0]
    key = repeat(k.float(), "key_head key -> (key_head group) key 1", group=group)
    query = repeat(q.float(), "key_head key -> (key_head group) key 1", group=group)
    gate = decay.float().exp()
    s = s * rearrange(gate, "head key -> head key 1" if gate.dim() == 2 else "head -> head 1 1")
    seen = (key * s).sum(dim=1)
    delta = rearrange(beta.float(), "head -> head 1") * (v.float() - seen)
    s = s + key * rearrange(delta, "head value -> head 1 value")
    return s, (query * s).sum(dim=1)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    scale: float | None,
    out: Tensor | None,
    window: Tensor | None,
) -> None:
    """Raises: ValueError naming the first argument whose shape, dtype, strides or address do not fit the others."""
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    tensors: dict[str, Tensor | None] = {
        "state": state, "q": q, "k": k, "v": v, "decay": decay, "beta": beta, **rows, "out": out, "window": window
    }  # fmt: skip
    check_tensors(tensors, "out", "window")
    device = state.device
    if scale is not None and not isinstance(scale, float | int | Real):
        raise ValueError(f"scale: expected a number or None, got {scale!r}")
    if q.dim() != 4 or v.dim() != 4 or not q.shape[2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"expected q `batch token key_head key` and v `batch token head value` with head a multiple of key_head, "
            f"got {tuple(q.shape)} and {tuple(v.shape)}"
        )
    batch, token, head, value = v.shape
    keys = (batch, token, q.shape[2], q.shape[3])
    check_sizes(head=head, key=q.shape[3], value=value)
    check("q", q, "batch token key_head key", keys, device)
    check("k", k, "batch token key_head key", keys, device)
    check("v", v, "batch token head value", (batch, token, head, value), device)
    if decay.dim() == 4:
        check("decay", decay, "batch token head key", (batch, token, head, q.shape[3]), device)
    else:
        check("decay", decay, "batch token head", (batch, token, head), device)
    check("beta", beta, "batch token head", (batch, token, head), device)
    slots = check_state(state, "slot head key value", (head, q.shape[3], value))
    check_columns(device, batch, **rows)
    if out is not None:
        check("out", out, "batch token head value", (batch, token, head, value), device)
    if window is not None:
        check_window(window, state, "batch token head key value", (batch, token))
    check_apart("state", slots, tensors, "out", "window")
