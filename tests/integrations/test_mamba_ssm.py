"""mamba_ssm's update of one token as the forward. Its Triton kernel needs no CUDA build."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.peers import (
    EVERY,
    MAMBA,
    RESUMED,
    Inputs,
    Loop,
    inner_module,
    mamba_arguments,
    on_cpu,
)  # fmt: skip


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    found = inner_module("mamba_ssm.ops.triton.selective_state_update")
    on_cpu(monkeypatch)
    return found.selective_state_update


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
