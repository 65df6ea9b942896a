"""Forwards that go through packed rows in pieces, and the states before each piece, in the layouts of engines' kernels.

Within a piece all tokens are computed at once, as chunked kernels do: with the log of the gate added up to G,

    gated delta   S_t = exp(G_t) S + sum_{i <= t} exp(G_t - G_i) k_i u_i^T
                  (1 + A) u = beta (v - exp(G) k^T S),   A_ti = beta_t exp(G_t - G_i) k_t . k_i   for i < t
    Mamba-2       S_t = exp(G_t) S + sum_{i <= t} exp(G_t - G_i) dt_i x_i b_i^T
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Advance = Callable[[Tensor, int, int], Tensor]  # state before, first token, end -> state after


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The first packed token of each row, and the number of tokens."""
    return [0, *accumulate(lengths)]


def first_of(lengths: Sequence[int], chunk: int) -> list[int]:
    """The first piece of each row, and the number of pieces, where pieces begin with their row."""
    return [0, *accumulate(-(-length // chunk) for length in lengths)]


def cuts(lengths: Sequence[int], chunk: int, flat: bool) -> Iterator[list[int]]:
    """Where the pieces of each row begin, packed, and its end; `flat` on multiples of `chunk` of the packed batch."""
    for start, end in pairwise(starts_of(lengths)):
        grid = range(-(-(start + 1) // chunk) * chunk, end, chunk) if flat else range(start + chunk, end, chunk)
        yield [start, *grid, end]


def before_pieces(
    advance: Advance, initial: Tensor, lengths: Sequence[int], chunk: int, flat: bool
) -> tuple[Tensor, Tensor]:
    """The state before each piece, `piece ...`, and each row's last state, `row ...`.

    On the grid of the packed batch a piece that several rows share has the state of the row that owns the token before
    it, as a chunk scan has; NaN stands where there is none.

    Args:
        advance: takes a state through tokens of one piece.
        initial: state of each row, `row ...`.
        lengths: tokens of each row.
        chunk: tokens of a piece.
        flat: whether pieces lie on the grid of the packed batch.
    """
    pieces = -(-sum(lengths) // chunk) if flat else first_of(lengths, chunk)[-1]
    h = torch.full((pieces, *initial.shape[1:]), torch.nan, dtype=initial.dtype)
    last, piece = initial.clone(), 0
    for row, places in enumerate(cuts(lengths, chunk, flat)):
        state = initial[row]
        for start, end in pairwise(places):
            if start == end:
                continue
            if not flat:
                h[piece] = state
                piece += 1
            elif start % chunk == 0:
                h[start // chunk] = state
            state = advance(state, start, end)
        last[row] = state
    return h, last


def gated_delta_piece(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Advance:
    """The gated delta rule over pieces; k `token head key`, v `token head value`, decay (log) and beta `token head`."""

    def advance(state: Tensor, start: int, end: int) -> Tensor:
        keys, values, rate = (tensor[start:end].transpose(0, 1) for tensor in (k, v, beta))
        total = decay[start:end].transpose(0, 1).cumsum(1)  # head token
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril(-1)
        mixed = rate[:, :, None] * between * (keys @ keys.transpose(1, 2))
        wanted = rate[:, :, None] * (values - total.exp()[:, :, None] * (keys @ state))
        change = torch.linalg.solve_triangular(mixed, wanted, upper=False, unitriangular=True)
        weight = (total[:, -1:] - total).exp()[:, :, None]
        return total[:, -1].exp()[:, None, None] * state + (weight * keys).transpose(1, 2) @ change

    return advance


def selective_piece(x: Tensor, dt: Tensor, a: Tensor, b: Tensor) -> Advance:
    """Mamba-2 over pieces; x `token head dim`, dt `token head`, a `head`, b `token head state`."""

    def advance(state: Tensor, start: int, end: int) -> Tensor:
        inner, outer, step = (tensor[start:end].transpose(0, 1) for tensor in (x, b, dt))
        total = (step * a[:, None]).cumsum(1)
        weight = ((total[:, -1:] - total).exp() * step)[:, :, None]
        return total[:, -1].exp()[:, None, None] * state + (weight * inner).transpose(1, 2) @ outer

    return advance
