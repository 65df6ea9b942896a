"""What the answers of a conversation are: noise, stopping, breaking off. Knows no schedule.

All of it depends on seed, conversation and position only, so that the cached loop and the uncached one must agree.
"""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstate_tools.demo.corpus import Conversation
from memstate_tools.demo.model import VOCABULARY

STOP_BYTES = frozenset(range(8))  # any of these ends an answer: the scheduler cannot know before the step's result
LONGEST = 20  # then up to one page more
SHORTEST = 10
BROKEN_OFF = 0.15  # share of the requests that their user aborts


@dataclass(frozen=True)
class AnswerRule:
    """How one request ends.

    Attributes:
        limit: Tokens after which it ends at the latest.
        abort_prompt: Aborted once at least this many prompt tokens are computed; 0 for never.
        abort_after: Aborted once this many tokens are generated; 0 for never.
    """

    limit: int
    abort_prompt: int = 0
    abort_after: int = 0

    @property
    def cap(self) -> int:
        """Tokens generated if no stop byte comes."""
        return 0 if self.abort_prompt else self.abort_after or self.limit

    def ends(self, generated: int, token: int) -> bool:
        """Whether the answer is complete with its `generated`-th token."""
        return token in STOP_BYTES or generated >= self.limit


def rule_for(seed: int, conversation: int, turn: int, prompt: int, page_size: int) -> AnswerRule:
    """Returns the rule of one request whose prompt has `prompt` tokens.

    The limit is such that the tokens folded into the state at the end fill a page: then even a run without tracking may
    publish it.
    """
    chance = random.Random(f"answer {seed} {conversation} {turn}")
    limit = chance.randint(SHORTEST, LONGEST)
    limit += -(prompt + limit - 1) % page_size
    if chance.random() >= BROKEN_OFF:
        return AnswerRule(limit)
    if chance.random() < 0.4:
        return AnswerRule(limit, abort_prompt=chance.randint(1, max(1, prompt - 1)))
    return AnswerRule(limit, abort_after=chance.randint(1, limit - 1))


def longest_context(conversation: Conversation, page_size: int) -> int:
    """Returns the tokens that a conversation may come to with its answers."""
    return conversation.prompt_bytes + len(conversation.turns) * (LONGEST + page_size)


def noise(seed: int, conversation: int, position: int) -> npt.NDArray[np.float32]:
    """Returns Gumbel noise for the token at `position`: the argmax of logits plus noise is a sample from their softmax.

    Shape `vocabulary`. Source: Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030.
    """
    draw = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[conversation, position, 0, 0]))
    return draw.gumbel(size=VOCABULARY).astype(np.float32)
