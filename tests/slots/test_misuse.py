"""Misuse of the command buffer raises a named error and changes nothing: no register, no count, no record."""

from collections.abc import Callable

import pytest

from memstate import MemstateError
from memstate.kernels.dispatch import Backend
from memstate.slots.commands import CommandBuffer
from tests.support.command_bench import Bench, perform
from tests.support.scan import scan_registers


@pytest.fixture
def bench(backend: Backend) -> Bench:
    return Bench(backend)


Misuse = Callable[[CommandBuffer], None]
# message -> calls that are refused with it; registers 3, 9 and 11 hold a slot
MISUSE: dict[str, list[Misuse]] = {
    r"^(claim|move): register \d holds a slot already": [lambda b: b.claim([4, 3]), lambda b: b.move([9], [3])],
    r"^4 slots requested, 3 free": [lambda b: b.claim([4, 5, 7, 8])],
    r"^\w+: register 4 holds no slot": [
        lambda b: b.move([10], [4]), lambda b: b.copy([4], [3]), lambda b: b.copy([3], [4]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("told", MISUSE)
def test_G1_misuse_raises_and_changes_nothing(bench: Bench, told: str) -> None:
    bench.fill(3, 1.0, 1)
    bench.fill(9, 2.0, 2)
    bench.fill(11, 3.0, 3)
    bench.buffer.release([11])  # recorded and not sent, so that an early submit would be noticed
    bench.buffer.claim([11])
    before = bench.observe()
    for misuse in MISUSE[told]:
        with pytest.raises(MemstateError, match=told):
            misuse(bench.buffer)
        assert bench.observe() == before
    bench.buffer.submit()
    scan_registers(bench.file)


@pytest.mark.parametrize("operation", ["claim", "release", "copy", "move", "write"])
def test_B3_B4_recording_nothing_sends_nothing(bench: Bench, operation: str) -> None:
    perform(bench, operation, [], [])
    bench.buffer.release([3])  # register 3 is empty
    bench.buffer.submit()
    counts = bench.allocator.backend.counts
    assert (counts.total_launches, counts.uploads) == (0, 0)
