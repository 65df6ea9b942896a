"""Which lengths count, and for how long: a change by one step or one token shows here at once."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on

LAYOUT = ms.StateLayout(planes=(ms.Plane("s", (3,), torch.float32),), layers=1)


@pytest.fixture
def mem(backend: Backend) -> ms.StateManager:
    return on(backend, LAYOUT, slots=8, max_requests=2, tracking=ms.PingPong(4), overlap=True)


def test_confirmed_lengths_do_not_move_on_while_an_earlier_step_is_unsettled(mem: ms.StateManager) -> None:
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    first = mem.plan([a], 2)
    assert (mem.info(a).confirmed, mem.info(b).confirmed) == (2, 0)
    second = mem.plan([a, b], [1, 3])
    assert (mem.info(a).confirmed, mem.info(b).confirmed) == (2, 3), "b is in one unsettled step, a in two"
    mem.settle(first)
    assert (mem.info(a).confirmed, mem.info(b).confirmed) == (3, 3)
    third = mem.plan([a, b])
    assert (mem.info(a).confirmed, mem.info(b).confirmed) == (3, 3)
    mem.settle(second)
    mem.plan([a, b])
    assert (mem.info(a).confirmed, mem.info(b).confirmed) == (4, 4)
    mem.settle(third, [True, False])
    assert (mem.info(a).confirmed, mem.info(b).confirmed) == (4, 5)


def test_a_step_is_promised_by_a_length_beyond_its_start_alone(mem: ms.StateManager) -> None:
    """A published state at the length where the open step begins was there before: the step can still be cancelled."""
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 4))
    step = mem.plan([row])
    (snapshot,) = mem.publish([row])
    assert snapshot is not None and snapshot.length == int(step.before[0]) == 4
    mem.cancel(step)
    (row,) = mem.admit([ms.Request("b")])
    step = mem.plan([row], 4)
    (snapshot,) = mem.publish([row])
    assert snapshot is not None and snapshot.length == 4 > int(step.before[0])
    with pytest.raises(ms.InvalidArgument, match="was handed out since its plan"):
        mem.cancel(step)


def test_an_idle_session_whose_pages_are_unsure_is_empty_after_a_recover(backend: Backend) -> None:
    """Its states are sure, and would be read with KV that never came."""
    mem = on(
        backend, LAYOUT, slots=8, max_requests=2, tracking=ms.NoTracking(4), pages=12, page_size=2, pages_per_row=6
    )
    sessions = [mem.sessions.open(name) for name in "ab"]
    texts = [[at + 10 * n for at in range(6)] for n in range(2)]
    rows = mem.admit([ms.Request(n, tokens=texts[n], session=sessions[n]) for n in range(2)])
    mem.settle(mem.plan(rows, 6))
    unsure = mem.device.page_table[rows[0].index].tolist()[2]
    mem.end(rows, keep="cache", tokens=texts)
    mem.submit()
    assert [info.tokens for info in mem.sessions.infos()] == [6, 6]
    with pytest.raises(MemoryError), mem._parts.guard.changing("extend"):
        mem._parts.guard.pages += [unsure]
        raise MemoryError
    assert mem.recover().in_sessions == 1
    assert [(info.tokens, info.states, info.pages) for info in mem.sessions.infos()] == [(0, 0, 0), (6, 1, 3)]
    mem.audit().raise_if_leaking()
