"""Everything that goes wrong in the loop on purpose, drawn from a seed: retractions, forwards that never run."""

import random
from collections.abc import Sequence

from memstate_tools.demo.work import Work

RETRACTED = 0.005  # per running request and step
RETRACTED_AT_PAGE_END = 0.02  # the better moment: there a state can be kept even without tracking
CANCELLED = 0.006  # per step
ABORTED_AT_ONCE = 0.3  # of the requests that are aborted within their prompt
RETRACTIONS_EACH = 2  # at random, so that a long prompt gets through in the end
MEDDLED = 0.2  # per step
BETWEEN = ("retract", "retract", "admit", "publish", "submit", "read_slots", "audit", "poll")
TOLD = 0.3  # per step


class Chance:
    """Decides what goes wrong, and does nothing itself.

    Args:
        seed: The same seed gives the same decisions.
    """

    def __init__(self, seed: int) -> None:
        self._events = random.Random(f"events {seed}")
        self._gaps = random.Random(f"gaps {seed}")

    def gap(self, mean: float) -> int:
        """Steps until the next arrival."""
        return round(self._events.expovariate(1 / mean))

    def retracts(self, retracted_before: int, page_end: bool) -> bool:
        """Whether a running request is retracted now."""
        share = RETRACTED_AT_PAGE_END if page_end else RETRACTED
        return self._events.random() < share and retracted_before < RETRACTIONS_EACH

    def aborts_at_once(self) -> bool:
        """Whether a request that is to be aborted within its prompt is aborted before any step."""
        return self._events.random() < ABORTED_AT_ONCE

    def cancels(self) -> bool:
        """Whether the forward of the step just planned never runs."""
        return self._events.random() < CANCELLED

    def calls_between(self) -> list[str]:
        """What is called between the plan of a step and its forward."""
        meddled = self._gaps.random() < MEDDLED
        return self._gaps.choices(BETWEEN, k=self._gaps.randint(1, 4)) if meddled else []

    def retracts_one(self, works: Sequence[Work]) -> list[Work]:
        """At most one request that may be retracted."""
        able = [work for work in works if work.retractions < RETRACTIONS_EACH]
        return self._gaps.sample(able, min(1, len(able)))

    def tells(self) -> bool:
        """Whether the manager is told that a forward has been launched."""
        return self._gaps.random() < TOLD
