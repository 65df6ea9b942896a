"""Misuse of a manager raises a named error and changes nothing: no row, no slot, no page, no label, no step."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import Loop
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


class Stage:
    """Two rows in flight, one that is gone, and a snapshot kept beside one that was dropped."""

    def __init__(self, backend: Backend) -> None:
        self.loop = Loop(backend, ms.PingPong(4), rows=4, pages=40, page_size=2, pages_per_row=8)
        self.mem = self.loop.mem
        self.row, self.other, self.gone = self.loop.admit(*[ms.Request(name, length=8) for name in "abc"])
        self.loop.advance([self.row, self.other, self.gone], 4)
        self.dropped, self.kept, _ = self.mem.publish([self.row, self.other, self.gone])
        self.mem.release([self.gone])
        self.mem.drop([self.dropped])
        self.old = self.loop.step([self.row])
        self.mem.settle(self.old)
        self.first = self.loop.step([self.row, self.other])

    def second(self) -> ms.Step:
        return self.loop.step([self.row, self.other])

    def observe(self) -> list[object]:
        self.mem.submit()
        mem, table = self.mem, self.mem._registers.table
        device = [tensor.tolist() for tensor in (table.cells, table.bitmap, table.counters, mem.page_table)]
        rows = [(mem.length(row), mem.confirmed(row), mem.slots_held(row)) for row in (self.row, self.other)]
        stats = mem.stats()
        counts = [stats.rows_used, stats.published, stats.dropped, stats.degraded]
        steps = (len(mem._log.unsettled), mem._table.unsettled.tolist(), mem._table.confirmed.tolist())
        return [*device, rows, mem.free_slots, mem.free_pages, *counts, steps, mem._snapshots.free]


Misuse = Callable[[Stage], object]
MISUSE: dict[str, tuple[type[ms.MemstateError], Misuse]] = {
    "a row twice": (ms.InvalidArgument, lambda s: s.mem.plan([s.row, s.row])),
    "a row that is gone": (ms.StaleHandle, lambda s: s.mem.plan([s.row, s.gone])),
    "a number for a row": (ms.InvalidArgument, lambda s: s.mem.plan([s.row, 2])),
    "a batch too large": (ms.InvalidArgument, lambda s: s.mem.plan([s.row, None, None, None, None])),
    "no tokens": (ms.InvalidArgument, lambda s: s.mem.plan([s.row], 0)),
    "negative tokens": (ms.InvalidArgument, lambda s: s.mem.plan([s.row, s.other], [1, -1])),
    "tokens for another batch": (ms.InvalidArgument, lambda s: s.mem.plan([s.row, s.other], [1, 1, 1])),
    "tokens that are no numbers": (ms.InvalidArgument, lambda s: s.mem.plan([s.row], ["one"])),
    "a fraction of a token": (ms.InvalidArgument, lambda s: s.mem.plan([s.row], [1.5])),
    "a chunk across a boundary": (ms.InvalidArgument, lambda s: s.mem.plan([s.other, s.row], [3, 3])),
    "settling twice": (ms.StaleHandle, lambda s: s.mem.settle(s.old)),
    "cancelling what is settled": (ms.StaleHandle, lambda s: s.mem.cancel(s.old)),
    "results of another batch": (ms.InvalidArgument, lambda s: s.mem.settle(s.first, [True])),
    "releasing a row twice": (ms.InvalidArgument, lambda s: s.mem.release([s.row, s.row])),
    "releasing what is gone": (ms.StaleHandle, lambda s: s.mem.release([s.row, s.gone], publish=True)),
    "too few key lengths": (ms.InvalidArgument, lambda s: s.mem.release([s.row, s.other], publish=[4])),
    "key lengths that are no numbers": (ms.InvalidArgument, lambda s: s.mem.release([s.row], publish=["4"])),
    "publishing what is gone": (ms.StaleHandle, lambda s: s.mem.publish([s.gone])),
    "publishing nothing strictly": (ms.InvalidArgument, lambda s: s.mem.publish([s.other, s.row], strict=True)),
    "dropping twice at once": (ms.InvalidArgument, lambda s: s.mem.drop([s.kept, s.kept])),
    "dropping what is dropped": (ms.StaleHandle, lambda s: s.mem.drop([s.kept, s.dropped])),
    "dropping a row": (ms.InvalidArgument, lambda s: s.mem.drop([s.kept, s.row])),
    "resuming what is dropped": (ms.StaleHandle, lambda s: s.mem.admit([ms.Request("d", resume=s.dropped)])),
    "lengths for another batch": (ms.InvalidArgument, lambda s: s.mem.extend([s.row], [8, 9])),
    "a state for a row that ran": (ms.InvalidArgument, lambda s: s.mem.arrived([s.row], [5])),
}  # fmt: skip
KINDS: dict[str, Misuse] = {  # arguments of the wrong kind
    "plan(row)": lambda s: s.mem.plan(s.row),
    "plan(None)": lambda s: s.mem.plan(None),
    "plan(generator)": lambda s: s.mem.plan(r for r in [s.row]),
    "plan(text)": lambda s: s.mem.plan("row"),
    "plan(forged)": lambda s: s.mem.plan([ms.Row(1.0, s.row.generation)]),
    "plan(True)": lambda s: s.mem.plan([ms.Row(True, s.row.generation)]),
    "abort(row)": lambda s: s.mem.abort(s.row),
    "release(None)": lambda s: s.mem.release(None),
    "publish(row)": lambda s: s.mem.publish(s.row),
    "extend(row)": lambda s: s.mem.extend(s.row, [4]),
    "arrived(row)": lambda s: s.mem.arrived(s.row, [4]),
    "read_slots(row)": lambda s: s.mem.read_slots(s.row),
    "read_slots(generator)": lambda s: s.mem.read_slots(r for r in [s.row]),
    "admit(request)": lambda s: s.mem.admit(ms.Request("x")),
    "fork(row, text)": lambda s: s.mem.fork(s.row, "ab"),
    "reorder(rows, text)": lambda s: s.mem.reorder([s.other], "0"),
    "reorder beyond": lambda s: s.mem.reorder([s.other], [1]),
    "reorder from the end": lambda s: s.mem.reorder([s.other], [-1]),
    "reorder of a row twice": lambda s: s.mem.reorder([s.other, s.other], [0]),
    "drop(snapshot)": lambda s: s.mem.drop(s.kept),
    "drop(None)": lambda s: s.mem.drop(None),
    "drop(generator)": lambda s: s.mem.drop(snap for snap in [s.kept]),
    "settle(None)": lambda s: s.mem.settle(None),
    "settle([step])": lambda s: s.mem.settle([s.first]),
    "cancel(None)": lambda s: s.mem.cancel(None),
    "accept(None)": lambda s: s.mem.accept(None, [1], {}),
    "finished ragged": lambda s: s.mem.settle(s.first, [[True], [True, False]]),
    "finished elsewhere": lambda s: s.mem.settle(s.first, torch.ones(2, device="meta")),
    "finished words": lambda s: s.mem.settle(s.first, ["False", "False"]),
    "finished numbers": lambda s: s.mem.settle(s.first, [0.5, 0.5]),
    "finished rows": lambda s: s.mem.settle(s.first, [s.row, s.row]),
    "finished of three": lambda s: s.mem.settle(s.first, [True, False, False]),
}
MISUSE |= {name: (ms.InvalidArgument, misuse) for name, misuse in KINDS.items()}


@pytest.mark.parametrize("case", MISUSE)
def test_G1_misuse_raises_and_changes_nothing(case: str, backend: Backend) -> None:
    stage = Stage(backend)
    error, misuse = MISUSE[case]
    before = stage.observe()
    with pytest.raises(error):
        misuse(stage)
    assert stage.observe() == before
    scan(stage.mem)


def test_G1_steps_are_settled_in_order_and_at_most_two_are_open(backend: Backend) -> None:
    stage = Stage(backend)
    second = stage.second()
    before = stage.observe()
    for error, misuse in (
        (ms.InvalidArgument, lambda: stage.mem.plan([stage.row])),
        (ms.InvalidArgument, lambda: stage.mem.settle(second)),
        (ms.InvalidArgument, lambda: stage.mem.cancel(stage.first)),
    ):
        with pytest.raises(error):
            misuse()
        assert stage.observe() == before
    stage.mem.settle(stage.first)
    stage.mem.settle(second)
    stage.loop.advance([stage.row])


def test_G1_in_turn_a_step_is_settled_before_the_next(backend: Backend) -> None:
    loop = Loop(backend, ms.LazyPingPong(4), overlap=False)
    (row,) = loop.admit()
    step = loop.step([row])
    with pytest.raises(ms.InvalidArgument):
        loop.mem.plan([row])
    assert loop.mem.length(row) == 1
    loop.mem.settle(step, np.array([True]))
    assert loop.step([row]).rows.tolist() == [0]  # it has ended: padding


@pytest.mark.parametrize("tokens", [2**31, 2**32 + 1])
def test_G1_a_length_beyond_int32_is_refused(tokens: int, backend: Backend) -> None:
    loop = Loop(backend, ms.NoTracking(4))
    (row,) = loop.admit()
    with pytest.raises(ms.InvalidArgument):
        loop.mem.plan([row], tokens)
    assert loop.mem.length(row) == 0
    scan(loop.mem)
