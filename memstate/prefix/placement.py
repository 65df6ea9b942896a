"""Placement policies: at which lengths of its prompt a request keeps states. They know lengths only."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.prefix.match import Match


class Placement(ABC):
    """Names the lengths of a prompt at which states are kept.

    What a length is good for is its kind, see `memstate.prefix.policies.Place`. The lengths that a request names
    itself, with `snapshot_at`, come on top.
    """

    @abstractmethod
    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """Returns lengths in tokens, each with its kind, such as {64: "branch", 128: "prompt"}.

        Lengths that the match covers, and those beyond the prompt, are ignored. `admit` refuses anything else that is
        not a multiple of the page size.

        Args:
            match: What the prompt found in the cache.
            page_size: Tokens of a KV page. Where planes have a grid, tokens that fill whole pages and the grid.
        """


@dataclass(frozen=True)
class Ends(Placement):
    """Keeps a state where a prompt ends, where it leaves what is known, and now and then in between.

    The lengths are the last whole page that leaves `spare` tokens of the prompt to compute, the branch point (KV
    reached it and no state did), the length of an evicted state, and the multiples of `every` up to that page. That is
    about one state a path, and more for long prompts. A request computes the last token in any case, so the same
    prompt hits.

    With templates of thinking models, the next turn parts 0 to 10 tokens before the end of a prompt. `spare=8` keeps
    the state before most of these. It pays from 2 tokens on, with pages of 16 and more. Otherwise it loses: the same
    prompt computes up to 7 tokens more, rounded up to whole pages. Where Transformers renders the prompts, `mst.chat`
    asks the template instead.

    Args:
        every: Tokens between two states of a long prompt, rounded up to whole pages. None: no states in between.
        spare: Tokens of the prompt to compute behind the state at its end.

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
        found: dict[int, str] = {}
        if self.every is not None:
            distance = -(-self.every // page_size) * page_size
            first = match.length // distance * distance + distance
            found = dict.fromkeys(range(first, end + 1, distance), "every")
        again, branch = (length // page_size * page_size for length in (match.evicted_length, match.kv_length))
        if again not in found:
            found[again] = "again"
        return found | {branch: "branch", end: "prompt"}


@dataclass(frozen=True)
class Nowhere(Placement):
    """Keeps only the states that requests name themselves.

    Example:
        >>> Nowhere().marks(Match(tokens=40, length=0, kv_length=0, evicted_length=0), page_size=8)
        {}
    """

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """See `Placement.marks`."""
        return {}
