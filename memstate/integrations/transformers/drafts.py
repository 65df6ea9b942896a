"""Guesses the next tokens of an answer: from its own text, with a smaller model, or by a function of the caller."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from memstate.errors import ConfigurationError
from memstate.integrations.transformers.own import cache_argument, own_cache, vocabulary

NGRAM: Final = 2  # number of last tokens that must be equal; the default of Transformers
NO_LIMIT: Final = 2**31

Draft = Callable[[Sequence[int], int], Sequence[int]]  # (all tokens so far, limit of the guesses) -> guesses


def lookup(most: int, ngram: int | None) -> Draft:
    """Returns a draft: it finds the last tokens earlier in the text, and guesses the tokens that followed there.

    This is what `prompt_lookup_num_tokens` of `generate` does.

    Args:
        most: limit of the tokens of a guess.
        ngram: how many last tokens it compares at first, before it tries fewer; None: the default of Transformers.
    """
    generator: Any = PromptLookupCandidateGenerator(
        num_output_tokens=most, max_matching_ngram_size=ngram or NGRAM, max_length=NO_LIMIT
    )

    def draft(tokens: Sequence[int], room: int) -> list[int]:
        ids, _ = generator.get_candidates(torch.tensor([tokens], device="cpu"))
        guesses: list[int] = ids[0, len(tokens) :].tolist()
        return guesses[:room]

    return draft


class Assistant:
    """A draft: guesses the greedy answer of a smaller model. Keeps the KV of one row in the model's own cache.

    Args:
        model: the smaller model.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._argument = model, cache_argument(model)
        self._cache, self._read = own_cache(model), list[int]()

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], most: int) -> list[int]:
        """Returns `most` tokens that may follow.

        Args:
            tokens: all tokens so far.
            most: number of tokens to guess.

        Syncs: yes.
        """
        try:
            return self._guess(tokens, most)
        except BaseException:  # some layers may have read more tokens than others
            self._cache, self._read = own_cache(self._model), []
            raise

    def _guess(self, tokens: Sequence[int], most: int) -> list[int]:
        pairs = enumerate(zip(self._read, tokens[:-1], strict=False))
        same = next((at for at, (old, new) in pairs if old != new), min(len(self._read), len(tokens) - 1))
        if same < len(self._read):
            self._cache.crop(same - len(self._read))
            del self._read[same:]
        given, guesses = list(tokens[same:]), list[int]()
        while len(guesses) < most:
            ids = torch.tensor([given], device=self._model.device)
            cache = {self._argument: self._cache}
            logits = self._model(input_ids=ids, use_cache=True, **cache).logits[0, -1]
            self._read += given
            guesses += (given := [int(logits.argmax())])
        return guesses


def require_assistant(assistant: Any, model: Any) -> None:
    """Raises an error unless an assistant can guess tokens for a model.

    Args:
        assistant: a smaller model, or a function.
        model: the model.

    Raises:
        ConfigurationError: the assistant is neither a model nor a function; it has another vocabulary; or its cache
            cannot forget tokens.
    """
    if not isinstance(assistant, torch.nn.Module):
        if not callable(assistant):
            raise ConfigurationError(f"assistant={assistant!r}: expected a model, or a function of tokens and a number")
        return
    ours, theirs = vocabulary(model), vocabulary(assistant)
    if ours != theirs:
        raise ConfigurationError(f"the assistant has a vocabulary of {theirs} tokens, and the model one of {ours}")
    if not own_cache(assistant).is_croppable:
        raise ConfigurationError(
            f"assistant {type(assistant).__name__}: its cache cannot forget rejected tokens; use a model whose layers "
            "attend to all tokens, or a function"
        )
