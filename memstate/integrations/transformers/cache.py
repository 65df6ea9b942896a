"""`StateCache`: a cache for `generate` of a Transformers model, with the states in slots."""

import weakref
from collections.abc import Callable
from functools import partial
from threading import current_thread
from typing import Any, Self

from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument
from memstate.integrations.transformers.asked import GuardedCache
from memstate.integrations.transformers.assisted import NO_WAY_BACK, allow_assistants, disallow_assistants
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import bound_to, release_left
from memstate.integrations.transformers.held import Held
from memstate.integrations.transformers.lengths import Ends, Lengths, ends_of
from memstate.integrations.transformers.own import own_cache
from memstate.integrations.transformers.paged import BatchColumns
from memstate.integrations.transformers.prefill import read_prompts, repeats, require_mask, texts_of
from memstate.integrations.transformers.states import Kernels, States
from memstate.integrations.transformers.watch import Call, watch
from memstate.requests.handles import Row, Snapshot


class StateCache(GuardedCache):
    """A cache of Transformers whose recurrent states lie in the slots of a StateManager.

    The first forward admits one row for each entry of the batch. Before each forward the cache plans a step and hands
    the states to the layers. After the forward it stores the states and settles the step. KV of attention layers is
    kept as in Transformers. Use the cache as a context manager, or call `close`. If a cache is deleted without this,
    its rows are released when the manager's next cache or server admits a request.

    Args:
        model: the model, or any model with the same layers.
        mem: the manager, made by `manager`.
        kernels: how one token of decode runs. "slots": memstate's kernels, on slots; "gathered": the model's own
            kernels, on copies of the states; "auto": slots on a GPU if the model can.
        prompt: the ids that `generate` will get, `batch column`. The cache reads all columns but the last at once, and
            starts from the longest cached states; `generate` reads the last column. KV then lies in the pages of the
            manager, and `close` leaves states and KV in the prefix cache.
        prompt_mask: which ids of the prompt are tokens; None: all. Pads must be at the left.
        ends: the token or tokens that end a row. Give here what `generate` gets in `eos_token_id=`, because the cache
            does not see that argument. None: those of `model.generation_config`.
        pad: the token that `generate` feeds to rows that have ended, its `pad_token_id=`. None: that of
            `model.generation_config`.

    Once a row gets a pad after a token, the later states of this row stand for no known tokens: the row *stops
    counting*. If `mst.layout(model).takes_pads` is False, any pad does this. States that the row has at that moment are
    kept; later ones are not published.

    With `prompt=`, on slots and with tails, `generate` can be assisted: a forward then reads guesses, and `crop` says
    how many of them were wrong. While such a cache is open, the model accepts assistants.

    Attributes:
        mem: the manager.
        rows: the requests of the batch; empty before the first forward.
        cached: number of tokens of each prompt whose state was in the prefix cache.

    Raises:
        LayoutMismatch: the manager was made for another model.
        ConfigurationError: the manager was made for other weights; the model is in training mode, keeps no recurrent
            state in a cache, or cannot do what `kernels` asks for; or with `prompt` the manager has no KV pages, or a
            layer keeps KV in a way that pages cannot hold.
        InvalidArgument: prompt and mask are not a batch padded at the left, or `ends` or `pad` are not tokens.
        OutOfSlots, OutOfRows, OutOfPages: back-pressure: there is no room for the prompt; nothing was admitted.

    Example:
        with mst.StateCache(model, mem) as cache:
            model.generate(ids, **{cache.argument: cache})
    """

    def __init__(
        self, model: Any, mem: StateManager, *, kernels: Kernels = "auto", prompt: Tensor | None = None,
        prompt_mask: Tensor | None = None, ends: Ends | None = None, pad: int | None = None,
    ) -> None:  # fmt: skip
        self.mem, self.cached = mem, list[int]()
        bound, texts = bound_to(model, mem), None if prompt is None else texts_of(model, prompt, prompt_mask)
        # reads the prompt and runs later forwards
        self._batches = None if texts is None else Batches(model, mem, bound, kernels)
        super().__init__(
            layers=self._batches.cache.layers if self._batches else own_cache(model, bound.layout.copies).layers
        )
        self._bound, self._layout, self._model = bound, bound.layout, model
        own = self._batches.states if self._batches else None
        self._states = own or States(model, mem, bound.layout, self.layers, kernels)
        self._ends, fed = ends_of(model, ends, pad)
        counting = partial(
            Lengths, ends=self._ends, pad=fed, takes_pads=bound.layout.takes_pads, attends=bool(bound.layout.attended),
            filed=self._batches is not None,
        )  # fmt: skip
        self._held = Held(mem, self._states, self._batches, self.layers, counting)
        gather = weakref.WeakMethod(self._held.gather)  # layers that live longer than their cache show nothing
        self._states.show(lambda: method() if (method := gather()) is not None else None)
        self._guesses = False
        self._last: list[int] | None = None  # last token of each prompt, which the first forward must read
        if self._batches is not None and texts is not None and prompt is not None:
            release_left(mem)
            self._held.rows, self.cached = read_prompts(self._batches, texts)
            self._held.have_read(texts, prompt.shape[1] - 1)
            self._last = [text[-1] for text in texts]
        self._unwatch: Callable[[], object] | None = watch(model, self)
        if self._goes_back:
            allow_assistants(model, self)

    def __repr__(self) -> str:
        held = self._held
        return f"StateCache({len(held.rows)} rows, {held.columns} columns{', closed' if held.closed else ''})"

    @property
    def rows(self) -> list[Row]:
        """The requests of the batch; empty before the first forward."""
        return self._held.rows

    @property
    def kernels(self) -> Kernels:
        """How one token of decode runs: "slots" or "gathered"."""
        return self._states.kernels

    @property
    def argument(self) -> str:
        """The name under which the model takes the cache: `cache` from Transformers 5.24 on."""
        return self._layout.argument

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row, without pads. It stays the same after the row has stopped counting."""
        lengths: list[int] = self._held.lengths.tokens.tolist()
        return lengths

    def _stop(self) -> None:
        """Stops watching the model. A second call does nothing."""
        if self._unwatch is None:
            return
        self._unwatch()
        disallow_assistants(self._model, self)
        self._unwatch = None

    @property
    def _goes_back(self) -> bool:
        """Whether tails keep the tokens of a step until the caller says which of them are real."""
        return self._batches is not None and self._states.verifies

    def known(self, ids: Tensor | None) -> int:
        """Returns how many first columns of a forward the cache has read already. `generate` may pass them again.

        Args:
            ids: the ids of the forward. After a prompt, or with an assistant, they can be all tokens from the start.

        Syncs: yes, if the ids can be all tokens from the start.
        """
        columns, known = self._held.columns, self._held.texts
        if not known or not (self._guesses or self._last) or ids is None or ids.shape[1] <= columns:
            return 0
        times, rest = divmod(len(ids), len(known))  # beams and samples repeat rows
        if not times or rest:
            return 0
        texts = (text for text in known for _ in range(times))
        read = zip(ids[:, :columns].tolist(), texts, strict=True)
        return columns if all(row[columns - len(text) :] == text for row, text in read) else 0

    def begin(self, call: Call) -> dict[str, Any]:
        """Plans the step of a forward and hands the states of its rows to the layers.

        Args:
            call: the inputs of the forward.

        Returns:
            More arguments for the forward: with a prompt, the positions of its tokens if the caller gave none.

        Raises:
            OutOfSlots, OutOfRows, OutOfPages: back-pressure; no row was admitted, and the cache has not changed.
            InvalidArgument: the cache is closed, the batch has another size or no tokens, the model cannot continue a
                prompt, or the prompt was read with another mask.

        Syncs: yes.
        """
        held = self._held
        held.abort_torn()
        release_left(self.mem)
        if held.closed:
            return {}  # the layers will raise an error with the reason
        held.accept(0)
        drafts = self._drafts(call)
        self._go_on(call, drafts)
        if admitted := not held.rows:
            held.admit(call.batch)
        seen = held.lengths.look(call, held.columns)
        self._bound.begun = weakref.ref(self), current_thread()
        try:
            step = held.plan(call.columns, seen.read.tolist(), drafts)
        except BaseException:
            if admitted:
                held.release(False)
            raise
        held.count(call, seen)
        more = {} if self._batches is None else self._place(call, self._batches, drafts)
        self._states.begin(step, call.columns, drafts=drafts > 0)
        held.columns += call.columns
        return more

    def _drafts(self, call: Call) -> int:
        """Returns how many tokens of a forward are guesses: 0 if it is longer than a tail, as at a new turn."""
        if not self._guesses or not 1 < call.columns <= self.mem.forward.tail:
            return 0
        if call.batch > 1 or not self._held.columns:
            raise InvalidArgument(
                f"guesses for {call.batch} rows behind {self._held.columns} tokens: one row can have an assistant, "
                "behind a prompt of two tokens or more"
            )
        return call.columns - 1

    def _go_on(self, call: Call, drafts: int) -> None:
        """Raises an error if a forward does not continue the rows. The first one after a prompt may repeat each row."""
        if not call.columns:
            raise InvalidArgument(
                f"a forward of no tokens: generate leaves out the {self._held.columns} columns that the cache has "
                "read, so give it the whole conversation, with the new tokens behind the old ones"
            )
        if self._batches is not None and call.ids is None:
            raise InvalidArgument("a cache with prompt= needs token ids: give no embeddings")
        if self._last is not None:
            if self._guesses and call.columns > (most := self.mem.forward.tail):
                raise InvalidArgument(
                    f"a forward of {call.columns} tokens, of which all but one are guesses, and tails keep {most}: let "
                    f"the assistant guess {most - 1} tokens at most, or give the manager Forward(tail={call.columns})"
                )
            times = repeats(call, len(self.rows), self._last, drafts)
            require_mask(call, self.lengths, self._held.columns, bool(self._layout.attended))
            if times > 1:
                self.batch_repeat_interleave(times)
            self._last = None
        rows, columns = len(self.rows), self._held.columns
        if rows and call.batch != rows:
            raise InvalidArgument(
                f"a batch of {call.batch}, and the cache has {rows} rows: call reset() between batches"
            )
        if call.columns > 1 and columns and not self._layout.continues:
            raise InvalidArgument(
                f"{call.columns} tokens behind {columns}: the scan of this model starts from zeros, so a chunk "
                "behind the first must have one token; give one token at a time, or call reset() and give all"
            )

    def _place(self, call: Call, batches: Batches, drafts: int) -> dict[str, Any]:
        """Sets where the KV of a planned forward lies. Returns more arguments for the forward, as `begin` does."""
        certain = 1 if drafts else call.columns  # tokens of this forward that the rows' lengths already include
        starts = [self.mem.info(row).length - certain for row in self.rows]  # below 0 if the row has pads
        table, numbers, size = self.mem.device.page_table, [row.index for row in self.rows], self.mem.pages.size
        columns = BatchColumns(table, numbers, starts, call.columns, size, keep=False, past=self._held.columns)
        batches.cache.place(columns)
        fill = call.positions is None and batches.takes_positions
        return {"position_ids": columns.positions.clamp(min=0)} if fill else {}

    def end(self, failed: bool) -> None:
        """Stores the states that the layers have computed and settles the step. After a failed forward, cancels it.

        Args:
            failed: whether the forward raised an exception. Its rows end, and the cache is closed.

        Syncs: no.
        """
        if (step := self._held.step) is None:
            return
        if failed:
            self._held.abort()
            return
        self._states.end(step)
        self._held.settle()
        self._bound.begun = None

    def close(self, publish: bool = False) -> list[Snapshot | None]:
        """Releases the rows and stops watching the model. A second call does nothing.

        Args:
            publish: whether to publish, for each row, its longest state that stands only for tokens, not for pads.

        Returns:
            With `publish`, a snapshot or None for each row; the caller must drop the snapshots. With `prompt=`, a
            snapshot shares the KV pages of its row; the state of a row that stopped counting is in the prefix cache
            already.

        Raises:
            InvalidArgument: `publish` is set, there are several rows, and nothing names the tokens that end a row. Then
                pads after an end could be taken for tokens. The cache stays open; `close()` releases the rows.

        Syncs: no.
        """
        if publish and self._ends is None and len(self.rows) > 1:
            raise InvalidArgument(
                f"publish=True of {len(self.rows)} rows, and neither StateCache(ends=) nor generation_config names the "
                "tokens that end a row, so pads may count as tokens: call close(), and make the cache with ends= and "
                "pad= as generate gets them, or with ends=[] if no row ends before the others"
            )
        try:
            return self._held.release(publish)
        finally:
            self._stop()
            self._held.closed = self._held.closed or "close() was called"

    def reset(self) -> None:
        """Releases the rows and forgets KV. The next forward begins another batch. Syncs: no."""
        self._held.release(False)
        self._last = None
        if self._batches is not None:
            return
        for layer in self.layers:
            layer.reset()

    def __del__(self) -> None:
        if getattr(self, "_held", None):
            self._held.leave()
        if getattr(self, "_unwatch", None):
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of columns that the cache has read, with tokens or pads."""
        if self._batches is not None and self._held.step is not None:
            return self._batches.cache.get_seq_length(layer_idx)
        own = self._layout.attended and self._batches is None
        return int(super().get_seq_length(layer_idx)) if own else self._held.columns

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens of the last forward, because they are wrong guesses.

        Args:
            tokens_to_remove: number of wrong guesses, negative.

        Raises:
            InvalidArgument: since the last call, no forward has read that many guesses; or the cache cannot take back
                guesses, because it lacks `prompt=`, decode on slots or tails.

        Syncs: no.
        """
        checked = self._held.checked
        most = 0 if checked is None else checked.batch.most - 1
        if type(tokens_to_remove) is not int:
            raise InvalidArgument(f"crop({tokens_to_remove!r}): expected a whole number from {-most} to 0")
        if not -most <= tokens_to_remove <= 0:
            why = f"the last forward had {most} guesses, and the manager has tails for {self.mem.forward.tail} tokens"
            raise InvalidArgument(f"crop({tokens_to_remove}): {why if self._guesses else NO_WAY_BACK}")
        self._held.accept(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Makes later forwards of up to `tail` tokens read guesses. Raises InvalidArgument if the cache cannot."""
        if not self._goes_back:
            raise InvalidArgument(f"activate_past_recording(): {NO_WAY_BACK}")
        self._guesses = True

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take back guesses of the last forward. `crop` never takes back other tokens."""
        return self._guesses
