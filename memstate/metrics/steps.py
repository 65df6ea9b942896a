"""Times the calls of one manager: how much host time they take, step by step.

While a manager is timed, its class is a subclass of its own class. The methods of the subclass read the clock before
and after they call the original methods. So a manager that is not timed loses no time.
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
    "accept", "admit", "cancel", "drop", "end", "extend", "forget", "fork", "park", "poll", "prefetch", "publish",
    "reorder", "snapshot_at", "submit",
)  # fmt: skip
BOUNDS = tuple(2.5e-5 * 2**n for n in range(15))  # seconds: 25 us to 0.41 s


class StepTimes(NamedTuple):
    """Host time since the timing began.

    Attributes:
        seconds: for each timed method by name, the seconds that all calls of it took together.
        buckets: histogram of the steps by host time. For each of `BOUNDS`: number of steps that took at most that long,
            and longer than the bound before. Last: number of steps that took longer than all bounds.
        total: seconds of all these steps.
    """

    seconds: Mapping[str, float]
    buckets: Sequence[int]
    total: float

    @property
    def cumulative(self) -> list[tuple[str, int]]:
        """Pairs (bound of a bucket as a text, number of steps that took at most that long)."""
        return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(self.buckets), strict=True))


class Timing(NamedTuple):
    """A timing that `start` has begun.

    Attributes:
        read: function that returns the times so far. Any thread can call it.
        stop: function that ends the timing. A second call does nothing, even if a new timing has begun.
    """

    read: Callable[[], StepTimes]
    stop: Callable[[], None]


class _Timed:
    """Marks the subclass of a timed manager."""


def start(mem: StateManager) -> Timing:
    """Begins to time the calls of a manager. The timing does not keep the manager alive.

    The time of a step is the host time of all calls after the `plan` of the previous step, including the step's own
    `plan`.

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
        alive = here()
        if type(alive) is timed:
            alive.__class__ = kind

    mem.__class__ = timed
    return Timing(read, stop)


def _timed(kind: type[StateManager]) -> tuple[dict[str, Any], Callable[[], StepTimes]]:
    """Returns the timed methods by name, and a function that reads the times.

    Only the loop writes the sums. They are variables of closures, because these are the fastest. `plan` and `settle`
    are called in every step, so their parameters are named: `*args` and `**settings` take longer.
    """
    clock, bounds, buckets = perf_counter, BOUNDS, [0] * (len(BOUNDS) + 1)
    own_plan, own_settle = kind.plan, kind.settle
    planning = settling = rest = 0.0
    before = 0.0  # value of planning + settling + rest at the end of the last plan
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
