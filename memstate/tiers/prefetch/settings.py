"""Settings of prefetches, with checks of their values."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from memstate.checks import is_count
from memstate.errors import ConfigurationError

StopPolicy = Literal["timeout", "wait_complete", "best_effort"]


@dataclass(frozen=True)
class Prefetch:
    """Configures prefetches from storage: which are worth their cost, and when they stop.

    Args:
        threshold: Least number of tokens that a prefetch must save. Smaller prefetches are not made.
        limit: Tokens that all prefetches together may fetch at a time: a whole number, or None for no limit. A float
            from 0 to 1 is a share of the host memory that is no copy of device memory. If a prompt lacks more tokens
            than the limit allows, only its first ones are fetched.
        stop: What happens to a prefetch whose request could be admitted. `timeout` stops it after `timeout` seconds
            plus `timeout_per_page` seconds for each missing page. `wait_complete` lets it end. `best_effort` stops it
            at once; so a request that can run as soon as it arrives gets nothing from storage.
        timeout: Seconds that `stop="timeout"` gives to every prefetch.
        timeout_per_page: Seconds that `stop="timeout"` adds for each missing page.
        chunk: Number of records in one call of storage.

    Raises:
        ConfigurationError: A setting is out of range.

    Example:
        >>> Prefetch(threshold=64).patience(pages=100)
        2.0
    """

    threshold: int = 256
    limit: int | float | None = 0.8
    stop: StopPolicy = "timeout"
    timeout: float = 1.0
    timeout_per_page: float = 0.01
    chunk: int = 32

    def __post_init__(self) -> None:
        part = isinstance(self.limit, float) and 0 < self.limit <= 1
        if not is_count(self.threshold) or not (self.limit is None or part or is_count(self.limit)):
            raise ConfigurationError(
                f"threshold={self.threshold!r}, limit={self.limit!r}: expected numbers of tokens, or a part of host "
                "memory such as 0.8 as the limit"
            )
        if is_count(self.limit) and self.limit < self.threshold:
            raise ConfigurationError(
                f"limit={self.limit} below threshold={self.threshold}: nothing would ever be fetched"
            )
        if self.stop not in get_args(StopPolicy):
            raise ConfigurationError(f"stop={self.stop!r}: expected one of {', '.join(get_args(StopPolicy))}")
        for name, seconds in (("timeout", self.timeout), ("timeout_per_page", self.timeout_per_page)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds!r}: expected seconds from 0 on")
        if not is_count(self.chunk) or self.chunk < 1:
            raise ConfigurationError(f"chunk={self.chunk!r}: expected at least 1 record")

    def in_tokens(self, host: int, device: int) -> "Prefetch":
        """Returns these settings with the limit as a number of tokens.

        At least half of host memory is taken to be no copy of device memory.

        Args:
            host: Tokens for which host memory has room; 0 if it keeps no KV: then there is no limit.
            device: How many of these tokens are a copy of device memory.

        Example:
            >>> Prefetch(threshold=64).in_tokens(host=3000, device=1000).limit
            1600
        """
        if not isinstance(self.limit, float):
            return self
        tokens = max(self.threshold, int(self.limit * max(host - device, host // 2)))
        return replace(self, limit=tokens if host else None)

    def patience(self, pages: int) -> float:
        """Returns the seconds after which `stop="timeout"` stops a prefetch with that many missing pages."""
        return self.timeout + pages * self.timeout_per_page
