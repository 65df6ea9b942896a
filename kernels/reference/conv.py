"""The causal convolution step in plain torch: the oracle of `memstate.kernels.conv` and the path without Triton."""

import torch
from torch import Tensor

from memstate.kernels.decode_checks import check_conv
from memstate.kernels.reference.slots import row_marks, row_slots
from memstate.kernels.tables import Marks


@torch.no_grad()
def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor,
    tokens: Tensor, activation: str | None = "silu", out: Tensor | None = None, window: Tensor | None = None,
    marks: Marks | None = None,
) -> Tensor:  # fmt: skip
    """Advances the convolution window of every row by its tokens, and returns the convolution at each token.

    Per token: y[t] = activation(bias + sum over w of weight[w] x[t - (tap - 1) + w]), each channel on its own. The sum
    starts at the bias and adds the oldest input first. This is the short causal convolution in the block of Mamba: Gu,
    Dao 2023, arXiv:2312.00752.

    Arithmetic is fp32. Inputs are rounded to the dtype of the state once, when they are stored. With a state that holds
    the inputs exactly, the bits do not depend on how a prompt is cut into chunks.

    Slot ids outside 1..slot-1 are null. A null read is zeros. A row with a null write changes nothing, and its output
    is zeros. The slots of one row may coincide. Across rows the slots stored are distinct, and none is another row's
    `read`.

    Args:
        x: `batch token channel`. May be a slice of a wider projection: what belongs to a token is contiguous, and
            tokens lie at equal distances. If a token is a multiple of 16 bytes wide, tokens begin at multiples of 16
            bytes.
        weight: `channel tap`, contiguous, at least 2 taps.
        bias: `channel`, contiguous, or None.
        state: one layer, `slot tap-1 channel`, the last inputs with the oldest first; fp32, bf16 or fp16; slots any
            stride apart. A slot lies in memory as `tap-1 channel` or as `channel tap-1`, and the strides say which:
            pass a plane that is stored `slot channel tap-1` as plane.transpose(1, 2).
        read: slot of each row to read, int32 or int64 `batch`.
        write: slot of each row to store, int32 or int64 `batch`.
        snapshot: second slot of each row to store, int32 or int64 `batch`; null for none.
        tokens: real tokens of each row, up to `token`, int32 or int64 `batch`. The output of the other tokens is zeros.
            With 0 tokens the window is copied through.
        activation: "silu" or None.
        out: where the output goes, `batch token channel`, a slice as `x` may be; given, nothing is allocated. A caller
            reads `q | k | v` or `x | B | C` as slices of it.
        window: for tokens that may be rejected, `batch tap-1+token channel`, contiguous, of the state's dtype. Given,
            no slot is stored. A row whose `write` is above 0 gets the window read and the inputs of its real tokens
            here; the rest stays as it is. The window after the first a tokens of row b is window[b, a : a + tap - 1].
        marks: states inside the step that are kept as well, or None. The window after `offset` tokens of row `entry`
            goes to `slot` in the same pass, for every mark. They ascend by entry, then by offset. Null slots, offsets
            beyond the row's tokens and rows with a null write keep nothing. The slots are distinct from each other and
            from all others of the step. Not beside a window.

    Returns:
        `out`. Changes: state, or window if given.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; slots share bytes; marks beside a window; or
            `out`, the window or the state requires grad, or shares bytes with another tensor.

    Syncs: no (the reference: yes, it reads the slots).
    """
    check_conv(x, weight, bias, state, read, write, snapshot, tokens, activation, out, window, marks)
    out = x.new_empty(x.shape) if out is None else out
    out.zero_()
    channels, taps = weight.shape
    rows = row_slots(state, read, write, snapshot, tokens, x.shape[1], window is None)
    kept = row_marks(marks, state.shape[0] - 1)
    for row, source, target, copy, count in rows:
        old = state[source].float() if source else torch.zeros(taps - 1, channels, device=state.device)
        inputs = torch.cat([old, x[row, :count].float()])
        for t in range(count):
            out[row, t] = mix(inputs[t : t + taps], weight, bias, activation)
            state[kept.get((row, t + 1), [])] = inputs[t + 1 : t + taps].to(state.dtype)
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
