"""The requests of a server that have not started: which is next, and which waits for what another one reads."""

from bisect import bisect
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from typing import Final

from memstate.engine.manager import StateManager
from memstate.errors import MemstateError
from memstate.integrations.transformers.running import Asked, Running

PASSES: Final = 64  # times that other tenants go before the oldest request of a priority


class Line:
    """Requests that wait, as they came.

    Higher priorities start first. Among tenants of one priority, the one with the fewest tokens starts first. A tenant
    that comes back starts with the least count of the tenants that stayed, or its own if that is more: Sheng et al.,
    "Fairness in Serving Large Language Models", OSDI 2024. At most `PASSES` later requests go before the oldest one of
    their priority.

    Attributes:
        waiting: the requests.
    """

    def __init__(self) -> None:
        self.waiting: deque[Asked] = deque()
        self._tokens: dict[Hashable, int] = {}  # of tenants: read and chosen
        self._active = set[Hashable]()  # tenants with requests when the order was last asked for

    def order(self, running: Collection[Running]) -> list[Asked]:
        """Returns the requests, the next one first.

        Args:
            running: the rows that run.
        """
        active = {one.prompt.tenant for one in self.waiting} | {one.prompt.tenant for one in running}
        if active != self._active:
            least = min((self._tokens[tenant] for tenant in active & self._active), default=None)
            before = {} if least is None else self._tokens  # nobody stayed: all begin again
            kept = {tenant: tokens for tenant, tokens in before.items() if tokens > (least or 0)}
            self._tokens = dict.fromkeys(active, least or 0) | kept
            self._active = active
        return sorted(
            self.waiting,
            key=lambda one: (-one.prompt.priority, 0 if one.passed >= PASSES else self._tokens[one.prompt.tenant]),
        )

    def charge(self, one: Asked, tokens: int) -> None:
        """Counts tokens that were read or chosen for a request."""
        tenant = one.prompt.tenant
        self._tokens[tenant] = self._tokens.get(tenant, 0) + tokens

    def start(self, one: Asked, tokens: int) -> None:
        """Takes the request that starts out of the line.

        Args:
            one: the request.
            tokens: of its prompt, that it has to read.
        """
        oldest = next(other for other in self.waiting if other.prompt.priority == one.prompt.priority)
        oldest.passed += oldest is not one
        self.waiting.remove(one)
        self.charge(one, tokens)

    def leave(self, gone: Collection[Asked]) -> None:
        """Takes requests out of the line that do not start."""
        self.waiting = deque(one for one in self.waiting if one not in gone)


def waits_for_reader(one: Asked, running: Collection[Running], mem: StateManager) -> bool:
    """Returns whether a row reads more of the beginning of a prompt than the cache has. Asks it to keep a state there.

    A request waits again only if the last wait was worth it, or if that row has ended early.

    Args:
        one: the request that would start.
        running: the rows that run.
        mem: the manager; it has a prefix cache.

    Syncs: no.
    """
    prompt, unit = one.prompt, mem.pages.size
    if one.reader is not None and one.reader[0].length < one.reader[1] and one.reader[0] in running:
        return True
    found: tuple[int, int, Running | None] = (0, 0, None)
    for row in running:
        other = row.prompt
        if row.length < len(other.tokens) and (other.salt, True) == (prompt.salt, other.priority >= prompt.priority):
            length = shared(prompt.tokens[:-1], other.tokens, unit)
            if length > row.length and (length, row.length) > found[:2]:
                found = length, row.length, row
    length, _, reader = found
    with suppress(MemstateError):  # a session that was closed: admission says so
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
    """Returns how many tokens two prompts begin with alike, in whole pages.

    Args:
        one: tokens.
        other: tokens.
        unit: tokens of a page.
    """
    if one[:unit] != other[:unit]:
        return 0
    pages = range(1, min(len(one), len(other)) // unit + 1)
    return unit * bisect(pages, False, key=lambda count: one[: count * unit] != other[: count * unit])
