"""Decodes the tokens of an answer one by one: whole characters only, and nothing behind a stop string."""

from collections.abc import Sequence
from typing import Any, Final

MOST: Final = 64  # tokens of a window; no character is that long
CONTEXT: Final = 8  # tokens before new ones: what a token adds depends on them, such as a space before a word
HALF: Final = "\ufffd"  # stands for bytes that are no character, or none yet


class Text:
    """The text that the tokens of an answer add to that of its prompt.

    Args:
        tokenizer: decodes tokens; None: there is no text.
        tokens: those of the prompt.
        stops: strings that end the answer.

    Attributes:
        stop: the stop string that was found; None as long as there is none.
    """

    def __init__(self, tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stops, self._parts = tokenizer, stops, list[str]()
        self.stop: str | None = None
        first = max(0, len(tokens) - CONTEXT)
        text = self._decoded(tokens[first:])
        known = len(text.rstrip(HALF))
        # where the window begins, and the next one; characters of it that are known, and halves behind them, which the
        # prompt may end with for good; those held back; number of parts
        self._at = (first, len(tokens), known, len(text) - known, "", 0)

    def _decoded(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def read(self, tokens: Sequence[int], last: bool) -> str:
        """Returns the text that is sure now, and was not before.

        An interrupted call can be repeated.

        Args:
            tokens: all so far, with those of the prompt.
            last: whether no token follows, so that nothing is held back.
        """
        if self._tokenizer is None or self.stop is not None:
            return ""
        first, following, known, halves, held, parts = self._at
        text, long = self._decoded(tokens[first:]), len(tokens) - first > MOST
        sure = len(text if last or long else text.rstrip(HALF))
        found = held + text[known:sure].removeprefix(HALF * halves)
        ends = [((at := found.index(stop)) + len(stop), at, stop) for stop in self._stops if stop in found]
        _, at, stop = min(ends, default=(0, len(found) if last else len(found) - self._begun(found), None))
        known, halves = max(known, sure), 0 if sure > known else halves
        if sure == len(text) and (long or len(tokens) - following >= CONTEXT):
            if (shorter := len(self._decoded(tokens[following:]))) or long:
                first, known = following, shorter
            following = len(tokens)
        self._parts[parts:] = [found[:at]]
        self._at, self.stop = (first, following, known, halves, found[at:], parts + 1), stop
        return found[:at]

    def _begun(self, text: str) -> int:
        """Returns how many of the last characters a stop string may begin with."""
        most = min(len(text), max(map(len, self._stops), default=1) - 1)
        return next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)

    def __str__(self) -> str:
        return "".join(self._parts)
