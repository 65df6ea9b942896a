"""Clocks and stores that `memstate.testing` gives to engines' tests. See test_chaos.py for its injected faults."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from memstate import InvalidArgument, Plane, StateLayout, StateManager
from memstate.testing import Chaos, Clock, Faults, MemoryStore
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


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Clock().advance(-1), r"^advance\(-1\): a clock goes forward only"),
        (lambda: Faults({"claims": 0.1}), r"^Faults\({'claims': 0.1}\): expected memstate.testing.Chaos"),  # type: ignore[arg-type]
        (lambda: Faults(Chaos()).inject(None), r"^inject\(None\): expected a StateManager"),  # type: ignore[arg-type]
    ],
)
def test_G1_what_cannot_be_meant_is_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        act()


def test_faults_are_those_of_one_manager() -> None:
    layout, faults = StateLayout((Plane("ssm", (4,), torch.float32),), 1), Faults(Chaos())
    first, second = (StateManager(layout, slots=2, max_requests=1) for _ in range(2))
    assert faults.inject(first) is first
    for mem, others in ((second, faults), (first, Faults(Chaos()))):
        with pytest.raises(InvalidArgument):
            others.inject(mem)
