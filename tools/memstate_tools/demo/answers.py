"""Rules of the answers of a conversation: noise, the end, and aborts.

They depend only on seed, conversation and position, so the cached and the uncached loop must agree.
"""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstate_tools.demo.corpus import ChatScript
from memstate_tools.demo.model import VOCABULARY

# each of these ends an answer, so the scheduler does not know the end before it has the step's result
STOP_BYTES = frozenset(range(8))
LONGEST = 20  # most tokens of an answer, before `rule_for` adds tokens to fill a page
SHORTEST = 10
BROKEN_OFF = 0.15  # share of the requests that are aborted


@dataclass(frozen=True)
class AnswerRule:
    """The rule by which one request ends.

    Attributes:
        limit: Largest number of generated tokens.
        abort_prompt: Prompt tokens after which the request is aborted; 0: never.
        abort_after: Generated tokens after which the request is aborted; 0: never.
    """

    limit: int
    abort_prompt: int = 0
    abort_after: int = 0

    @property
    def cap(self) -> int:
        """Number of generated tokens if no stop byte comes."""
        return 0 if self.abort_prompt else self.abort_after or self.limit

    def ends(self, generated: int, token: int) -> bool:
        """Returns whether `token`, which is token number `generated` of the answer, completes it."""
        return token in STOP_BYTES or generated >= self.limit


def rule_for(seed: int, conversation: int, turn: int, prompt: int, page_size: int) -> AnswerRule:
    """Returns the rule of one request whose prompt has `prompt` tokens.

    The limit is such that the tokens of the last state fill whole pages. So even a run without tracking may publish
    this state.
    """
    chance = random.Random(f"answer {seed} {conversation} {turn}")
    limit = chance.randint(SHORTEST, LONGEST)
    limit += -(prompt + limit - 1) % page_size
    if chance.random() >= BROKEN_OFF:
        return AnswerRule(limit)
    if chance.random() < 0.4:
        return AnswerRule(limit, abort_prompt=chance.randint(1, max(1, prompt - 1)))
    return AnswerRule(limit, abort_after=chance.randint(1, limit - 1))


def longest_context(conversation: ChatScript, page_size: int) -> int:
    """Returns the largest number of tokens that a conversation can have with its answers."""
    return conversation.prompt_bytes + len(conversation.turns) * (LONGEST + page_size)


def noise(seed: int, conversation: int, position: int) -> npt.NDArray[np.float32]:
    """Returns Gumbel noise for the token at `position`, float32 `vocabulary`.

    The argmax of logits plus noise is a sample from the softmax of the logits. Source: Gumbel 1954; Maddison, Tarlow
    and Minka 2014, arXiv:1411.0030.
    """
    draw = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[conversation, position, 0, 0]))
    return draw.gumbel(size=VOCABULARY).astype(np.float32)
