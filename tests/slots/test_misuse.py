"""Misuse of the command buffer raises a named error and changes nothing: no register, no count, no packet to be."""

import pytest

from memstate import EmptyRegister, InvalidArgument, MemstateError, OutOfSlots, RegisterInUse
from memstate.kernels.dispatch import Backend
from tests.support.command_bench import Bench, perform
from tests.support.scan import scan_registers

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


@pytest.fixture
def bench(backend: Backend) -> Bench:
    return Bench(backend)


MISUSE = {
    "claim into a full register": (RegisterInUse, lambda b: b.claim([4, 3])),
    "claim beyond the pool": (OutOfSlots, lambda b: b.claim([4, 5, 7, 8])),
    "claim twice": (InvalidArgument, lambda b: b.claim([4, 4])),
    "claim for the null row": (InvalidArgument, lambda b: b.claim([0])),
    "claim for its lane": (InvalidArgument, lambda b: b.claim([4, 2])),
    "claim beyond the file": (InvalidArgument, lambda b: b.claim([12])),
    "claim a negative register": (InvalidArgument, lambda b: b.claim([-1])),
    "claim a fraction": (InvalidArgument, lambda b: b.claim([4.5])),
    "release twice": (InvalidArgument, lambda b: b.release([3, 3])),
    "release the null row": (InvalidArgument, lambda b: b.release([1])),
    "release beyond the file": (InvalidArgument, lambda b: b.release([12])),
    "move onto a full register": (RegisterInUse, lambda b: b.move([9], [3])),
    "move from an empty one": (EmptyRegister, lambda b: b.move([10], [4])),
    "move one to two": (InvalidArgument, lambda b: b.move([4, 5], [3])),
    "move two to one": (InvalidArgument, lambda b: b.move([4, 4], [3, 9])),
    "move in a circle": (InvalidArgument, lambda b: b.move([3, 9], [9, 3])),
    "move from the null row": (InvalidArgument, lambda b: b.move([4], [0])),
    "copy to an empty register": (EmptyRegister, lambda b: b.copy([4], [3])),
    "copy from an empty one": (EmptyRegister, lambda b: b.copy([3], [4])),
    "copy from the null row": (MemstateError, lambda b: b.copy([3], [0])),
    "copy from a negative register": (MemstateError, lambda b: b.copy([3], [-1])),
    "copy from beyond the file": (MemstateError, lambda b: b.copy([3], [12])),
    "copy onto itself": (InvalidArgument, lambda b: b.copy([3], [3])),
    "copy in a circle": (InvalidArgument, lambda b: b.copy([3, 9], [9, 3])),
    "copy two to one": (InvalidArgument, lambda b: b.copy([3, 3], [9, 11])),
    "write before the first cell": (MemstateError, lambda b: b.write([-1], [5])),
    "write behind the last": (MemstateError, lambda b: b.write([10**6], [5])),
    "write what does not fit": (MemstateError, lambda b: b.write([200], [2**31])),
    "write three values to two cells": (MemstateError, lambda b: b.write([200, 201], [1, 2, 3])),
}


@pytest.mark.parametrize("case", MISUSE)
def test_G1_misuse_raises_and_changes_nothing(bench: Bench, case: str) -> None:
    bench.fill(3, 1.0, 1)
    bench.fill(9, 2.0, 2)
    bench.fill(11, 3.0, 3)
    bench.buffer.release([11])  # recorded and not sent: an early submit would show
    bench.buffer.claim([11])
    before = bench.observe()
    error, misuse = MISUSE[case]
    with pytest.raises(error):
        misuse(bench.buffer)
    assert bench.observe() == before
    bench.buffer.submit()
    scan_registers(bench.file)


@pytest.mark.parametrize("operation", ["claim", "release", "zero", "copy", "move", "write"])
def test_B3_B4_recording_nothing_sends_nothing(bench: Bench, operation: str) -> None:
    perform(bench, operation, [], [])
    bench.buffer.release([3])  # empty, so nothing to give back
    bench.buffer.submit()
    counts = bench.allocator.backend.counts
    assert (counts.total_launches, counts.uploads) == (0, 0)
