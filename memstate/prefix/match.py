"""What a look into the prefix cache found, and why it was not more. Plain data."""

from dataclasses import dataclass, field, replace

from memstate.prefix.tree import Found
from memstate.requests.handles import Snapshot


@dataclass(frozen=True)
class Match:
    """How much of a prompt need not be computed. Lengths in tokens, from the start of the prompt.

    tokens: the prompt's. length: up to the deepest state, which is where a row starts. kv_length: as far as KV alone
    reaches. evicted_length: up to the deepest state that was here and was given up, `length` where there is none.
    snapshot: the state, None at length 0. host_length: up to a longer state in host memory, 0 where there is none.
    """

    tokens: int
    length: int
    kv_length: int
    evicted_length: int
    snapshot: Snapshot | None = None
    host_length: int = 0
    found: Found | None = field(default=None, repr=False, compare=False)

    @property
    def lost(self) -> dict[str, int]:
        """Tokens to compute, by reason: `no_sharing` (nobody computed them, their KV is gone, or they are the end of
        the prompt behind its last whole page that leaves a token to compute), `evicted` (a state was there),
        `no_snapshot` (KV is there, and never was there a state).
        """
        return {
            "no_sharing": self.tokens - self.kv_length,
            "evicted": self.evicted_length - self.length,
            "no_snapshot": self.kv_length - self.evicted_length,
        }

    @property
    def reason(self) -> str:
        """Why KV reaches further than the state: `evicted` or `no_snapshot`; else `no_sharing`, or `` for a full
        match.
        """
        lost = self.lost
        between = [reason for reason in ("evicted", "no_snapshot") if lost[reason]]
        return between[0] if between else "no_sharing" if lost["no_sharing"] else ""

    def instead(self, length: int) -> "Match":
        """The same look where another state, of `length` tokens, is gone on from: one that a session kept."""
        reach, gone = max(self.kv_length, length), max(self.evicted_length, length)
        return replace(self, length=length, kv_length=reach, evicted_length=gone, snapshot=None, found=None)

    def __str__(self) -> str:
        host = f", {self.host_length} in host memory" if self.host_length else ""
        why = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in self.lost.items() if n)
        found = f"{self.length} of {self.tokens} tokens by state, {self.kv_length} by KV{host}"
        return found + (f" ({why})" if why else "")
