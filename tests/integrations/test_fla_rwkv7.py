"""Compares memstate's RWKV-7 kernel with flash-linear-attention's torch recurrence, from the same states."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from memstate.kernels.dispatch import Backend
from tests.support.peers import module, normal
from tests.support.recurrences import float64, low_rank_bound

HEADS, SIZE = 2, 16  # with 16 keys the scale is 1/4, a power of two


@pytest.mark.filterwarnings("ignore:Triton is not supported")  # fla warns without a GPU
def test_memstate_and_fla_agree(backend: Backend, generator: torch.Generator) -> None:
    """fla and memstate may each differ from the exact recurrence by the bound, so from each other by twice
    the bound.
    """
    device, read, write, shape = backend.device, [1, 0, 3], [2, 4, 3], (3, 3, HEADS, SIZE)
    r, k, v, learn = (normal(generator, *shape).to(device) for _ in range(4))
    direction = normalize(normal(generator, *shape), dim=-1).to(device)
    decay, a, b = -0.6 * normal(generator, *shape).sigmoid().to(device), -direction, direction * learn.sigmoid()
    states = normal(generator, 5, HEADS, SIZE, SIZE).to(device)
    old = states[read].contiguous()
    old[1] = 0  # slot 0 reads as zeros
    recurrence = module("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    outputs, final = recurrence(*(x.transpose(1, 2) for x in (r, k, v, a, b, decay)), initial_state=old)
    vectors = torch.tensor([read, write, [0] * 3, [3] * 3], dtype=torch.int32, device=device)
    ours = backend.gated_delta_step(r, k, v, decay, None, states, *vectors, a=a, b=b)
    for i in range(3):
        for h in range(HEADS):
            given = [float64(x[i, :, h]) for x in (r, k, v, decay, a, b)]
            bounds = low_rank_bound(*given, float64(old[i, h]), SIZE**-0.5)
            pairs = (ours[i, :, h], outputs[i, h]), (states[write[i], h], final[i, h])
            for (mine, other), bound in zip(pairs, bounds, strict=True):
                assert (np.abs(float64(mine) - float64(other)) <= 2 * bound.error).all()
