"""`StateCache`: the cache that a model of Transformers gets for `generate`, with its states in slots."""

import weakref
from collections.abc import Callable, Sequence
from threading import current_thread
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, StaleHandle
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import bound_to, leave, release_left
from memstate.integrations.transformers.left import Left, release
from memstate.integrations.transformers.lengths import Ends, Lengths, Seen, ends_of
from memstate.integrations.transformers.own import own_cache
from memstate.integrations.transformers.paged import Columns
from memstate.integrations.transformers.prefill import read_prompts, texts_of
from memstate.integrations.transformers.states import Kernels, States
from memstate.integrations.transformers.watch import Call, watch
from memstate.requests.handles import Request, Row, Snapshot
from memstate.requests.steps import Step

NO_WAY_BACK = (
    "a recurrent state has no way back to an earlier token, unless tails keep the tokens behind it: give prompt=, "
    "kernels='slots' and a manager with forward=ms.Forward(tail=16)"
)
_ASSISTED: weakref.WeakKeyDictionary[Any, set[int]] = (
    weakref.WeakKeyDictionary()
)  # model -> open caches that take assistants


def _length(snapshot: Snapshot | None) -> int:
    return -1 if snapshot is None else snapshot.length


class StateCache(Cache):
    """A cache of Transformers whose recurrent states lie in the slots of a StateManager.

    The first forward admits one row for each entry of the batch. Before each forward the cache plans a step and hands
    the states to the layers. Behind it, it stores them and settles the step. KV of attention layers is kept as
    Transformers keeps it. Use it as a context manager, or call `close`. What a forgotten cache holds is released when
    the manager's next cache or server admits a request.

    Args:
        model: the model, or any model with the same layers.
        mem: the manager, made by `manager`.
        kernels: how one token of decode runs. "slots": memstate's kernels on slots; "gathered": the model's own on
            copies of the states; "auto": slots on a GPU where the model can.
        prompt: the ids that `generate` is going to get, `batch column`. The cache reads them at once, up to the last
            column and from the longest cached states on, and `generate` reads the rest. KV then lies in the pages of
            the manager, and `close` leaves states and KV in the prefix cache.
        prompt_mask: which of them are tokens; None: all. Pads are at the left.
        ends: the token or tokens that end a row, as `generate` gets them in `eos_token_id=`. None: those of
            `model.generation_config`. Nothing tells a cache what `generate` is given.
        pad: what `generate` feeds to rows that have ended, its `pad_token_id=`. None: as `ends`.

    A row stops counting for good when a forward brings it a pad behind a token, or any pad if
    `mst.layout(model).takes_pads` is False. What it has until then is kept, and no later state of it is ever published.

    With `prompt=`, on slots and with tails, `generate` can be assisted: a forward then reads guesses, and `crop` says
    how many of them were wrong. As long as such a cache is open, the model does not refuse assistants by itself.

    Attributes:
        mem: the manager.
        rows: the requests of the batch; empty before the first forward.
        cached: tokens of each prompt that were found in the prefix cache.

    Raises:
        LayoutMismatch: the manager was made for another model.
        ConfigurationError: the manager was made for other weights; the model is in training mode, keeps no recurrent
            state in a cache, or cannot do what `kernels` asks for; or with `prompt` the manager has no KV pages, or a
            layer keeps KV in a way that pages cannot hold.
        InvalidArgument: prompt and mask are not a batch padded at the left, or `ends` are no tokens.
        OutOfSlots, OutOfRows, OutOfPages: back-pressure; there is no room for the prompt, and nothing was admitted.

    Example:
        with mst.StateCache(model, mem) as cache:
            model.generate(ids, **{cache.argument: cache})
    """

    def __init__(
        self, model: Any, mem: StateManager, *, kernels: Kernels = "auto", prompt: Tensor | None = None,
        prompt_mask: Tensor | None = None, ends: Ends | None = None, pad: int | None = None,
    ) -> None:  # fmt: skip
        self.mem, self.rows, self.cached = mem, list[Row](), list[int]()
        self._step: Step | None = None
        self._checked: Step | None = None  # whose forward has read guesses, until `crop` says which were right
        self._torn = False  # while rows and what is known of them do not fit; an interrupt leaves it so
        self._closed = ""
        bound, texts = bound_to(model, mem), None if prompt is None else texts_of(model, prompt, prompt_mask)
        self._batches = None if texts is None else Batches(model, mem, bound, kernels)  # that read the prompt
        super().__init__(
            layers=self._batches.cache.layers if self._batches else own_cache(model, bound.found.copies).layers
        )
        self._bound, self._found, self._model = bound, bound.found, model
        self._me = weakref.ref(self)
        own = self._batches.states if self._batches else None
        self._states = own or States(model, mem, bound.found, self.layers, kernels)
        gathered = weakref.WeakMethod(self._gathered)  # layers that outlive their cache have nothing to show
        self._states.show(lambda: method() if (method := gathered()) is not None else None)
        self._ends, self._pad = ends_of(model, ends, pad)
        self._begin_batch(0)
        self._guesses = False
        self._texts: list[list[int]] = []  # tokens of each row, with a prompt
        self._columns = 0
        self._last: list[int] | None = None  # the tokens that the first forward must read, behind a prompt
        if self._batches is not None and texts is not None and prompt is not None:
            release_left(mem)
            self.rows, self.cached = read_prompts(self._batches, texts)
            self._texts = [text[:-1] for text in texts]
            self._begin_batch(len(texts))
            self._lengths.tokens = np.array([len(text) - 1 for text in texts])
            self._columns, self._last = prompt.shape[1] - 1, [text[-1] for text in texts]
        self._unwatch: Callable[[], object] | None = watch(model, self)
        if self._goes_back:
            _ASSISTED.setdefault(model, set()).add(id(self))
            model._is_stateful = False  # of this instance, so that generate takes assistants; its class keeps its own

    def _begin_batch(self, batch: int) -> None:
        found, filed = self._found, self._batches is not None
        self._lengths = Lengths(batch, self._ends, self._pad, found.takes_pads, bool(found.attended), filed)
        self._kept: list[Snapshot | None] = [None] * batch  # of rows that stopped counting: the last that counted

    def __repr__(self) -> str:
        return f"StateCache({len(self.rows)} rows, {self._columns} columns{', closed' if self._closed else ''})"

    @property
    def kernels(self) -> Kernels:
        """How one token of decode runs: "slots" or "gathered"."""
        return self._states.kernels

    @property
    def argument(self) -> str:
        """The name under which the model takes the cache: `cache` from Transformers 5.24 on."""
        return self._found.argument

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, pads left out, up to where a row stopped counting."""
        lengths: list[int] = self._lengths.tokens.tolist()
        return lengths

    def _stop(self) -> None:
        """Lets the model go; the second time nothing happens."""
        if self._unwatch is None:
            return
        self._unwatch()
        if self._goes_back:
            _ASSISTED[self._model].discard(id(self))
            if not _ASSISTED[self._model]:
                vars(self._model).pop("_is_stateful", None)
        self._unwatch = None

    @property
    def _goes_back(self) -> bool:
        """Whether tails keep the tokens of a step until it is known which are real."""
        return self._batches is not None and self._states.verifies

    def known(self, ids: Tensor | None) -> int:
        """Returns how many columns of a forward the cache has read before: not every `generate` leaves them out.

        Args:
            ids: what the forward is given. Behind a prompt, or assisted, it can be the whole text.

        Syncs: yes, for such a forward.
        """
        if not (self._guesses or self._last) or ids is None or ids.shape[1] <= self._columns:
            return 0
        times, rest = divmod(len(ids), len(self._texts))  # beams and samples repeat rows
        if not times or rest:
            return 0
        texts = (text for text in self._texts for _ in range(times))
        read = zip(ids[:, : self._columns].tolist(), texts, strict=True)
        return self._columns if all(row[self._columns - len(text) :] == text for row, text in read) else 0

    def begin(self, call: Call) -> dict[str, Any]:
        """Plans the step of a forward and hands the states of its rows to the layers.

        Args:
            call: what the forward reads.

        Returns:
            What else the forward is given: with a prompt the positions of its tokens, where they were left out.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; no row was admitted and the cache is as it was.
            InvalidArgument: the cache is closed, the batch has another size, or the model cannot continue a prompt.

        Syncs: yes.
        """
        if self._step is not None or self._torn:
            self._abort()
        release_left(self.mem)
        if self._closed:
            return {}  # the layers say why
        self._accept(0)
        self._go_on(call)
        self._require_batch(call)
        admitted = not self.rows
        if admitted:
            self._begin_batch(call.batch)
            self.rows = list(self.mem.admit([Request(f"generate {entry}") for entry in range(call.batch)]))
        seen = self._lengths.look(call, self._columns)
        self._bound.begun = self._me, current_thread()
        try:
            self._step = self._plan(call, seen.read.tolist())
        except BaseException:
            if admitted:
                self._release(False)
            raise
        for entry in np.flatnonzero(seen.stop).tolist():  # before what it reads now is confirmed
            self._keep(entry, int(seen.certain[entry]))
        self._lengths.add(call, seen)
        more = {} if self._batches is None else self._place(call, self._batches, seen)
        self._states.begin(self._step, call.columns, drafts=self._drafts(call) > 0)
        self._columns += call.columns
        return more

    def _gathered(self) -> dict[str, Tensor] | None:
        """Returns copies of the states of all rows, by plane; None if there are none. Syncs: yes."""
        if not self.rows or self._step is not None:
            return None
        found = self.mem.device.read_slots(self.rows).wait()
        slots = [slot if self.mem.info(row).length else 0 for slot, row in zip(found, self.rows, strict=True)]
        planes = self.mem.planes
        return {name: planes.gather(name, torch.tensor(slots, device=planes.device)) for name in planes}

    def _keep(self, entry: int, length: int) -> None:
        """Keeps the newest state of a row that stops counting, of at most so many tokens."""
        row = self.rows[entry]
        if self._batches is not None and self.mem.prefix is not None:
            if length:
                self.mem.publish([row], keep="cache", tokens=[self._texts[entry][:length]])
            return
        (self._kept[entry],) = self.mem.publish([row])
        if (kept := self._kept[entry]) is not None and kept.length > length:
            self.mem.drop([kept])
            self._kept[entry] = None

    def _place(self, call: Call, batches: Batches, seen: Seen) -> dict[str, Any]:
        """Notes the tokens of a forward and says where its KV lies. Returns what `begin` does."""
        self._note(call, seen)
        certain = 1 if self._drafts(call) else call.columns  # tokens that are in the lengths
        starts = [self.mem.info(row).length - certain for row in self.rows]  # below 0 at pads
        table, numbers, size = self.mem.device.page_table, [row.index for row in self.rows], self.mem.pages.size
        columns = Columns(table, numbers, starts, call.columns, size, keep=False, past=self._columns)
        batches.cache.place(columns)
        fill = call.positions is None and batches.takes_positions
        return {"position_ids": columns.positions.clamp(min=0)} if fill else {}

    def _note(self, call: Call, seen: Seen) -> None:
        """Notes the tokens of a forward, and the pads of rows that do not count. Syncs: yes."""
        assert call.ids is not None
        self._texts = self._texts or [[] for _ in range(call.batch)]
        for text, ids, read in zip(self._texts, call.ids.tolist(), seen.read.tolist(), strict=True):
            text += ids[call.columns - read :]

    def _go_on(self, call: Call) -> None:
        """Requires that the first forward behind a prompt reads its last tokens. Beams and samples repeat rows."""
        if self._batches is not None and call.ids is None:
            raise InvalidArgument("a cache with prompt= needs token ids: give no embeddings")
        if self._last is None:
            return
        if self._guesses and call.columns > (most := self.mem.forward.tail):
            raise InvalidArgument(
                f"a forward of {call.columns} tokens, of which all but one are guesses, and tails keep {most}: let the "
                f"assistant guess {most - 1} tokens at most, or give the manager Forward(tail={call.columns})"
            )
        times, rest = divmod(call.batch, len(self.rows))
        several = call.columns > 1 and not self._drafts(call)
        ids = None if call.ids is None or rest or several else call.ids[:, 0].tolist()
        if not times or ids != [token for token in self._last for _ in range(times)]:
            raise InvalidArgument(
                f"a forward of {call.batch} x {call.columns} tokens behind a prompt of {len(self.rows)} rows: give "
                "generate the ids that prompt= had"
            )
        if times > 1:
            self.batch_repeat_interleave(times)
        self._last = None

    def _require_batch(self, call: Call) -> None:
        if self.rows and call.batch != len(self.rows):
            raise InvalidArgument(
                f"a batch of {call.batch}, and the cache has {len(self.rows)} rows: call reset() between batches"
            )

    def _plan(self, call: Call, read: Sequence[int]) -> Step:
        if call.columns > 1 and self._columns and not self._found.continues:
            raise InvalidArgument(
                f"{call.columns} tokens behind {self._columns}: the scan of this model starts from zeros, so a chunk "
                "behind the first must have one token; give one token at a time, or call reset() and give all"
            )
        # an entry that has read nothing but pads so far has no state: it is padding in this step
        batch = [row if tokens else None for row, tokens in zip(self.rows, read, strict=True)]
        if self.mem.device.page_table.numel():
            lengths = [self.mem.info(row).length + tokens for row, tokens in zip(self.rows, read, strict=True)]
            self.mem.extend(self.rows, lengths)
        if self._batches is not None and call.columns > 1 and not self._drafts(call):
            self._batches.fold(self.rows)  # a chunk starts from a state with all tokens before
        return self.mem.plan(batch, list(read), drafts=self._drafts(call))

    def _drafts(self, call: Call) -> int:
        """Returns how many tokens of a forward are guesses; those of a longer one are the next turn's."""
        if not self._guesses or not 1 < call.columns <= self.mem.forward.tail:
            return 0
        if call.batch > 1 or not self._columns:
            raise InvalidArgument(
                f"guesses for {call.batch} rows behind {self._columns} tokens: one row can have an assistant, behind a "
                "prompt of two tokens or more"
            )
        return call.columns - 1

    def end(self, failed: bool) -> None:
        """Stores the states that the layers left and settles the step; after a failed forward, cancels it.

        Args:
            failed: whether the forward raised an exception. Its rows are over then, and the cache is closed.

        Syncs: no.
        """
        step = self._step
        if step is None:
            return
        if failed:
            self._abort()
            return
        self._states.end(step)
        if step.batch.drafts is None:
            self.mem.settle(step)
        else:  # which of them are right is not known yet
            self._checked = step
        self._step = self._bound.begun = None  # not before: an exception here leaves the step to the next call

    def _abort(self) -> None:
        """Ends the rows of a forward that raised or was interrupted. The cache is closed."""
        self._closed = self._closed or "a forward raised an exception, so its rows ended"
        left = Left(self.rows, self._kept, self._step or self._checked)
        self._states.hide()
        if not release(self.mem, left):
            leave(self.mem, left)
        self.rows, self._kept, self._step, self._checked, self._torn = [], [], None, None, False

    def close(self, publish: bool = False) -> list[Snapshot | None]:
        """Releases the rows. The model no longer calls this cache. A second call does nothing.

        Args:
            publish: publish the longest state of each row that stands for tokens alone, and not for pads.

        Returns:
            With `publish`, one snapshot for each row, or None. You must drop them. With `prompt=` the state of a row
            that stopped counting went to the prefix cache before, and a snapshot shares the KV pages of its row.

        Raises:
            InvalidArgument: `publish` of more than one row, and nothing names the tokens that end a row, so that pads
                behind an end may count as tokens. The cache stays open, and `close()` releases the rows.

        Syncs: no.
        """
        if publish and self._ends is None and len(self.rows) > 1:
            raise InvalidArgument(
                f"publish=True of {len(self.rows)} rows, and neither StateCache(ends=) nor generation_config names the "
                "tokens that end a row, so pads may count as tokens: call close(), and make the cache with ends= and "
                "pad= as generate gets them, or with ends=[] if no row ends before the others"
            )
        try:
            return self._release(publish)
        finally:
            self._stop()
            self._closed = self._closed or "close() was called"

    def reset(self) -> None:
        """Releases the rows and forgets KV. The next forward begins another batch. Syncs: no."""
        self._release(False)
        self._texts = []
        if self._batches is not None:
            return
        for layer in self.layers:
            layer.reset()

    def _release(self, publish: bool) -> list[Snapshot | None]:
        if self._step is not None or self._torn:
            self._abort()
        try:
            return self._end_rows(publish)
        except StaleHandle:  # a reset or a recovery of the manager has ended the rows
            self._abort()
            if publish:
                raise
            return []

    def _end_rows(self, publish: bool) -> list[Snapshot | None]:
        self._accept(0)
        rows, lengths = self.rows, self.lengths
        if rows and self._batches is not None:
            try:
                self._batches.fold(rows)
            except BaseException:
                self._abort()
                raise
        texts = [text[:length] for text, length in zip(self._texts, lengths, strict=False)]
        found = list[Snapshot | None]()
        if rows and publish:
            kept = self._kept
            self._kept, self.rows = kept + self.mem.end(rows, keep="handle", lengths=lengths), []
            found = [max(two, key=_length) for two in zip(kept, self._kept[len(kept) :], strict=True)]
        elif rows and self.mem.prefix is not None and len(texts) == len(rows):
            _, self.rows = self.mem.end(rows, keep="cache", lengths=lengths, tokens=texts), []
        elif rows:
            _, self.rows = self.mem.end(rows), []
        release(self.mem, Left([], [one for one in self._kept if one not in found], None))
        self._states.hide()
        self._kept, self._columns, self._last = [], 0, None
        return found

    def __del__(self) -> None:
        left = Left(getattr(self, "rows", []), getattr(self, "_kept", []), getattr(self, "_step", None))
        left = left if left.step else left._replace(step=getattr(self, "_checked", None))
        if left.rows or left.step or any(left.snapshots):
            leave(self.mem, left)
        if getattr(self, "_unwatch", None):
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a window of the batch, as Transformers does; None if no row has a state. Raises: InvalidArgument."""
        if not self.rows:
            self._require_step()
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Moves a window on, as Transformers does. Raises: InvalidArgument."""
        self._require_step()
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Stores a recurrent state, as Transformers does. Raises: InvalidArgument."""
        self._require_step()
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values, as Transformers does. Raises: InvalidArgument."""
        self._require_step()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _require_step(self) -> None:
        if self._step is None:
            why = f"the cache is closed: {self._closed}" if self._closed else "no forward of its model has begun"
            raise InvalidArgument(f"{why}; make a StateCache for the model that you call, and call that model")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the columns that the cache has read, tokens and pads."""
        if self._batches is not None and self._step is not None:
            return self._batches.cache.get_seq_length(layer_idx)
        own = self._found.attended and self._batches is None
        return int(super().get_seq_length(layer_idx)) if own else self._columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes entry i of the batch what entry `beam_idx[i]` was: rows that go on twice are forked.

        Args:
            beam_idx: an entry of the batch for each entry, `batch`.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; the cache is as it was.

        Syncs: yes, for the indices.
        """
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some entries of the batch, as `reorder_cache`. Syncs: yes."""
        self._take(torch.arange(len(self.rows), device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each entry of the batch, as `reorder_cache`. Syncs: no."""
        self._take([entry for entry in range(len(self.rows)) for _ in range(repeats)])

    def _take(self, entries: list[int]) -> None:
        self.rows, self._torn = list((fork := self.mem.reorder(self.rows, entries)).rows), True
        self._lengths.take(entries)
        kept = dict(enumerate(self._kept))
        taken = [kept.pop(entry, None) for entry in entries]
        release(self.mem, Left([], list(kept.values()), None))
        self._kept = taken
        if self._batches is not None:
            self._texts = [list(self._texts[entry]) for entry in entries]
            if self._batches.kv is not None:
                self._batches.kv.copy(fork.page_copies)
        else:
            self._states.hide()  # the slots have the states
            for layer in self.layers:
                if isinstance(layer, CacheLayerMixin):
                    layer.reorder_cache(torch.LongTensor(entries))
            self._states.drop()
        self._states.uncover()
        self._torn = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens of the last forward, which were wrong guesses.

        Args:
            tokens_to_remove: how many, times -1.

        Raises:
            InvalidArgument: no forward has read guesses since the last call, or not so many. Without `prompt=`, slots
                and tails there is no way back.

        Syncs: no.
        """
        most = 0 if self._checked is None else self._checked.batch.most - 1
        if type(tokens_to_remove) is not int:
            raise InvalidArgument(f"crop({tokens_to_remove!r}): expected a whole number from {-most} to 0")
        if not -most <= tokens_to_remove <= 0:
            why = f"the last forward had {most} guesses, and the manager has tails for {self.mem.forward.tail} tokens"
            raise InvalidArgument(f"crop({tokens_to_remove}): {why if self._guesses else NO_WAY_BACK}")
        self._accept(-tokens_to_remove)

    def _accept(self, wrong: int) -> None:
        """Accepts what the last forward has read, if it had guesses, but for the last tokens. Syncs: no."""
        step = self._checked
        if step is None:
            return
        self._torn = True
        try:
            self.mem.accept(step, [step.batch.most - wrong] * len(self.rows))
        except InvalidArgument:  # an older step of somebody else comes first
            self._torn = False
            raise
        self._checked = None
        self._lengths.forget(wrong)
        self._columns -= wrong
        self._texts = [text[: len(text) - wrong] for text in self._texts]
        self._torn = False

    def activate_past_recording(self) -> None:
        """Says that forwards of up to `tail` tokens read guesses behind the first. Raises: InvalidArgument."""
        if not self._goes_back:
            raise InvalidArgument(f"activate_past_recording(): {NO_WAY_BACK}")
        self._guesses = True

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can go back by the guesses of a forward; no further."""
        return self._guesses

    @property
    def is_compileable(self) -> bool:
        """False: plans change from step to step."""
        return False
