"""States that are computed elsewhere: when they may arrive, and in which rows."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import I, Loop
from tests.support.scan import scan


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
