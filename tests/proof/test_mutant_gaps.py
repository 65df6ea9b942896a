"""Tests rules that no other quick test checks: mutants of them had survived."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import HEADER_INTS
from memstate.slots import commands


def manager(backend: Backend, tracking: ms.Tracking, **forward: int) -> ms.StateManager:
    """Returns a manager with four slots for two requests."""
    layout = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
    return ms.StateManager(
        layout, slots=4, max_requests=2, tracking=tracking, overlap=False,
        forward=ms.Forward(**forward), backend=backend.name, device=backend.device,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.sample(interpreter=1)
def test_the_device_keeps_to_the_limit_of_a_plan(backend: Backend) -> None:
    mem = manager(backend, ms.Redirect(1))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows))
    mem.settle(mem.plan(rows, limit=1))
    assert (mem.stats().snapshots, mem.stats().degraded) == (1, 1)
    mem.audit().raise_if_leaking()
    mem.device.check()


def test_a_warm_up_leaves_the_batch_of_no_step(backend: Backend) -> None:
    """`warm_up` plans null rows, so the next plan must upload its batch, even if it equals the last one."""
    mem = manager(backend, ms.NoTracking(4))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows))
    ms.warm_up(mem)
    step = mem.plan(rows)
    assert step.rows.tolist() == [row.index for row in rows] and step.write.all()


def test_changes_that_do_not_fit_beside_a_batch_go_before_it(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "STEP_ROOM", HEADER_INTS)
    mem = manager(backend, ms.Redirect(1))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    before = mem.backend.counts.uploads
    for replay in (None, lambda: mem.launch(2)):
        step = mem.plan(rows, replay=replay)
        assert step.rows.tolist() == [row.index for row in rows] and step.write.all()
        mem.settle(step)
    assert mem.backend.counts.uploads - before == 2  # the second batch equals the first one, so it is not uploaded
    mem.audit().raise_if_leaking()


def test_drafts_of_a_row_given_up_say_nothing_of_its_next_request(backend: Backend) -> None:
    mem = manager(backend, ms.NoTracking(4), tail=2)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    step = mem.plan([a, b], 2, drafts=2)
    mem.submit(step)
    mem.end([b])
    (c,) = mem.admit([ms.Request("c")])
    assert c.index == b.index
    mem.accept(step, [1, 2])
    assert [mem.info(row).length for row in (a, c)] == [1, 0]
    step = mem.plan([a, c])
    assert step.before.tolist() == [1, 0] == step.lengths.tolist()
    mem.audit().raise_if_leaking()


def test_a_batch_is_looked_up_again_once_a_row_has_ended(backend: Backend) -> None:
    """A plan keeps the rows that it has looked up. A next plan with the same batch uses them, unless one has ended."""
    mem = manager(backend, ms.NoTracking(4))
    a, b = rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows), [True, False])
    step = mem.plan(rows)
    assert step.rows.tolist() == [0, b.index]
    mem.settle(step)
    mem.end([b])
    with pytest.raises(ms.StaleHandle):
        mem.plan(rows)
    assert mem.info(a).length == 1
