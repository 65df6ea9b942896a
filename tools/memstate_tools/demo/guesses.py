"""Guesses tokens for steps with drafts: what the uncached run has, with some of it wrong. Knows no row."""

import random
from collections.abc import Mapping

from memstate_tools.demo.transcript import Transcript
from memstate_tools.demo.trees import Tree
from memstate_tools.demo.work import Work

RIGHT = 0.7  # share of the guesses that are right, as long as those before them are; and of second guesses


class Guesser:
    """Guesses from what every conversation comes to.

    Args:
        seed: Of what is wrong.
        known: What the uncached run gave, by conversation.
    """

    def __init__(self, seed: int, known: Mapping[int, Transcript]) -> None:
        self._chance, self._known = random.Random(f"guess {seed}"), known

    def guess(self, work: Work, at: int, most: int, tree: Tree) -> list[list[int]]:
        """Returns up to so many tokens that may follow the first `at` of a request, and others for a fork."""
        found = self._known[work.conversation.number].tokens[at : at + max(0, most)]
        sides = [[self._instead(token, None) for token in found]]
        if tree.branches:
            sides.append([self._instead(token, other) for token, other in zip(found, sides[0], strict=True)])
        return sides

    def _instead(self, token: int, not_: int | None) -> int:
        """A token, or now and then another, but not that one."""
        while (guess := token if self._chance.random() < RIGHT else self._chance.randrange(256)) == not_:
            pass
        return guess
