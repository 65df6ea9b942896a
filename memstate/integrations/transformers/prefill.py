"""Prompts of `StateCache`: they start from cached states, and their KV lies in the pages of the manager."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import Bound
from memstate.integrations.transformers.paged import Columns
from memstate.integrations.transformers.prompts import checked
from memstate.integrations.transformers.states import Kernels
from memstate.integrations.transformers.watch import Call
from memstate.requests.handles import Request, Row


def texts_of(model: Any, prompt: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Returns the tokens of each entry of a batch, pads left out.

    Args:
        model: the model.
        prompt: the tokens, `batch column`, padded at the left.
        mask: which of them are tokens, `batch column`; None: all.

    Raises:
        InvalidArgument: the shapes do not fit, pads are at the right, or `checked` refuses the tokens of an entry.

    Syncs: yes.
    """
    if not isinstance(prompt, Tensor) or prompt.dim() != 2:
        raise InvalidArgument(f"prompt={type(prompt).__name__}: expected the ids of generate, `batch column`")
    known = torch.ones_like(prompt) if mask is None else mask
    if known.shape != prompt.shape or not bool(known[:, -1].all()) or bool((known[:, 1:] < known[:, :-1]).any()):
        raise InvalidArgument(
            f"prompt_mask {tuple(known.shape)} of a prompt {tuple(prompt.shape)}: expected the same shape, pads at the "
            "left, and a token at the end of each entry"
        )
    rows = zip(prompt.tolist(), known.tolist(), strict=True)
    texts = [[token for token, real in zip(*row, strict=True) if real] for row in rows]
    return [checked(model, text, f"entry {entry} of prompt=") for entry, text in enumerate(texts)]


class Prefill:
    """Reads all of some prompts but their last tokens, and knows the tokens of each row from then on.

    Args:
        model: the model.
        mem: the manager.
        bound: what belongs to the manager.
        kernels: as for `StateCache`.

    Attributes:
        batches: the forwards that read prompts. Its cache has the layers of the StateCache.
        texts: tokens of each row.

    Raises:
        ConfigurationError: `generate` of the model reads all tokens again; the manager has no KV pages; or a layer
            keeps KV in a way that pages cannot hold.
    """

    def __init__(self, model: Any, mem: StateManager, bound: Bound, kernels: Kernels) -> None:
        if bound.found.argument != "past_key_values":
            raise ConfigurationError(
                f"generate of {type(model).__name__} does not ask its cache what it has read, so prompt= has no "
                "effect: use serve"
            )
        self.batches = Batches(model, mem, bound, kernels)
        self.mem, self.texts = mem, list[list[int]]()

    def start(self, texts: list[list[int]]) -> tuple[list[Row], list[int]]:
        """Admits a row for each prompt, and reads each up to its last token.

        Args:
            texts: the prompts.

        Returns:
            The rows, and how many tokens of each were found in a cache.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; nothing was admitted.
            Exception: what a forward raised; the rows have ended.

        Syncs: no.
        """
        rows = list(self.mem.admit([Request(f"generate {entry}", tokens=text) for entry, text in enumerate(texts)]))
        cached, batch = [self.mem.info(row).length for row in rows], list[int]()
        try:
            while groups := self._chunks(rows, texts):
                for tokens, _, *batch in groups:
                    starts = [self.mem.info(rows[entry]).length for entry in batch]
                    given = [texts[entry][start : start + tokens] for entry, start in zip(batch, starts, strict=True)]
                    self.batches.run([rows[entry] for entry in batch], given, starts)
                if self.mem.prefix is not None:
                    self.mem.publish(rows, keep="cache", tokens=texts)
        except BaseException:  # the rows of the batch have ended
            self.mem.end([row for entry, row in enumerate(rows) if entry not in batch])
            raise
        self.batches.states.drop()
        self.texts = [text[:-1] for text in texts]
        return rows, cached

    def _chunks(self, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Returns what to read next: tokens, whether there is no state yet, and the rows that share the forward."""
        groups = dict[tuple[int, int], list[int]]()
        for entry, (row, text) in enumerate(zip(rows, texts, strict=True)):
            length = self.mem.info(row).length
            left = len(text) - 1 - length
            if left > 0:
                tokens = self.mem.chunk(row, left) if self.batches.found.continues or not length else 1
                groups.setdefault((tokens, int(not length)), []).append(entry)
        return [(*key, *batch) for key, batch in groups.items()]

    def add(self, call: Call) -> None:
        """Notes the tokens of a forward.

        Args:
            call: the forward, with ids.

        Syncs: yes.
        """
        assert call.ids is not None
        real = torch.ones_like(call.ids) if call.real is None else call.real
        self.texts = self.texts or [[] for _ in range(call.batch)]
        for text, ids, known in zip(self.texts, call.ids.tolist(), real.tolist(), strict=True):
            text += [token for token, is_real in zip(ids, known, strict=True) if is_real]

    def place(self, rows: Sequence[Row], past: int, new: int) -> None:
        """Tells the layers where the tokens of a planned step lie.

        Args:
            rows: the rows.
            past: columns before the step.
            new: columns of the step.

        Syncs: no.
        """
        starts = [self.mem.info(row).length - new for row in rows]  # below 0 at pads
        numbers, size = [row.index for row in rows], self.mem.pages.size
        columns = Columns(self.mem.device.page_table, numbers, starts, new, size, keep=False, past=past)
        self.batches.cache.place(columns)

    def reorder(self, entries: Sequence[int], page_copies: Sequence[tuple[int, int]]) -> None:
        """Makes entry i what entry `entries[i]` was.

        Args:
            entries: an entry for each entry.
            page_copies: pages to copy, as `StateManager.reorder` returned them.

        Syncs: no.
        """
        self.texts = [list(self.texts[entry]) for entry in entries]
        if self.batches.kv is not None:
            self.batches.kv.copy(page_copies)
