"""Redirect: the old slot is the snapshot, and nothing is copied for it. Lengths from 0, I = 4."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import I, Loop, both_orders, running

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


def test_B32_redirect_snapshots_without_moving_a_byte(backend: Backend) -> None:
    redirect, in_place = Loop(backend, ms.Redirect(I)), Loop(backend, ms.NoTracking(I))
    (row,), (twin,) = redirect.admit(), in_place.admit()
    for length in range(1, 4 * I):
        old = redirect.slot(row)
        before = {name: plane[:, old].clone() for name, plane in redirect.mem.planes.items()}
        redirect.advance([row])
        in_place.advance([twin])
        for name, plane in redirect.mem.planes.items():
            assert torch.equal(plane[:, redirect.slot(row)], in_place.mem.planes[name][:, in_place.slot(twin)])
            if length > I and (length - 1) % I == 0:
                assert redirect.slot(row, 1) == old != redirect.slot(row) and redirect.label(row, 1) == length - 1
                assert torch.equal(plane[:, old], before[name])
    assert redirect.mem.stats().snapshots == 3 and redirect.mem.stats().copied_bytes == 0
    assert redirect.mem.backend.counts.launches["copy_slots"] == 0
    assert redirect.mem.backend.counts.launches["run_data"] == 1  # zeroes the state of a new request


@both_orders
@pytest.mark.parametrize("direct", [False, True], ids=["copied", "read directly"])
def test_B36a_redirect_takes_no_snapshot_of_what_it_was_given(direct: bool, overlap: bool, backend: Backend) -> None:
    loop, row = running(backend, ms.Redirect(I), direct_hits=direct, overlap=overlap)
    loop.mem.settle(loop.step([row]))
    assert loop.slot(row, 1) == 0  # length 0 is a multiple of I
    loop.advance([row], 4)
    (snap,) = loop.mem.end([row], keep="handle", lengths=[4])  # the lane: live stands for 5 tokens
    assert snap and snap.length == 4
    (again,) = loop.admit(ms.Request("again", resume=snap))
    loop.fed[again] = loop.fed[row][:4]
    loop.advance([again])
    assert loop.slot(again, 1) == 0 and loop.mem.info(again).length == 5 and loop.mem.free_slots == 16 - 2
    loop.advance([again], 4)
    assert loop.label(again, 1) == 8 and loop.holds(loop.slot(again, 1), again, 8)
