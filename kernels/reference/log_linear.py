"""The log-linear attention step in plain torch: oracle of `memstate.kernels.log_linear`, path without Triton."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor

from memstate.kernels.decode_checks import check_log_linear
from memstate.kernels.fenwick import CHUNK, INNER, levels_of, merge_of


@torch.no_grad()
def log_linear_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, level_scales: Tensor, levels: Tensor, level_decay: Tensor,
    chunk_k: Tensor, chunk_v: Tensor, chunk_decay: Tensor, rows: Tensor, lengths: Tensor, tokens: Tensor,
    table: Tensor, target: Tensor, scale: float = 1.0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Takes the tokens of every row into its open chunk, and returns what the queries read from chunk and levels.

    With D(s, t) the sum of decay behind token s up to token t: o_t = scale * sum over s <= t of
    level_scales[t, level(s, t)] exp(D(s, t)) (q_t k_s) v_s. This is log-linear attention: Guo et al. 2025,
    arXiv:2506.04761. The level of two tokens is the number of bits that it takes to write s ^ t. flash-linear-attention
    has it as `chunk_log_linear_attn`, with the same numbers of levels.

    A row of m whole chunks has a level j for each set bit j of m: the state of 2^j chunks, decayed to their end. A
    level slot holds one, and the sum of decay over it. A level ends where the next lower one begins, so these sums say
    how far each has decayed since, and no level is ever written again. Rows and snapshots share levels; a snapshot
    at the end of a chunk is the row of its slots, and copies nothing. `levels_of` and `merge_of` of
    `memstate.kernels.fenwick` say which levels a row has, and which merge.

    A step ends at the end of a chunk at the latest: tokens of a row beyond it are not real, and need another step. At
    the end of a chunk, the levels that merge and the chunk become one level in the slot `target`. Then the caller
    enters this slot in the row's table. A row with L levels holds 64 * 2^L tokens; its last chunk needs no target.
    Tokens that are rejected leave nothing: if the length does not grow, the next step writes over them.

    States of a prefill become levels too. Those of `chunk_log_linear_attn` are decayed to the end of the last whole
    chunk: each goes to a slot of its own, with 0 as its decay, and the inputs behind that chunk to the open chunk.

    As one plane, 24 layers of 64 heads of 128 x 64 with 12 levels in fp32, and inputs in bf16, are 589 MiB a slot. As
    levels, a token reads 48 MiB for each level of its row (five of them, 240 MiB, after 100 000 tokens) and up to 13
    MiB of its open chunk; it writes 0.2 MiB. The end of a chunk reads 48 MiB for each level that merges, one on
    average, and writes 48 MiB. A snapshot there takes no memory of its own until levels merge that it holds.

    Arithmetic is fp32. A level is rounded to its dtype when it is stored. Outputs and levels do not depend on how
    tokens are cut into steps, to the last bit. Slot and row ids outside of their planes are null: a null row changes
    nothing, and its output is zeros; a null level is zeros; a null target is not written.

    q, k, v, decay and level_scales may be slices of a wider projection, as with `gated_delta_step`. Slots and rows of
    planes lie any distance apart; if they are a multiple of 16 bytes wide, they begin at multiples of 16 bytes.

    Args:
        q: `batch token key_head key`, up to 64 tokens. Head h uses key head h // (head / key_head).
        k: `batch token key_head key`.
        v: `batch token head value`.
        decay: natural log of the gate, `batch token head`; -inf forgets all.
        level_scales: `batch token head 7+level`: for the token itself, for buckets of 1, 2, 4, .. 32 tokens inside the
            chunk, and for the levels.
        levels: one layer, `level_slot head key value`; fp32, bf16 or fp16.
        level_decay: sum of decay over each level, fp32 `level_slot head`.
        chunk_k: keys of the open chunk, `row 64 key_head key`, of the dtype of `k`.
        chunk_v: values of the open chunk, `row 64 head value`, of the dtype of `v`.
        chunk_decay: decay of each of its tokens, `row 64 head`, of the dtype of `decay`.
        rows: row of each entry, null for padding, int32 or int64 `batch`. Rows are distinct.
        lengths: tokens of each row before the step, int32 or int64 `batch`.
        tokens: real tokens of each row, int32 or int64 `batch`. The output of the other tokens is zeros.
        table: slot of each level of each row, int32 or int64 `batch level`. Those of levels that the length does not
            have are not read.
        target: level slot for the chunk that ends, int32 or int64 `batch`. It is distinct from all others of the step.
        scale: factor of the output.
        out: where the output goes, `batch token head value`, contiguous, on 16 bytes as the inputs are. Given, nothing
            is allocated.

    Returns:
        `out`. Changes: the open chunks, and the target slots of rows whose chunk ends.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; more than 64 tokens; or what is written
            requires grad, or shares bytes with another tensor.

    Syncs: no (the reference: yes, it reads the columns).
    """
    check_log_linear(
        q, k, v, decay, level_scales, levels, level_decay, chunk_k, chunk_v, chunk_decay, rows, lengths, tokens, table,
        target, scale, out,
    )  # fmt: skip
    out = v.new_empty(v.shape) if out is None else out
    out.zero_()
    group, last = v.shape[2] // k.shape[2], levels.shape[0] - 1
    columns = torch.stack([rows, lengths, tokens, target], dim=1).tolist()
    for i, ((row, length, count, into), slots) in enumerate(zip(columns, table.tolist(), strict=True)):
        start, stop = length % CHUNK, min(length % CHUNK + max(0, min(count, v.shape[1])), CHUNK)
        if not 0 < row < chunk_k.shape[0] or start == stop:
            continue
        for plane, new in ((chunk_k, k), (chunk_v, v), (chunk_decay, decay)):
            plane[row, start:stop] = new[i, : stop - start]
        for t in range(start, stop):
            query = repeat(q[i, t - start].float(), "key_head key -> (key_head group) key", group=group)
            scales = level_scales[i, t - start].float()
            keys, values, since, past = _chunk(chunk_k, chunk_v, chunk_decay, row, t + 1, group)
            inner = scales[:, [(s ^ t).bit_length() for s in range(t + 1)]] * since.exp()
            weight = inner * einsum(query, keys, "head key, token head key -> head token")
            held = [(level, slots[level]) for level in levels_of(length) if level < len(slots)]
            state, _ = _mixed(levels, level_decay, held, past, scales[:, INNER:])
            read = einsum(weight, values, "head token, token head value -> head value")
            out[i, t - start] = scale * (read + einsum(query, state, "head key, head key value -> head value"))
        if stop == CHUNK and 0 < into <= last:
            keys, values, since, past = _chunk(chunk_k, chunk_v, chunk_decay, row, CHUNK, group)
            merging = [(level, slots[level]) for level in merge_of(length - start + CHUNK)[0] if level < len(slots)]
            state, level_decay[into] = _mixed(levels, level_decay, merging, past)
            late = values * rearrange(since.exp(), "head token -> token head 1")
            levels[into] = state + einsum(keys, late, "token head key, token head value -> head key value")
    return out


def _chunk(
    chunk_k: Tensor, chunk_v: Tensor, chunk_decay: Tensor, row: int, count: int, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first tokens of an open chunk in fp32, a key for each head, and the decay behind each and since the start."""
    keys = repeat(chunk_k[row, :count].float(), "token key_head key -> token (key_head group) key", group=group)
    decay = rearrange(chunk_decay[row, :count].float(), "token head -> head token")
    since = F.pad(decay[:, 1:], (0, 1)).flip(1).cumsum(1).flip(1)
    return keys, chunk_v[row, :count].float(), since, decay.sum(1)


def _mixed(
    levels: Tensor, level_decay: Tensor, held: Iterable[tuple[int, int]], since: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of levels, each decayed since its end and scaled; and the decay since the oldest of them began."""
    found = torch.zeros(levels.shape[1:], dtype=torch.float32, device=levels.device)
    for level, slot in held:
        if 0 < slot < levels.shape[0]:
            weight = since.exp() if scales is None else since.exp() * scales[:, level]
            found = found + levels[slot].float() * rearrange(weight, "head -> head 1 1")
            since = since + level_decay[slot]
    return found, since
