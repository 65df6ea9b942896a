"""Reads guessed tokens behind the states of rows, and keeps the states after them only where all guesses were right.

A step reads what a row has not read yet, p tokens, and k guesses. All of them are planned as drafts, of which 0 are
accepted, so that slots, lengths and boundaries stay as they are. Then

all right       a second plan of p + k tokens stores the states that the forward has left; nothing is computed again
some wrong      the row stays where it was: the right ones are read again by its next step, together with new guesses
too many again  a row with more than k tokens to read again reads them in an ordinary step

KV of wrong guesses lies behind the row's tokens, in pages of its own, and the next step writes over it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.drafts import Assistant, Draft, lookup, require_assistant
from memstate.integrations.transformers.probe import vocabulary
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
        if not self._batches.found.continues:
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
        """Returns guesses for a row; none where it reads on without, or where they would go beyond a boundary.

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
        room = self._mem.info(one.row).next_boundary - len(one.tokens)
        room = min(room, most, one.sampler.most - len(one.answer) - 1, self._mem.forward.tail - unread)
        if unread > most or room < 1:
            return []
        found = [int(token) for token in one.draft(list(one.tokens), room)][:room]
        if not all(0 <= token < self._vocabulary for token in found):
            raise InvalidArgument(f"guesses {found}: expected tokens from 0 to {self._vocabulary - 1}")
        return found

    @torch.inference_mode()
    def read(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int], last: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Reads tokens behind the states of rows, and leaves rows and slots as they are.

        Args:
            rows: the rows.
            tokens: of each row, the same number.
            lengths: tokens that the state of each row stands for.
            last: of how many last tokens the logits are wanted.

        Returns:
            Logits, `batch last vocabulary`, and the states behind all tokens: plane name -> `layer batch ...`.

        Raises:
            Exception: what the plan or the forward raised. The rows have ended then.

        Syncs: no.
        """
        held = self._batches.states
        held.drop()
        count = len(tokens[0])
        with self._batches.step(rows, count, drafts=count) as step:
            held.begin(step, count)
            logits = self._batches.logits(rows, tokens, lengths, last)
            states = held.collect()
            held.drop()
            self._mem.accept(step, [0] * len(rows))
        return logits, states

    def keep(self, rows: Sequence[Row], tokens: int, states: dict[str, Tensor], entries: Sequence[int]) -> None:
        """Moves rows on behind the tokens that `read` has read.

        Args:
            rows: the rows whose guesses were right.
            tokens: tokens that each of them has read.
            states: what `read` returned.
            entries: their entries in its batch.

        Raises:
            Exception: what the plan or a launch raised. The rows have ended then.

        Syncs: no.
        """
        with self._batches.step(rows, tokens) as step:
            self._batches.states.store(step, {name: state[:, list(entries)] for name, state in states.items()})
            self._mem.settle(step)


def by_length(guesses: dict[Running, list[int]]) -> list[dict[Running, list[int]]]:
    """Returns guesses in groups of rows that read the same number of tokens, and can share a forward.

    Args:
        guesses: of each row.
    """
    groups: dict[int, dict[Running, list[int]]] = {}
    for one, found in guesses.items():
        groups.setdefault(len(one.tokens) - one.length + len(found), {})[one] = found
    return list(groups.values())
