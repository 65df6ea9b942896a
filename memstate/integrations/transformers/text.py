"""Decodes the tokens of an answer one by one: only whole characters, and nothing after a stop string."""

from collections.abc import Sequence
from typing import Any, Final

MOST: Final = 64  # limit of the tokens that are decoded together (the window); every character needs fewer
CONTEXT: Final = 8  # earlier tokens that are decoded again, because new text depends on them: a space, say
HALF: Final = "\ufffd"  # stands in decoded text for bytes that are no whole character


class Text:
    """The text that the tokens of an answer add to the text of the prompt.

    Args:
        tokenizer: tokenizer that decodes tokens; None: there is no text.
        tokens: tokens of the prompt.
        stops: strings that end the answer.

    Attributes:
        stop: the stop string in the text; None if there is none yet.
    """

    def __init__(self, tokenizer: Any, tokens: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._stops, self._parts = tokenizer, stops, list[str]()
        self.stop: str | None = None
        first = max(0, len(tokens) - CONTEXT)
        text = self._decoded(tokens[first:])
        known = len(text.rstrip(HALF))
        # (start of the window, start of the next window, known characters of the window, number of `HALF` after them
        # that may really end the prompt, text that is held back, number of parts)
        self._at = (first, len(tokens), known, len(text) - known, "", 0)

    def _decoded(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def read(self, tokens: Sequence[int], last: bool) -> str:
        """Returns the new text, as far as later tokens cannot change it.

        An interrupted call can be repeated.

        Args:
            tokens: all tokens so far, including those of the prompt.
            last: whether no token follows; then no text is held back.
        """
        if self._tokenizer is None or self.stop is not None:
            return ""
        first, following, known, halves, held, parts = self._at
        text, long = self._decoded(tokens[first:]), len(tokens) - first > MOST
        sure = len(text if last or long else text.rstrip(HALF))
        new = held + text[known:sure].removeprefix(HALF * halves)
        ends = [((at := new.index(stop)) + len(stop), at, stop) for stop in self._stops if stop in new]
        _, at, stop = min(ends, default=(0, len(new) if last else len(new) - self._begun(new), None))
        known, halves = max(known, sure), 0 if sure > known else halves
        if sure == len(text) and (long or len(tokens) - following >= CONTEXT):
            if (shorter := len(self._decoded(tokens[following:]))) or long:
                first, known = following, shorter
            following = len(tokens)
        self._parts[parts:] = [new[:at]]
        self._at, self.stop = (first, following, known, halves, new[at:], parts + 1), stop
        return new[:at]

    def _begun(self, text: str) -> int:
        """Returns how many last characters of a text may be the beginning of a stop string."""
        most = min(len(text), max(map(len, self._stops), default=1) - 1)
        return next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)

    def __str__(self) -> str:
        return "".join(self._parts)
