"""Rows whose state is computed elsewhere, and slot ids on the host for whoever moves it."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import MAKERS, I, Loop, every_strategy, fold
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


@every_strategy
def test_B12_preallocated_rows_take_a_state_that_arrives(backend: Backend, name: str) -> None:
    loop = Loop(backend, MAKERS[name](), rows=1, preallocated=1, pages=16, page_size=1, pages_per_row=8)
    rows = loop.admit(ms.Request("here", length=8), ms.Request("from elsewhere", length=8))
    with pytest.raises(ms.OutOfRows):
        loop.admit(ms.Request("one too many"))
    here, there = rows
    loop.fed[there] = [7, 8, 9]
    slot = int(loop.mem.device.read_slots([there]).wait()[0])
    assert slot == loop.slot(there)
    for plane_name, plane in loop.mem.planes.items():
        plane[:, slot] = (fold((7, 8, 9)) * loop.planes.weights[plane_name]).to(plane.dtype)
    loop.advance([here])
    loop.mem.device.arrived([there], [3])
    assert loop.mem.info(there).length == loop.mem.info(there).confirmed == 3
    loop.advance([here, there], 2)
    assert loop.holds(loop.slot(there), there, 5)
    (snapshot,) = loop.mem.publish([there])
    if name != "none":
        assert snapshot and snapshot.length == 4 and loop.holds(loop.node(snapshot), there, 4)
    scan(loop.mem)


def test_an_arrival_that_makes_no_sense_is_refused(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I), pages=4, page_size=1, pages_per_row=4)
    fresh, begun = loop.admit(ms.Request("a", length=2), ms.Request("b", length=2))
    loop.advance([begun])
    for rows, lengths, told in (
        ([begun], [3], "that has folded no token"),
        ([fresh], [0], "at least 1"),
        ([fresh], [-1], r"lengths\[0\]=-1"),
        ([fresh, fresh], [1, 1], "named twice"),
        ([fresh], [3], "3 tokens, pages for 2"),
    ):
        with pytest.raises(ms.InvalidArgument, match=told):
            loop.mem.device.arrived(rows, lengths)
    step = loop.step([fresh])
    with pytest.raises(ms.InvalidArgument, match="is in no step"):
        loop.mem.device.arrived([fresh], [1])
    loop.mem.settle(step)
    assert loop.mem.info(fresh).length == 1
    scan(loop.mem)


def test_a_state_arrives_in_a_row_whose_last_request_is_in_a_step(backend: Backend) -> None:
    loop = Loop(backend, ms.PingPong(I))
    (row,) = loop.admit(ms.Request("a"))
    step = loop.step([row])
    loop.mem.end([row])
    (again,) = loop.admit(ms.Request("b"))
    loop.mem.device.arrived([again], [3])
    loop.mem.settle(step)
    assert again.index == row.index and loop.mem.info(again).length == loop.mem.info(again).confirmed == 3
    scan(loop.mem)


def test_slot_ids_come_back_in_the_order_asked(backend: Backend) -> None:
    loop = Loop(backend, ms.PingPong(I))
    rows = loop.admit(*(ms.Request(x) for x in "abc"))
    loop.advance(rows, I)
    (snapshot,) = loop.mem.publish([rows[1]])
    assert snapshot
    counts = loop.mem.backend.counts
    loop.mem.submit()
    counts.reset()
    back = loop.mem.device.read_slots([rows[2], snapshot, rows[0]])
    assert dict(counts.launches) == {"resolve": 1} and (counts.uploads, counts.syncs) == (1, 0)
    expected = [loop.slot(rows[2]), loop.node(snapshot), loop.slot(rows[0])]
    loop.mem.end(rows)
    loop.mem.submit()  # the answer is of the moment it was asked for
    assert back.wait().tolist() == expected and back.ready
    assert loop.mem.device.read_slots([]).wait().tolist() == []
    loop.mem.drop([snapshot])
    for stale in (rows[0], snapshot):
        with pytest.raises(ms.StaleHandle):
            loop.mem.device.read_slots([stale])
    assert torch.equal(torch.tensor(expected), torch.tensor(back.wait().tolist()))
