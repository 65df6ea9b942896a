"""Turns a trace into requests with tokens. The module uses no manager and no cache.

The trace has one id for each block of 512 tokens of a prompt, and only the length of an answer. Two requests share
tokens as far as their ids agree. An answer has tokens of its own, unless a later request goes on from it: then the ids
of the later request also give the blocks of the answer. No request goes on from the answer of a request that has
`parts`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memstate.cli.traces import BLOCK, TraceRequest
from memstate.slots.registers import Longs


@dataclass(frozen=True)
class Units:
    """The unit in which lengths are counted. Coarse units make a replay fast; chunks and blocks are multiples of them.

    Args:
        tokens: Tokens of a unit. A block has at least two units, so that a block can be partly filled.
    """

    tokens: int

    @classmethod
    def of(cls, chunk: int) -> "Units":
        """Returns the coarsest unit for chunks of `chunk` tokens."""
        return cls(math.gcd(BLOCK // 2, chunk))

    @property
    def per_block(self) -> int:
        """Number of units of a block."""
        return BLOCK // self.tokens

    def length(self, tokens: int) -> int:
        """Returns a length in units. Filled blocks stay filled, and a partly filled block stays partly filled."""
        blocks, rest = divmod(tokens, BLOCK)
        return blocks * self.per_block + min(-(-rest // self.tokens), self.per_block - 1)


@dataclass(frozen=True, eq=False)
class UnitRequest:
    """One request of a trace. Lengths are in units.

    Attributes:
        at: Index of the request in the trace.
        tokens: The prompt and the answer, one number for each unit: int64 `unit`.
        prompt: Length of the prompt.
        asked: Blocks of the prompt, with the partly filled one.
        filled: Filled blocks of the prompt.
        known: Filled blocks at the start of the prompt that an earlier prompt had.
        follows: The request whose answer this prompt goes on from, or None.
        common: Tokens that the two requests share: see `TraceRequest.shared`.
        kind: See `memstate.Request`.
    """

    at: int
    tokens: Longs
    prompt: int
    asked: int
    filled: int
    known: int
    follows: int | None
    common: int
    kind: str | None = None


def numbered(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Returns the requests of a trace with small ids. Each new id stands for a block and all blocks before it.

    An id of the trace can be too large for int64, and can stand at several places of a prompt.
    """
    numbers: dict[tuple[int, int], int] = {}  # (new id of the block before, id in the trace) -> new id

    def chained(blocks: Sequence[int]) -> Iterator[int]:
        before = -1
        for block in blocks:
            before = numbers.setdefault((before, block), len(numbers))
            yield before

    return [replace(request, hash_ids=tuple(chained(request.hash_ids))) for request in requests]


def served(requests: Sequence[TraceRequest], units: Units) -> list[UnitRequest]:
    """Returns the requests of a trace with tokens.

    Args:
        requests: The requests of the trace, in its order.
        units: The unit in which lengths are counted.
    """
    follows, per, within = followed(requests), units.per_block, np.arange(units.per_block)
    following = {before: after for after, before in enumerate(follows) if before is not None}
    fresh = 1 + max((max(request.hash_ids, default=0) for request in requests), default=0)
    result, seen = [], set[int]()
    for at, request in enumerate(requests):
        filled, total = request.input_length // BLOCK, request.input_length + request.output_length
        blocks = -(-total // BLOCK)
        goes_on = at in following and request.parts is None
        later = requests[following[at]].hash_ids[:blocks] if goes_on else request.hash_ids
        ids = np.arange(fresh, fresh + blocks)  # new ids, for blocks of the answer that no other request has
        fresh += blocks
        ids[: len(later)] = later
        length = units.length(total)
        tokens = (ids[:, None] * per + within).reshape(-1)[:length]
        known = next((n for n, block in enumerate(request.hash_ids[:filled]) if block not in seen), filled)
        seen.update(request.hash_ids[:filled])
        before = follows[at]
        common = 0 if before is None else requests[before].shared
        prompt = units.length(request.input_length)
        asked = len(request.hash_ids)
        result.append(UnitRequest(at, tokens, prompt, asked, filled, known, before, common, request.kind))
    return result


def followed(requests: Sequence[TraceRequest]) -> list[int | None]:
    """Returns for each request the earlier request that it goes on from; None if the trace shows none.

    The candidate is the longest earlier prompt whose filled blocks begin this prompt; of several, the latest. The
    prompt goes on from the candidate if

    * the prompt is at least as long as the part that it shares with the candidate and its answer,
    * the last filled block of the candidate first appeared in the candidate or in an earlier turn of its conversation,
      so that a common system prompt does not count,
    * the next block is new, because the answer is new, and
    * no other prompt has gone on from the candidate.
    """
    owner: dict[int, int] = {}  # block -> the first request that filled it
    ends: dict[int, list[int]] = {}  # last filled block -> requests that end there and have no next turn yet
    origin: list[int] = []  # request -> the first request of its conversation
    earlier: list[int | None] = []
    for at, request in enumerate(requests):
        ids, filled = request.hash_ids, request.input_length // BLOCK
        before = None
        for end in range(filled, 0, -1):
            if open_ends := ends.get(ids[end - 1]):
                before = _last_that_fits(requests, open_ends, request.input_length)
                if before is not None and end < len(ids) and owner.get(ids[end], at) < at:
                    before = None
                break
        if before is not None:
            ends[ids[_begun(requests[before]) - 1]].remove(before)
        earlier.append(before)
        origin.append(at if before is None else origin[before])
        for block in ids[:filled]:
            owner.setdefault(block, at)
        last = _begun(request)
        if last and origin[owner[ids[last - 1]]] == origin[at]:
            ends.setdefault(ids[last - 1], []).append(at)
    return earlier


def _begun(request: TraceRequest) -> int:
    """Returns the number of filled blocks of a prompt with which the next turn begins."""
    return min(request.input_length, request.shared) // BLOCK


def _last_that_fits(requests: Sequence[TraceRequest], ends: Sequence[int], length: int) -> int | None:
    fits = (at for at in reversed(ends) if requests[at].shared <= length)
    return next(fits, None)
