"""Runs one forward over rows of a manager: states are in slots, KV in pages; returns logits after each row's tokens."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError, MemstateError
from memstate.integrations.transformers.binding import Binding, kv_of
from memstate.integrations.transformers.kv import KvPages
from memstate.integrations.transformers.own import own_cache
from memstate.integrations.transformers.paged import BatchColumns, PagedHybridLayer, PagedIndexedLayer, PagedLayer
from memstate.integrations.transformers.states import Kernels, States
from memstate.requests.handles import Row
from memstate.requests.steps import Step

PAD: Final = 0  # any valid token id: no result depends on it
KINDS: Final = (
    "full_attention", "sliding_attention", "indexed_attention", "linear_attention", "hybrid", "hybrid_sliding", "dummy",
)  # fmt: skip
KNOWN: Final = {DYNAMIC_LAYER_TYPE_MAPPING[kind] for kind in KINDS}  # cache layers that pages can replace


class PagedCache(Cache):
    """A cache of Transformers with states in slots and KV in pages. `Batches` sets it up before each forward.

    Args:
        model: the model.
        kv: the KV pages; None if no layer attends.
        copies: for each layer that the model adds at the end of its cache, the number of the layer that it copies.

    Raises:
        ConfigurationError: a layer keeps KV in a way that pages cannot hold.

    Attributes:
        past: number of columns that were read before the forward.
    """

    def __init__(self, model: Any, kv: KvPages | None, copies: Sequence[int]) -> None:
        own = own_cache(model, copies).layers
        super().__init__(layers=[_paged(layer, number, kv) for number, layer in enumerate(own)])
        self.past = 0
        self._paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def place(self, columns: BatchColumns) -> None:
        """Sets the columns of the next forward."""
        self.past = columns.past
        for layer in self._paged:
            layer.place(columns)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of columns before the forward. Adds the new ones once the layer has stored their keys."""
        layer = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, PagedLayer) else self.past

    @property
    def is_compileable(self) -> bool:
        """False, because each step has another plan."""
        return False


def _paged(layer: Any, number: int, kv: KvPages | None) -> Any:
    """Returns a cache layer that replaces `layer` and keeps its KV in pages."""
    if type(layer) not in KNOWN:
        raise ConfigurationError(
            f"layer {number} is a {type(layer).__name__}, whose KV pages cannot hold: use generate and StateCache"
        )
    if kv is None or not kv.has(number):
        return layer
    window = int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None
    if hasattr(layer, "number_of_states"):
        return PagedHybridLayer(kv, number, window, layer.number_of_states)
    return (PagedIndexedLayer if hasattr(layer, "update_indexer") else PagedLayer)(kv, number, window)


class Batches:
    """Plans, runs and settles forwards over rows of a manager.

    Args:
        model: the model.
        mem: the model's manager.
        bound: the manager's layout, weights and KV pages.
        kernels: how one token of decode runs, as for `StateCache`.

    Attributes:
        cache: the cache that each forward gets.
        states: hands the states to the cache's layers.
        layout: the model's layout.
        kv: the KV pages; None if no layer attends.
        takes_positions: whether the model's forward has an argument `position_ids`.

    Raises:
        ConfigurationError: the manager has no KV pages; a layer keeps KV in a way that pages cannot hold; or the
            forward takes no positions.
    """

    def __init__(self, model: Any, mem: StateManager, bound: Binding, kernels: Kernels) -> None:
        self.model, self.mem = model, mem
        self.layout, self.kv = bound.layout, kv_of(bound, mem)
        self.cache = PagedCache(model, self.kv, self.layout.copies)
        self.states = States(model, mem, self.layout, self.cache.layers, kernels, keep=True)
        parameters = inspect.signature(model.forward).parameters
        self._keep = [name for name in ("logits_to_keep",) if name in parameters]
        self._columns: BatchColumns | None = None  # columns of the last forward
        self.takes_positions = "position_ids" in parameters
        if self.kv is not None and not self.takes_positions:
            raise ConfigurationError(
                f"{type(model).__name__}.forward names no argument position_ids, and rows of several lengths share a "
                "forward: add it, or use generate with a StateCache without prompt="
            )

    def run(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Runs a forward over the next tokens of some rows.

        Args:
            rows: the rows.
            tokens: the next tokens of each row. Rows may have different numbers of them only if the model takes pads
                and no row has a state yet. Either all rows have a state, or none has one.
            lengths: number of tokens of each row before the forward.

        Returns:
            The logits after the last token of each row, `batch vocabulary`; an inference tensor.

        Raises:
            Exception: the plan or the forward raised it. The rows have ended.

        Syncs: no.
        """
        new, fewest = len(max(tokens, key=len)), len(min(tokens, key=len))
        planned = new if new == fewest else [len(one) for one in tokens]
        if fewest < new:
            lengths = [len(one) - new for one in tokens]
            tokens = [[PAD] * (new - len(one)) + list(one) for one in tokens]
        with self.step(rows, planned) as step:
            with torch.inference_mode():  # a tenth faster than no_grad
                goes_on = self.states.begin(step, new)
                logits = self.logits(rows, tokens, lengths, goes_on=goes_on)[:, -1]
                self.states.end(step)
            self.mem.settle(step)
        return logits

    def fold(self, rows: Sequence[Row], ends: bool = False) -> None:
        """Adds the pending tokens of rows to their states. Runs at most two forwards.

        Args:
            rows: the rows.
            ends: whether the rows end now. Then rows are skipped whose new state the prefix cache could not keep.

        Raises:
            Exception: a plan or a forward raised it. The rows have ended.

        Syncs: no.
        """
        while late := [row for row in rows if self._lags(row, ends)]:
            with self.step(late, 0) as step:
                with torch.inference_mode():
                    self.states.begin(step, 1)
                    self.logits(late, [[] for _ in late], [self.mem.info(row).length for row in late])
                    self.states.end(step)
                self.mem.settle(step)

    def _lags(self, row: Row, ends: bool) -> bool:
        """Returns whether a row has pending tokens; if it ends, whether these reach a boundary or the end of a page."""
        info, every = self.mem.info(row), self.mem.tracking.every
        if not info.pending or not ends:
            return info.pending > 0
        return info.length // every > (info.length - info.pending) // every or info.length % self.mem.pages.size == 0

    @contextmanager
    def step(self, rows: Sequence[Row], tokens: int | Sequence[int], drafts: int | Sequence[int] = 0) -> Iterator[Step]:
        """Plans a step for a `with` block. If the plan or the block raises, the step is cancelled and its rows end.

        Args:
            rows: the rows.
            tokens: number of tokens of each row, or one number for all.
            drafts: how many of these tokens may be rejected, for each row or one number for all.
        """
        step = None
        try:
            step = self.mem.plan(rows, tokens, drafts=drafts)
            yield step
        except BaseException:
            self.states.drop()
            with suppress(MemstateError):  # the step is settled already, or a call of the manager was interrupted
                self.mem.end(rows) if step is None else self.mem.cancel(step)
            raise

    def logits(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int], last: int = 1,
        goes_on: bool = False,
    ) -> Tensor:  # fmt: skip
        """Runs the forward of a planned step. Call it in inference mode.

        Args:
            rows: the rows.
            tokens: the tokens of each row. Rows with fewer tokens get pads at the right.
            lengths: number of tokens of each row before the forward, minus the pads at the left of its new tokens.
            last: number of columns, at the end, whose logits are returned.
            goes_on: whether the last forward had the same rows and ended at these lengths.

        Returns:
            The logits, `batch last vocabulary`.
        """
        new = max(1, *map(len, tokens))
        ids = np.array([[*one, *[PAD] * (new - len(one))] for one in tokens], np.int64)
        given = self._inputs(rows, lengths, [*map(len, tokens)], new, goes_on) | dict.fromkeys(self._keep, last)
        given["input_ids"] = torch.from_numpy(ids).to(self.mem.planes.device)
        logits: Tensor = self.model(**given).logits
        return logits if logits.shape[1] == last else logits[:, -last:]

    def _inputs(
        self, rows: Sequence[Row], lengths: Sequence[int], read: Sequence[int], new: int, goes_on: bool
    ) -> dict[str, Any]:
        """Returns the arguments of the forward besides the tokens."""
        columns = self._columns if goes_on else None
        if columns is None or not columns.move(new):
            size, keep = self.mem.pages.size, self.states.kernels == "gathered"
            table, ends = self.mem.device.page_table, None if min(read) == new else read
            columns = BatchColumns(table, [row.index for row in rows], lengths, new, size, keep, read=ends)
        self._columns = columns
        self.cache.place(columns)
        inputs = {"use_cache": True, self.layout.argument: self.cache}
        padded = min(lengths) < 0
        if self.takes_positions:
            inputs["position_ids"] = columns.positions.clamp(min=0) if padded else columns.positions
        if (padded or self.kv is not None) and columns.mask is not None:
            inputs["attention_mask"] = columns.mask
        return inputs
