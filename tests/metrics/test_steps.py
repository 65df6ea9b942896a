"""Host time of steps: while it is off, steps make no further call; while it is on, every step counts."""

import sys
from collections import Counter
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

import memstate as ms
from memstate import metrics
from memstate.metrics import steps
from tests.support.metered import manager, turn


def called(call: Callable[[], object]) -> Counter[str]:
    """Returns the calls of Python and C functions that a call makes."""
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, of: Any) -> None:
        if event == "call":
            seen[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            seen[getattr(of, "__qualname__", repr(of))] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def step_of(mem: ms.StateManager) -> Counter[str]:
    """Returns the calls that a decode step makes, after some steps that fill the caches of Python."""
    rows = mem.admit([ms.Request("a")])
    mem.extend(rows, [8])
    for _ in range(3):
        mem.settle(mem.plan(rows))
    calls = called(lambda: mem.settle(mem.plan(rows)))
    mem.end(rows)
    mem.submit()
    return calls


def test_O3_a_step_makes_no_call_more_unless_it_is_timed() -> None:
    plain = step_of(manager())
    mem = manager()
    made = metrics.collector(mem, tenant=str)  # the figures are exported, but steps are not timed
    list(made.collect())
    assert step_of(mem) == plain and plain.total() > 20
    timed = metrics.collector(mem, steps=True)
    added = step_of(mem) - plain
    assert added == Counter(
        {"perf_counter": 4, "bisect_left": 1, **{name: 1 for name in added if "metrics/steps.py" in name}}
    )
    assert len(added) == 4, "the clock, the histogram, plan and settle"
    timed.close()
    assert step_of(mem) == plain


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(steps, "perf_counter", lambda: now[0])
    return now


def test_a_step_is_all_calls_up_to_its_plan(clock: list[float]) -> None:
    mem = manager(slots=2, prefix=None, pages=None)

    class Slow(ms.StateManager):
        """A manager whose calls take fixed times."""

        def admit(self, requests: Any) -> Any:
            clock[0] += 3e-3
            return super().admit(requests)

        def plan(self, *args: Any, **settings: Any) -> Any:
            clock[0] += 3e-5
            return super().plan(*args, **settings)

        def settle(self, *args: Any, **settings: Any) -> None:
            clock[0] += 1e-5
            super().settle(*args, **settings)

    mem.__class__ = Slow
    read, stop = steps.start(mem)
    rows = mem.admit([ms.Request("a")])
    step = mem.plan(rows)  # the admission takes 3 ms, the plan 30 us
    clock[0] += 1.0  # the time of the forward
    mem.settle(step)
    mem.settle(mem.plan(rows))  # 10 us and 30 us
    with pytest.raises(ms.OutOfSlots):
        mem.admit([ms.Request(n) for n in range(2)])
    times = read()
    assert {call: round(seconds, 9) for call, seconds in times.seconds.items()} == {
        "plan": 6e-5, "settle": 2e-5, "admit": 6e-3,
    }  # fmt: skip
    assert round(times.total, 9) == 3.07e-3
    counts = {bound: n for bound, n in zip((*steps.BOUNDS, "more"), times.buckets, strict=True) if n}
    assert counts == {5e-5: 1, 3.2e-3: 1}, "the time of the forward counts nowhere"
    clock[0] += 1.0
    mem.plan(rows)  # the refused admission counts in the step that follows
    assert {bound for bound, n in zip(steps.BOUNDS, read().buckets, strict=False) if n} == {5e-5, 3.2e-3}
    assert read().buckets[steps.BOUNDS.index(3.2e-3)] == 2
    stop()
    assert type(mem) is Slow
    again = steps.start(mem)
    stop()  # a second stop does not end the new timing
    mem.cancel(mem.plan(rows))
    assert sum(again.read().buckets) == 1 and sum(read().buckets) == 3
    again.stop()


def test_timed_calls_do_what_they_do() -> None:
    mem, other = manager(), manager()
    made = metrics.collector(mem, steps=True)
    for who in range(6):
        turn(mem, who)
        turn(other, who)
    assert mem.stats() == other.stats()
    rows = mem.admit([ms.Request("a", tokens=[1, 2, 3])])
    step = mem.plan(rows, tokens=2, limit=0)
    mem.cancel(step)
    with pytest.raises(TypeError):
        mem.plan(rows, nonsense=1)  # type: ignore[call-arg]
    made.close()


def test_timed_calls_take_what_the_others_take() -> None:
    mem = manager()
    made = metrics.collector(mem, steps=True)
    for name in ("plan", "settle"):
        timed, own = (list(signature(getattr(kind, name)).parameters) for kind in (type(mem), ms.StateManager))
        assert timed == own
    made.close()


def test_every_call_that_changes_something_is_timed() -> None:
    """If a public call enters the guard but is not timed, its host time counts in no step."""
    outside = "audit close inspect recover"
    asks = "chunk info launch match sheet shortfall stats"
    public = {
        name for name in dir(ms.StateManager) if not name.startswith("_") and callable(getattr(ms.StateManager, name))
    }
    assert public == {"plan", "settle", *steps.RARE, *outside.split(), *asks.split()}
