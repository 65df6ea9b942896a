"""Checks guessed tokens: one forward reads the unread tokens of rows and the guesses after them.

If a model decodes on slots, the tails of the rows keep the tokens until it is known which of them are real. No token is
read twice. Guesses may go beyond a boundary: the next steps of the row store the state at the boundary.

Otherwise the forward runs on copies of the states. All its tokens are planned as drafts and none is accepted, so that
slots, lengths and boundaries do not change. Then there are three cases:

all right    a second plan of all tokens stores the states that the forward has computed; nothing is computed again
some wrong   the row stays at its length; its next step reads the right tokens again, together with new guesses
too many     if a row must read more tokens again than it may guess, it reads them in an ordinary step

On copies, guesses end before the next boundary. The KV of wrong guesses lies after that of the row's tokens, in pages
that only this row has, and the next step overwrites it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.drafts import Assistant, Draft, lookup, require_assistant
from memstate.integrations.transformers.own import vocabulary
from memstate.integrations.transformers.running import Running
from memstate.integrations.transformers.sampling import Sampler
from memstate.requests.handles import Row

SETTINGS = "mst.manager(..., forward=ms.Forward(tail=16))"


class Speculation:
    """Guesses the next tokens of rows, and checks the guesses.

    Args:
        batches: object that runs the forwards of the server.
        assistant: a smaller model or a function that guesses; None: only requests that look up their own text have
            guesses.

    Raises:
        ConfigurationError: the assistant, the manager or the model cannot speculate.
    """

    def __init__(self, batches: Batches, assistant: Any = None) -> None:
        self._batches, self._mem, self._assistant = batches, batches.mem, assistant
        self._vocabulary = vocabulary(batches.model)
        if assistant is not None:
            if why := self._missing():
                raise ConfigurationError(f"an assistant needs {why}")
            require_assistant(assistant, batches.model)

    def _missing(self) -> str:
        """Returns a text that says what is missing for speculation; "" if nothing is."""
        if not self._batches.layout.continues:
            return "a model whose chunks start from the state before them; the scan of this one starts from zeros"
        return "" if self._mem.forward.tail else f"a manager whose steps take drafts: {SETTINGS}"

    def draft(self, id: object, sampler: Sampler) -> Draft | None:
        """Returns the function that guesses for a row, or None.

        Args:
            id: the request's id.
            sampler: the row's sampler.

        Returns:
            The function; None if nothing guesses for this row.

        Raises:
            InvalidArgument: the request looks up its text, and the manager or the model cannot speculate.
        """
        if sampler.lookup:
            if why := self._missing():
                raise InvalidArgument(f"prompt {id!r}: prompt_lookup_num_tokens needs {why}")
            return lookup(sampler.lookup, sampler.ngram)
        if isinstance(self._assistant, torch.nn.Module):
            return Assistant(self._assistant)
        guess: Draft | None = self._assistant
        return guess

    def guesses(self, one: Running) -> list[int]:
        """Returns guesses for a row. An empty list: the row has no guesses in the next step.

        Args:
            one: a row that has read its prompt.

        Raises:
            Exception: the assistant raised it.
            InvalidArgument: a guess is not a token of the model.

        Syncs: yes, if the assistant does.
        """
        if one.draft is None or len(one.tokens) == len(one.prompt.tokens):
            return []
        unread, most = len(one.tokens) - one.length, one.sampler.guesses
        room = min(most, one.sampler.most - len(one.answer) - 1, self._mem.forward.tail - unread)
        if not self._batches.states.verifies:
            if len(one.answer) == 1 and len(one.asked.samplers) > 1:  # this step gives each sample a state of its own
                return []
            room = min(room, self._mem.info(one.row).next_boundary - len(one.tokens))
        if unread > most or room < 1:
            return []
        drafted = [int(token) for token in one.draft(list(one.tokens), room)][:room]
        if not all(0 <= token < self._vocabulary for token in drafted):
            raise InvalidArgument(f"guesses {drafted}: expected tokens from 0 to {self._vocabulary - 1}")
        return drafted

    def verify(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int], guesses: Sequence[int],
        real: Callable[[Tensor], Sequence[int]],
    ) -> list[int]:  # fmt: skip
        """Reads the next tokens of rows, and moves each row on by those of them that are real.

        Args:
            rows: the rows.
            tokens: tokens that each row reads. Only on slots may rows have different numbers of them.
            lengths: number of tokens of each row before the forward.
            guesses: how many of the last tokens of each row are guesses.
            real: function that gets the logits of the last columns, `batch column vocabulary`, and returns the number
                of real tokens of each row. Rows with fewer tokens have pads at the right.

        Returns:
            The number of tokens by which each row has moved on.

        Raises:
            Exception: a plan, the forward or `real` raised it. The rows have ended.

        Syncs: yes, if `real` does.
        """
        planned, last, states = [*map(len, tokens)], 1 + max(guesses), self._batches.states
        states.drop()
        count = max(planned)
        with self._batches.step(rows, planned, drafts=guesses if states.verifies else count) as step:
            with torch.inference_mode():
                states.begin(step, count, drafts=states.verifies)
                logits, left = self._batches.logits(rows, tokens, lengths, last), states.collect()
            states.drop()
            moved = list(real(logits)) if states.verifies else [0] * len(rows)
            self._mem.accept(step, moved)
        if states.verifies:
            return moved
        if kept := [entry for entry, number in enumerate(real(logits)) if number == count]:
            with self._batches.step([rows[entry] for entry in kept], count) as step, torch.inference_mode():
                states.store(step, {name: state[:, kept] for name, state in left.items()})
                self._mem.settle(step)
        return [count if entry in kept else 0 for entry in range(len(rows))]
