"""Holds the rows of a `StateCache`, with lengths, texts and step; reorders and ends them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, StaleHandle
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import leave
from memstate.integrations.transformers.left import Left, release
from memstate.integrations.transformers.lengths import Lengths, Seen
from memstate.integrations.transformers.states import States
from memstate.integrations.transformers.watch import Call
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.steps import Step


def _length(snapshot: Snapshot | None) -> int:
    return -1 if snapshot is None else snapshot.length


class Held:
    """Holds the manager's rows for a cache, from the first forward of a batch to the end of the rows.

    Args:
        mem: the manager.
        states: object that hands states to the layers.
        batches: object that reads the prompt; None if there is no prompt.
        layers: layers of the cache. Their KV is reordered with the rows, unless it is in pages.
        counting: function that makes `Lengths` for a number of rows.

    Attributes:
        rows: the requests of the batch; empty before the first forward.
        lengths: counts the tokens of each row that are certain.
        texts: with a prompt, the tokens that each row has read. After the row stopped counting (see `StateCache`), also
            pads.
        columns: number of columns of the batch that were read, with tokens or pads.
        step: the step of the running forward.
        checked: the step whose forward has read guesses, until `accept` says which of them are right.
        torn: True while the attributes contradict each other, within a call. After an interrupt it stays True.
        closed: why no forward can begin; "" if one can.
    """

    def __init__(
        self, mem: StateManager, states: States, batches: Batches | None, layers: Sequence[object],
        counting: Callable[[int], Lengths],
    ) -> None:  # fmt: skip
        self._mem, self._states, self._batches = mem, states, batches
        self._layers, self._counting = layers, counting
        self.rows, self.texts, self.columns = list[Row](), list[list[int]](), 0
        self.step: Step | None = None
        self.checked: Step | None = None
        self.torn, self.closed = False, ""
        self._begin(0)

    def _begin(self, batch: int) -> None:
        self.lengths = self._counting(batch)
        # entry -> the last snapshot of its row that stands for known tokens, if the row stopped counting
        self._kept: list[Snapshot | None] = [None] * batch

    @property
    def _left(self) -> Left:
        return Left(self.rows, self._kept, self.step or self.checked)

    def admit(self, batch: int) -> None:
        """Admits a row for each entry of a batch. Raises OutOfSlots or OutOfRows. Syncs: no."""
        self._begin(batch)
        self.rows = list(self._mem.admit([Request(f"generate {entry}") for entry in range(batch)]))

    def have_read(self, texts: Sequence[list[int]], columns: int) -> None:
        """Notes that the rows have read `columns` columns, and of each text all tokens except the last."""
        self._begin(len(texts))
        self.texts, self.columns = [text[:-1] for text in texts], columns
        self.lengths.tokens = np.array([len(text) for text in self.texts])

    def plan(self, columns: int, read: Sequence[int], drafts: int) -> Step:
        """Plans the step of a forward.

        Args:
            columns: columns that the forward reads, tokens and pads.
            read: how many of these columns each row reads.
            drafts: how many of these columns are guesses.

        Raises:
            OutOfSlots, OutOfPages: back-pressure; nothing was planned.

        Syncs: no.
        """
        # a row that gets only pads is left out of this step: its entry is padding
        batch = [row if tokens else None for row, tokens in zip(self.rows, read, strict=True)]
        if self._mem.device.page_table.numel():
            lengths = [self._mem.info(row).length + tokens for row, tokens in zip(self.rows, read, strict=True)]
            self._mem.extend(self.rows, lengths)
        if self._batches is not None and columns > 1 and not drafts:
            self._batches.fold(self.rows)  # so that the states include all tokens before the chunk
        self.step = self._mem.plan(batch, list(read), drafts=drafts)
        return self.step

    def count(self, call: Call, seen: Seen) -> None:
        """Counts the tokens of a planned forward, and keeps the states of rows that stop counting. Syncs: yes."""
        for entry in np.flatnonzero(seen.stop).tolist():  # first, before the tokens of this forward are confirmed
            self._keep(entry, int(seen.certain[entry]))
        self.lengths.add(call, seen)
        if self._batches is None:
            return
        assert call.ids is not None
        self.texts = self.texts or [[] for _ in range(call.batch)]
        for text, ids, read in zip(self.texts, call.ids.tolist(), seen.read.tolist(), strict=True):
            text += ids[call.columns - read :]

    def _keep(self, entry: int, length: int) -> None:
        """Keeps the newest state of a row that stops counting, unless it stands for more than `length` tokens."""
        row = self.rows[entry]
        if self._batches is not None and self._mem.prefix is not None:
            if length:
                self._mem.publish([row], keep="cache", tokens=[self.texts[entry][:length]])
            return
        (self._kept[entry],) = self._mem.publish([row])
        if (kept := self._kept[entry]) is not None and kept.length > length:
            self._mem.drop([kept])
            self._kept[entry] = None

    def settle(self) -> None:
        """Settles the step. If it has guesses, leaves this to `accept`. Syncs: no."""
        step = self.step
        assert step is not None
        if step.batch.drafts is None:
            self._mem.settle(step)
        else:
            self.checked = step
        self.step = None  # at the end: after an exception above, the next call still knows the step

    def accept(self, wrong: int) -> None:
        """If the last forward had guesses, accepts its tokens except the last `wrong` ones. Syncs: no."""
        if (step := self.checked) is None:
            return
        self.torn = True
        try:
            self._mem.accept(step, [step.batch.most - wrong] * len(self.rows))
        except InvalidArgument:  # an older step of another caller must be settled first
            self.torn = False
            raise
        self.checked = None
        self.lengths.forget(wrong)
        self.columns -= wrong
        self.texts = [text[: len(text) - wrong] for text in self.texts]
        self.torn = False

    def take(self, entries: list[int]) -> None:
        """Replaces row i of the batch by the old row `entries[i]`, for all i.

        Args:
            entries: index of the old row for each new row.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; nothing changed.

        Syncs: no.
        """
        self.rows, self.torn = list((fork := self._mem.reorder(self.rows, entries)).rows), True
        self.lengths.take(entries)
        kept = dict(enumerate(self._kept))
        taken = [kept.pop(entry, None) for entry in entries]
        release(self._mem, Left([], list(kept.values()), None))
        self._kept = taken
        if self._batches is not None:
            self.texts = [list(self.texts[entry]) for entry in entries]
            if self._batches.kv is not None:
                self._batches.kv.copy(fork.page_copies)
        else:
            self._states.hide()  # the states stay in the slots
            for layer in self._layers:
                if isinstance(layer, CacheLayerMixin):
                    layer.reorder_cache(torch.LongTensor(entries))
            self._states.drop()
        self._states.uncover()
        self.torn = False

    def gather(self) -> dict[str, Tensor] | None:
        """Returns copies of the states of all rows, by plane; None without rows or during a forward. Syncs: yes."""
        if not self.rows or self.step is not None:
            return None
        ids = self._mem.device.read_slots(self.rows).wait()
        slots = [slot if self._mem.info(row).length else 0 for slot, row in zip(ids, self.rows, strict=True)]
        planes = self._mem.planes
        return {name: planes.gather(name, torch.tensor(slots, device=planes.device)) for name in planes}

    def release(self, publish: bool) -> list[Snapshot | None]:
        """Ends the rows, and puts their states into the prefix cache if there is one and a prompt was given.

        Args:
            publish: whether to return a snapshot of each row, instead of using the prefix cache.

        Returns:
            With `publish`, a snapshot or None for each row; otherwise an empty list.

        Raises:
            StaleHandle: with `publish`, if a reset or a recovery of the manager has ended the rows.

        Syncs: no.
        """
        self.abort_torn()
        try:
            return self._end(publish)
        except StaleHandle:
            self.abort()
            if publish:
                raise
            return []

    def _end(self, publish: bool) -> list[Snapshot | None]:
        self.accept(0)
        rows, lengths = self.rows, self.lengths.tokens.tolist()
        if rows and self._batches is not None:
            try:
                self._batches.fold(rows)
            except BaseException:
                self.abort()
                raise
        texts = [text[:length] for text, length in zip(self.texts, lengths, strict=False)]
        snapshots = list[Snapshot | None]()
        if rows and publish:
            kept = self._kept
            self._kept, self.rows = kept + self._mem.end(rows, keep="handle", lengths=lengths), []
            snapshots = [max(two, key=_length) for two in zip(kept, self._kept[len(kept) :], strict=True)]
        elif rows and self._mem.prefix is not None and len(texts) == len(rows):
            _, self.rows = self._mem.end(rows, keep="cache", lengths=lengths, tokens=texts), []
        elif rows:
            _, self.rows = self._mem.end(rows), []
        release(self._mem, Left([], [one for one in self._kept if one not in snapshots], None))
        self._states.hide()
        self._kept, self.texts, self.columns = [], [], 0
        return snapshots

    def abort_torn(self) -> None:
        """Ends the rows if the last forward never ended or a call was interrupted."""
        if self.step is not None or self.torn:
            self.abort()

    def abort(self) -> None:
        """Ends the rows after a forward that raised or was interrupted. No later forward can begin."""
        self.closed = self.closed or "a forward raised an exception, so its rows ended"
        left = self._left
        self._states.hide()
        if not release(self._mem, left):
            leave(self._mem, left)
        self.rows, self._kept, self.step, self.checked, self.torn = [], [], None, None, False

    def leave(self) -> None:
        """Lets the manager's next cache or server release rows and snapshots. Calls no method of the manager."""
        left = self._left
        if left.rows or left.step or any(left.snapshots):
            leave(self._mem, left)
