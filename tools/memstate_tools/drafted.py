"""Steps that verify drafts, of chains and of trees, for the workloads of decode kernels: their tails and columns."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.kernels.tables import Cursor

DRAFTS, PENDING = 4, 2  # tokens of a row in such a step, and tokens of its tail, which the step folds into the state
BRANCHES = (-1, 0, 0, 1)  # of each token the one before it: two ways to go on


class Drafted(NamedTuple):
    """A step of `DRAFTS` tokens a row.

    Attributes:
        acts: Operation -> the call, with drafts that are a chain, and a tree.
        nbytes: Bytes that a call reads and writes beside the states.
        written: Name -> what the calls write beside the states.
    """

    acts: dict[str, Callable[[], object]]
    nbytes: int
    written: dict[str, Tensor]


def drafted(
    name: str, step: Callable[..., object], batch: int, out: Tensor, tail: Any, inputs: tuple[Tensor, ...]
) -> Drafted:
    """Returns the step with tails that have random tokens.

    Args:
        name: Of the operation.
        step: The call without what is added here: `tokens`, `out`, `tail`, `cursor`, `parents`.
        batch: Rows. Row r has the memory r + 1.
        out: `batch token ..`.
        tail: Its rings, `batch+1 ring ..`.
        inputs: What the call reads of each token.
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


def ring(generator: torch.Generator, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns rings `batch+1 ring ..` of random numbers for tokens as an input `batch token ..` has them.

    They are below 1 and short, so that states stay bounded whatever a ring is of.
    """
    shape = like.shape[0] + 1, DRAFTS + PENDING, *like.shape[2:]
    random = torch.rand(shape, generator=generator, dtype=torch.float32, device=like.device).div_(like.shape[-1] ** 0.5)
    return random.to(dtype or like.dtype)
