"""Policies by name, as a replay compares them: for states and for pages."""

from collections.abc import Callable
from typing import Any

from memstate.prefix import Prefix
from memstate.prefix.policies import (
    FlopAware,
    GreedyDual,
    Lru,
    LruPages,
    PagePolicy,
    PathCap,
    ReturnRate,
    StatePolicy,
)

POLICIES: dict[str, tuple[Callable[[], StatePolicy], Callable[[], PagePolicy] | None]] = {
    "lru": (Lru, lambda: LruPages(tombstones=False)),
    "lru-tombstones": (Lru, LruPages),
    "path-cap": (lambda: PathCap(3, Lru()), LruPages),
    "flop-aware": (FlopAware, LruPages),
    "greedy-dual": (GreedyDual, LruPages),
    "return-rate": (ReturnRate, None),
}


def prefix_of(policy: str, states: int, **settings: Any) -> Prefix:
    """Returns the settings of a prefix cache of so many states under a policy."""
    of_states, of_pages = POLICIES[policy]
    return Prefix(of_states(), of_pages and of_pages(), most_states=states, **settings)
