"""Stores the states at marks, one by one, in plain torch.

Tests compare `memstate.kernels.marks` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
from torch import Tensor

from memstate.kernels.move_checks import check_scatter_states
from memstate.kernels.tables import StepMarks


@torch.no_grad()
def scatter_states(
    marks: StepMarks, starts: Tensor, read: Tensor, write: Tensor, plane: Tensor | None = None, h: Tensor | None = None,
    first: Tensor | None = None, chunk: int = 64, transposed: bool = False, conv: Tensor | None = None,
    inputs: Tensor | None = None,
) -> None:  # fmt: skip
    """Stores the states at the marks of a step whose forward has its own kernels, all layers in one launch.

    A mark at the end of its entry's tokens gets its state from the slot that the forward wrote, every other mark from
    `h`. In `h`, the forward has stored the state before each piece of `chunk` tokens. The pieces of an entry of n
    tokens begin at its first token or, if `first` is None, at multiples of `chunk` in the packed batch:

        first given   plane[:, slot] = h[:, first[entry] + offset / chunk]      where `chunk` divides offset
        first None    plane[:, slot] = h[:, (starts[entry] + offset) / chunk]   where `chunk` divides the sum
        offset = n    plane[:, slot] = plane[:, write[entry]]

    With `first`, `h` is that of flash-linear-attention's `chunk_gated_delta_rule_fwd_h`, and `first` comes from
    `prepare_chunk_offsets`. Without `first`, `h` is that of a Mamba-2 chunk scan. A window gets the inputs before the
    mark; its taps before the first token come from slot `read`. Values of another dtype are rounded once.

    Other marks are skipped: a mark between two pieces, an offset outside 1..n, an entry outside the batch, a null slot.
    If `h` or `inputs` is None, marks before the end of an entry's tokens are skipped, too. The slots of marks are
    distinct from each other and from all slots that the step reads or writes.

    Call this op after the forward, and before the next plan. One case differs: a mark with fewer tokens before it than
    a window has taps also needs the old window. If the forward overwrites the window in the slot that it read, call the
    op before the convolution, or set no such marks.

    Args:
        marks: marks of the step: int32 columns, ascending by entry.
        starts: the first packed token of each entry, then the number of all tokens, int32 or int64 `batch+1`; fewer
            than 2**31 tokens.
        read: slot that the step read for each entry, int32 or int64 `batch`; null for zeros.
        write: slot that the step wrote for each entry, int32 or int64 `batch`.
        plane: states, `layer slot ...`; fp32, bf16 or fp16, or any dtype without `h`; one layer of one slot is
            contiguous, any strides between layers and slots. None for no plane of states. Changed.
        h: states before pieces, `layer piece ...`, contiguous, fp32, bf16 or fp16; or None.
        first: index of the first piece of each entry, then the number of all pieces, int32 or int64 `batch+1`. None if
            pieces begin at multiples of `chunk` of the packed batch.
        chunk: tokens of a piece.
        transposed: whether the last two axes of `h` are swapped, compared with those of the plane.
        conv: windows, `layer slot tap-1 channel`, the oldest input first, stored as `tap channel` or, passed as a
            transposed view, as `channel tap`. None for no plane of windows. Changed.
        inputs: packed inputs of the convolution, `layer token channel`, contiguous; or None.

    Raises:
        ValueError: no plane; a shape, dtype, device or stride does not fit; slots share bytes; or a plane requires
            grad, or shares bytes with another tensor.

    Syncs: no (the reference: yes, it reads the marks).
    """
    check_scatter_states(marks, starts, read, write, plane, h, first, chunk, transposed, conv, inputs)
    count = min(int(marks.count), marks.entry.numel())
    begins, sources, targets = starts.tolist(), read.tolist(), write.tolist()
    pieces = [0] * len(begins) if first is None else first.tolist()
    slots = (conv if plane is None else plane).shape[1]  # type: ignore[union-attr]
    for entry, offset, slot in torch.stack(marks[1:], 1)[:count].tolist():
        if not 0 <= entry < len(targets) or not 0 < slot < slots:
            continue
        start, tokens, written = begins[entry], begins[entry + 1] - begins[entry], targets[entry]
        if not 0 < offset <= tokens:
            continue
        ended = offset == tokens and 0 < written < slots
        if plane is not None and ended:
            plane[:, slot] = plane[:, written]
        elif plane is not None and h is not None and offset < tokens:
            at = offset + (start if first is None else 0)
            piece = pieces[entry] + at // chunk
            if at % chunk == 0 and 0 <= piece < h.shape[1]:
                state = h[:, piece]
                plane[:, slot] = (state.transpose(-1, -2) if transposed else state).to(plane.dtype)
        if conv is not None and inputs is not None:
            taps = conv.shape[2]
            source = sources[entry]
            old = conv[:, source] if 0 < source < slots else torch.zeros_like(conv[:, 0])
            new = inputs[:, start + max(0, offset - taps) : start + offset].to(conv.dtype)
            conv[:, slot] = torch.cat([old, new], 1)[:, -taps:]
        elif conv is not None and ended:
            conv[:, slot] = conv[:, written]
