"""Settings of sessions, with checks of their values."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits what idle sessions keep.

    If room is short, expired sessions give up their states first, then sessions beyond `share`, then the prefix cache,
    then the other sessions. Among sessions, the lowest priority goes first; at equal priority, the least recently used.

    Args:
        share: part of all slots, from 0 to 1, that idle sessions may keep while cached states could be evicted instead.
            It limits nothing while slots are free.
        per_session: limit of the states that one session keeps; it keeps the longest. None: all that its row held, up
            to 3.
        most_states: limit of the states that all idle sessions together keep. None: no limit.
        clock: function that returns the time in seconds, for `ttl` and for the ages of requests and sessions in
            figures. Ranks of tensor parallelism need a clock that gives all of them the same time, such as the number
            of the step. It must not raise: an error can interrupt a call that ends a turn or frees slots, and then the
            manager is `Broken`. Threads that read figures call it, too.

    Raises:
        ConfigurationError: a setting is out of range.

    Example:
        >>> SessionLimits(most_states=64).share
        0.5
    """

    share: float = 0.5
    per_session: int | None = None
    most_states: int | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 <= self.share <= 1:
            raise ConfigurationError(f"share={self.share!r}: expected a part of the slots, from 0 to 1")
        for name, most, least in (("per_session", self.per_session, 1), ("most_states", self.most_states, 0)):
            if most is not None and not (is_count(most) and most >= least):
                raise ConfigurationError(f"{name}={most!r}: expected a number of states from {least} on, or None")
        if not callable(self.clock):
            raise ConfigurationError(f"clock={self.clock!r}: expected a function that returns seconds")


def is_duration(value: object) -> bool:
    """Returns whether a value is a number of seconds from 0 on that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max
