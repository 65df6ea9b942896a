"""An op refuses to write to a tensor of autograd, and reads one as any other."""

from typing import Any

import pytest
import torch

from memstate.kernels.dispatch import Backend

pytestmark = pytest.mark.sample(interpreter=1)
WRITTEN = ("state", "out", "window")


def arguments(device: torch.device) -> dict[str, Any]:
    def ids(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device)

    return {
        "x": floats(2, 1, 4), "weight": floats(4, 4), "bias": floats(4), "state": floats(3, 3, 4), "read": ids(1, 2),
        "write": ids(1, 2), "snapshot": ids(0, 0), "tokens": ids(1, 1), "out": floats(2, 1, 4),
        "window": floats(2, 4, 4),
    }  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_an_op_writes_must_not_require_grad(name: str, backend: Backend) -> None:
    given = arguments(backend.device)
    given[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: requires grad.*\.detach\(\)"):
        backend.conv_step(**given)


def test_what_an_op_reads_may_require_grad(backend: Backend) -> None:
    given = arguments(backend.device)
    for name in ("x", "weight", "bias"):
        given[name].requires_grad_()
    assert not backend.conv_step(**given).requires_grad


def test_a_gather_does_not_write_to_a_tensor_that_requires_grad(backend: Backend) -> None:
    plane = torch.ones(1, 3, 4, device=backend.device)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=backend.device)
    batch = torch.ones(1, 2, 4, device=backend.device, requires_grad=True)
    with pytest.raises(ValueError, match=r"^out: requires grad"):
        backend.gather_slots(plane, slots, batch)
    backend.scatter_slots(plane, slots, batch)
    with pytest.raises(ValueError, match=r"^plane: requires grad"):
        backend.scatter_slots(plane.requires_grad_(), slots, batch)
