"""Checks guessed tokens: one forward reads what rows have not read yet, and guesses behind it.

Where a model decodes on slots, the tails of the rows keep the tokens until it is known which of them are real. Nothing
is read again, and guesses may go beyond boundaries: the next steps of the row store the states there.

Elsewhere the forward runs on copies. All its tokens are planned as drafts, of which 0 are accepted, so that slots,
lengths and boundaries stay as they are. Then

all right       a second plan of all tokens stores the states that the forward has left; nothing is computed again
some wrong      the row stays where it was: the right ones are read again by its next step, together with new guesses
too many again  a row with more tokens to read again than it may guess reads them in an ordinary step

There guesses end before the next boundary. KV of wrong guesses lies behind the row's tokens, in pages of its own, and
the next step writes over it.
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
    """Guesses tokens of rows, and reads the guesses.

    Args:
        batches: the forwards of the server.
        assistant: a smaller model or a function that guesses; None: requests may look their own text up.

    Raises:
        ConfigurationError: the assistant, the manager or the model cannot do it.
    """

    def __init__(self, batches: Batches, assistant: Any = None) -> None:
        self._batches, self._mem, self._assistant = batches, batches.mem, assistant
        self._vocabulary = vocabulary(batches.model)
        if assistant is not None:
            if why := self._missing():
                raise ConfigurationError(f"an assistant needs {why}")
            require_assistant(assistant, batches.model)

    def _missing(self) -> str:
        """What speculation lacks here, "" for nothing."""
        if not self._batches.layout.continues:
            return "a model whose chunks start from the state before them; the scan of this one starts from zeros"
        return "" if self._mem.forward.tail else f"a manager whose steps take drafts: {SETTINGS}"

    def draft(self, id: object, sampler: Sampler) -> Draft | None:
        """Returns what guesses for a row.

        Args:
            id: of the request.
            sampler: of the row.

        Returns:
            The function; None: nothing guesses.

        Raises:
            InvalidArgument: the request wants its text looked up, and the manager or the model cannot do it.
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
        """Returns guesses for a row; none where it reads on without.

        Args:
            one: a row that has read its prompt.

        Raises:
            Exception: what the assistant raised.
            InvalidArgument: it guessed something that is no token.

        Syncs: as the assistant.
        """
        if one.draft is None or len(one.tokens) == len(one.prompt.tokens):
            return []
        unread, most = len(one.tokens) - one.length, one.sampler.guesses
        room = min(most, one.sampler.most - len(one.answer) - 1, self._mem.forward.tail - unread)
        if not self._batches.states.verifies:
            room = min(room, self._mem.info(one.row).next_boundary - len(one.tokens))
        if unread > most or room < 1:
            return []
        found = [int(token) for token in one.draft(list(one.tokens), room)][:room]
        if not all(0 <= token < self._vocabulary for token in found):
            raise InvalidArgument(f"guesses {found}: expected tokens from 0 to {self._vocabulary - 1}")
        return found

    def verify(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int], guesses: Sequence[int],
        real: Callable[[Tensor], Sequence[int]],
    ) -> list[int]:  # fmt: skip
        """Reads tokens behind the states of rows, and moves each row on as far as they are real.

        Args:
            rows: the rows.
            tokens: of each row, the same number; more or less only on slots.
            lengths: tokens of each row before.
            guesses: how many of the last of its tokens each row has guessed.
            real: gets the logits behind the last columns, `batch column vocabulary`, and returns how many tokens of
                each row are real. Rows with fewer tokens have pads behind them.

        Returns:
            By how many tokens each row has moved on.

        Raises:
            Exception: what a plan, the forward or `real` raised. The rows have ended then.

        Syncs: as `real`.
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
        kept = [entry for entry, number in enumerate(real(logits)) if number == count]
        if kept:
            with self._batches.step([rows[entry] for entry in kept], count) as step, torch.inference_mode():
                states.store(step, {name: state[:, kept] for name, state in left.items()})
                self._mem.settle(step)
        return [count if entry in kept else 0 for entry in range(len(rows))]
