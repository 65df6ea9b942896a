"""Orders the requests that wait for a server, and lets a request wait while another one reads the same beginning."""

from bisect import bisect
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from typing import Final

from memstate.engine.manager import StateManager
from memstate.errors import MemstateError
from memstate.integrations.transformers.running import Running, Submission

PASSES: Final = 64  # limit of the later requests that may start before the oldest request of their priority


class Line:
    """Waiting requests, in the order in which they came.

    Higher priorities start first. Among tenants of one priority, the one with the smallest count of tokens comes first.
    A tenant that comes back continues with its own count, or with the smallest count of the tenants that stayed if that
    is larger: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. At most `PASSES` later requests
    start before the oldest request of their priority.

    Attributes:
        waiting: the waiting requests.
    """

    def __init__(self) -> None:
        self.waiting: deque[Submission] = deque()
        self._tokens: dict[Hashable, int] = {}  # tenant -> count of the tokens that were read or chosen for it
        self._active = set[Hashable]()  # tenants with requests at the last call of `order`

    def order(self, running: Collection[Running]) -> list[Submission]:
        """Returns the waiting requests, the next one first.

        Args:
            running: the running rows.
        """
        active = {one.prompt.tenant for one in self.waiting} | {one.prompt.tenant for one in running}
        if active != self._active:
            least = min((self._tokens[tenant] for tenant in active & self._active), default=None)
            before = {} if least is None else self._tokens  # no tenant stayed: all begin at 0
            kept = {tenant: tokens for tenant, tokens in before.items() if tokens > (least or 0)}
            self._tokens = dict.fromkeys(active, least or 0) | kept
            self._active = active
        return sorted(
            self.waiting,
            key=lambda one: (-one.prompt.priority, 0 if one.passed >= PASSES else self._tokens[one.prompt.tenant]),
        )

    def charge(self, one: Submission, tokens: int) -> None:
        """Counts tokens that were read or chosen for a request."""
        tenant = one.prompt.tenant
        self._tokens[tenant] = self._tokens.get(tenant, 0) + tokens

    def start(self, one: Submission, tokens: int) -> None:
        """Removes a request from the line because it starts.

        Args:
            one: the request.
            tokens: number of tokens of its prompt that it must read.
        """
        oldest = next(other for other in self.waiting if other.prompt.priority == one.prompt.priority)
        oldest.passed += oldest is not one
        self.waiting.remove(one)
        self.charge(one, tokens)

    def leave(self, gone: Collection[Submission]) -> None:
        """Removes from the line the requests that will not start."""
        self.waiting = deque(one for one in self.waiting if one not in gone)


def waits_for_reader(one: Submission, running: Collection[Running], mem: StateManager) -> bool:
    """Returns whether a request should wait for a row that reads the same beginning, and more of it than is cached.

    If so, asks that row to keep a state where the two prompts part. A request waits again only if its last wait helped,
    or if the row for which it waited ended early.

    Args:
        one: the request that would start.
        running: the running rows.
        mem: the manager, with a prefix cache.

    Syncs: no.
    """
    prompt, unit = one.prompt, mem.pages.size
    if one.reader is not None and one.reader[0].length < one.reader[1] and one.reader[0] in running:
        return True
    longest: tuple[int, int, Running | None] = (0, 0, None)
    for row in running:
        other = row.prompt
        if row.length < len(other.tokens) and (other.salt, True) == (prompt.salt, other.priority >= prompt.priority):
            length = shared(prompt.tokens[:-1], other.tokens, unit)
            if length > row.length and (length, row.length) > longest[:2]:
                longest = length, row.length, row
    length, _, reader = longest
    with suppress(MemstateError):  # the session was closed: admission reports it
        if reader is not None:
            match = mem.match(prompt.tokens, prompt.salt, prompt.session)
            known = max(match.length, match.host_length)
            in_vain = one.reader is not None and known < one.reader[1] <= one.reader[0].length
            if known < length and not in_vain:
                mem.snapshot_at(reader.row, [length])
                one.reader = reader, length
                return True
    return False


def shared(one: Sequence[int], other: Sequence[int], unit: int) -> int:
    """Returns how many first tokens two prompts have in common, rounded down to whole pages.

    Args:
        one: tokens.
        other: tokens.
        unit: tokens of a page.
    """
    if one[:unit] != other[:unit]:
        return 0
    pages = range(1, min(len(one), len(other)) // unit + 1)
    return unit * bisect(pages, False, key=lambda count: one[: count * unit] != other[: count * unit])
