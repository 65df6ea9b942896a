"""Placement policies: they choose the lengths of a prompt at which states are kept. They know lengths only."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.prefix.match import Match


class Placement(ABC):
    """Chooses the lengths of a prompt at which states are kept.

    Each length has a kind, which says why it was chosen; see `memstate.prefix.policies.Place`. States are kept at the
    lengths of `Request(snapshot_at=)` as well.
    """

    @abstractmethod
    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """Returns lengths in tokens, each with its kind, such as {64: "branch", 128: "prompt"}.

        The caller ignores lengths that the match covers and lengths beyond the prompt. `admit` refuses any other length
        that is not a multiple of the page size.

        Args:
            match: What the prompt found in the cache.
            page_size: Tokens of a KV page. If planes have a grid: the least common multiple of the page and the grid.
        """


@dataclass(frozen=True)
class Ends(Placement):
    """Keeps states at the end of a prompt, at its branch point, and at regular distances in between.

    The lengths are:

    * the end of the prompt: the last whole page that leaves `spare` tokens to compute
    * the branch point: cached KV reaches it, but no cached state does
    * the length of an evicted state
    * the multiples of `every` before the end

    That is about one state per path, and more for long prompts. `spare` is at least 1, because every request computes
    at least its last token. So when the same prompt comes again, it hits the state at its end.

    With templates of thinking models, the prompt of the next turn differs from this one in its last 0 to 10 tokens.
    `spare=8` keeps a state before most of these points. It pays if the prompts of turns differ from 2 tokens or more
    before the end on, and pages have 16 tokens or more. Otherwise it costs time: the same prompt computes up to 7
    tokens more, rounded up to whole pages. If Transformers renders the prompts, `mst.chat` finds the point from the
    template instead.

    Args:
        every: Tokens between two states of a long prompt, rounded up to whole pages. None: no states in between.
        spare: Least number of tokens of the prompt that are computed after the last state.

    Raises:
        ConfigurationError: `every` or `spare` is not a whole number from 1 on.

    Example:
        >>> Ends(every=16).marks(Match(tokens=29, length=0, kv_length=8, evicted_length=0), page_size=8)
        {16: 'every', 0: 'again', 8: 'branch', 24: 'prompt'}
    """

    every: int | None = 8192
    spare: int = 1

    def __post_init__(self) -> None:
        if self.every is not None and (not is_count(self.every) or self.every < 1):
            raise ConfigurationError(f"{self}: expected a whole number of tokens from 1 on, or None")
        if not is_count(self.spare) or self.spare < 1:
            raise ConfigurationError(f"{self}: spare: expected a whole number of tokens from 1 on")

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """See `Placement.marks`."""
        end = max(0, match.tokens - self.spare) // page_size * page_size
        kinds: dict[int, str] = {}
        if self.every is not None:
            distance = -(-self.every // page_size) * page_size
            first = match.length // distance * distance + distance
            kinds = dict.fromkeys(range(first, end + 1, distance), "every")
        again, branch = (length // page_size * page_size for length in (match.evicted_length, match.kv_length))
        if again not in kinds:
            kinds[again] = "again"
        return kinds | {branch: "branch", end: "prompt"}


@dataclass(frozen=True)
class Nowhere(Placement):
    """Keeps states only at the lengths that requests name, `Request(snapshot_at=)`.

    Example:
        >>> Nowhere().marks(Match(tokens=40, length=0, kv_length=0, evicted_length=0), page_size=8)
        {}
    """

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """See `Placement.marks`."""
        return {}
