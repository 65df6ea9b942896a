"""Computes the causal convolution step in plain torch.

Tests compare `memstate.kernels.conv` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
from torch import Tensor

from memstate.kernels.decode_checks import check_conv
from memstate.kernels.reference.slots import row_marks, row_slots, row_tails
from memstate.kernels.reference.trees import lineage
from memstate.kernels.tables import ConvTail, Cursor, StepMarks


@torch.no_grad()
def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor,
    tokens: Tensor, activation: str | None = "silu", out: Tensor | None = None, marks: StepMarks | None = None,
    tail: ConvTail | None = None, cursor: Cursor | None = None, parents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Advances the convolution window of every row by its tokens, and returns the convolution at each token.

    Per token: y[t] = activation(bias + sum over w of weight[w] x[t - (tap - 1) + w]), each channel on its own. The sum
    starts at the bias and adds the oldest input first. This is the short causal convolution in the block of Mamba: Gu,
    Dao 2023, arXiv:2312.00752.

    Arithmetic is fp32. Inputs are rounded to the dtype of the state once, when they are stored. With a state that holds
    the inputs exactly, the bits do not depend on how a prompt is cut into chunks.

    Slot ids outside 1..slot-1 are null. A null read is zeros. A row with a null write changes nothing, and its output
    is zeros. The slots of one row may coincide. No two rows store the same slot, and no row stores a slot that another
    row reads.

    Args:
        x: `batch token channel`. May be a slice of a wider projection: the elements of a token are contiguous, and
            tokens lie at equal distances. If a token is a multiple of 16 bytes wide, tokens begin at multiples of 16
            bytes.
        weight: `channel tap`, contiguous, at least 2 taps.
        bias: `channel`, contiguous, or None.
        state: one layer, `slot tap-1 channel`: the last inputs, the oldest first; fp32, bf16 or fp16; any stride
            between slots. A slot lies in memory as `tap-1 channel` or as `channel tap-1`; the strides say which. Pass a
            plane that is stored `slot channel tap-1` as plane.transpose(1, 2).
        read: slot of each row to read, int32 or int64 `batch`.
        write: slot of each row to store, int32 or int64 `batch`.
        snapshot: second slot of each row to store, int32 or int64 `batch`; null for none.
        tokens: real tokens of each row, up to `token`, int32 or int64 `batch`. The output of the other tokens is zeros.
            With 0 tokens the window is copied through.
        activation: "silu" or None.
        out: tensor for the output, `batch token channel`; may be a slice, like `x`. With it the op allocates nothing.
            Callers take `q | k | v` or `x | B | C` as slices of the output.
        marks: marks of the step, or None. For each mark, the op also stores the window after `offset` tokens of row
            `entry` to `slot`. Marks ascend by entry, then by offset. Null slots, offsets beyond the row's tokens and
            rows with a null write store nothing. The slots are distinct from each other and from all other slots of the
            step.
        tail: rings of inputs that are not in a row's window yet, or None; see `gated_delta_step`.
        cursor: says which tokens of a row are in the state already, and which are in the tail, see `Cursor`. Given if
            and only if `tail` is.
        parents: trees of drafts, or None; see `gated_delta_step`.

    Returns:
        `out`. Changes: state; tail.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; slots share bytes; a tail without a cursor;
            or `out`, the state or the tail requires grad, or shares bytes with another tensor.

    Syncs: no (the reference: yes, it reads the slots).
    """
    check_conv(*locals().values())  # all arguments, in order
    out = x.new_empty(x.shape) if out is None else out
    out.zero_()
    channels, taps = weight.shape
    rows = row_slots(state, read, write, snapshot, tokens, x.shape[1])
    kept = row_marks(marks, state.shape[0] - 1)
    tails = row_tails(tail, cursor, len(x))
    for row, source, target, copy, count in rows:
        old = (
            state[source].float()
            if source
            else torch.zeros(taps - 1, channels, dtype=torch.float32, device=state.device)
        )
        own = tails[row]
        pending = [own.at(token).x[None].float() for token in range(own.pending)]
        inputs = torch.cat([old, *pending, x[row, :count].float()])
        held = inputs if tail is None else inputs.to(state.dtype).float()  # with a tail, windows have rounded inputs
        windows = {-1: held[own.pending : own.pending + taps - 1]}  # token of the step -> window behind it
        for t in range(count):
            at, window = own.pending + t, windows[lineage(parents, row, t)]
            out[row, t] = mix(torch.cat([window, x[row, t][None].float()]), weight, bias, activation)
            window = torch.cat([window[1:], held[at + taps - 1][None]])
            windows = {**windows, t: window} if parents is not None else {t: window}
            state[kept.get((row, t + 1), [])] = window.to(state.dtype)
            own.keep(at, ConvTail(x[row, t]))
        end = own.store if own.store <= own.pending else own.pending + count
        if end >= 0:
            state[[slot for slot in (target, copy) if slot]] = held[end : end + taps - 1].to(state.dtype)
    return out


def mix(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Returns one output `channel` of inputs `tap channel`, in fp32: adds weighted inputs to the bias, oldest first."""
    y = torch.zeros_like(window[0]) if bias is None else bias.float()
    for tap, values in enumerate(window):
        y = y + weight[:, tap].float() * values
    return y / (1 + (-y).exp()) if activation == "silu" else y
