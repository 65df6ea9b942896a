"""Makes steps that verify drafts, as chains and as trees, for the workloads of decode kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import Cursor
from memstate_tools.maker import Maker

DRAFTS, PENDING = 4, 2  # tokens of a row in such a step; tokens in its tail that the step folds into the state
BRANCHES = (-1, 0, 0, 1)  # parent of each token: two branches


class Drafted(NamedTuple):
    """A step of `DRAFTS` tokens per row.

    Attributes:
        acts: Operation -> the call. There are two: the drafts are a chain, or a tree.
        nbytes: Bytes that a call reads and writes, without the states.
        written: Name -> tensor that the calls write, without the states.
    """

    acts: dict[str, Callable[[], object]]
    nbytes: int
    written: dict[str, Tensor]


def drafted(
    name: str, step: Callable[..., object], batch: int, out: Tensor, tail: Any, inputs: tuple[Tensor, ...]
) -> Drafted:
    """Returns the step with drafts. Its tails hold random tokens.

    Args:
        name: Name of the operation.
        step: The call without `tokens`, `out`, `tail`, `cursor` and `parents`, which are added here.
        batch: Number of rows. Row r has the memory r + 1.
        out: Output, `batch token ..`.
        tail: Rings of the tail, `batch+1 ring ..`.
        inputs: Inputs of the call, for each token.
    """

    def column(value: int) -> Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=out.device)

    rows = torch.arange(1, batch + 1, dtype=torch.int32, device=out.device)
    tree = torch.tensor([BRANCHES] * batch, dtype=torch.int32, device=out.device)
    cursor = Cursor(rows, column(0), column(PENDING), column(PENDING))
    chain = partial(step, tokens=column(DRAFTS), out=out, tail=tail, cursor=cursor)
    rings = {f"{name} tail {field}": ring for field, ring in tail._asdict().items() if ring is not None}
    places = batch * (DRAFTS + PENDING)
    nbytes = out.nbytes + sum(x.nbytes for x in inputs) + sum(places * ring[0, 0].nbytes for ring in rings.values())
    acts: dict[str, Callable[[], object]] = {f"{name}, drafts": chain, f"{name}, trees": partial(chain, parents=tree)}
    return Drafted(acts, nbytes, {f"{name} drafts out": out, **rings})


def ring(make: Maker, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a ring `batch+1 ring ..` of random numbers, for tokens of an input `batch token ..`.

    The numbers are between 0 and 1 and shrink with the last axis, so that states stay bounded for every input.
    """
    shape = like.shape[0] + 1, DRAFTS + PENDING, *like.shape[2:]
    random = torch.rand(shape, generator=make.generator, dtype=torch.float32, device=like.device)
    return make.empty(*shape, dtype=dtype or like.dtype).copy_(random.div_(like.shape[-1] ** 0.5))
