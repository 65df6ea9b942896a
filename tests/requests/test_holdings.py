"""The table of holders and their owners: only audit, inspect and recover compare it with the owners themselves."""

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.requests.handles import risen
from tests.support import owners

LAYOUT = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)


def manager(backend: Backend, **more: object) -> ms.StateManager:
    return ms.StateManager(LAYOUT, slots=8, max_requests=4, backend=backend.name, device=backend.device, **more)  # type: ignore[arg-type]


def published(mem: ms.StateManager, value: float = 5.0) -> ms.Snapshot:
    """Returns a snapshot of three tokens, whose bytes have this value."""
    rows = mem.admit([ms.Request("a")])
    step = mem.plan(rows, [3])
    mem.planes["ssm"][0][step.write.long()] = value
    mem.settle(step)
    (snapshot,) = mem.end(rows, keep="handle")
    assert snapshot is not None
    return snapshot


def test_all_owners_are_asked_by_audit_inspect_and_recover_alone() -> None:
    """A walk over all owners takes long, so no other call makes one."""
    mem, asked = manager(Backend("reference", torch.device("cpu"))), list[None]()
    recount = mem._reports._recount
    walk = recount.walk
    recount.walk = lambda: [asked.append(None), walk()][1]  # type: ignore[method-assign]
    mem.drop([published(mem)])
    rows = mem.admit([ms.Request("b")])
    mem.stats(), mem._reports.owners(), repr(mem), mem.end(rows)
    assert not asked
    for call in (mem.audit, mem.inspect, mem.recover, lambda: mem.recover(keep=False)):
        before = len(asked)
        call()  # type: ignore[operator]
        assert len(asked) == before + 1


def test_every_call_in_debug_mode_compares_owners_and_holders() -> None:
    mem = manager(Backend("reference", torch.device("cpu")), debug=True)
    snapshot = published(mem)
    owners.holdings(mem).held["snapshot"].pop(snapshot.register)
    with pytest.raises(ms.LeakFound, match="kinds of the states"):
        mem.admit([ms.Request("b")])


def test_generations_start_again_behind_the_largest() -> None:
    assert risen(np.array([0, 7, 2**31 - 1], np.int32)).tolist() == [1, 8, 0]
