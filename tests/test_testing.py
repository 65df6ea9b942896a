"""What `memstate.testing` gives to the tests of engines; its faults are in tests/engine/test_chaos.py."""

import numpy as np
import pytest

from memstate.testing import Clock, MemoryStore
from memstate.tiers import Outcome, Store


def test_a_clock_goes_where_the_test_says_and_does_what_is_due_in_order() -> None:
    clock, seen = Clock(), []
    clock.after(2, lambda: seen.append(("b", clock())))
    clock.after(1, lambda: (seen.append(("a", clock())), clock.after(0.5, lambda: seen.append(("c", clock())))))
    clock.after(2, lambda: seen.append(("d", clock())))
    clock.advance(1)
    assert seen == [("a", 1)] and clock() == 1
    clock.advance(5)
    assert seen == [("a", 1), ("c", 1.5), ("b", 2), ("d", 2)] and clock() == 6


@pytest.mark.parametrize(
    ("fault", "outcome", "content"),
    [
        ("", Outcome.DONE, [1, 2, 3, 4]), ("vanished", Outcome.MISSING, [0] * 4),
        ("half", Outcome.DAMAGED, [1, 2, 0, 0]),
        ("garbage", Outcome.DONE, [1, 2, 3, 4 ^ 0x5A]), ("denied", Outcome.FAILED, [0] * 4),
    ],
)  # fmt: skip
def test_a_record_meets_the_fault_that_the_test_names(fault: str, outcome: Outcome, content: list[int]) -> None:
    store = MemoryStore()
    assert isinstance(store, Store)
    store.put(["a"], [np.array([1, 2, 3, 4], np.uint8)])
    if fault:
        store.faults["a"] = fault
    buffer = np.zeros(4, np.uint8)
    assert store.exists(["a", "b"]) == [True, False]
    assert store.get(["a"], [buffer]) == [outcome] and buffer.tolist() == content
    assert store.asked("exists") == ["a", "b"] and store.asked("get") == ["a"]


def test_a_broken_store_raises_in_each_call() -> None:
    store = MemoryStore()
    store.faults["a"] = "raises"
    with pytest.raises(ConnectionResetError):
        store.get(["a"], [np.zeros(1, np.uint8)])
    store.broken = True
    for call in (lambda: store.exists(["a"]), lambda: store.put(["a"], [np.zeros(1, np.uint8)])):
        with pytest.raises(OSError, match="storage is not there"):
            call()
