"""Writes talks whose prompts share prefixes: a few openings, forks of a first question, and each talk's history."""

import random
from typing import Final

from tests.proof.engines.vllm.job import Ask
from tests.proof.engines.vllm.models import WORDS

OPENINGS: Final = 3
TURNS: Final = 4
FORK: Final = 4  # one of 4 talks asks the same first question as the talk before it
QUESTION: Final = (20, 60)  # least and largest number of tokens


class Talks:
    """Writes the prompts of a round from the answers of the rounds before.

    Args:
        requests: Number of requests, a whole number of rounds.
        opening: Number of tokens of an opening.
        seed: Seed of the words.
    """

    def __init__(self, requests: int, opening: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        openings = [self._words(opening) for _ in range(OPENINGS)]
        self.histories = [list(openings[talk % OPENINGS]) for talk in range(max(1, requests // TURNS))]
        self.turn = 0

    def ask(self) -> list[Ask]:
        """Returns the requests of the next round, none after the last round."""
        if self.turn == TURNS:
            return []
        question: list[int] = []
        for talk, history in enumerate(self.histories):
            if self.turn or talk % FORK != 1:
                question = self._words(self._draw.randint(*QUESTION))
            elif talk:
                history[:] = self.histories[talk - 1][: -len(question)]
            history += question
        self.turn += 1
        return [Ask(f"{talk}.{self.turn}", list(history)) for talk, history in enumerate(self.histories)]

    def answered(self, answers: dict[str, list[int]]) -> None:
        """Appends the answers of a round to the histories."""
        for talk, history in enumerate(self.histories):
            history += answers[f"{talk}.{self.turn}"]

    def _words(self, number: int) -> list[int]:
        return [self._draw.randrange(4, WORDS) for _ in range(number)]
