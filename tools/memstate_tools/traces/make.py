"""Makes synthetic traces: conversations, questions to a few long prompts, agents, and all of these at once.

Lengths and times are drawn at random; block ids follow from them. A text is a name and a length, and no name has two
lengths. So two blocks hold the same tokens exactly if they are cut from the same texts at the same places. Texts whose
name is below 0 are tails and thoughts, which later prompts lack.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from typing import Final

from memstate.checks import is_count
from memstate.cli.traces.form import BLOCK, TraceRequest
from memstate.errors import InvalidArgument

Text = tuple[int, int]  # name, number of tokens
Context = tuple[Text, ...]


@dataclass(frozen=True)
class Spread:
    """A log-normal distribution, cut off at both ends. Half of the drawn numbers lie below the median."""

    median: float
    sigma: float
    least: float
    most: float


# all kinds; lengths are in tokens
STRIDE: Final = 64  # requests between two reports of progress
CONTEXT: Final = 131072  # tokens of the longest input; a session ends before a longer one
MOST: Final = 32768  # tokens of a tail or of thoughts, so few that the first prompt of each session fits
FIRST_TOKEN_MS: Final = 300.0  # from a request to the first token of its answer
TOKEN_MS: Final = 20.0  # from one token of an answer to the next; the next request waits for the whole answer

# chat: people who read, think and answer
CHAT_GAP_MS: Final = 1000.0  # mean time between two new conversations
CHAT_SYSTEM: Final = 700  # the one system prompt: a whole block that all share, and the beginning of another
CHAT_OPENING: Final = Spread(1500, 1.4, 8, 65536)  # the first message: often a pasted document, sometimes a book
CHAT_MESSAGE: Final = Spread(120, 1.3, 2, 16384)  # later messages: a line, rarely pages
CHAT_ANSWER: Final = Spread(350, 0.7, 1, 2000)  # answers without thoughts: half of them above 350 tokens
CHAT_MORE: Final = 0.7  # the chance of another turn: 3.3 turns on average
CHAT_THINK_MS: Final = Spread(25_000, 1.0, 1000, 1_800_000)  # from the end of an answer to the next message

# shared-prompt: one program for each of a few prompts, and one request for each question
SHARED_GAP_MS: Final = 250.0  # mean time between two requests
SHARED_PROMPTS: Final = 20  # number of system prompts
SHARED_ZIPF: Final = 1.0  # the prompt of rank r is chosen in proportion to r ** -SHARED_ZIPF
SHARED_PROMPT: Final = Spread(4000, 0.5, 1100, 16384)  # a system prompt: instructions and worked examples
SHARED_QUESTION: Final = Spread(250, 1.1, 4, 8192)  # the question below the prompt
SHARED_ANSWER: Final = Spread(150, 0.9, 1, 2000)  # answers: mostly short and of a fixed form

# agent: programs that call tools in bursts, hand parts of a task to branches, and sometimes ask a person
AGENT_GAP_MS: Final = 8000.0  # mean time between two new tasks
AGENT_PREAMBLE: Final = 3500  # the tools of all agents: six whole blocks, and the beginning of another
AGENT_TASK: Final = Spread(500, 1.0, 16, 16384)  # what a person asks for, at the start and after a burst
AGENT_CALL: Final = Spread(90, 0.8, 8, 2000)  # generated text: a call, rarely a file to write
AGENT_RESULT: Final = Spread(400, 1.4, 4, 16384)  # result of a tool: a line, or a whole file
AGENT_TOOL_MS: Final = Spread(1200, 0.9, 50, 60_000)  # how long a tool runs
AGENT_MORE_CALLS: Final = 0.88  # the chance of another call in a burst: 8.3 requests on average
AGENT_FORK: Final = 0.08  # the chance that a call starts branches: each goes on from the same context
AGENT_BRANCHES: Final = (2, 4)  # how many branches start together, at least and at most
AGENT_BRIEF: Final = Spread(150, 0.6, 16, 2048)  # text that tells a branch its part of the task
AGENT_MORE_IN_BRANCH: Final = 0.6  # the chance of another call in a branch: 2.5 requests on average
AGENT_REPORT: Final = Spread(300, 0.6, 16, 2048)  # text that a branch leaves in the context from which it came
AGENT_MORE_BURSTS: Final = 0.45  # the chance that the person goes on after a burst: 1.8 bursts on average
AGENT_PAUSE_MS: Final = Spread(45_000, 0.8, 2000, 1_800_000)  # time until the person goes on

# mixed: all of these in one service, and questions to texts that are looked up once
RETRIEVAL_GAP_MS: Final = 500.0  # mean time between two requests
RETRIEVAL_TEXTS: Final = Spread(10_000, 0.7, 2000, 58_000)  # tokens of the texts and the question together
RETRIEVAL_ANSWER: Final = Spread(250, 0.7, 1, 2000)  # tokens of an answer


@dataclass(frozen=True)
class _Turn:
    at: float
    context: Context
    answer: int
    kind: str | None = None
    parts: int | None = None


class Numbering:
    """Gives ids to blocks in the order in which the blocks first appear, from 0 on.

    Two ids are equal exactly if the blocks are cut from equal texts at equal places and all blocks before them are
    equal. A partly filled block and the same block after it is filled have different ids.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}

    def ids(self, context: Context) -> tuple[int, ...]:
        """Returns an id for each block of 512 tokens of the joined texts. The last block may be shorter.

        Syncs: no.
        """
        ids: list[int] = []
        block: list[tuple[int, int]] = []  # (name, first token) of each text in the block
        room = BLOCK
        for name, length in context:
            done = 0
            while done < length:
                end = min(length, done + room)
                block.append((name, done))
                room -= end - done
                done = end
                if not room:
                    ids.append(self._number(ids, block))
                    block, room = [], BLOCK
        return (*ids, self._number(ids, block)) if block else tuple(ids)

    def _number(self, before: list[int], block: list[tuple[int, int]]) -> int:
        return self._ids.setdefault((before[-1] if before else -1, tuple(block)), len(self._ids))


class _Draw:
    """Draws all random numbers of a trace from one seed, and makes new texts.

    Attributes:
        tail: Text at the end of every prompt.
    """

    def __init__(self, kind: str, seed: int, tail: int = 0, thoughts: int = 0) -> None:
        self.random = random.Random(f"memstate trace {kind} {seed}")
        self._names, self._thoughts, self._length = count(), count(-2, -1), thoughts
        self.tail: Context = ((-1, tail),) if tail else ()

    def amount(self, spread: Spread) -> float:
        drawn = self.random.lognormvariate(math.log(spread.median), spread.sigma)
        return min(spread.most, max(spread.least, drawn))

    def text(self, length: Spread | int) -> Text:
        return next(self._names), length if isinstance(length, int) else round(self.amount(length))

    def thoughts(self) -> Context:
        return ((next(self._thoughts), self._length),) if self._length else ()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def arrivals(self, gap: float) -> Iterator[float]:
        """Yields the times of a Poisson process. The first time is 0."""
        at = 0.0
        while True:
            yield at
            at += self.random.expovariate(1 / gap)


def make(
    kind: str, requests: int, seed: int, progress: Callable[[int, int], None] = lambda done, total: None, *,
    tail: int = 0, thoughts: int = 0,
) -> list[TraceRequest]:  # fmt: skip
    """Returns the first requests of an endless trace, by time.

    The same kind and seed give the same requests, so a longer trace begins with the shorter one. Ids count up from 0 as
    blocks first appear. The start is colder than the rest: no session was under way before time 0.

    Args:
        kind: One of `KINDS`.
        requests: Number of requests.
        seed: A whole number.
        progress: Called with (requests done, requests in all).
        tail: Tokens at the end of each prompt that the next turn lacks, such as those that a chat template puts before
            an answer.
        thoughts: Tokens at the start of each answer that later prompts lack. In a tool loop they stay until a person
            asks the next question.

    Raises:
        InvalidArgument: A value is out of range.

    Syncs: no.
    """
    if kind not in _SESSIONS:
        raise InvalidArgument(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
    if requests < 1:
        raise InvalidArgument(f"requests={requests!r}: expected a whole number from 1 on")
    for name, value in (("tail", tail), ("thoughts", thoughts)):
        if not is_count(value) or value > MOST:
            raise InvalidArgument(f"{name}={value!r}: expected a whole number of tokens from 0 to {MOST}")
    numbering, sessions = Numbering(), _SESSIONS[kind]
    turns = islice(_by_time(sessions(_Draw(kind, seed, tail, thoughts))), requests)
    made = list[TraceRequest]()
    for turn in turns:
        ids = numbering.ids(turn.context)
        made.append(TraceRequest(int(turn.at), _tokens(turn.context), turn.answer, ids, turn.kind, turn.parts))
        if not len(made) % STRIDE:
            progress(len(made), requests)
    return made


def _by_time(sessions: Iterator[list[_Turn]]) -> Iterator[_Turn]:
    """Yields the turns of sessions by time. A turn is yielded once no session to come can have an earlier one."""
    waiting: list[tuple[float, int, _Turn]] = []
    tickets = count()
    for session in sessions:
        while waiting and waiting[0][0] <= session[0].at:
            yield heapq.heappop(waiting)[2]
        for turn in session:
            heapq.heappush(waiting, (turn.at, next(tickets), turn))


def _tokens(context: Context) -> int:
    return sum(length for _, length in context)


def _answered(draw: _Draw, turns: list[_Turn], context: Context, at: float, answer: Spread) -> tuple[Context, float]:
    """Adds a turn. Returns the context with thoughts and answer, and the time when the answer is complete."""
    answered = (*draw.thoughts(), draw.text(answer))
    length = _tokens(answered)
    turns.append(_Turn(at, (*context, *draw.tail), length, parts=_tokens(draw.tail) or None))
    return (*context, *answered), at + FIRST_TOKEN_MS + TOKEN_MS * length


def _without_thoughts(turns: list[_Turn], context: Context) -> Context:
    """Returns a context without thoughts, for the next question. Notes in the last turn how many tokens that drops."""
    first = next((at for at, (name, _) in enumerate(context) if name < 0), None)
    if first is None:
        return context
    turns[-1] = replace(turns[-1], parts=_tokens(turns[-1].context) - _tokens(context[:first]))
    return tuple(text for text in context if text[0] >= 0)


def _fits(draw: _Draw, context: Context) -> bool:
    return _tokens((*context, *draw.tail)) <= CONTEXT


def _chat(draw: _Draw) -> Iterator[list[_Turn]]:
    system = draw.text(CHAT_SYSTEM)
    for start in draw.arrivals(CHAT_GAP_MS):
        turns: list[_Turn] = []
        context: Context = (system, draw.text(CHAT_OPENING))
        at = start
        while _fits(draw, context):
            context, at = _answered(draw, turns, context, at, CHAT_ANSWER)
            if not draw.chance(CHAT_MORE):
                break
            context = (*_without_thoughts(turns, context), draw.text(CHAT_MESSAGE))
            at += draw.amount(CHAT_THINK_MS)
        yield turns


def _shared_prompt(draw: _Draw) -> Iterator[list[_Turn]]:
    prompts = [draw.text(SHARED_PROMPT) for _ in range(SHARED_PROMPTS)]
    weights = list(accumulate(rank**-SHARED_ZIPF for rank in range(1, SHARED_PROMPTS + 1)))
    for start in draw.arrivals(SHARED_GAP_MS):
        (prompt,) = draw.random.choices(prompts, cum_weights=weights)
        turns: list[_Turn] = []
        _answered(draw, turns, (prompt, draw.text(SHARED_QUESTION)), start, SHARED_ANSWER)
        yield turns


def _agent(draw: _Draw) -> Iterator[list[_Turn]]:
    preamble = draw.text(AGENT_PREAMBLE)
    for start in draw.arrivals(AGENT_GAP_MS):
        turns: list[_Turn] = []
        context, at = _burst(draw, turns, (preamble, draw.text(AGENT_TASK)), start, AGENT_MORE_CALLS, AGENT_FORK)
        while draw.chance(AGENT_MORE_BURSTS):
            context = (*_without_thoughts(turns, context), draw.text(AGENT_TASK))
            at += draw.amount(AGENT_PAUSE_MS)
            context, at = _burst(draw, turns, context, at, AGENT_MORE_CALLS, AGENT_FORK)
        yield turns


def _burst(
    draw: _Draw, turns: list[_Turn], context: Context, at: float, more: float, fork: float
) -> tuple[Context, float]:
    """Adds the turns of a burst of calls, and of the branches that some calls start."""
    while _fits(draw, context):
        context, at = _answered(draw, turns, context, at, AGENT_CALL)
        if not draw.chance(more):
            break
        if draw.chance(fork):
            briefs = [draw.text(AGENT_BRIEF) for _ in range(draw.random.randint(*AGENT_BRANCHES))]
            ends = [_burst(draw, turns, (*context, brief), at, AGENT_MORE_IN_BRANCH, 0.0)[1] for brief in briefs]
            context, at = (*context, *(draw.text(AGENT_REPORT) for _ in ends)), max(ends)
        else:
            context, at = (*context, draw.text(AGENT_RESULT)), at + draw.amount(AGENT_TOOL_MS)
    return context, at


def _retrieval(draw: _Draw) -> Iterator[list[_Turn]]:
    system = draw.text(CHAT_SYSTEM)
    for start in draw.arrivals(RETRIEVAL_GAP_MS):
        turns: list[_Turn] = []
        _answered(draw, turns, (system, draw.text(RETRIEVAL_TEXTS)), start, RETRIEVAL_ANSWER)
        yield turns


def _mixed(draw: _Draw) -> Iterator[list[_Turn]]:
    def named(kind: str, sessions: Iterator[list[_Turn]]) -> Iterator[list[_Turn]]:
        return ([replace(turn, kind=kind) for turn in turns] for turns in sessions if turns)

    parts = _SESSIONS | {"retrieval": _retrieval}
    del parts["mixed"]
    each = [named(kind, sessions(draw)) for kind, sessions in parts.items()]
    return heapq.merge(*each, key=lambda turns: turns[0].at)


_SESSIONS: Final[dict[str, Callable[[_Draw], Iterator[list[_Turn]]]]] = {
    "chat": _chat,
    "shared-prompt": _shared_prompt,
    "agent": _agent,
    "mixed": _mixed,
}
KINDS: Final = tuple(_SESSIONS)
