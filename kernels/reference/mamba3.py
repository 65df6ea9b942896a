"""Computes the state update of Mamba-3 in plain torch.

Tests compare `memstate.kernels.mamba3` with this reference, which replaces the kernels where Triton is missing.
"""

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from memstate.kernels.decode_checks import check_mamba3
from memstate.kernels.reference.slots import row_marks, row_slots
from memstate.kernels.tables import Mamba3State, StepMarks


@torch.no_grad()
def mamba3_step(
    x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor, trap: Tensor, rotation: Tensor, b_bias: Tensor,
    c_bias: Tensor, d: Tensor, state: Mamba3State, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor,
    z: Tensor | None = None, out: Tensor | None = None, marks: StepMarks | None = None,
) -> Tensor:  # fmt: skip
    """Advances the Mamba-3 state of every row by its tokens, in order, and returns what `c` reads from it.

    Per token, with n = sigmoid(trap):  angle <- angle + pi tanh(rotation) dt;  k' = turn(b + b_bias, angle);
    S <- e^decay S + e^decay dt (1 - n) v (x) k + dt n x (x) k';  y = S turn(c + c_bias, angle) + d x;  y silu(z);
    k, v <- k', x. turn() rotates elements 2i and 2i + 1, as a point of a plane, by angle i. This is Mamba-3 with
    one input and one output, as `mamba_ssm` 2.3.2 has it (`mamba3_siso_step`).

    Arithmetic is fp32. Planes are rounded to their dtypes once, when they are stored. Whole turns are subtracted
    from an angle at every token. With planes of fp32 the bits do not depend on how a prompt is cut into chunks.

    Null slots, padding, slots that coincide, and slices of a wider projection are as in `selective_step`.

    Args:
        x: `batch token head dim`; dim and state are powers of two.
        b: `batch token group state`, after its norm; head h uses group h // (head / group).
        c: `batch token group state`, as `b`.
        dt: steps, positive, `batch token head`.
        decay: log of the decay, A dt, `batch token head`.
        trap: input of the sigmoid, `batch token head`.
        rotation: input of the tanh, the same for all heads, `batch token angle`; angle <= state / 2.
        b_bias: `head state`, contiguous.
        c_bias: `head state`, contiguous.
        d: `head`, contiguous.
        state: the four planes of one layer. The stride between slots is any multiple of 16 bytes. A slot is contiguous,
            and the part of a head in it is a multiple of 16 bytes.
        read: slot of each row to read, int32 or int64 `batch`.
        write: slot of each row to store, int32 or int64 `batch`.
        snapshot: second slot of each row to store, int32 or int64 `batch`; null for none.
        tokens: real tokens of each row, up to `token`, int32 or int64 `batch`. The output of the other tokens is zeros.
            With 0 tokens the state is copied through.
        z: `batch token head dim`, or None.
        out: tensor for the output, `batch token head dim`, contiguous. With it the op allocates nothing.
        marks: marks of the step, or None; see `selective_step`.

    Returns:
        `out`. Changes: state.

    Raises:
        ValueError: a shape, dtype, device, stride or address does not fit; dim or state is no power of two, or S has
            more than 8192 elements; planes share bytes; or a written tensor requires grad, or shares bytes with another
            tensor.

    Syncs: no (the reference: yes, it reads the slots).
    """
    check_mamba3(*locals().values())  # all arguments, in order
    out = x.new_empty(x.shape) if out is None else out
    out.zero_()
    ratio, kept = x.shape[2] // b.shape[2], row_marks(marks, len(state.ssm) - 1)
    rows = row_slots(state.ssm, read, write, snapshot, tokens, x.shape[1])
    for row, source, target, copy, count in rows:
        angle, s, k, v = (plane[source].float() if source else torch.zeros_like(plane[0]).float() for plane in state)
        for t in range(count):
            value, step, now = x[row, t].float(), dt[row, t].float(), trap[row, t].float().sigmoid()
            forget = decay[row, t].float().exp()
            angle = angle + torch.outer(math.pi * step, rotation[row, t].float().tanh())
            angle = angle - 2 * math.pi * (angle / (2 * math.pi)).round()
            key, query = (
                _turned(vectors[row, t].float().repeat_interleave(ratio, 0) + bias, angle)
                for vectors, bias in ((b, b_bias), (c, c_bias))
            )
            s = s * _of_head(forget, 3) + _outer(_of_head(forget * step * (1 - now), 2) * v, k)
            s = s + _outer(_of_head(step * now, 2) * value, key)
            k, v = key, value
            y = (s * rearrange(query, "head state -> head 1 state")).sum(2) + _of_head(d.float(), 2) * value
            out[row, t] = y if z is None else y * F.silu(z[row, t].float())
            _store(state, kept.get((row, t + 1), []), (angle, s, k, v))
        for slot in (target, copy):
            _store(state, slot or [], (angle, s, k, v))
    return out


def _store(planes: Mamba3State, at: Any, kept: tuple[Tensor, ...]) -> None:
    """Stores the state of a row to one or several slots."""
    for plane, part in zip(planes, kept, strict=True):
        plane[at] = part.to(plane.dtype)


def _of_head(numbers: Tensor, axes: int) -> Tensor:
    """Returns one number of each head, shaped to broadcast with tensors of `axes` axes."""
    return numbers.view(-1, *[1] * (axes - 1))


def _outer(values: Tensor, keys: Tensor) -> Tensor:
    """Returns the outer products `head dim state` of `head dim` and `head state`."""
    return rearrange(values, "head dim -> head dim 1") * rearrange(keys, "head state -> head 1 state")


def _turned(vectors: Tensor, angle: Tensor) -> Tensor:
    """Returns `head state` with pairs of neighbours turned by `head angle`; pairs without an angle stay."""
    points = torch.view_as_complex(rearrange(vectors, "head (pair two) -> head pair two", two=2).contiguous())
    points[:, : angle.shape[1]] *= torch.polar(torch.ones_like(angle), angle)
    return rearrange(torch.view_as_real(points), "head pair two -> head (pair two)")
