"""Runs one forward over rows of a manager: states from slots, KV from pages, logits of the last token of each row."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError, MemstateError
from memstate.integrations.transformers.kv import KvPages
from memstate.integrations.transformers.layout import ModelLayout
from memstate.integrations.transformers.paged import Columns, PagedHybridLayer, PagedIndexedLayer, PagedLayer
from memstate.integrations.transformers.probe import own_cache
from memstate.integrations.transformers.states import Kernels, States
from memstate.requests.handles import Row
from memstate.requests.steps import Step

KINDS: Final = (
    "full_attention", "sliding_attention", "indexed_attention", "linear_attention", "hybrid", "hybrid_sliding", "dummy",
)  # fmt: skip
KNOWN: Final = {DYNAMIC_LAYER_TYPE_MAPPING[kind] for kind in KINDS}  # classes of layers that pages can replace


class PagedCache(Cache):
    """A cache of Transformers with states in slots and KV in pages, which `Batches` sets up before each forward.

    Args:
        model: the model.
        kv: the pages; None: no layer attends.

    Raises:
        ConfigurationError: a layer keeps KV in a way that pages cannot hold.

    Attributes:
        past: columns before the forward.
    """

    def __init__(self, model: Any, kv: KvPages | None) -> None:
        super().__init__(layers=[_paged(layer, number, kv) for number, layer in enumerate(own_cache(model).layers)])
        self.past = 0

    def place(self, columns: Columns | None, past: int) -> None:
        """Sets where the tokens of the next forward lie."""
        self.past = past
        for layer in self.layers:
            if isinstance(layer, PagedLayer) and columns is not None:
                layer.place(columns)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the columns before the forward; of a layer that has read its keys, the new ones as well."""
        layer = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, PagedLayer) else self.past

    @property
    def is_compileable(self) -> bool:
        """False: plans change from step to step."""
        return False


def _paged(layer: Any, number: int, kv: KvPages | None) -> Any:
    """The layer with its KV in pages."""
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
    """Plans, runs and settles forwards over rows.

    Args:
        model: the model.
        mem: its manager.
        found: where its states lie.
        kv: its pages; None: no layer attends.
        kernels: as for `StateCache`.
    """

    def __init__(self, model: Any, mem: StateManager, found: ModelLayout, kv: KvPages | None, kernels: Kernels) -> None:
        self.model, self.mem, self.found, self.kv = model, mem, found, kv
        self.cache = PagedCache(model, kv)
        self.states = States(model, mem, found, self.cache.layers, kernels)
        parameters = inspect.signature(model.forward).parameters
        self._keep = [name for name in ("logits_to_keep",) if name in parameters]
        self._takes_positions = "position_ids" in parameters

    @torch.no_grad()
    def run(self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Reads the next tokens of some rows: the same number of tokens for each.

        Args:
            rows: the rows.
            tokens: of each row. With more than one token, all rows or none have a state already.
            lengths: tokens of each row before.

        Returns:
            The logits behind the last token of each row, `batch vocabulary`.

        Raises:
            Exception: what the plan or the forward raised. The rows have ended then.

        Syncs: no.
        """
        step = self.planned(rows, new := len(tokens[0]))
        try:
            self.states.begin(step, new)
            logits = self.logits(rows, tokens, lengths)[:, -1]
        except BaseException:
            self.states.drop()
            self.mem.cancel(step)
            raise
        self.states.end(step)
        self.mem.settle(step)
        return logits

    def planned(self, rows: Sequence[Row], tokens: int, window: bool = False) -> Step:
        """Plans a step of some rows. If that fails, they end.

        Args:
            rows: the rows.
            tokens: of each row.
            window: whether the step is speculative.
        """
        try:
            return self.mem.plan(rows, tokens, window=window)
        except BaseException:
            with suppress(MemstateError):
                self.mem.abort(rows)
            raise

    def logits(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int], last: int = 1
    ) -> Tensor:
        """Runs the forward of a planned step.

        Args:
            rows: the rows.
            tokens: of each row, the same number.
            lengths: tokens of each row before.
            last: of how many last tokens the logits are wanted.

        Returns:
            `batch last vocabulary`.
        """
        given = self._inputs(rows, tokens, lengths, len(tokens[0])) | dict.fromkeys(self._keep, last)
        found: Tensor = self.model(**given).logits[:, -last:]
        return found

    def _inputs(
        self, rows: Sequence[Row], tokens: Sequence[Sequence[int]], lengths: Sequence[int], new: int
    ) -> dict[str, Any]:
        device, past, columns = self.model.device, max(lengths), None
        inputs = {"input_ids": torch.tensor(tokens, device=device), "use_cache": True}
        before = torch.tensor(lengths, device=device)
        if self.kv is not None:
            index = torch.tensor([row.index for row in rows], device=device)
            columns = Columns.of(self.mem.page_table, index, before, past, new, self.kv.size)
            if min(lengths) < past:
                inputs["attention_mask"] = columns.mask
        if self._takes_positions:
            inputs["position_ids"] = before[:, None] + torch.arange(new, device=device)
        self.cache.place(columns, past)
        return {**inputs, self.found.argument: self.cache}
