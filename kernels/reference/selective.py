"""Computes the selective state update of Mamba in plain torch.

Tests compare `memstate.kernels.selective` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from memstate.kernels.decode_checks import check_selective
from memstate.kernels.reference.scaled import States
from memstate.kernels.reference.slots import row_marks, row_slots, row_tails
from memstate.kernels.reference.trees import lineage
from memstate.kernels.tables import Cursor, SelectiveTail, StepMarks


@torch.no_grad()
def selective_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, d: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    softplus: bool = False, out: Tensor | None = None, marks: StepMarks | None = None,
    tail: SelectiveTail | None = None, cursor: Cursor | None = None, parents: Tensor | None = None,
    scales: Tensor | None = None, lengths: Tensor | None = None, seed: int | None = None, layer: int = 0,
    first_head: int = 0, dt_min: float | None = None, dt_max: float | None = None,
) -> Tensor:  # fmt: skip
    """Advances the state of every row by its tokens, in order, and returns what `c` reads from it.

    Per token: dt' = dt + dt_bias, or softplus of that;  S <- exp(dt' a) S + dt' x (x) b;  y = S c + d x;  y silu(z).
    dt_min and dt_max bound dt'.
    This is the selective state space model of Gu, Dao 2023, arXiv:2312.00752. With one `a` and one dt per head, it is
    Mamba2: Dao, Gu 2024, arXiv:2405.21060. Softplus is the identity above 20.

    Arithmetic is fp32. The state is rounded to its dtype once, when it is stored; whole numbers after each token, as
    `memstate.kernels.reference.scaled` defines. With an fp32 state and with whole numbers, the bits do not depend on
    how a prompt is cut into chunks.

    Slot ids outside 1..slot-1 are null. A null read is zeros. A row with a null write changes nothing, and its output
    is zeros. The slots of one row may coincide. No two rows store the same slot, and no row stores a slot that another
    row reads.

    x, dt, b, c and z may be slices of a wider projection: the elements of a token are contiguous, and tokens lie at
    equal distances. If a token is a multiple of 16 bytes wide, tokens begin at multiples of 16 bytes.

    Args:
        x: `batch token head dim`. For Mamba1 all channels may be one head.
        dt: `batch token head` (Mamba2) or `batch token head dim` (Mamba1).
        a: negative, contiguous; `head` (Mamba2), or `head dim state` that begins at a multiple of 16 bytes (Mamba1).
        b: `batch token group state`; head h uses group h // (head / group).
        c: `batch token group state`, as `b`.
        state: one layer, `slot head dim state`; fp32, bf16 or fp16, or int16 or int8 with `scales`; any stride between
            slots. A slot is contiguous or, for Mamba2, the transposed view of a contiguous `head state dim`, as in
            TensorRT-LLM's plugin. Mamba1 takes no such view, because the kernel loads its `a`, `head dim state`, in the
            same order as the state. Pass a plane without heads, `slot channel state`, as plane.unsqueeze(1).
        read: slot of each row to read, int32 or int64 `batch`.
        write: slot of each row to store, int32 or int64 `batch`.
        snapshot: second slot of each row to store, int32 or int64 `batch`; null for none.
        tokens: real tokens of each row, up to `token`, int32 or int64 `batch`. The output of the other tokens is zeros.
            With 0 tokens the state is copied through.
        d: `head` (Mamba2) or `head dim` (Mamba1), contiguous, or None.
        z: `batch token head dim`, or None.
        dt_bias: bias of dt, shaped as `d`, or None.
        softplus: whether dt' is the softplus of the sum.
        out: tensor for the output, `batch token head dim`, contiguous. With it the op allocates nothing. If slots store
            `state dim` and `dim` elements are a multiple of 16 bytes, it begins at a multiple of 16 bytes.
        marks: marks of the step, or None. For each mark, the op also stores the state after `offset` tokens of row
            `entry` to `slot`. Marks ascend by entry, then by offset. Null slots, offsets beyond the row's tokens and
            rows with a null write store nothing. The slots are distinct from each other and from all other slots of the
            step.
        tail: rings of tokens that are not in a row's state yet, or None; see `gated_delta_step`.
        cursor: says which tokens of a row are in the state already, and which are in the tail, see `Cursor`. Given if
            and only if `tail` is.
        parents: trees of drafts, or None; see `gated_delta_step`.
        scales: scales of a Mamba2 state of whole numbers, fp32 `slot head dim`, any stride between slots; see
            `gated_delta_step`.
        lengths: tokens of the state that each row reads, int32 or int64 `batch`; only with `seed`.
        seed: seed to round whole numbers by chance, 0 to 2^31 - 1; None rounds to the nearest.
        layer: number of the layer, for the draws of `seed`.
        first_head: number of the first head in the model, for the draws of `seed`.
        dt_min: least dt', or None. mamba_ssm calls the two `dt_limit`.
        dt_max: largest dt', or None; at least `dt_min`.

    Returns:
        `out`. Changes: state; scales; tail.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; a state of Mamba1 stores `state dim` or has
            scales; there are 2^31 tokens or more; slots share bytes; a tail without a cursor; or `out`, the state, the
            scales or the tail requires grad, or shares bytes with another tensor.

    Syncs: no (the reference: yes, it reads the slots).
    """
    check_selective(*locals().values())  # all arguments, in order
    out = x.new_empty(x.shape) if out is None else out
    out.zero_()
    rows = row_slots(state, read, write, snapshot, tokens, x.shape[1])
    kept = row_marks(marks, state.shape[0] - 1)
    tails = row_tails(tail, cursor, len(x))
    memory = States(state, scales, 2, seed, layer, first_head)
    for row, source, target, copy, count in rows:
        s, length = memory.load(source), 0 if lengths is None else int(lengths[row])
        own, stored = tails[row], [slot for slot in (target, copy) if slot]
        for entry in range(own.pending + 1):
            if entry == own.store:
                memory.store(stored, s)
            if entry < own.pending:
                kept_token, length = own.at(entry), length + 1
                s = memory.rounded(advance(s, kept_token.x, kept_token.b, kept_token.dt, a), length)
        states = {-1: (s, length)}  # token of the step -> (state behind it, its length); -1: behind the pending tokens
        for t in range(count):
            step = dt[row, t].float() if dt_bias is None else dt[row, t].float() + dt_bias.float()
            step = F.softplus(step) if softplus else step
            step = step if dt_min is dt_max is None else step.clamp(dt_min, dt_max)
            entering = SelectiveTail(x[row, t], b[row, t], step)
            own.keep(own.pending + t, entering)
            s, length = states[lineage(parents, row, t)]
            s, length = advance(s, entering.x, entering.b, entering.dt, a), length + 1
            y = (s * of_heads(c[row, t], s)).sum(dim=2)
            if d is not None:
                y = y + per_channel(d) * x[row, t].float()
            out[row, t] = y if z is None else y * F.silu(z[row, t].float())
            if tail is not None or scales is not None:
                s = memory.rounded(s, length)
            states = {**states, t: (s, length)} if parents is not None else {t: (s, length)}
            memory.store(kept.get((row, t + 1), []), s)
        if own.store > own.pending:
            memory.store(stored, s)
    return out


def advance(s: Tensor, x: Tensor, b: Tensor, dt: Tensor, a: Tensor) -> Tensor:
    """Returns the state `head dim state` of one row after one more token, fp32; dt is `head` or `head dim`."""
    dt = per_channel(dt)
    gate = rearrange(a.float(), "head -> head 1 1") if a.dim() == 1 else a.float()
    decay = (rearrange(dt, "head dim -> head dim 1") * gate).exp()
    return s * decay + rearrange(dt * x.float(), "head dim -> head dim 1") * of_heads(b, s)


def of_heads(shared: Tensor, s: Tensor) -> Tensor:
    """Returns vectors of groups as `head 1 state`, for each head of the state."""
    return repeat(shared.float(), "group state -> (group head) 1 state", head=s.shape[0] // shared.shape[0])


def per_channel(values: Tensor) -> Tensor:
    """Returns values in fp32: `head` becomes `head 1`, and `head dim` keeps its shape."""
    return rearrange(values.float(), "head -> head 1") if values.dim() == 1 else values.float()
