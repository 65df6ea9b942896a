"""Times the calls of one manager: how much of the loop's time they take, step by step.

A timed manager has a class of its own, whose calls look at the clock before and after those that they hide. A manager
that is not timed is not touched.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

from memstate.engine.manager import NO_LIMIT, StateManager
from memstate.errors import InvalidArgument
from memstate.requests.handles import Row
from memstate.requests.steps import Step

RARE = (
    "accept", "admit", "cancel", "drop", "end", "extend", "fork", "poll", "prefetch", "publish", "reorder",
    "snapshot_at", "submit",
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

    @property
    def cumulative(self) -> list[tuple[str, int]]:
        """The bound of each bucket as a text, and how many steps took at most so long."""
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(self.buckets), strict=True))


class Timing(NamedTuple):
    """What a `start` has begun.

    Attributes:
        read: returns the times so far. Any thread can call it.
        stop: ends the timing. A second call does nothing, also if the calls are timed again by then.
    """

    read: Callable[[], StepTimes]
    stop: Callable[[], None]


class _Timed:
    """Marks the class of a timed manager."""


def start(mem: StateManager) -> Timing:
    """Times the calls of a manager. It does not keep the manager alive.

    A step ends where its `plan` returns. Its time is that of all calls since the plan before it, that one left out.

    Args:
        mem: the manager.

    Raises:
        InvalidArgument: the calls are timed already.
    """
    if isinstance(mem, _Timed):
        raise InvalidArgument(f"the calls of {mem} are timed already: use one collector with steps=True")
    kind, here = type(mem), ref(mem)
    calls, read = _timed(kind)
    timed = type(kind.__name__, (_Timed, kind), calls)

    def stop() -> None:
        found = here()
        if type(found) is timed:
            found.__class__ = kind

    mem.__class__ = timed
    return Timing(read, stop)


def _timed(kind: type[StateManager]) -> tuple[dict[str, Any], Callable[[], StepTimes]]:
    """Returns timed calls by name, and what reads their times.

    The loop alone writes the sums. They are variables of closures, because nothing else is as fast. Plan and settle
    come in every step, so they have parameters of their own: passing on any arguments takes longer.
    """
    clock, bounds, buckets = perf_counter, BOUNDS, [0] * (len(BOUNDS) + 1)
    own_plan, own_settle = kind.plan, kind.settle
    planning = settling = rest = 0.0
    before = 0.0  # the sum of the three at the end of the last plan
    rare: defaultdict[str, float] = defaultdict(float)

    def plan(
        self: StateManager, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, limit: int = NO_LIMIT,
        replay: Callable[[], object] | None = None, drafts: int | Sequence[int] = 0, defer: int = 0,
    ) -> Step:  # fmt: skip
        nonlocal planning, before
        begin = clock()
        try:
            return own_plan(self, rows, tokens, limit=limit, replay=replay, drafts=drafts, defer=defer)
        finally:
            planning += clock() - begin
            now = planning + settling + rest
            buckets[bisect_left(bounds, now - before)] += 1
            before = now

    def settle(self: StateManager, step: Step, finished: Any = None) -> None:
        nonlocal settling
        begin = clock()
        try:
            own_settle(self, step, finished)
        finally:
            settling += clock() - begin

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: StateManager, *args: Any, **settings: Any) -> Any:
            nonlocal rest
            begin = clock()
            try:
                return call(self, *args, **settings)
            finally:
                took = clock() - begin
                rest += took
                rare[name] += took

        return run

    def read() -> StepTimes:
        seconds = {"plan": planning, "settle": settling, **rare.copy()}
        return StepTimes(seconds, buckets.copy(), before)

    calls = {name: timed(name, getattr(kind, name)) for name in RARE}
    return {**calls, "plan": plan, "settle": settle}, read
