"""Policies by name, as a replay compares them: for states and for pages."""

from collections.abc import Callable

from memstate.prefix.policies.base import PagePolicy, StatePolicy
from memstate.prefix.policies.flop_aware import FlopAware
from memstate.prefix.policies.greedy_dual import GreedyDual
from memstate.prefix.policies.lru import Lru, LruPages
from memstate.prefix.policies.path_cap import PathCap
from memstate.prefix.policies.return_rate import ReturnRate

POLICIES: dict[str, tuple[Callable[[], StatePolicy], Callable[[], PagePolicy] | None]] = {
    "lru": (Lru, lambda: LruPages(tombstones=False)),
    "lru-tombstones": (Lru, LruPages),
    "path-cap": (lambda: PathCap(3, Lru()), LruPages),
    "flop-aware": (FlopAware, LruPages),
    "greedy-dual": (GreedyDual, LruPages),
    "return-rate": (ReturnRate, None),
}
