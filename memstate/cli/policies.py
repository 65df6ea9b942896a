"""Policies and placements by the names that programs give them."""

from collections.abc import Callable
from typing import Any

from memstate.checks import INT32_MAX
from memstate.errors import InvalidArgument
from memstate.prefix import Prefix
from memstate.prefix.placement import Ends, Nowhere, Placement
from memstate.prefix.policies.base import PagePolicy, StatePolicy
from memstate.prefix.policies.flop_aware import FlopAware
from memstate.prefix.policies.lru import Lru, LruPages
from memstate.prefix.policies.return_rate import ReturnRate

# for states and for pages
POLICIES: dict[str, tuple[Callable[[], StatePolicy], Callable[[], PagePolicy] | None]] = {
    "lru": (Lru, lambda: LruPages(tombstones=False)),
    "lru-tombstones": (Lru, LruPages),
    "flop-aware": (FlopAware, LruPages),
    "return-rate": (ReturnRate, None),
}
PLACEMENTS = ("ends", "ends-only", "every-N", "nowhere")


def placement_of(name: str) -> Placement:
    """Returns the placement that a command line names.

    Args:
        name: One of `PLACEMENTS`, with a number of tokens for N.

    Raises:
        InvalidArgument: There is no such placement.

    Example:
        >>> placement_of("every-512")
        Ends(every=512)
    """
    named = {"ends": Ends(), "ends-only": Ends(every=None), "nowhere": Nowhere()}
    every, _, tokens = name.partition("-")
    if every == "every" and tokens.isdecimal() and 1 <= int(tokens) <= INT32_MAX:
        named[name] = Ends(every=int(tokens))
    if name not in named:
        raise InvalidArgument(f"placement {name!r}: expected {', '.join(PLACEMENTS)}, such as every-512")
    return named[name]


def prefix_of(policy: str, states: int, **settings: Any) -> Prefix:
    """Returns the settings of a prefix cache of so many states under a policy.

    Args:
        policy: A name of `POLICIES`.
        states: The most states that it keeps.
        settings: Further settings of `Prefix`.
    """
    of_states, of_pages = POLICIES[policy]
    return Prefix(of_states(), of_pages and of_pages(), most_states=states, **settings)
