"""Times the calls of one manager: how much of the loop's time they take, step by step.

A timed manager has attributes that hide its calls, and look at the clock before and after them. A manager that is not
timed is not touched.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from memstate.engine.manager import NO_LIMIT, StateManager
from memstate.errors import InvalidArgument
from memstate.requests.handles import Row
from memstate.requests.steps import Step

RARE = (
    "abort", "accept", "admit", "arrived", "cancel", "drop", "extend", "fork", "poll", "prefetch", "publish",
    "read_slots", "release", "reorder", "retract", "submit",
)  # fmt: skip
BOUNDS = tuple(2.5e-5 * 2**n for n in range(15))  # seconds: 25 us to 0.41 s


class StepTimes(NamedTuple):
    """Host time since the timing began.

    Attributes:
        seconds: call -> seconds.
        buckets: steps that took at most so many seconds more than the bound before: one number for each of `BOUNDS`,
            and one for all that took longer.
        total: seconds of all these steps.
    """

    seconds: Mapping[str, float]
    buckets: Sequence[int]
    total: float


def start(mem: StateManager) -> Callable[[], StepTimes]:
    """Times the calls of a manager until `stop`.

    A step ends where its `plan` returns. Its time is that of all calls since the plan before it, that one left out.

    Args:
        mem: the manager.

    Returns:
        A function that returns the times so far. Any thread can call it.

    Raises:
        InvalidArgument: the calls are timed already.
    """
    if "plan" in vars(mem):
        raise InvalidArgument(f"the calls of {mem} are timed already: use one collector with steps=True")
    calls, read = _timed(mem)
    vars(mem).update(calls)
    return read


def stop(mem: StateManager) -> None:
    """Ends the timing, if there is one.

    Args:
        mem: the manager.
    """
    for name in ("plan", "settle", *RARE):
        vars(mem).pop(name, None)


def _timed(mem: StateManager) -> tuple[dict[str, Callable[..., Any]], Callable[[], StepTimes]]:
    """Returns timed calls by name, and what reads their times.

    The loop alone writes the sums. They are variables of closures, because nothing else is as fast. Plan and settle
    come in every step, so they have parameters of their own: passing on any arguments takes longer.
    """
    clock, bounds, buckets = perf_counter, BOUNDS, [0] * (len(BOUNDS) + 1)
    own_plan, own_settle = mem.plan, mem.settle
    planning = settling = rest = 0.0
    before = 0.0  # the sum of the three at the end of the last plan
    rare: defaultdict[str, float] = defaultdict(float)

    def plan(
        rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, limit: int = NO_LIMIT, window: bool = False,
        replay: Callable[[], object] | None = None,
    ) -> Step:  # fmt: skip
        nonlocal planning, before
        begin = clock()
        try:
            return own_plan(rows, tokens, limit=limit, window=window, replay=replay)
        finally:
            planning += clock() - begin
            now = planning + settling + rest
            buckets[bisect_left(bounds, now - before)] += 1
            before = now

    def settle(step: Step, finished: Any = None) -> None:
        nonlocal settling
        begin = clock()
        try:
            own_settle(step, finished)
        finally:
            settling += clock() - begin

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            nonlocal rest
            begin = clock()
            try:
                return call(*args, **settings)
            finally:
                took = clock() - begin
                rest += took
                rare[name] += took

        return run

    def read() -> StepTimes:
        seconds = {"plan": planning, "settle": settling, **rare.copy()}
        return StepTimes(seconds, buckets.copy(), before)

    calls: dict[str, Callable[..., Any]] = {name: timed(name, getattr(mem, name)) for name in RARE}
    return {**calls, "plan": plan, "settle": settle}, read
