"""Continuous batching: requests join and leave a running batch, and prompts are read in chunks."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, OutOfPages, OutOfRows, OutOfSlots
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import kv_for, layout_for, release_left
from memstate.integrations.transformers.prompts import Event, Prompt, Reason, Served, Token
from memstate.integrations.transformers.sampling import Sampler, choose
from memstate.integrations.transformers.states import Kernels
from memstate.requests.handles import Request, Row
from memstate.tiers import Fetch

BACK_PRESSURE = (OutOfSlots, OutOfRows, OutOfPages)


@dataclass(eq=False)
class _Waiting:
    """A request that has not started."""

    prompt: Prompt
    sampler: Sampler
    fetch: Fetch | None


@dataclass(eq=False)
class _Running:
    """A request that runs: its tokens so far, prompt and answer, and how many of them its state stands for."""

    prompt: Prompt
    sampler: Sampler
    row: Row
    tokens: list[int]
    cached: int
    length: int

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.tokens[len(self.prompt.tokens) :]


class Server:
    """Runs requests over a model. Call `step` until `busy` is False; submit and abort between any two steps.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`, so that there are KV pages.
        chunk: tokens of prompts that a step reads at most, beside one token of each running answer. Models whose scans
            start from zeros read more: the first chunk of a prompt goes to its end, or to the first mark in it.
        tokenizer: for stop strings.
        kernels: how one token of decode runs, as for `StateCache`.

    Raises:
        LayoutMismatch: the manager was made for another model.
        ConfigurationError: there are no KV pages, or a layer keeps KV in a way that pages cannot hold.
        InvalidArgument: `chunk` is below 1.
    """

    def __init__(
        self, model: Any, mem: StateManager, *, chunk: int = 256, tokenizer: Any = None, kernels: Kernels = "auto"
    ) -> None:
        if chunk < 1:
            raise InvalidArgument(f"chunk={chunk}: expected at least 1 token")
        found = layout_for(model, mem)
        self.model, self.mem = model, mem
        self._batches = Batches(model, mem, found, kv_for(model, mem), kernels)
        self._continues, self._chunk, self._tokenizer = found.continues, chunk, tokenizer
        self._waiting: deque[_Waiting] = deque()
        self._running: list[_Running] = []

    @property
    def kernels(self) -> Kernels:
        """How one token of decode runs: "slots" or "gathered"."""
        return self._batches.states.kernels

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    def submit(self, prompt: Prompt) -> None:
        """Adds a request. It starts in a later step, in the order of submission.

        Args:
            prompt: the request.

        Raises:
            InvalidArgument: it has no tokens, or asks for what `serve` does not do.

        Syncs: no.
        """
        sampler = Sampler(self.model, prompt, self._tokenizer)
        tiers, fetch = self.mem.tiers, None
        if tiers is not None and tiers.settings.store is not None:
            fetch = self.mem.prefetch(list(prompt.tokens), prompt.salt, prompt.session)
        self._waiting.append(_Waiting(prompt, sampler, fetch))

    def abort(self, id: Hashable) -> list[Served]:
        """Ends the requests of a name at once.

        Args:
            id: of the requests.

        Returns:
            What they had so far.

        Syncs: no.
        """
        gone = [one for one in self._waiting if one.prompt.id == id]
        self._waiting = deque(one for one in self._waiting if one.prompt.id != id)
        self._cancel(gone)
        ended = [Served(id, [], "aborted") for _ in gone]
        for one in [one for one in self._running if one.prompt.id == id]:
            self.mem.abort([one.row])
            self._running.remove(one)
            ended.append(Served(id, one.answer, "aborted", one.cached))
        return ended

    def close(self) -> None:
        """Aborts all requests. Syncs: no."""
        self.mem.abort([one.row for one in self._running])
        waiting = self._waiting
        self._running, self._waiting = [], deque()
        self._cancel(waiting)

    def _cancel(self, waiting: Iterable[_Waiting]) -> None:
        """Cancels what storage reads for requests that never start: host memory is kept for it."""
        for one in waiting:
            if one.fetch is not None and self.mem.tiers is not None:
                self.mem.tiers.cancel(one.fetch)

    def step(self) -> list[Event]:
        """Admits what fits, reads chunks of prompts, and computes one token of each running answer.

        Returns:
            The new tokens, and the requests that have ended.

        Raises:
            Exception: what the forward raised. Its rows are gone; other requests go on in the next step.

        Syncs: yes, for the tokens.
        """
        self.mem.poll()
        events: list[Event] = list(self._admit())
        budget, chunks = self._chunk, dict[tuple[int, bool], list[_Running]]()
        singles, later = list[_Running](), list[_Running]()
        for one in self._running:
            tokens = self._several(one)
            if tokens < 2:
                singles.append(one)
                continue
            if self._continues:
                tokens = min(tokens, budget)
            if tokens < 2 or budget < 1:
                later.append(one)
            else:  # a scan that starts from zeros reads all it can, whatever the budget
                tokens = self.mem.chunk(one.row, tokens)
                chunks.setdefault((tokens, not one.length), []).append(one)
                budget -= tokens
        if budget == 1:
            singles += later
        for (tokens, _), batch in chunks.items():  # chunks of one length share a forward
            events += self._forward(batch, tokens)
        return events + self._forward(singles, 1) if singles else events

    def _several(self, one: _Running) -> int:
        """Returns how many tokens a row can read in one forward."""
        return len(one.tokens) - one.length if self._continues or not one.length else 1

    def _admit(self) -> Iterator[Served]:
        release_left(self.mem)
        while self._waiting:
            one = self._waiting[0]
            if one.fetch is not None and self.mem.tiers is not None and not self.mem.tiers.ready(one.fetch):
                return
            prompt, tokens = one.prompt, list(one.prompt.tokens)
            request = Request(
                prompt.id, length=len(tokens) + one.sampler.most - 1, tokens=tokens, salt=prompt.salt,
                session=prompt.session, snapshot_at=prompt.snapshot_at, fetch=one.fetch,
            )  # fmt: skip
            try:
                (row,) = self.mem.admit([request])
            except (*BACK_PRESSURE, InvalidArgument) as error:
                if isinstance(error, BACK_PRESSURE) and self._running:
                    return  # later: a row that ends makes room
                self._cancel([self._waiting.popleft()])
                yield Served(prompt.id, [], "refused", error=str(error))
                continue
            self._waiting.popleft()
            cached = self.mem.length(row)
            self._running.append(_Running(prompt, one.sampler, row, tokens, cached, cached))

    def _forward(self, batch: list[_Running], tokens: int) -> list[Event]:
        """Reads the next tokens of some rows, and chooses a token for each that has read all it had."""
        starts = [one.length for one in batch]
        given = [one.tokens[start : start + tokens] for one, start in zip(batch, starts, strict=True)]
        try:
            logits = self._batches.run([one.row for one in batch], given, starts)
        except BaseException:
            self._running = [one for one in self._running if one not in batch]
            raise
        for one in batch:
            one.length += tokens
        if self.mem.prefix is not None:  # other requests can start from what was read so far
            read = [one for one, start in zip(batch, starts, strict=True) if start < len(one.prompt.tokens)]
            if read:
                self.mem.publish([one.row for one in read], tokens=[one.tokens for one in read])
        due = [entry for entry, one in enumerate(batch) if starts[entry] + tokens == len(one.tokens)]
        if len(due) == len(batch):
            return self._choose(batch, logits)
        return self._choose([batch[entry] for entry in due], logits[due]) if due else []

    def _choose(self, batch: list[_Running], logits: Tensor) -> list[Event]:
        events: list[Event] = []
        chosen = choose([one.sampler for one in batch], [one.tokens for one in batch], logits)
        for one, token in zip(batch, chosen, strict=True):
            one.tokens.append(token)
            events.append(Token(one.prompt.id, token))
            if (reason := one.sampler.reason(one.tokens, len(one.tokens) - len(one.prompt.tokens))) is not None:
                events.append(self._end(one, reason))
        return events

    def _end(self, one: _Running, reason: Reason) -> Served:
        cached = self.mem.prefix is not None or one.prompt.session is not None
        self.mem.release([one.row], tokens=[one.tokens] if cached else None)
        self._running.remove(one)
        return Served(one.prompt.id, one.answer, reason, one.cached)


def stream(model: Any, mem: StateManager, requests: Iterable[Any], **settings: Any) -> Iterator[Event]:
    """Runs requests and yields every token as it is chosen, and every request as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. It is read as there is room. None means that nothing has arrived yet.
        **settings: those of `Server`.

    Raises:
        Exception: as `Server` and `Server.step`; the requests that run are aborted then.

    Syncs: yes, for the tokens.
    """
    server, arrivals, number, more = Server(model, mem, **settings), iter(requests), 0, True
    arrived: Any
    try:
        while more or server.busy:
            while more and not server.waiting:
                arrived = next(arrivals, server)
                more = arrived is not server
                if arrived is None or not more:
                    break
                server.submit(arrived if isinstance(arrived, Prompt) else Prompt(arrived, number))
                number += 1
                yield from server._admit()
            yield from server.step()
    finally:
        server.close()


def serve(model: Any, mem: StateManager, requests: Iterable[Any], **settings: Any) -> Iterator[Served]:
    """Runs requests by continuous batching and yields each as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. It is read as there is room. None means that nothing has arrived yet.
        **settings: those of `Server`.

    Raises:
        Exception: as `stream`.

    Syncs: yes, for the tokens.
    """
    return (event for event in stream(model, mem, requests, **settings) if isinstance(event, Served))
