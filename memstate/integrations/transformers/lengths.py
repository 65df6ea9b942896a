"""Counts the tokens of each row of a batch that `generate` runs. Pads that follow the end of a row are no tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memstate.integrations.transformers.watch import Call


def ends_of(model: Any) -> tuple[frozenset[int], int | None]:
    """Returns the tokens that end a row, and the token that `generate` feeds behind the end."""
    config = getattr(model, "generation_config", None)
    end, pad = getattr(config, "eos_token_id", None), getattr(config, "pad_token_id", None)
    ends = frozenset(end if isinstance(end, list) else [] if end is None else [end])
    return ends, min(ends) if pad is None and ends else pad


class Lengths:
    """How many tokens of each row are certain to be its own.

    `generate` feeds pads to rows that have ended while others go on, and tells nobody. A row that is fed a pad stops
    counting for good, even if the pad was a token that the model chose: then a snapshot is shorter than it could be.

    Args:
        batch: entries of the batch.
        ends: tokens that end a row.
        pad: the token that follows an end.

    Attributes:
        tokens: tokens of each row.
    """

    def __init__(self, batch: int, ends: frozenset[int], pad: int | None) -> None:
        self.tokens = np.zeros(batch, np.int64)
        self._ended = np.zeros(batch, np.bool_)
        self._padded = np.zeros(batch, np.bool_)
        self._ends, self._pad = ends, pad

    def first_pads(self, call: Call) -> list[int]:
        """Returns the entries that are fed a pad for the first time. Changes nothing. Syncs: as `add`."""
        if call.columns > 1 or call.ids is None:
            return []
        return np.flatnonzero(self._pads(call.ids[:, 0].cpu().numpy()) & ~self._padded).tolist()

    def _pads(self, fed: NDArray[np.integer]) -> NDArray[np.bool_]:
        pads: NDArray[np.bool_] = (fed == self._pad) | (self._ended & np.isin(fed, list(self._ends)))
        return pads

    def add(self, call: Call, real: Sequence[int]) -> None:
        """Counts the tokens of a forward.

        Args:
            call: the forward.
            real: tokens of each row, pads of the attention mask left out.

        Syncs: yes, for one token a row.
        """
        if call.columns > 1 or call.ids is None:  # a prompt, or another turn
            self.tokens += np.where(self._padded, 0, real)
            self._ended[:] = False
            return
        fed = call.ids[:, 0].cpu().numpy()
        self._padded |= self._pads(fed)
        self.tokens += np.where(self._padded, 0, real)
        self._ended |= np.isin(fed, list(self._ends))

    def forget(self, tokens: int) -> None:
        """Takes back the last tokens of a forward, which `add` has counted."""
        self.tokens -= np.where(self._padded, 0, tokens)

    def take(self, entries: Sequence[int]) -> None:
        """Reorders the rows: entry i becomes what entry `entries[i]` was."""
        chosen = list(entries)
        self.tokens, self._ended, self._padded = self.tokens[chosen], self._ended[chosen], self._padded[chosen]
