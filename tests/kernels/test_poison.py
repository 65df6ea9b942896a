"""What was never written, or was given up, does not look like a state."""

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.poison import Freed

LAYOUT = ms.StateLayout((ms.Plane("ssm", (3,), torch.bfloat16), ms.Plane("count", (2,), torch.int32)), layers=2)


def test_fresh_tensors_and_slots_are_poisoned(backend: Backend) -> None:
    assert torch.empty(4, device=backend.device).isnan().all()
    assert (torch.ones(2, dtype=torch.int32, device=backend.device).new_empty(5) == 2**31 - 1).all()
    mem = ms.StateManager(LAYOUT, slots=4, max_requests=2, device=backend.device, backend=backend.name)
    assert mem.planes["ssm"][:, 1:].isnan().all() and (mem.planes["count"][:, 1:] != 0).all()
    assert (mem.planes["ssm"][:, 0] == 0).all()


def test_a_freed_slot_is_poisoned_at_once_and_no_other(backend: Backend, poison: Freed) -> None:
    mem = ms.StateManager(LAYOUT, slots=4, max_requests=2, device=backend.device, backend=backend.name)
    first, second = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.submit()
    for plane in mem.planes.values():
        plane[:, 1:3] = 7
    mem.abort([first])
    mem.submit()
    assert poison.filled == 1
    assert mem.planes["ssm"][:, 1].isnan().all() and (mem.planes["count"][:, 1] == 0x5A5A5A5A).all()
    assert all((plane[:, 2] == 7).all() for plane in mem.planes.values())
    assert mem.length(second) == 0
