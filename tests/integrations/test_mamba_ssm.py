"""mamba_ssm's update of one token as the forward. Its Triton kernel needs no CUDA build."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.peers import (
    DIM,
    EVERY,
    HEADS,
    MAMBA,
    RESUMED,
    STATE,
    Inputs,
    Loop,
    distance,
    inner_module,
    mamba_arguments,
    normal,
    on_cpu,
    slots,
)  # fmt: skip
from tests.support.recurrences import float64, selective_bound


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    found = inner_module("mamba_ssm.ops.triton.selective_state_update")
    on_cpu(monkeypatch)
    return found.selective_state_update


def test_memstate_and_mamba_agree(backend: Backend, generator: torch.Generator, update: Callable[..., Tensor]) -> None:
    """Both are within the bound of the exact recurrence, so within twice the bound of each other."""
    device, at, requests = backend.device, [3, 1], [MAMBA.draw(generator, 1) for _ in range(2)]
    x = {name: torch.cat([one[name] for one in requests]).to(device) for name in requests[0]}
    weights = {name: tensor.to(device) for name, tensor in MAMBA.weights(generator).items()}
    states = normal(generator, 4, *MAMBA.shape).to(device)
    old, updated, vector = float64(states[at]), states.clone(), slots(device, *at)
    theirs = update(updated, **mamba_arguments(weights, x), dt_softplus=True, state_batch_indices=vector.long())
    vectors = {"read": vector, "write": vector, "snapshot": 0 * vector, "tokens": 0 * vector + 1}
    ours = backend.selective_step(**x, **weights, **vectors, state=states, softplus=True)
    given, (a, d, bias) = {n: float64(t) for n, t in x.items()}, (float64(weights[n]) for n in ("a", "d", "dt_bias"))
    for i, h in np.ndindex(2, HEADS):
        dt, rate = np.repeat(given["dt"][i, :, h, None], DIM, 1), np.full((DIM, STATE), a[h])
        out, after = selective_bound(
            given["x"][i, :, h], dt, np.full(DIM, bias[h]), rate, given["b"][i, :, 0], given["c"][i, :, 0],
            np.full(DIM, d[h]), None, old[i, h], softplus=True,
        )  # fmt: skip
        assert (distance(ours[i, 0, h], theirs[i, h]) <= 2 * out[0].error).all()
        assert (distance(states[at[i], h], updated[at[i], h]) <= 2 * after[1].error).all()


@pytest.mark.parametrize("tracking", [ms.Redirect(EVERY), ms.PingPong(EVERY)], ids=["redirect", "ping-pong"])
def test_selective_state_update(
    backend: Backend, generator: torch.Generator, update: Callable[..., Tensor], tracking: ms.Tracking
) -> None:
    """It updates one slot a row: memstate copies what snapshots need, before and after."""

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        at = step.write.long()  # it multiplies them by a stride as they are
        return update(plane, **mamba_arguments(weights, x), dt_softplus=True, state_batch_indices=at)

    loop = Loop(backend, generator, MAMBA, forward, tracking, in_place=True, pad=-1).run()
    assert loop.copied > RESUMED
    assert not loop.null_written
