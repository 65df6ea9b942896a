"""The causal convolution step in plain torch: the oracle of `memstate.kernels.conv` and the path without Triton."""

import torch
from torch import Tensor

from memstate.kernels.checks import Blocks, check_apart, check_columns, check_sizes, check_tensors
from memstate.kernels.decode_inputs import FLOATS, check, check_slots
from memstate.kernels.reference.slots import row_slots

if not __name__.startswith("memstate."):
    raise ImportError(
        "import memstate.kernels.reference.conv, not kernels.reference.conv: a second copy would duplicate it"
    )

ACTIVATIONS = ("silu", None)


@torch.no_grad()
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
    window: Tensor | None = None,
) -> Tensor:
    """Advances the window of every row by its tokens; see `memstate.kernels.conv`. Syncs: yes, reads the slots."""
    check_arguments(x, weight, bias, state, read, write, snapshot, tokens, activation, out, window)
    out = torch.empty_like(x) if out is None else out
    out.zero_()
    channels, taps = weight.shape
    rows = row_slots(state, read, write, snapshot, tokens, x.shape[1], window is None)
    for row, source, target, copy, count in rows:
        old = state[source].float() if source else torch.zeros(taps - 1, channels, device=state.device)
        inputs = torch.cat([old, x[row, :count].float()])
        for t in range(count):
            out[row, t] = mix(inputs[t : t + taps], weight, bias, activation)
        if window is not None:
            window[row, : len(inputs)] = inputs
            continue
        state[target] = inputs[count:]
        if copy:
            state[copy] = inputs[count:]
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
    window: Tensor | None,
) -> None:
    """Raises: ValueError naming the first argument whose shape, dtype or strides do not fit the others."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {ACTIVATIONS}")
    rows = {"read": read, "write": write, "snapshot": snapshot, "tokens": tokens}
    tensors: dict[str, Tensor | None] = {
        "state": state,
        "x": x,
        "weight": weight,
        **rows,
        "bias": bias,
        "out": out,
        "window": window,
    }
    check_tensors(tensors, "bias", "out", "window")
    device = state.device
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] < 2:
        raise ValueError(
            f"expected x `batch token channel` and weight `channel tap` with at least 2 taps, "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    batch, token, channel = x.shape
    check_sizes(channel=channel)
    check("x", x, "batch token channel", (batch, token, channel), device)
    check("weight", weight, "channel tap", (channel, weight.shape[1]), device)
    if bias is not None:
        check("bias", bias, "channel", (channel,), device)
    slots = check_state(state, (weight.shape[1] - 1, channel))
    check_columns(device, batch, **rows)
    if out is not None:
        check("out", out, "batch token channel", (batch, token, channel), device)
    if window is not None:
        check("window", window, "batch tap-1+token channel", (batch, weight.shape[1] - 1 + token, channel), device)
        if window.dtype != state.dtype:
            raise ValueError(f"window: expected {state.dtype} like state, got {window.dtype}")
    check_apart("state", slots, tensors, "out", "window")


def check_state(state: Tensor, shape: tuple[int, int]) -> Blocks:
    """Where the slots lie. Raises: ValueError unless each is dense, `tap-1 channel` or `channel tap-1`, and apart."""
    if state.shape[1:] != shape:
        raise ValueError(f"state: expected `slot tap-1 channel` = {('slots', *shape)}, got {tuple(state.shape)}")
    if state.dtype not in FLOATS:
        raise ValueError(f"state: expected one of {FLOATS}, got {state.dtype}")
    if not taps_are_fastest(state) and not _dense(state, 2, 1):
        raise ValueError(
            f"state: a slot `tap-1 channel` must be contiguous, or the transpose of a contiguous `channel tap-1`, "
            f"got strides {state.stride()}"
        )
    return check_slots(state, shape)


def taps_are_fastest(state: Tensor) -> bool:
    """Whether a slot lies in memory as `channel tap-1` and not as `tap-1 channel`."""
    return _dense(state, 1, 2) and not _dense(state, 2, 1)


def _dense(state: Tensor, fast: int, slow: int) -> bool:
    """Whether a slot has its elements side by side, `fast` the faster axis; one of length 1 may have any stride."""
    shape, strides = state.shape, state.stride()
    return (shape[fast] == 1 or strides[fast] == 1) and (shape[slow] == 1 or strides[slow] == shape[fast])
