"""Writes talks (conversations) whose prompts share prefixes: openings, first questions, and earlier turns."""

import random
from typing import Final

from tests.proof.engines.vllm.job import Ask
from tests.proof.engines.vllm.models import WORDS

OPENINGS: Final = 3
TURNS: Final = 4
FORK: Final = 4  # one of 4 talks has the same first question as the talk before it
QUESTION: Final = (20, 60)  # smallest and largest number of tokens


class Talks:
    """Writes the prompts of each round, one for each talk. They contain the answers of earlier rounds.

    Args:
        requests: Number of requests of all rounds, a multiple of TURNS.
        opening: Number of tokens of an opening.
        seed: Seed of the words.
    """

    def __init__(self, requests: int, opening: int, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        openings = [self._words(opening) for _ in range(OPENINGS)]
        self.histories = [list(openings[talk % OPENINGS]) for talk in range(max(1, requests // TURNS))]
        self.turn = 0

    def ask(self) -> list[Ask]:
        """Returns the requests of the next round; [] after the last round."""
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
