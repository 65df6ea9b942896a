"""Counts the tokens of each row of a batch, until its layers read a pad or another input that is no token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate.checks import is_count, shown
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.own import vocabulary
from memstate.integrations.transformers.watch import Call

Ends = int | Sequence[int]


def ends_of(model: Any, ends: Ends | None, pad: int | None) -> tuple[frozenset[int] | None, int | None]:
    """Returns the tokens that end a row, and the token that `generate` feeds to a row after its end.

    Args:
        model: the model; its generation_config is used for arguments that are None.
        ends: a token or several that end a row, or None.
        pad: the token that is fed after an end, or None.

    Returns:
        (tokens that end a row, None if nothing names them; the pad, by default the first token that ends a row).

    Raises:
        InvalidArgument: `ends` or `pad` are not tokens of the model.
    """
    config, known = getattr(model, "generation_config", None), vocabulary(model)
    given: list[Any] = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]
    for name, values, all_of in (("ends", given, ends), ("pad", [] if pad is None else [pad], pad)):
        if any(not is_count(one) or one >= known for one in values):
            many = " or a list of them" * (name == "ends")
            raise InvalidArgument(f"{name}={shown(all_of)}: expected a token from 0 to {known - 1}{many}")
    if ends is None:
        own = getattr(config, "eos_token_id", None)
        named = own if own is None or isinstance(own, Sequence) else [own]
    else:
        named = given
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    tokens = None if named is None else [int(one) for one in named]
    return None if tokens is None else frozenset(tokens), tokens[0] if tokens and pad is None else pad


class Seen(NamedTuple):
    """What a forward brings to each row, from `Lengths.look` to `Lengths.add`.

    Attributes:
        stop: whether the row stops counting at this forward.
        certain: number of tokens of the row before the forward; if it stops, without those that the mask now hides.
        new: number of tokens among the forward's columns.
        read: number of columns that the row's step reads; with pads if the row has stopped counting.
    """

    stop: NDArray[np.bool_]
    certain: NDArray[np.int64]
    new: NDArray[np.int64]
    read: NDArray[np.int64]


class Lengths:
    """Counts the tokens that are certain to be a row's own.

    A state stands for tokens only if the layers have read no pad among these tokens. A row stops counting for ever when
    a forward brings it one of these:

    a pad after a token    The mask says so; or there is no mask, and `generate` feeds the pad to a row that has ended
                           before others. A token with the id of the pad counts as a pad, even if the model chose it.
    any pad                If pads change the states of this model.
    another past           The mask hides earlier tokens, shows earlier pads, or cannot be read.
    other input            If states are filed under tokens: other positions, or inputs that are no tokens (pictures).

    From then on, pads are read like tokens.

    Args:
        batch: number of entries of the batch.
        ends: tokens that end a row.
        pad: the token that is fed after an end.
        takes_pads: whether pads before the first token leave states unchanged.
        attends: whether layers attend to earlier columns.
        filed: whether states will be filed in a prefix cache, under their tokens.

    Attributes:
        tokens: number of tokens of each row, int64 `batch`.
    """

    def __init__(
        self, batch: int, ends: frozenset[int] | None, pad: int | None, takes_pads: bool, attends: bool, filed: bool
    ) -> None:
        self.tokens = np.zeros(batch, np.int64)
        self._ended = np.zeros(batch, np.bool_)
        self._stopped = np.zeros(batch, np.bool_)
        self._ends, self._pad = list(ends or ()), pad
        self._takes_pads, self._attends, self._filed = takes_pads, attends, filed

    def look(self, call: Call, past: int) -> Seen:
        """Returns what a forward brings to each row. Changes nothing.

        Args:
            call: the forward.
            past: number of columns that were read before the forward.

        Syncs: yes.
        """
        certain, new = self.tokens, np.full(call.batch, call.columns)
        earlier = 0 if call.mask is None else call.mask.shape[1] - call.columns
        stop = np.zeros(call.batch, np.bool_)
        if not call.readable or (call.mask is not None and earlier != past and (earlier or self._attends)):
            stop[:] = True
        elif call.mask is not None:
            certain, new, stop = self._masked(call, earlier)
        elif self._attends:  # without a mask, all earlier columns are tokens
            stop = certain != past
        if past and call.ids is not None:
            stop = stop | self._fed_pads(call)
        if self._filed:
            stop = stop | ~self._as_filed(call, new)
        stop = stop & ~self._stopped
        return Seen(stop, certain, new, np.where(self._stopped | stop, call.columns, new))

    def _masked(self, call: Call, earlier: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Returns for each row, by the mask: tokens before the forward, tokens of the forward, whether it stops."""
        assert call.mask is not None
        real, running = call.mask.ne(0), ~self._stopped
        known, new = (one.sum(1).cpu().numpy() for one in (real[:, :earlier], real[:, earlier:]))
        other = running & (known != self.tokens) & (self._attends or earlier > 0)
        pads = running & (new < call.columns)
        if not (pads | other).any():
            return self.tokens, new, pads
        columns = real.cpu().numpy()
        up_to, _ = _first_pads(columns[:, :earlier])
        _, behind = _first_pads(columns[:, earlier:])
        stop = other | (pads & (behind | (self.tokens > 0) | (not self._takes_pads)))
        return np.where(other, np.minimum(self.tokens, up_to), self.tokens), new, stop

    def _as_filed(self, call: Call, new: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns for each row whether it reads only tokens, at the positions that follow its earlier tokens."""
        if not call.plain or call.positions is None:
            return np.full(call.batch, call.plain)
        given = call.positions.cpu().numpy()  # `axis batch column` for some models
        expected = (self.tokens - (call.columns - new))[:, None] + np.arange(call.columns)
        right = (given == expected) | (expected < self.tokens[:, None])
        equal: NDArray[np.bool_] = right.reshape(-1, *expected.shape).all((0, 2))
        return equal

    def _fed_pads(self, call: Call) -> NDArray[np.bool_]:
        """Returns for each row whether its first input is a pad. With several columns, only ended rows can get pads."""
        assert call.ids is not None
        fed = call.ids[:, 0].cpu().numpy()
        named: NDArray[np.bool_] = fed == self._pad
        return (self._ended & (named | np.isin(fed, self._ends))) | (named & (call.columns == 1))

    def add(self, call: Call, seen: Seen) -> None:
        """Counts the tokens of a forward.

        Args:
            call: the forward.
            seen: the result of `look`.

        Syncs: yes, if each row reads one token.
        """
        self._stopped = self._stopped | seen.stop
        self.tokens = np.where(seen.stop, seen.certain, self.tokens + np.where(self._stopped, 0, seen.new))
        if call.columns > 1 or call.ids is None:  # a prompt or another turn: no row has ended
            self._ended = np.zeros(call.batch, np.bool_)
        else:
            self._ended = self._ended | np.isin(call.ids[:, 0].cpu().numpy(), self._ends)

    def forget(self, tokens: int) -> None:
        """Subtracts the last tokens of a forward that `add` has counted."""
        self.tokens = self.tokens - np.where(self._stopped, 0, tokens)

    def take(self, entries: Sequence[int]) -> None:
        """Reorders the rows: the new entry i is the old entry `entries[i]`."""
        chosen = list(entries)
        self.tokens, self._ended, self._stopped = self.tokens[chosen], self._ended[chosen], self._stopped[chosen]


def _first_pads(real: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns for each entry: (number of tokens before the first pad after a token, whether there is such a pad)."""
    began = np.logical_or.accumulate(real, 1)
    over = np.logical_or.accumulate(began & ~real, 1)
    tokens: NDArray[np.int64] = (real & ~over).sum(1)
    behind: NDArray[np.bool_] = np.logical_or.reduce(over, 1)
    return tokens, behind
