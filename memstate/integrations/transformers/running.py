"""Requests of a server: those that wait, and the rows that run."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from memstate.integrations.transformers.drafts import Draft
from memstate.integrations.transformers.prompts import Prompt, Reason, Served
from memstate.integrations.transformers.sampling import Sampler
from memstate.requests.handles import Row
from memstate.tiers import Fetch


@dataclass(eq=False)
class Waiting:
    """A request that has not started.

    Attributes:
        prompt: the request.
        samplers: one for each of its samples.
        fetch: what storage reads for it, or None.
    """

    prompt: Prompt
    samplers: list[Sampler]
    fetch: Fetch | None = None


@dataclass(eq=False)
class Running:
    """A row that runs: one sample of a request.

    Attributes:
        prompt: the request.
        samplers: its own, and those of the samples that are to be forked from it.
        row: the row.
        tokens: all so far, prompt and answer.
        cached: tokens of the prompt whose state was found.
        length: how many tokens its state stands for.
        fetch: what storage has read for it, or None.
        sample: number of the sample.
        draft: guesses its next tokens; None: nothing does.
        logits: behind the prompt, `vocabulary`, while its other samples wait for room; otherwise None.
        guessed: tokens that were guessed.
        right: guesses that were right.
        missed: why no more of the prompt was cached.
    """

    prompt: Prompt
    samplers: list[Sampler]
    row: Row
    tokens: list[int]
    cached: int
    length: int
    fetch: Fetch | None = None
    sample: int = 0
    draft: Draft | None = None
    logits: Tensor | None = None
    guessed: int = 0
    right: int = 0
    missed: str = ""

    @property
    def sampler(self) -> Sampler:
        """How it samples."""
        return self.samplers[0]

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.prompt.tokens) :]

    def served(self, reason: Reason, error: str = "") -> Served:
        """Returns the result.

        Args:
            reason: why it has ended.
            error: why it was refused.
        """
        outcome, text, answer = self.fetch.outcome if self.fetch is not None else None, self.sampler.text, self.answer
        if answer:
            text.read(self.tokens, last=True)
        return Served(
            self.prompt.id, answer, reason, self.cached, error, self.sample, self.guessed, self.right,
            str(outcome or ""), str(text), self.sampler.stop(self.tokens) if answer else None, self.missed,
        )  # fmt: skip


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
