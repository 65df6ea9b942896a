"""Placement policies: they choose the lengths of a prompt at which states are kept. They know lengths only."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.prefix.match import Match


class Placement(ABC):
    """Names the lengths of a prompt at which states are kept.

    Each length has a kind, which says why it was chosen; see `memstate.prefix.policies.Place`. States are kept at the
    lengths of `Request(snapshot_at=)` as well.
    """

    @abstractmethod
    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """Returns lengths in tokens, each with its kind, such as {64: "branch", 128: "prompt"}.

        Lengths that the match covers, and those beyond the prompt, are ignored. `admit` refuses anything else that is
        not a multiple of the page size.

        Args:
            match: What the prompt found in the cache.
            page_size: Tokens of a KV page. If planes have a grid: the least number of tokens that fills whole pages and
                whole cells of the grid.
        """


@dataclass(frozen=True)
class Ends(Placement):
    """Keeps states at the end of a prompt, at its branch point, and at regular distances in between.

    The lengths are:

    * the end of the prompt: the last whole page that leaves `spare` tokens to compute
    * the branch point: cached KV reaches it, and no state does
    * the length of an evicted state
    * the multiples of `every` before the end

    That is about one state a path, and more for long prompts. The same prompt hits the state at its end, because every
    request computes at least its last token.

    With templates of thinking models, the next turn leaves the prompt 0 to 10 tokens before its end. `spare=8` keeps a
    state before most of these points. It pays if turns part 2 tokens or more before the end, and pages have 16 tokens
    or more. Otherwise it loses: the same prompt computes up to 7 tokens more, rounded up to whole pages. If
    Transformers renders the prompts, `mst.chat` asks the template instead.

    Args:
        every: Tokens between two states of a long prompt, rounded up to whole pages. None: no states in between.
        spare: Tokens of the prompt that the last state leaves to compute, at least.

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
    """Keeps only the states that requests name themselves.

    Example:
        >>> Nowhere().marks(Match(tokens=40, length=0, kv_length=0, evicted_length=0), page_size=8)
        {}
    """

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """See `Placement.marks`."""
        return {}
