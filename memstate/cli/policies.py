"""Finds policies and placements by their names on the command line."""

from collections.abc import Callable
from typing import Any

from memstate.checks import INT32_MAX
from memstate.cli.own import own
from memstate.errors import InvalidArgument
from memstate.prefix import Prefix
from memstate.prefix.placement import Ends, Nowhere, Placement
from memstate.prefix.policies.base import PagePolicy, StatePolicy
from memstate.prefix.policies.flop_aware import FlopAware
from memstate.prefix.policies.lru import Lru, LruPages
from memstate.prefix.policies.return_rate import ReturnRate

Named = str | Callable[[], StatePolicy]
# (function that makes a policy for states; function that makes one for pages, or None)
Factories = tuple[Callable[[], StatePolicy], Callable[[], PagePolicy] | None]
POLICIES: dict[str, Factories] = {
    "lru": (Lru, lambda: LruPages(tombstones=False)),
    "lru-tombstones": (Lru, LruPages),
    "flop-aware": (FlopAware, LruPages),
    "return-rate": (ReturnRate, None),
}
PLACEMENTS = ("ends", "ends-only", "every-N", "nowhere")


def placement_of(name: str) -> Placement:
    """Returns the placement of a name.

    Args:
        name: One of `PLACEMENTS`, with a number of tokens in place of N.

    Raises:
        InvalidArgument: There is no such placement.

    Example:
        >>> placement_of("every-512")
        Ends(every=512, spare=1)
    """
    named = {"ends": Ends(), "ends-only": Ends(every=None), "nowhere": Nowhere()}
    every, _, tokens = name.partition("-")
    if every == "every" and tokens.isdecimal() and 1 <= int(tokens) <= INT32_MAX:
        named[name] = Ends(every=int(tokens))
    if name not in named:
        raise InvalidArgument(f"placement {name!r}: expected {', '.join(PLACEMENTS)}, such as every-512")
    return named[name]


def prefix_of(policy: Named, states: int, **settings: Any) -> Prefix:
    """Returns the settings of a prefix cache with a policy.

    Args:
        policy: A policy, see `factories_of`.
        states: Largest number of cached states.
        settings: Further settings of `Prefix`.

    Raises:
        InvalidArgument: There is no such policy.
        ConfigurationError: The policy is no `StatePolicy`.
    """
    of_states, of_pages = factories_of(policy)
    return Prefix(of_states(), of_pages and of_pages(), most_states=states, **settings)


def factories_of(policy: Named) -> Factories:
    """Returns a function that makes a policy for states, and one for pages (None: `Prefix` chooses the latter).

    Args:
        policy: A name of `POLICIES`; or a class or function that makes a policy for states; or its name, module:name.

    Raises:
        InvalidArgument: There is no such policy.
    """
    if not isinstance(policy, str):
        if not callable(policy):
            raise InvalidArgument(f"policy {policy!r}: expected a name, or a class or function that makes one")
        return policy, None
    return POLICIES.get(policy) or (own("policy", policy, f"{', '.join(POLICIES)}, bound, or module:class"), None)
