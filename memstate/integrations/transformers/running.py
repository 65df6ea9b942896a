"""Requests of a server: those that wait, the rows that run, and why one was refused."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from traceback import format_exception_only
from typing import Final

from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import MemstateError, OutOfPages, OutOfRows, OutOfSlots
from memstate.integrations.transformers.drafts import Draft
from memstate.integrations.transformers.prompts import Event, Prompt, Reason, Served
from memstate.integrations.transformers.sampling import Sampler
from memstate.requests.handles import Row
from memstate.tiers import Fetch

BACK_PRESSURE: Final = (OutOfSlots, OutOfRows, OutOfPages)
THERE: Final = {"capacity": "slots", "rows": "rows", "pages": "KV pages"}  # attributes of these: how many there are


@dataclass(eq=False)
class Asked:
    """A request, from its submission to its end.

    Attributes:
        prompt: the request.
        samplers: one for each of its samples.
        to: gets its events; None: steps return them.
        deadline: second of the server's clock at which it ends.
        fetch: what storage reads for it, or None.
        reader: a row that reads the beginning of its prompt, and the length at which they part. It waits for that.
        passed: how often a later request of its priority went first while it was the oldest.
    """

    prompt: Prompt
    samplers: list[Sampler]
    to: Callable[[Event], object] | None = None
    deadline: float = inf
    fetch: Fetch | None = None
    reader: "tuple[Running, int] | None" = None
    passed: int = 0

    def results(self, reason: Reason, error: str = "") -> list[Served]:
        """Returns a result for each of its samples, none of which has started.

        Args:
            reason: why it has ended.
            error: what was wrong.
        """
        return [Served(self.prompt.id, [], reason, error=error, sample=number) for number in range(len(self.samplers))]


@dataclass(eq=False)
class Running:
    """A row that runs: one sample of a request.

    Attributes:
        asked: the request.
        samplers: its own, and those of the samples that are to be forked from it.
        row: the row.
        tokens: all so far, prompt and answer.
        cached: tokens of the prompt whose state was found.
        length: how many tokens its state stands for.
        sample: number of the sample.
        draft: guesses its next tokens; None: nothing does.
        logits: behind the prompt, `vocabulary`, while its other samples wait for room; otherwise None.
        guessed: tokens that were guessed.
        right: guesses that were right.
        missed: why no more of the prompt was cached.
    """

    asked: Asked
    samplers: list[Sampler]
    row: Row
    tokens: list[int]
    cached: int
    length: int
    sample: int = 0
    draft: Draft | None = None
    logits: Tensor | None = None
    guessed: int = 0
    right: int = 0
    missed: str = ""

    @property
    def prompt(self) -> Prompt:
        """The request."""
        return self.asked.prompt

    @property
    def sampler(self) -> Sampler:
        """How it samples."""
        return self.samplers[0]

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def unread(self) -> int:
        """Tokens that its state does not stand for yet."""
        return len(self.tokens) - self.length

    def results(self, reason: Reason, error: str = "") -> list[Served]:
        """Returns a result for itself, and for each sample that was to be forked from it.

        Args:
            reason: why it has ended.
            error: what was wrong.
        """
        outcome, answer = self.asked.fetch.outcome if self.asked.fetch is not None else None, self.answer
        text, stop = self.sampler.text, None
        if answer and not error:  # code that raises would raise again
            try:
                text.read(self.tokens, last=True)
                stop = self.sampler.stop(self.tokens)
            except Exception as raised:
                reason, error = "failed", said(raised)
        return [
            Served(
                self.prompt.id, answer, reason, self.cached, error, self.sample + number, self.guessed, self.right,
                str(outcome or ""), str(text), stop, self.missed,
            )
            for number in range(len(self.samplers))
        ]  # fmt: skip


def refusal(error: MemstateError, one: Asked | Running, mem: StateManager) -> tuple[Reason, str]:
    """Returns the kind of a refusal, and what it says. A request that can never fit is not told to wait.

    Args:
        error: what the manager raised.
        one: the request, or its row if other samples lack room. The row still runs.
        mem: the manager.
    """
    asked = one if isinstance(one, Asked) else one.asked
    row = mem.info(one.row) if isinstance(one, Running) else None
    pages, length = mem.pages, len(asked.prompt.tokens) + asked.samplers[0].most - 1
    room = min(pages.per_row, pages.count) * pages.size if pages.count else inf
    if not isinstance(error, BACK_PRESSURE):  # samples can lack a register for the state that they share
        return "too_large" if length > room else "no_room" if row else "invalid", str(error)
    if length > room:
        return "too_large", f"{length} tokens of prompt and answer, and one request can have pages for {room}: ask less"
    has = {OutOfSlots: row.slots, OutOfRows: 1, OutOfPages: -(-length // pages.size)}[type(error)] if row else 0
    name, there = next(((name, most) for name in THERE if (most := getattr(error, name, None))), ("", inf))
    if error.requested + has > there:
        return "too_large", f"{error.requested + has} {THERE[name]} needed at once, there are {there}: ask for less"
    return "no_room", str(error) if row else why(error, mem)


def why(error: MemstateError, mem: StateManager) -> str:
    """Returns the error of a request that was refused while nothing of its server runs, and what to do.

    Args:
        error: what the manager raised.
        mem: the manager.
    """
    others = len(mem.rows)
    if not others or not isinstance(error, BACK_PRESSURE):
        return str(error)
    return (
        f"{error}; {others} rows of the manager are not this server's: close the caches and servers that they "
        "belong to, or call the manager's recover() if there are none"
    )


def said(error: BaseException) -> str:
    """Returns what an exception says, whatever its own methods raise."""
    return "".join(format_exception_only(error)).strip()


def sharing(chunks: Mapping[Running, int], pads: int) -> list[dict[Running, int]]:
    """Returns which chunks share a forward: those of one length, and first chunks with pads before shorter ones.

    Args:
        chunks: tokens that each row reads next.
        pads: in a forward at most.
    """
    first = {one: tokens for one, tokens in chunks.items() if not one.length}
    return [*alike({one: chunks[one] for one in chunks if one not in first}, 0), *alike(first, pads)]


def alike(counts: Mapping[Running, int], pads: int) -> list[dict[Running, int]]:
    """Returns which rows share a forward, so that no forward has more pads than are allowed.

    Args:
        counts: tokens that each row reads.
        pads: in a forward at most; 0: rows of one number share it.
    """
    found = list[dict[Running, int]]()
    longest = room = 0
    for one in sorted(counts, key=counts.__getitem__, reverse=True):
        tokens = counts[one]
        if not found or longest - tokens > room:
            longest, room = tokens, pads
            found.append({})
        room -= longest - tokens
        found[-1][one] = tokens
    return found


def shares(reading: Iterable[Running], budget: int) -> Iterator[tuple[Running, int]]:
    """Yields rows that read prompts, each with the tokens of the budget that are kept for others.

    Higher priorities come first. Half of the budget is for the oldest row of the highest, so that it always moves on.
    The rest goes to the rows that have least to read, so that a long prompt does not stop the first tokens of others.

    Args:
        reading: the rows, the oldest first.
        budget: tokens that they may read together.
    """
    ranked = sorted(reading, key=lambda one: -one.prompt.priority)
    before = True
    for one in sorted(ranked, key=lambda one: (-one.prompt.priority, one.unread)):
        before = before and one is not ranked[0]
        yield one, budget // 2 if before else 0
