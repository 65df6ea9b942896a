"""An operation of one's own: running means of the tokens of each row, kept in slots.

No list of operations names it. Registered, or named by an entry point, it is in all of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.own import Kernel

RATE = tl.constexpr(0.25)
SIZE, TOKENS = 208, 2  # more than one block, and no multiple of a block


@triton.jit
def _running_mean(
    x_ptr, state_ptr, read_ptr, write_ptr, snapshot_ptr, tokens_ptr, out_ptr, most, size, BLOCK: tl.constexpr
):
    row, lane = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read, write, snapshot = tl.load(read_ptr + row), tl.load(write_ptr + row), tl.load(snapshot_ptr + row)
    inside = lane < size
    mean = tl.load(state_ptr + read.to(tl.int64) * size + lane, mask=inside & (read > 0), other=0.0)
    for token in range(tl.load(tokens_ptr + row)):
        at = (row * most + token).to(tl.int64) * size + lane
        mean += (tl.load(x_ptr + at, mask=inside, other=0.0) - mean) * RATE
        tl.store(out_ptr + at, tl.where(write > 0, mean, 0.0), mask=inside)
    tl.store(state_ptr + write.to(tl.int64) * size + lane, mean, mask=inside & (write > 0))
    tl.store(state_ptr + snapshot.to(tl.int64) * size + lane, mean, mask=inside & (snapshot > 0))


def launch(
    x: Tensor, state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor, out: Tensor,
    BLOCK: int, warps: int,
) -> None:  # fmt: skip
    batch, most, size = x.shape
    grid = batch, triton.cdiv(size, BLOCK)
    _running_mean[grid](x, state, read, write, snapshot, tokens, out, most, size, BLOCK=BLOCK, num_warps=warps)


def reference(
    x: Tensor, state: Tensor, read: Tensor, write: Tensor, snapshot: Tensor, tokens: Tensor, out: Tensor
) -> None:
    """Moves the state of each row a quarter of the way to each of its tokens. Padding gives zeros."""
    for row in range(len(x)):
        of, *kept = (int(column[row]) for column in (read, write, snapshot))
        mean = state[of] if of > 0 else torch.zeros_like(state[0])
        for token in range(int(tokens[row])):
            mean = mean + (x[row, token] - mean) * RATE.value
            out[row, token] = mean if kept[0] > 0 else 0
        for slot in kept:
            if slot > 0:
                state[slot] = mean


def case(batch: int, make: Any) -> dict[str, Any]:
    x = make.normal(batch, TOKENS, SIZE)
    return {"x": x, "state": make.normal(2 * batch + 1, SIZE), "out": make.like(x), **make.rows(batch, TOKENS)}


running_mean = Kernel(
    launch, reference, case, {"BLOCK": (128, 256), "warps": (1, 2)}, state=["state"],
    key=lambda given: {"size": given["state"].shape[1]}, name="running_mean",
)  # fmt: skip
