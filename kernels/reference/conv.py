"""The causal convolution step in plain torch: the oracle of `memstate.kernels.conv` and the path without Triton."""

import torch
from torch import Tensor

from memstate.kernels.decode_inputs import check, check_rows, check_state

if not __name__.startswith("memstate."):
    raise ImportError(
        "import memstate.kernels.reference.conv, not kernels.reference.conv: a second copy would duplicate it"
    )

ACTIVATIONS = ("silu", None)


def conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    activation: str | None = "silu",
    out: Tensor | None = None,
) -> Tensor:
    """Advances the window of every row by its tokens; see `memstate.kernels.conv`. Syncs: yes, reads the slots."""
    check_arguments(x, weight, bias, state, read, write, snapshot, tokens, activation, out)
    out = torch.empty_like(x) if out is None else out
    out.zero_()
    channels, taps = weight.shape
    slots = torch.stack([read, write, snapshot, tokens], dim=1).tolist()
    for row, (source, target, copy, count) in enumerate(slots):
        if target <= 0:
            continue
        window = state[source].float() if source > 0 else torch.zeros(taps - 1, channels, device=state.device)
        for t in range(min(count, x.shape[1])):
            window = torch.cat([window, x[row, t : t + 1].float()])
            out[row, t] = mix(window, weight, bias, activation)
            window = window[1:]
        state[target] = window
        if copy > 0:
            state[copy] = window
    return out


def mix(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """One output `channel` of the inputs `tap channel`, oldest first, added up in that order from the bias on; fp32."""
    y = torch.zeros_like(window[0]) if bias is None else bias.float()
    for tap, values in enumerate(window):
        y = y + weight[:, tap].float() * values
    return y / (1 + (-y).exp()) if activation == "silu" else y


def check_arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    read: Tensor,
    write: Tensor,
    snapshot: Tensor,
    tokens: Tensor,
    activation: str | None,
    out: Tensor | None,
) -> None:
    """Raises: ValueError naming the first argument whose shape, dtype or strides do not fit the others."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {ACTIVATIONS}")
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] < 2:
        raise ValueError(
            f"expected x `batch token channel` and weight `channel tap` with at least 2 taps, "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    batch, token, channel = x.shape
    check("x", x, "batch token channel", (batch, token, channel))
    check("weight", weight, "channel tap", (channel, weight.shape[1]))
    if bias is not None:
        check("bias", bias, "channel", (channel,))
    check_state(state, "slot tap-1 channel", (weight.shape[1] - 1, channel))
    check_rows(batch, read=read, write=write, snapshot=snapshot, tokens=tokens)
    if out is not None:
        check("out", out, "batch token channel", (batch, token, channel))
