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
        positions: token of the row, `batch column`; 0 where there is none.
    """

    past: int
    pages: Tensor
    offsets: Tensor
    positions: Tensor

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
        return cls(past, torch.where(position >= 0, pages, 0), here % size, here)

    @property
    def mask(self) -> Tensor:
        """Which columns are tokens, `batch column`, as an attention mask."""
        return (self.pages > 0).long()


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer of a cache. Call `place` before each forward.

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
        self._new = 0

    def place(self, columns: Columns) -> None:
        """Says where the tokens of the next forward lie.

        Args:
            columns: of the batch.
        """
        self.columns, self._new = columns, 0

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
        self._new = key_states.shape[2]
        held = self._kv.of(self._layer)
        keys, values = (self._exchange(*one) for one in zip(held, (key_states, value_states), strict=True))
        return keys, values

    def _exchange(self, held: Tensor, given: Tensor) -> Tensor:
        """Stores what is new, `batch head token value`, and returns what the layer attends to."""
        pages, offsets, new = self.columns.pages, self.columns.offsets, given.shape[2]
        seen, _ = self.get_mask_sizes(new)
        held[pages[:, -new:], offsets[:, -new:]] = given.transpose(1, 2).to(held.dtype)
        return held[pages[:, -seen:], offsets[:, -seen:]].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many columns the layer attends to, and the first of them.

        Args:
            query_length: new columns.
        """
        past = self.columns.past
        first = 0 if self.sliding_window is None else max(past - self.sliding_window + 1, 0)
        return past - first + query_length, first

    def get_seq_length(self) -> int:
        """Returns the columns before the forward, and the new ones once `update` has them."""
        return self.columns.past + self._new

    def get_max_length(self) -> int:
        """Returns the window, or -1."""
        return self.sliding_window or -1


class PagedIndexedLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """A layer that attends to a few tokens, which it finds by an index of its keys.

    Args:
        kv: the pages.
        layer: number of the layer.
        window: tokens that a sliding window sees; None: all.

    Attributes:
        indexer_position_ids: positions of the columns before the forward, `axis batch column`; None: the layer keeps
            none. The model adds those of the new columns.
    """

    indexer_position_ids: Tensor | None = None

    def place(self, columns: Columns) -> None:
        """Says where the tokens of the next forward lie.

        Args:
            columns: of the batch.
        """
        super().place(columns)
        if axes := self._kv.axes(self._layer):
            self.indexer_position_ids = columns.positions[:, : columns.past].expand(axes, -1, -1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, and returns all of the batch.

        Args:
            key_states: `batch head token value`.
            value_states: `batch head token value`.
            *args: ignored.
            **kwargs: ignored.
        """
        self.keys, self.values = super().update(key_states, value_states)  # models ask for their number of columns
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Stores new keys of the index, and returns all of the batch, `batch column value`.

        Args:
            indexer_key_states: `batch token value`.
        """
        held = self._kv.index_of(self._layer)
        return self._exchange(held[:, :, None], indexer_key_states[:, None])[:, 0]


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
