"""The host's mirror: what it says of many rows is what it says of each."""

import numpy as np
import pytest

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import risen
from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.allocator import SlotAllocator
from memstate.slots.packet import FEW
from memstate.slots.registers import RegisterFile


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("tracking", [NoTracking(4), PingPong(4), LazyPingPong(4), Redirect(4)], ids=repr)
def test_the_newest_snapshots_of_many_rows_are_those_of_each(tracking: Tracking, ended: bool) -> None:
    draw, count = np.random.default_rng(0), 40
    file = RegisterFile(SlotAllocator(8, Backend("reference")), count, 4)
    mirror = Mirror(file, tracking, overlap=True)
    file.held[:] = draw.random(file.count) < 0.6
    file.labels[:] = draw.integers(0, 5, file.count) * file.held
    rows = draw.permutation(np.arange(1, count + 1))
    known = draw.integers(0, 6, count)
    each = [mirror.answer(int(row), int(bound), ended) or 0 for row, bound in zip(rows, known, strict=True)]
    assert mirror.answers(rows, known, ended).tolist() == each
    assert mirror.answers(rows[:FEW], known[:FEW], ended).tolist() == each[:FEW]
    assert mirror.answers(rows[:0], known[:0], ended).tolist() == []
    assert ended or bool(any(each)) == (tracking != NoTracking(4))
    assert all(register // REGISTERS_PER_ROW == row for register, row in zip(each, rows, strict=True) if register)


def test_generations_start_again_behind_the_largest() -> None:
    assert risen(np.array([0, 7, 2**31 - 1], np.int32)).tolist() == [1, 8, 0]
    assert risen(np.array([5], np.int32)).dtype == np.int32
