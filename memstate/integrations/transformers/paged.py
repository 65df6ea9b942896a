"""Layers of a cache whose KV lies in pages, for attention that needs one tensor `batch head column value`.

Rows of different lengths are aligned at the right, as in a left-padded batch. In columns before the first token of a
row, the tensor has the content of the null page, and the attention mask hides it.

A step of decode adds one column for all rows. So while the batch stays the same, layers can keep the tensor, with room
for later columns. Every new column is also written to the pages.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from memstate.integrations.transformers.kv import INDEX, KEYS, VALUES, KvPages

ROOM: Final = 64  # columns for later tokens in a kept tensor; when they are used up, the layer reads its pages again


class BatchColumns:
    """The columns of a batch, and where each of them lies in pages.

    Args:
        page_table: the pages of each row, `row page`; without elements if no layer attends.
        rows: number of the row of each entry, `batch`.
        lengths: number of tokens of each entry before the forward, minus the pads at the left of its new tokens.
        new: number of columns of the forward.
        size: tokens of a page.
        keep: whether layers keep their tensors for the next forward.
        past: number of columns before the forward; None: the largest length.
        read: number of tokens of each entry among its new columns, if pads follow them; None: no pads follow.

    Attributes:
        past: number of columns before the forward.
        new: number of columns of the forward.
        end: number of columns for which the layers' tensors have room.
        keep: whether layers keep their tensors for the next forward.
        goes_on: whether the layers already have tensors of these rows, with all columns before the forward.
        positions: positions of the new tokens, `batch column`.
        written: two tensors `batch column`: the page of each new column, and its place within the page.

    Syncs: yes with `keep`, to read for how many columns the pages of the rows have room.
    """

    def __init__(
        self, page_table: Tensor, rows: Sequence[int], lengths: Sequence[int], new: int, size: int, keep: bool,
        past: int | None = None, read: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        device, reach = page_table.device, new + (ROOM if keep else 0)
        self.past, self.new, self.keep, self.goes_on = max(lengths) if past is None else past, new, keep, False
        self._start, self._table, self._size = self.past, page_table, size
        self._rows = torch.tensor(rows, device=device)[:, None]
        before = torch.tensor(lengths, device=device)[:, None]
        positions = before + torch.arange(reach, device=device)  # those of the new tokens and of later tokens
        self._pads = None if min(lengths) == self.past else self.past - before
        self._mask: Tensor | None = None
        if read is not None:
            columns, ends = torch.arange(self.past + new, device=device), torch.tensor(read, device=device)[:, None]
            self._mask = ((columns >= self.past - before) & (columns < self.past + ends)).long()
        self._read: dict[int, tuple[Tensor, Tensor]] = {}
        pages, offsets = self._find(positions, (positions >= 0) & (positions < page_table.shape[1] * size))
        if keep and page_table.numel():  # no column beyond the pages that all rows have in the table now
            reach = max(new, int((pages > 0).all(0).sum()))
        self.end = self.past + reach
        self._all = torch.stack((positions, pages, offsets))
        self.positions, *self.written = self._now()

    def move(self, new: int) -> bool:
        """Moves on to the next forward of the same rows.

        Args:
            new: number of columns of that forward.

        Returns:
            Whether there is room for the new columns. If not, nothing changed.
        """
        past = self.past + self.new
        if not self.keep or past + new > self.end:
            return False
        self.past, self.new, self.goes_on = past, new, True
        self.positions, *self.written = self._now()
        self._read = {}
        return True

    @property
    def past_positions(self) -> Tensor:
        """Positions of the tokens before the forward, `batch column`; 0 at pads."""
        return self._before(0, self.past).clamp(min=0)

    @property
    def mask(self) -> Tensor | None:
        """The attention mask, `batch column`: 1 for tokens, 0 for pads. None if there are no pads."""
        if self._mask is None:
            if self._pads is None:
                return None
            self._mask = (torch.arange(self.end, device=self._pads.device) >= self._pads).long()
        return self._mask[:, : self.past + self.new]

    def read(self, first: int) -> tuple[Tensor, Tensor]:
        """Returns the page of each column up to the end, and its place within the page: two tensors `batch column`.

        At pads, the page is the null page.

        Args:
            first: the first column.
        """
        if first not in self._read:
            position = self._before(first, self.end)
            self._read[first] = self._find(position, (position >= 0) & (position < self.positions[:, :1]))
        return self._read[first]

    def _now(self) -> tuple[Tensor, ...]:
        """Returns the position of each new column, its page, and its place within the page."""
        at = self.past - self._start
        return self._all[:, :, at : at + self.new].unbind()

    def _before(self, first: int, end: int) -> Tensor:
        """Returns the positions of columns `first` to `end - 1`; negative at pads."""
        return torch.arange(first - self.past, end - self.past, device=self._rows.device) + self.positions[:, :1]

    def _find(self, position: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the page of each position, and the place within it. Where `known` is False: the null page."""
        position = torch.where(known, position, 0)
        if not self._table.numel():  # no layer attends
            return position, position
        pages = self._table[self._rows, position // self._size].long()
        return torch.where(known, pages, 0), position % self._size


class LayerPages(NamedTuple):
    """A tensor that a layer keeps for the next forward.

    Attributes:
        tensor: `batch head column value`.
        first: number of the column with which it begins.
    """

    tensor: Tensor
    first: int


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One attention layer of a cache. Call `place` before each forward.

    Args:
        kv: the pages.
        layer: number of the layer.
        window: tokens that a sliding window sees; None: all.

    Attributes:
        columns: the columns of the forward.
    """

    is_compileable = False
    columns: BatchColumns

    def __init__(self, kv: KvPages, layer: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kv, self._layer, self.sliding_window = kv, layer, window
        self._held = (kv.plane(layer, KEYS), kv.plane(layer, VALUES))
        self.is_sliding = window is not None
        self._new = 0
        self._kept: dict[str, LayerPages] = {}

    def place(self, columns: BatchColumns) -> None:
        """Sets the columns of the next forward.

        Args:
            columns: the columns of the batch.
        """
        self.columns, self._new = columns, 0
        if not columns.goes_on:
            self._kept = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the pages exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys and values. Returns the keys and values to which the layer attends.

        Args:
            key_states: the new keys, `batch head token value`.
            value_states: the new values, `batch head token value`.
            *args: ignored.
            **kwargs: ignored.
        """
        self._new = key_states.shape[2]
        keys, values = self._held
        return self._exchange(KEYS, keys, key_states), self._exchange(VALUES, values, value_states)

    def _exchange(self, name: str, held: Tensor, given: Tensor) -> Tensor:
        """Stores new columns, `batch head token value`. Returns the columns to which the layer attends."""
        columns = self.columns
        _, first = self.get_mask_sizes(columns.new)
        kept = self._kept.get(name) if columns.goes_on else None
        if kept is None and columns.past:
            past_kv = held[columns.read(first)].transpose(1, 2)
            kept = LayerPages(past_kv.contiguous() if columns.keep else past_kv, first)
        elif kept is None and columns.keep:  # there are no earlier columns to read
            kept = LayerPages(held.new_empty(*given.shape[:2], columns.end, given.shape[3]), first)
        given = given if given.dtype is held.dtype else given.to(held.dtype)
        held[*columns.written] = given.transpose(1, 2)
        if kept is None:
            return given
        if columns.keep:
            self._kept[name] = kept
        past = columns.past - kept.first
        kept.tensor[:, :, past : past + columns.new] = given
        # without a past, `given` has the same values and is contiguous, which attention reads faster
        return kept.tensor[:, :, first - kept.first : past + columns.new] if columns.past else given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of columns to which the layer attends, and the index of the first of them.

        Args:
            query_length: number of new columns.
        """
        past = self.columns.past
        first = 0 if self.sliding_window is None else max(past - self.sliding_window + 1, 0)
        return past - first + query_length, first

    def get_seq_length(self) -> int:
        """Returns the number of columns before the forward; after `update`, plus the new ones."""
        return self.columns.past + self._new

    def get_max_length(self) -> int:
        """Returns the number of tokens of the window, or -1 without a window."""
        return self.sliding_window or -1


class PagedIndexedLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """A layer that attends only to a few tokens, which it finds by an index of keys.

    Args:
        kv: the pages.
        layer: number of the layer.
        window: tokens that a sliding window sees; None: all.

    Attributes:
        indexer_position_ids: positions of the columns before the forward, `axis batch column`; None if the layer keeps
            none. The model adds the positions of the new columns.
    """

    indexer_position_ids: Tensor | None = None

    def place(self, columns: BatchColumns) -> None:
        """Sets the columns of the next forward.

        Args:
            columns: the columns of the batch.
        """
        super().place(columns)
        if axes := self._kv.axes[self._layer]:
            self.indexer_position_ids = columns.past_positions.expand(axes, -1, -1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys and values. Returns the keys and values of all columns.

        Args:
            key_states: the new keys, `batch head token value`.
            value_states: the new values, `batch head token value`.
            *args: ignored.
            **kwargs: ignored.
        """
        # stored in these attributes, because models read the number of columns from them
        self.keys, self.values = super().update(key_states, value_states)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Stores new keys of the index. Returns the keys of all columns, `batch column value`.

        Args:
            indexer_key_states: the new keys, `batch token value`.
        """
        held = self._kv.plane(self._layer, INDEX)
        return self._exchange(INDEX, held[:, :, None], indexer_key_states[:, None])[:, 0]


class PagedHybridLayer(PagedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call, override, misc]
    """A layer that has both attention and recurrent states.

    It has the base class by which Transformers recognises layers with states. Transformers takes the size of the
    attention mask from the first layer that attends to all tokens.

    Args:
        kv: the pages.
        layer: number of the layer.
        window: tokens that a sliding window sees; None: all.
        number_of_states: number of recurrent states of the layer.
    """

    def __init__(self, kv: KvPages, layer: int, window: int | None, number_of_states: int) -> None:
        PagedLayer.__init__(self, kv, layer, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Creates a recurrent state, as Transformers does. Pages need no creation."""
        if not args:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)
