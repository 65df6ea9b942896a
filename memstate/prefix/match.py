"""The result of a lookup in the prefix cache: how much of a prompt is cached, and why not more. Plain data."""

from dataclasses import dataclass, field, replace

from memstate.prefix.tree import Found
from memstate.requests.handles import Snapshot
from memstate.sheet import Sheet, Shown, bar, of_tokens, sheet


@dataclass(slots=True, unsafe_hash=True)
class Match(Shown):
    """How much of a prompt need not be computed. Lengths are tokens from the start of the prompt.

    Attributes:
        tokens: Tokens of the prompt.
        length: Tokens up to the deepest cached state. A row starts from this state.
        kv_length: Tokens up to which KV is cached.
        evicted_length: Tokens up to the deepest state that was evicted; `length` if there is none.
        snapshot: The deepest state, None at length 0.
        host_length: Tokens up to a longer state in host memory, 0 for none.
        found: The nodes of the tree that matched, for the cache itself.
        known_length: Tokens that the tree still remembers. Of those beyond `kv_length`, KV and states were evicted.

    Example:
        >>> match = Match(tokens=29, length=16, kv_length=20, evicted_length=16)
        >>> match.lost, match.reason
        ({'no_sharing': 9, 'evicted': 0, 'no_snapshot': 4}, 'no_snapshot')
        >>> print(match)
        16 of 29 tokens by state, 20 by KV (9 no sharing, 4 no snapshot)
    """

    tokens: int
    length: int
    kv_length: int
    evicted_length: int
    snapshot: Snapshot | None = None
    host_length: int = 0
    found: Found | None = field(default=None, repr=False, compare=False)
    known_length: int = field(default=0, repr=False, compare=False)

    @property
    def lost(self) -> dict[str, int]:
        """Tokens that must be computed, by the reason why no state covers them.

        `no_sharing`: they have no cached KV, or lie beyond the last page that a hit may cover.
        `evicted`: a state that covered them was evicted.
        `no_snapshot`: they have KV, but never had a state.
        """
        return {
            "no_sharing": self.tokens - self.kv_length,
            "evicted": self.evicted_length - self.length,
            "no_snapshot": self.kv_length - self.evicted_length,
        }

    @property
    def reason(self) -> str:
        """The reason why KV reaches further than the state: `evicted` or `no_snapshot`.

        `no_sharing` if KV reaches no further than the state, "" for a full match.
        """
        lost = self.lost
        between = [reason for reason in ("evicted", "no_snapshot") if lost[reason]]
        return between[0] if between else "no_sharing" if lost["no_sharing"] else ""

    def instead(self, length: int) -> "Match":
        """Returns this match with a session's own state in place of the cached one.

        Args:
            length: Tokens that the session's state stands for.
        """
        reach, gone = max(self.kv_length, length), max(self.evicted_length, length)
        return replace(self, length=length, kv_length=reach, evicted_length=gone, snapshot=None, found=None)

    def __str__(self) -> str:
        host = f", {self.host_length} in host memory" if self.host_length else ""
        why = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in self.lost.items() if n)
        reach = f"{self.length} of {self.tokens} tokens by state, {self.kv_length} by KV{host}"
        return reach + (f" ({why})" if why else "")

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        host = max(0, self.host_length - self.length)
        lost = {reason.replace("_", " "): count for reason, count in self.lost.items()}
        parts = [of_tokens("by state", self.length, "hit"), *(of_tokens(why, n, why) for why, n in lost.items())]
        notes = [f"KV alone reaches {self.kv_length:,} tokens."]
        notes += [f"Host memory has a state {host:,} tokens further."] if host else []
        notes += [f"Reason: {self.reason.replace('_', ' ')}."] if self.reason else []
        return sheet(f"Match({self})", [bar(f"{self.tokens:,} tokens of the prompt", parts)], notes=notes)
