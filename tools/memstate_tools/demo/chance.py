"""Draws from a seed all disturbances of the loop: retractions, cancelled steps, aborts, calls in between."""

import random
from collections.abc import Sequence

from memstate_tools.demo.work import Work

RETRACTED = 0.005  # probability per running request and step
RETRACTED_AT_PAGE_END = 0.02  # probability at a page end, where a state can be kept even without tracking
CANCELLED = 0.006  # probability per step
ABORTED_AT_ONCE = 0.3  # share of the requests aborted within their prompt that are aborted before any step
RETRACTIONS_EACH = 2  # most random retractions of one request: so a long prompt comes to its end
MEDDLED = 0.2  # probability per step of calls between plan and forward
OFTEN = 8  # factor of retractions and calls between, where requests are parked
BETWEEN = ("retract", "retract", "admit", "publish", "submit", "read_slots", "audit", "poll")
TOLD = 0.3  # probability per step that the manager is told of the launched forward


class Chance:
    """Decides which disturbances happen. It does not carry them out.

    Args:
        seed: The same seed gives the same decisions.
        often: Whether requests give up their rows often.
    """

    def __init__(self, seed: int, often: bool = False) -> None:
        self._times = OFTEN if often else 1
        self._events = random.Random(f"events {seed}")
        self._gaps = random.Random(f"gaps {seed}")

    def gap(self, mean: float) -> int:
        """Returns the steps until the next arrival."""
        return round(self._events.expovariate(1 / mean))

    def retracts(self, retracted_before: int, page_end: bool) -> bool:
        """Returns whether a running request is retracted now."""
        share = RETRACTED_AT_PAGE_END if page_end else RETRACTED
        return self._events.random() < share * self._times and self._may(retracted_before)

    def _may(self, retracted_before: int) -> bool:
        return retracted_before < RETRACTIONS_EACH * self._times

    def aborts_at_once(self) -> bool:
        """Returns whether a request to be aborted within its prompt is aborted before any step."""
        return self._events.random() < ABORTED_AT_ONCE

    def cancels(self) -> bool:
        """Returns whether the step just planned is cancelled."""
        return self._events.random() < CANCELLED

    def calls_between(self) -> list[str]:
        """Returns the calls between the plan of a step and its forward."""
        meddled = self._gaps.random() < min(0.5, MEDDLED * self._times)
        return self._gaps.choices(BETWEEN, k=self._gaps.randint(1, 4)) if meddled else []

    def retracts_one(self, works: Sequence[Work]) -> list[Work]:
        """Returns at most one request that may be retracted."""
        able = [work for work in works if self._may(work.retractions)]
        return self._gaps.sample(able, min(1, len(able)))

    def tells(self) -> bool:
        """Returns whether the manager is told that a forward has been launched."""
        return self._gaps.random() < TOLD
