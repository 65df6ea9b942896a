"""The gated delta rule step in plain torch: oracle of `memstate.kernels.gated_delta` and the path without Triton."""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from memstate.kernels.decode_checks import check_gated_delta
from memstate.kernels.reference.slots import row_marks, row_slots, row_tails
from memstate.kernels.reference.trees import lineage
from memstate.kernels.tables import Cursor, DeltaTail, Marks


@torch.no_grad()
def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, read: Tensor, write: Tensor,
    snapshot: Tensor, tokens: Tensor, scale: float | None = None, out: Tensor | None = None,
    marks: Marks | None = None, a_log: Tensor | None = None, dt_bias: Tensor | None = None, sigmoid: bool = False,
    normalize: bool = False, a: Tensor | None = None, b: Tensor | None = None, tail: DeltaTail | None = None,
    cursor: Cursor | None = None, parents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Advances the state of every row by its tokens, in order, and returns what the queries read from it.

    Per token: S <- exp(decay) S;  S <- S + k (x) beta (v - k^T S);  o = scale q^T S. This is the gated delta rule of
    Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, with S transposed to `key value`. With one decay per key channel,
    S <- Diag(exp(decay)) S, it is Kimi Delta Attention: Kimi Team 2025, arXiv:2510.26692.

    With `a` and `b`, and no beta, it is the generalized delta rule: S <- Diag(exp(decay)) S + b (x) a^T S + k (x) v.
    That is RWKV-7 (Peng et al. 2025, arXiv:2503.14456) with a = -kk and b = kk * alpha, of normalised kk and with a
    scale of 1; and Gated DeltaNet 2 with a = exp(decay) * erase * k, b = -k, and v times its write gate.

    decay, beta, q and k are what the recurrence takes, or what a model projects. With `a_log`, `sigmoid` and
    `normalize` the op computes the rest, as layers of the two papers do. flash-linear-attention calls the three
    `use_gate_in_kernel`, `use_beta_sigmoid_in_kernel` and `use_qk_l2norm_in_kernel`.

    Arithmetic is fp32. The state is rounded to its dtype once, when it is stored. With an fp32 state the bits do not
    depend on how a prompt is cut into chunks. They may depend on which of `key` and `value` is the fastest axis.

    q, k, v, decay and beta may be slices of wider tensors, such as one projection: what belongs to a token is
    contiguous, and tokens lie at equal distances. Where the elements of a token fill a multiple of 16 bytes, its first
    one lies on 16 bytes. Nothing is copied.

    Slot ids outside 1..slot-1 are null. A null read is zeros. A row with a null write changes nothing, and its output
    is zeros. The slots of one row may coincide. Across rows the slots stored are distinct, and none is another row's
    `read`.

    Args:
        q: `batch token key_head key`, normalised if the model does so, unless `normalize` is given. Head h uses key
            head h // (head / key_head).
        k: `batch token key_head key`, as `q`.
        v: `batch token head value`.
        decay: natural log of the gate, `batch token head`, or `batch token head key` for one per key channel. With
            `a_log`, what the model projects for it.
        beta: `batch token head`. With `sigmoid`, what the model projects for it. None beside `a` and `b`.
        state: one layer, `slot head key value`; fp32, bf16 or fp16; slots any stride apart. A slot is contiguous, or
            the transposed view of a contiguous `head value key`: `state.mT` of such a plane.
        read: slot of each row to read, int32 or int64 `batch`.
        write: slot of each row to store, int32 or int64 `batch`.
        snapshot: second slot of each row to store, int32 or int64 `batch`; null for none.
        tokens: real tokens of each row, up to `token`, int32 or int64 `batch`. The output of the other tokens is zeros.
            With 0 tokens the state is copied through.
        scale: factor of the output; key ** -0.5 unless given.
        out: where the output goes, `batch token head value`, contiguous; if `value` elements fill a multiple of 16
            bytes, from such a multiple on. Given, nothing is allocated.
        marks: states inside the step that are kept as well, or None. The state after `offset` tokens of row `entry`
            goes to `slot` in the same pass, for every mark. They ascend by entry, then by offset. Null slots, offsets
            beyond the row's tokens and rows with a null write keep nothing. The slots are distinct from each other and
            from all others of the step.
        a_log: `head`, contiguous. Given, the log decay is -exp(a_log) softplus(decay + dt_bias). softplus is the
            identity above 20.
        dt_bias: `head`, or `head key` if the decay is per key channel, contiguous; if `key` elements fill a multiple of
            16 bytes, from such a multiple on. Only beside `a_log`.
        sigmoid: whether the sigmoid of beta takes its place.
        normalize: whether q and k are divided by their lengths over keys: x / sqrt(sum(x ** 2) + 1e-6).
        a: what is read from the state before it decays, `batch token key_head key`. Beside `b`, without a gate inside.
        b: where the state gets what `a` has read, as `a`.
        tail: rings of tokens that are not in a row's state yet, because nobody knows whether they are real, or None.
            The op first adds the pending ones to the state, then runs the tokens of the step. Those that are not in the
            state that it stores go to the ring, in the memory of the row. A state of 16 bits is rounded after every
            token, as if each had been a step. Rows of the step have distinct memory, or none; rings have room for
            pending tokens and those of the step. Beside `cursor`. Beside `a` and `b` their rings take the place of
            beta's.
        cursor: columns of the step that say how far.
        parents: trees of drafts, or None. The node before each of the first tokens of the step, -1 for none, int32 or
            int64 `batch node`, contiguous; a token behind them follows the one before it. A node follows its parent
            instead, which has a lower number. Only rows without marks behind the first token, and whose tokens go to
            the tail, have other parents than those of a chain, `token - 1`. Beside `tail`.

    Returns:
        `out`. Changes: state; tail.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; slots share bytes; a tail without a cursor,
            or without a ring that the rule needs; `dt_bias` without `a_log`; `a` without `b`, or beside beta or a gate;
            2**31 tokens or more; or `out`, the state or the tail requires grad, or shares bytes with another tensor.

    Syncs: no (the reference: yes, it reads the slots).
    """
    check_gated_delta(
        q, k, v, decay, beta, state, read, write, snapshot, tokens, scale, out, marks, a_log, dt_bias, sigmoid,
        normalize, a, b, tail, cursor, parents,
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out = v.new_empty(v.shape) if out is None else out
    out.zero_()
    rows = row_slots(state, read, write, snapshot, tokens, v.shape[1])
    kept_at = row_marks(marks, state.shape[0] - 1)
    tails = row_tails(tail, cursor, len(v))
    for row, source, target, copy, count in rows:
        s = torch.zeros(state.shape[1:], dtype=torch.float32, device=state.device)
        if source:
            s.copy_(state[source])
        stored = [slot for slot in (target, copy) if slot]
        own = tails[row]
        for entry in range(own.pending + 1):
            if entry == own.store:
                state[stored] = s.to(state.dtype)
            if entry < own.pending:
                kept = own.at(entry)
                keys = normalized(kept.k.float()) if normalize else kept.k
                s = advance(s, keys, *kept[1:]).to(state.dtype).float()
        states = {-1: s}  # behind the pending tokens, and behind each token of the step
        for t in range(count):
            queries, keys = q[row, t].float(), k[row, t].float()
            if normalize:
                queries, keys = normalized(queries), normalized(keys)
            gate = (gated(decay[row, t], a_log, dt_bias) if a_log is not None else decay[row, t]).float().exp()
            rate = None if beta is None else beta[row, t].float().sigmoid() if sigmoid else beta[row, t].float()
            entering = DeltaTail(k[row, t], v[row, t], gate, rate, *(None if x is None else x[row, t] for x in (a, b)))
            own.keep(own.pending + t, entering)
            s = advance(states[lineage(parents, row, t)], keys, *entering[1:])
            out[row, t] = (_of_heads(queries, s) * s).sum(dim=1) * scale
            if tail is not None:
                s = s.to(state.dtype).float()
            states = {**states, t: s} if parents is not None else {t: s}
            state[kept_at.get((row, t + 1), [])] = s.to(state.dtype)
        if own.store > own.pending:
            state[stored] = s.to(state.dtype)
    return out


def gated(projected: Tensor, a_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """The log decay of one token, `head` or `head key`, of what the model projects."""
    step = projected.float() if dt_bias is None else projected.float() + dt_bias.float()
    rate = a_log.float().exp()
    return -(rate[:, None] if step.dim() == 2 else rate) * F.softplus(step)


def normalized(x: Tensor) -> Tensor:
    """Vectors `key_head key` of length 1; a shorter one than 1e-3 stays shorter."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def advance(
    s: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, a: Tensor | None, b: Tensor | None
) -> Tensor:
    """The state `head key value` of one row behind one more token, fp32; by the generalized delta rule without a beta.

    The gate is `head` or `head key`. One row at a time, and products summed over one axis: a matmul over the batch
    rounds differently with its size.
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
    """Vectors of key heads as `head key 1`, for each head of the state."""
    return repeat(x.float(), "key_head key -> (key_head group) key 1", group=s.shape[0] // x.shape[0])


def _decayed(s: Tensor, gate: Tensor) -> Tensor:
    return s * rearrange(gate, "head key -> head key 1" if gate.dim() == 2 else "head -> head 1 1")
