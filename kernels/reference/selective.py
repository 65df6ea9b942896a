"""The selective state update of Mamba in plain torch: oracle of `memstate.kernels.selective`, path without Triton."""

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from memstate.kernels.checks import check_apart, check_columns, check_sizes, check_tensors
from memstate.kernels.decode_inputs import check, check_address, check_state, check_window
from memstate.kernels.reference.slots import row_slots

if not __name__.startswith("memstate."):
    raise ImportError("import memstate.kernels.reference.selective, not kernels.reference.selective")


@torch.no_grad()
def selective_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    window: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Advances the state of every row by its tokens; see `memstate.kernels.selective`. Syncs: yes."""
    check_arguments(x, dt, a, b, c, state, read, write, snapshot, tokens, d, z, dt_bias, softplus, window, out)
    out = torch.empty_like(x) if out is None else out
    out.zero_()
    rows = row_slots(state, read, write, snapshot, tokens, x.shape[1], window is None)
    for row, source, target, copy, count in rows:
        s = state[source].float() if source else torch.zeros(state.shape[1:], device=state.device)
        for t in range(count):
            step = dt[row, t].float() if dt_bias is None else dt[row, t].float() + dt_bias.float()
            s, y = advance(s, x[row, t], F.softplus(step) if softplus else step, a, b[row, t], c[row, t])
            if d is not None:
                y = y + per_channel(d) * x[row, t].float()
            out[row, t] = y if z is None else y * F.silu(z[row, t].float())
            if window is not None:
                window[row, t] = s
        if window is None:
            state[target] = s
            if copy:
                state[copy] = s
    return out


def advance(s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One token of one row, fp32: returns the new state `head dim state` and S c `head dim`.

    dt: `head` or `head dim`. One row at a time, and products summed over one axis: a matmul over the batch rounds
    differently with its size.
    """
    group = s.shape[0] // b.shape[0]
    inward = repeat(b.float(), "group state -> (group head) 1 state", head=group)
    outward = repeat(c.float(), "group state -> (group head) 1 state", head=group)
    dt = per_channel(dt)
    gate = rearrange(a.float(), "head -> head 1 1") if a.dim() == 1 else a.float()
    decay = (rearrange(dt, "head dim -> head dim 1") * gate).exp()
    s = s * decay + rearrange(dt * x.float(), "head dim -> head dim 1") * inward
    return s, (s * outward).sum(dim=2)


def per_channel(values: Tensor) -> Tensor:
    """`head` or `head dim` as fp32 `head 1` or `head dim`."""
    return rearrange(values.float(), "head -> head 1") if values.dim() == 1 else values.float()


def check_arguments(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    window: Tensor | None,
    out: Tensor | None,
) -> None:
    """Raises: ValueError naming the first argument whose shape, dtype, strides or address do not fit the others."""
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    tensors: dict[str, Tensor | None] = {
        "state": state, "x": x, "dt": dt, "a": a, "b": b, "c": c, **rows,
        "d": d, "z": z, "dt_bias": dt_bias, "window": window, "out": out,
    }  # fmt: skip
    check_tensors(tensors, "d", "z", "dt_bias", "window", "out")
    device = state.device
    if not isinstance(softplus, bool):
        raise ValueError(f"softplus: expected True or False, got {softplus!r}")
    if x.dim() != 4 or b.dim() != 4 or not b.shape[2] or x.shape[2] % b.shape[2]:
        raise ValueError(
            f"expected x `batch token head dim` and b `batch token group state` with head a multiple of group, "
            f"got {tuple(x.shape)} and {tuple(b.shape)}"
        )
    if dt.dim() not in (3, 4):
        raise ValueError(
            f"dt: expected `batch token head` (Mamba2) or `batch token head dim` (Mamba1), got {tuple(dt.shape)}"
        )
    batch, token, head, dim = x.shape
    states = b.shape[3]
    check_sizes(head=head, dim=dim, state=states)
    check("x", x, "batch token head dim", (batch, token, head, dim), device)
    for name, shared in (("b", b), ("c", c)):
        check(name, shared, "batch token group state", (batch, token, b.shape[2], states), device)
    # One step, decay, skip and bias a head, or for each of its channels.
    tied = dt.dim() == 3
    pattern, shape = ("head", (head,)) if tied else ("head dim", (head, dim))
    check("dt", dt, f"batch token {pattern}", (batch, token, *shape), device)
    check("a", a, pattern if tied else "head dim state", shape if tied else (head, dim, states), device)
    if not tied:
        check_address("a", a)
    for name, weight in (("d", d), ("dt_bias", dt_bias)):
        if weight is not None:
            check(name, weight, pattern, shape, device)
    slots = check_state(state, "slot head dim state", (head, dim, states))
    check_columns(device, batch, **rows)
    for name, like_x in (("z", z), ("out", out)):
        if like_x is not None:
            check(name, like_x, "batch token head dim", (batch, token, head, dim), device)
    if window is not None:
        check_window(window, state, "batch token head dim state", (batch, token))
    check_apart("state", slots, tensors, "out", "window")
