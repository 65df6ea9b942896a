"""Layers of a cache whose KV lies in pages, for attention that wants one tensor `batch head column value`.

Rows of different lengths are aligned at the right, as a left-padded batch. Columns before the first token of a row read
the null page, and the attention mask hides them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from memstate.integrations.transformers.kv import KvPages


class Columns(NamedTuple):
    """Where the tokens of a batch lie.

    Attributes:
        past: columns before the new ones.
        pages: page of each column, `batch column`; 0: no token.
        offsets: token of the page, `batch column`.
    """

    past: int
    pages: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, page_table: Tensor, rows: Tensor, lengths: Tensor, past: int, new: int, size: int) -> "Columns":
        """Finds the columns of a batch.

        Args:
            page_table: `row page`.
            rows: row of each entry, `batch`.
            lengths: tokens of each entry before the step, `batch`.
            past: the largest of them.
            new: tokens of each entry in the step.
            size: tokens of a page.

        Syncs: no.
        """
        position = torch.arange(past + new, device=rows.device) - past + lengths[:, None]
        here = position.clamp(min=0)
        pages = page_table[rows[:, None], here // size].long()
        return cls(past, torch.where(position >= 0, pages, 0), here % size)

    @property
    def mask(self) -> Tensor:
        """Which columns are tokens, `batch column`, as an attention mask."""
        return (self.pages > 0).long()


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer of a cache. Set `columns` before each forward.

    Args:
        kv: the pages.
        layer: number of the layer.
        window: tokens that a sliding window sees; None: all.

    Attributes:
        columns: where the tokens of the forward lie.
    """

    is_compileable = False
    columns: Columns

    def __init__(self, kv: KvPages, layer: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kv, self._layer, self.sliding_window = kv, layer, window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the pages are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, and returns those that the layer attends to.

        Args:
            key_states: `batch head token value`.
            value_states: `batch head token value`.
            *args: ignored.
            **kwargs: ignored.
        """
        _, pages, offsets = self.columns
        new, (seen, _) = key_states.shape[2], self.get_mask_sizes(key_states.shape[2])
        found = []
        for held, given in zip(self._kv.of(self._layer), (key_states, value_states), strict=True):
            held[pages[:, -new:], offsets[:, -new:]] = given.transpose(1, 2).to(held.dtype)
            found.append(held[pages[:, -seen:], offsets[:, -seen:]].transpose(1, 2))
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many columns the layer attends to, and the first of them.

        Args:
            query_length: new columns.
        """
        past = self.columns.past
        first = 0 if self.sliding_window is None else max(past - self.sliding_window + 1, 0)
        return past - first + query_length, first

    def get_seq_length(self) -> int:
        """Returns the columns before the forward."""
        return self.columns.past

    def get_max_length(self) -> int:
        """Returns the window, or -1."""
        return self.sliding_window or -1


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore[no-untyped-call, override]
    """A layer that attends and has recurrent states as well.

    Args:
        kv: the pages.
        layer: number of the layer.
        window: tokens that a sliding window sees; None: all.
        number_of_states: recurrent states of the layer.
    """

    is_compileable = False

    def __init__(self, kv: KvPages, layer: int, window: int | None, number_of_states: int) -> None:
        PagedLayer.__init__(self, kv, layer, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Makes a recurrent state, as Transformers does; pages are there."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """Returns the window, or -1."""
        return PagedLayer.get_max_length(self)
