"""Requests of a server, waiting and running: their results, reasons of refusals, and which rows share a forward."""

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
# attribute of an error, which says how many slots, rows or pages there are -> name for them in messages
THERE: Final = {"capacity": "slots", "rows": "rows", "pages": "KV pages"}


@dataclass(eq=False)
class Submission:
    """A request, from its submission to its end.

    Attributes:
        prompt: the request.
        samplers: one for each sample of the request.
        to: function that gets its events; None: steps return them.
        deadline: time on the server's clock, in seconds, at which the request is ended.
        fetch: its prefetch from storage, or None.
        reader: (a row that reads the beginning of the prompt, the length at which both prompts part), or None. The
            request waits until the row has read that far.
        passed: number of later requests of its priority that started while it was the oldest.
    """

    prompt: Prompt
    samplers: list[Sampler]
    to: Callable[[Event], object] | None = None
    deadline: float = inf
    fetch: Fetch | None = None
    reader: "tuple[Running, int] | None" = None
    passed: int = 0

    def results(self, reason: Reason, error: str = "") -> list[Served]:
        """Returns a result for each sample of a request that has not started.

        Args:
            reason: why the request has ended.
            error: what went wrong; "" if nothing did.
        """
        return [Served(self.prompt.id, [], reason, error=error, sample=number) for number in range(len(self.samplers))]


@dataclass(eq=False)
class Running:
    """A running row: one sample of a request.

    Attributes:
        asked: the request.
        samplers: the row's sampler, then those of the samples that will be forked from it.
        row: the row.
        tokens: all tokens so far, prompt and answer.
        cached: number of tokens of the prompt that a cached state covered.
        length: number of tokens that the row's state stands for.
        sample: number of the sample.
        draft: function that guesses the row's next tokens; None: nothing is guessed.
        logits: logits after the prompt, `vocabulary`, while forks for other samples wait for room; otherwise None.
        guessed: number of tokens that were guessed.
        right: number of guesses that were right.
        missed: why no more of the prompt was cached.
        told: number of new tokens that are in the events. After an interrupt it may lack the last one.
    """

    asked: Submission
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
    told: int = 0

    @property
    def prompt(self) -> Prompt:
        """The request's prompt."""
        return self.asked.prompt

    @property
    def sampler(self) -> Sampler:
        """The sampler of this row."""
        return self.samplers[0]

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def unread(self) -> int:
        """Number of tokens that are not in the row's state yet."""
        return len(self.tokens) - self.length

    def results(self, reason: Reason, error: str = "") -> list[Served]:
        """Returns a result for this sample, and for each sample that was still to be forked from the row.

        Args:
            reason: why the row has ended.
            error: what went wrong; "" if nothing did.
        """
        outcome, answer = self.asked.fetch.outcome if self.asked.fetch is not None else None, self.answer
        text, stop = self.sampler.text, None
        if answer and not error:  # after an error, do not call code of the request again
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


def refusal(error: MemstateError, one: Submission | Running, mem: StateManager) -> tuple[Reason, str]:
    """Returns the reason and the text of a refusal. A request that can never fit gets "too_large".

    Args:
        error: the error of the manager.
        one: the request; or, if there is no room for its other samples, its row, which still runs.
        mem: the manager.
    """
    asked = one if isinstance(one, Submission) else one.asked
    row = mem.info(one.row) if isinstance(one, Running) else None
    pages, length = mem.pages, len(asked.prompt.tokens) + asked.samplers[0].most - 1
    room = min(pages.per_row, pages.count) * pages.size if pages.count else inf
    if not isinstance(error, BACK_PRESSURE):  # such as: no register is free for the state that samples share
        return "too_large" if length > room else "no_room" if row else "invalid", str(error)
    if length > room:
        return "too_large", f"{length} tokens of prompt and answer, and one request can have pages for {room}: ask less"
    has = {OutOfSlots: row.slots, OutOfRows: 1, OutOfPages: -(-length // pages.size)}[type(error)] if row else 0
    name, there = next(((name, most) for name in THERE if (most := getattr(error, name, None))), ("", inf))
    if error.requested + has > there:
        return "too_large", f"{error.requested + has} {THERE[name]} needed at once, there are {there}: ask for less"
    return "no_room", str(error) if row else why(error, mem)


def why(error: MemstateError, mem: StateManager) -> str:
    """Returns the text of a refusal, with what the caller can do, for a server without running rows.

    Args:
        error: the error of the manager.
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
    """Returns the text of an exception, even if its own methods raise."""
    return "".join(format_exception_only(error)).strip()


def sharing(chunks: Mapping[Running, int], pads: int) -> list[dict[Running, int]]:
    """Returns groups of chunks that share a forward.

    Chunks of equal length share a forward. The first chunks of prompts share one even if their lengths differ: shorter
    chunks get pads in front.

    Args:
        chunks: number of tokens that each row reads next.
        pads: limit of the pads in a forward.
    """
    if not chunks:
        return []
    first = {one: tokens for one, tokens in chunks.items() if not one.length}
    return [*alike({one: chunks[one] for one in chunks if one not in first}, 0), *alike(first, pads)]


def alike(counts: Mapping[Running, int], pads: int) -> list[dict[Running, int]]:
    """Returns groups of rows that share a forward, so that no forward has more than `pads` pads.

    Args:
        counts: number of tokens that each row reads.
        pads: limit of the pads in a forward; 0: only rows with equal counts share one.
    """
    groups: list[dict[Running, int]] = []
    longest = room = 0
    for one in sorted(counts, key=counts.__getitem__, reverse=True):
        tokens = counts[one]
        if not groups or longest - tokens > room:
            longest, room = tokens, pads
            groups.append({})
        room -= longest - tokens
        groups[-1][one] = tokens
    return groups


def shares(reading: Iterable[Running], budget: int) -> Iterator[tuple[Running, int]]:
    """Yields (row that reads a prompt, tokens of the budget that the row must leave to others), in the order of turns.

    Higher priorities come first. Half of the budget is for the oldest row of the highest priority, so that this row
    always advances. The rest is first given to the rows with the fewest tokens to read, so that a long prompt does not
    delay the first tokens of others.

    Args:
        reading: the rows, the oldest first.
        budget: limit of the tokens that all these rows read in the step.
    """
    ranked = sorted(reading, key=lambda one: -one.prompt.priority)
    before = True
    for one in sorted(ranked, key=lambda one: (-one.prompt.priority, one.unread)):
        before = before and one is not ranked[0]
        yield one, budget // 2 if before else 0
