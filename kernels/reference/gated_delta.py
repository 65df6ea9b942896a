"""Computes the gated delta rule step in plain torch.

Tests compare `memstate.kernels.gated_delta` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from memstate.kernels.decode_checks import check_gated_delta
from memstate.kernels.reference.scaled import States
from memstate.kernels.reference.slots import row_marks, row_slots, row_tails
from memstate.kernels.reference.trees import lineage
from memstate.kernels.tables import Cursor, DeltaTail, StepMarks


@torch.no_grad()
def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, scale: float | None = None, out: Tensor | None = None,
    marks: StepMarks | None = None, a_log: Tensor | None = None, dt_bias: Tensor | None = None, sigmoid: bool = False,
    normalize: bool = False, a: Tensor | None = None, b: Tensor | None = None, tail: DeltaTail | None = None,
    cursor: Cursor | None = None, parents: Tensor | None = None, scales: Tensor | None = None,
    lengths: Tensor | None = None, seed: int | None = None, layer: int = 0, first_head: int = 0,
) -> Tensor:  # fmt: skip
    """Advances the state of every row by its tokens, in order, and returns what the queries read from it.

    Per token: S <- exp(decay) S;  S <- S + k (x) beta (v - k^T S);  o = scale q^T S. This is the gated delta rule of
    Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, with S transposed to `key value`. With one decay per key channel,
    S <- Diag(exp(decay)) S, it is Kimi Delta Attention: Kimi Team 2025, arXiv:2510.26692.

    With `a` and `b`, and no beta, it is the generalized delta rule: S <- Diag(exp(decay)) S + b (x) a^T S + k (x) v.
    That is RWKV-7 (Peng et al. 2025, arXiv:2503.14456) with a = -kk and b = kk * alpha, of normalised kk and with a
    scale of 1; and Gated DeltaNet 2 with a = exp(decay) * erase * k, b = -k, and v times its write gate.

    decay, beta, q and k are inputs of the recurrence, or projections of the model. From projections, the op computes
    these inputs with `a_log`, `sigmoid` and `normalize`, as layers of the two papers do. flash-linear-attention calls
    the three `use_gate_in_kernel`, `use_beta_sigmoid_in_kernel` and `use_qk_l2norm_in_kernel`.

    Arithmetic is fp32. The state is rounded to its dtype once, when it is stored; whole numbers after each token, as
    `memstate.kernels.reference.scaled` defines. With an fp32 state and with whole numbers, the bits do not depend on
    how a prompt is cut into chunks. They may depend on which of `key` and `value` is the fastest axis.

    q, k, v, decay and beta may be slices of wider tensors, such as one projection: the elements of a token are
    contiguous, and tokens lie at equal distances. If a token is a multiple of 16 bytes wide, tokens begin at multiples
    of 16 bytes. The op copies no input.

    Slot ids outside 1..slot-1 are null. A null read is zeros. A row with a null write changes nothing, and its output
    is zeros. The slots of one row may coincide. No two rows store the same slot, and no row stores a slot that another
    row reads.

    Args:
        q: `batch token key_head key`. If the model normalises q, pass it normalised, or set `normalize`. Head h uses
            key head h // (head / key_head).
        k: `batch token key_head key`, as `q`.
        v: `batch token head value`.
        decay: natural log of the gate, `batch token head`, or `batch token head key` for one gate per key channel. With
            `a_log`, the projection of the model from which the op computes the decay.
        beta: `batch token head`. With `sigmoid`, the projection of the model. None if `a` and `b` are given.
        state: one layer, `slot head key value`; fp32, bf16 or fp16, or int16 or int8 with `scales`; any stride between
            slots. A slot is contiguous, or the transposed view of a contiguous `head value key`: `state.mT` of such a
            plane.
        read: slot of each row to read, int32 or int64 `batch`.
        write: slot of each row to store, int32 or int64 `batch`.
        snapshot: second slot of each row to store, int32 or int64 `batch`; null for none.
        tokens: real tokens of each row, up to `token`, int32 or int64 `batch`. The output of the other tokens is zeros.
            With 0 tokens the state is copied through.
        scale: factor of the output; key ** -0.5 unless given.
        out: tensor for the output, `batch token head value`, contiguous. If `value` elements are a multiple of 16
            bytes, it begins at a multiple of 16 bytes. With it the op allocates nothing.
        marks: marks of the step, or None. For each mark, the op also stores the state after `offset` tokens of row
            `entry` to `slot`. Marks ascend by entry, then by offset. Null slots, offsets beyond the row's tokens and
            rows with a null write store nothing. The slots are distinct from each other and from all other slots of the
            step.
        a_log: `head`, contiguous. With it the log decay is -exp(a_log) softplus(decay + dt_bias). softplus is the
            identity above 20.
        dt_bias: `head`, or `head key` if the decay is per key channel, contiguous. If `key` elements are a multiple of
            16 bytes, it begins at a multiple of 16 bytes. Only together with `a_log`.
        sigmoid: whether the op takes the sigmoid of beta.
        normalize: whether q and k are divided by their lengths over keys: x / sqrt(sum(x ** 2) + 1e-6).
        a: vector that reads the state before it decays, `batch token key_head key`. Only together with `b`, and only
            without `a_log`, `sigmoid` and `normalize`.
        b: vector along which the value that `a` has read is written to the state, `batch token key_head key`.
        tail: None, or rings of tokens that are not in a row's state yet, because nobody knows whether they are real.
            The op first adds the pending tokens to the state, then runs the tokens of the step. Tokens that are not in
            the stored state go to the ring, in the memory of the row. A state of 16 bits or less is rounded after every
            token, as if each token had been a step. Rows of the step have distinct memory, or none. Rings have room for
            pending tokens and those of the step. The rings of `a` and `b` replace that of beta.
        cursor: says which tokens of a row are in the state already, and which are in the tail, see `Cursor`. Given if
            and only if `tail` is.
        parents: trees of drafts, or None: the parent of each node, -1 for none, int32 or int64 `batch node`,
            contiguous. Nodes are the first tokens of the step; each later token follows the token before it. A parent
            has a lower number than its node. Rows with marks behind the first token, and rows whose tokens do not go to
            the tail, must have the parents of a chain, `token - 1`. Only together with `tail`.
        scales: scales of a state of whole numbers, one for each value over its keys, fp32 `slot head value`, contiguous
            in each slot, any stride between slots. Keys are a multiple of 16. Not together with `a` and `b`.
        lengths: tokens of the state that each row reads, int32 or int64 `batch`. Only together with `seed`.
        seed: seed to round whole numbers by chance, 0 to 2**31 - 1, always the same for a request; None rounds to the
            nearest number.
        layer: number of the layer in the model, for the draws of `seed`.
        first_head: number of the first head in the model, for the draws of `seed`, so that ranks draw alike.

    Returns:
        `out`. Changes: state; scales; tail.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; slots share bytes; a tail without a cursor,
            or without a ring that the rule needs; `dt_bias` without `a_log`; `a` without `b`, or beside beta or a gate;
            2**31 tokens or more; or `out`, the state, the scales or the tail requires grad, or shares bytes with
            another tensor.

    Syncs: no (the reference: yes, it reads the slots).
    """
    check_gated_delta(*locals().values())  # all arguments, in order
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out = v.new_empty(v.shape) if out is None else out
    out.zero_()
    rows = row_slots(state, read, write, snapshot, tokens, v.shape[1])
    kept_at = row_marks(marks, state.shape[0] - 1)
    tails = row_tails(tail, cursor, len(v))
    memory = States(state, scales, 1, seed, layer, first_head)
    for row, source, target, copy, count in rows:
        s, length = memory.load(source), 0 if lengths is None else int(lengths[row])
        stored = [slot for slot in (target, copy) if slot]
        own = tails[row]
        for entry in range(own.pending + 1):
            if entry == own.store:
                memory.store(stored, s)
            if entry < own.pending:
                kept, length = own.at(entry), length + 1
                keys = normalized(kept.k.float()) if normalize else kept.k
                s = memory.rounded(advance(s, keys, *kept[1:]), length)
        states = {-1: (s, length)}  # token of the step -> (state behind it, its length); -1: behind the pending tokens
        for t in range(count):
            queries, keys = q[row, t].float(), k[row, t].float()
            if normalize:
                queries, keys = normalized(queries), normalized(keys)
            gate = (gated(decay[row, t], a_log, dt_bias) if a_log is not None else decay[row, t]).float().exp()
            rate = None if beta is None else beta[row, t].float().sigmoid() if sigmoid else beta[row, t].float()
            entering = DeltaTail(k[row, t], v[row, t], gate, rate, *(None if x is None else x[row, t] for x in (a, b)))
            own.keep(own.pending + t, entering)
            s, length = states[lineage(parents, row, t)]
            s, length = advance(s, keys, *entering[1:]), length + 1
            out[row, t] = (_of_heads(queries, s) * s).sum(dim=1) * scale
            if tail is not None or scales is not None:
                s = memory.rounded(s, length)
            states = {**states, t: (s, length)} if parents is not None else {t: (s, length)}
            memory.store(kept_at.get((row, t + 1), []), s)
        if own.store > own.pending:
            memory.store(stored, s)
    return out


def gated(projected: Tensor, a_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """Returns the log decay of one token, `head` or `head key`, from the projection of the model."""
    step = projected.float() if dt_bias is None else projected.float() + dt_bias.float()
    rate = a_log.float().exp()
    return -(rate[:, None] if step.dim() == 2 else rate) * F.softplus(step)


def normalized(x: Tensor) -> Tensor:
    """Returns vectors `key_head key` divided by their lengths. Vectors with a length below 1e-3 stay shorter than 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def advance(
    s: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """Returns the state `head key value` of one row after one more token, in fp32.

    If beta is None, this is the generalized rule.

    The gate is `head` or `head key`. The function takes one row at a time, and multiplies and sums elements, because a
    matmul over the batch would round differently for each size of the batch.
    """
    key, delta = _of_heads(k, s), v.float()
    if beta is not None:
        s = _decayed(s, gate)
        delta = rearrange(beta, "head -> head 1") * (delta - (key * s).sum(dim=1))
    elif a is not None and b is not None:
        seen = (_of_heads(a, s) * s).sum(dim=1, keepdim=True)
        s = _decayed(s, gate) + _of_heads(b, s) * seen
    return s + key * rearrange(delta, "head value -> head 1 value")


def _of_heads(x: Tensor, s: Tensor) -> Tensor:
    """Returns vectors of key heads as `head key 1`, for each head of the state."""
    return repeat(x.float(), "key_head key -> (key_head group) key 1", group=s.shape[0] // x.shape[0])


def _decayed(s: Tensor, gate: Tensor) -> Tensor:
    return s * rearrange(gate, "head key -> head key 1" if gate.dim() == 2 else "head -> head 1 1")
