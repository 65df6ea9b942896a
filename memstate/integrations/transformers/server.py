"""Continuous batching: requests join and leave a running batch, and prompts are read in chunks."""

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from memstate.checks import whole
from memstate.engine.manager import StateManager
from memstate.errors import Broken, InvalidArgument, StaleHandle
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import kv_for, layout_for, release_left
from memstate.integrations.transformers.progress import shown
from memstate.integrations.transformers.prompts import Event, Prompt, Reason, Served, checked
from memstate.integrations.transformers.running import Running, Waiting, sharing
from memstate.integrations.transformers.samples import BACK_PRESSURE, forked
from memstate.integrations.transformers.sampling import Sampler, choose
from memstate.integrations.transformers.speculation import Speculation, by_length
from memstate.integrations.transformers.states import Kernels
from memstate.requests.handles import Request

PADS: Final = 256  # in a forward at most: so few columns more cost less than another forward


class Server:
    """Runs requests over a model. Call `step` until `busy` is False; submit and abort between any two steps.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`, so that there are KV pages.
        chunk: tokens of prompts that a step reads at most, beside one token of each running answer. Models whose scans
            start from zeros read more: the first chunk of a prompt goes to its end, or to the first mark in it.
        tokenizer: for stop strings.
        kernels: how one token of decode runs, as for `StateCache`.
        assistant: guesses the next tokens of every request that does not look them up in its own text: a smaller model
            of the same vocabulary, or a function that gets all tokens and a number, and returns at most so many tokens.

    Raises:
        LayoutMismatch: the manager was made for another model.
        ConfigurationError: the manager was made for other weights; there are no KV pages, or a layer keeps KV in a way
            that pages cannot hold; or the assistant, the model or the manager cannot speculate.
        InvalidArgument: `chunk` is below 1.
    """

    def __init__(
        self, model: Any, mem: StateManager, *, chunk: int = 256, tokenizer: Any = None, kernels: Kernels = "auto",
        assistant: Any = None,
    ) -> None:  # fmt: skip
        whole("chunk", chunk)
        found = layout_for(model, mem)
        self.model, self.mem = model, mem
        self._batches = Batches(model, mem, found, kv_for(model, mem), kernels)
        self._speculation = Speculation(self._batches, assistant)
        self._continues, self._takes_pads = found.continues, found.takes_pads
        self._chunk, self._tokenizer = chunk, tokenizer
        self._waiting: deque[Waiting] = deque()
        self._running: list[Running] = []
        self._events: list[Event] = []  # that no step has returned
        self._inside = False  # whether a step is running

    @property
    def kernels(self) -> Kernels:
        """How one token of decode runs: "slots" or "gathered"."""
        return self._batches.states.kernels

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or a step that failed has left results for the next."""
        return bool(self._waiting or self._running or self._events)

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Rows that run: requests, and samples of requests."""
        return len(self._running)

    def submit(self, prompt: Prompt) -> None:
        """Adds a request. It starts in a later step, in the order of submission.

        Args:
            prompt: the request.

        Raises:
            InvalidArgument: it is no `Prompt`, its tokens are not those of the model, or it asks for what `serve` does
                not do.

        Syncs: no.
        """
        if not isinstance(prompt, Prompt):
            raise InvalidArgument(f"{prompt!r}: expected a Prompt")
        prompt = replace(prompt, tokens=checked(self.model, prompt.tokens, f"prompt {prompt.id!r}"))
        first = Sampler(self.model, prompt, self._tokenizer)
        self._speculation.draft(prompt.id, first)
        more = [Sampler(self.model, prompt, self._tokenizer, number) for number in range(1, first.samples)]
        tiers, fetch = self.mem.tiers, None
        if tiers is not None and tiers.settings.store is not None:
            fetch = self.mem.prefetch(list(prompt.tokens), prompt.salt, prompt.session)
        self._waiting.append(Waiting(prompt, [first, *more], fetch))

    def abort(self, id: Hashable) -> list[Served]:
        """Ends the requests of a name at once, with all their samples.

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
        running = [one for one in self._running if one.prompt.id == id]
        self._drop(running)
        return ended + [one.served("aborted") for one in running]

    def _drop(self, gone: Collection[Running]) -> None:
        """Aborts rows. Some may have ended: by the manager's `reset`, or in a forward that failed."""
        try:
            self.mem.abort([one.row for one in gone])
        except StaleHandle:
            for one in gone:
                with suppress(StaleHandle):
                    self.mem.abort([one.row])
        except Broken:
            gone = self._running  # `recover` ends them all
        self._running = [one for one in self._running if one not in gone]

    def _failed(self, one: Running, error: Exception) -> Exception:
        """Aborts a row whose own code has raised. Returns the error with a note of its request."""
        self._drop([one])
        error.add_note(f"the request {one.prompt.id!r} has ended")
        return error

    def close(self) -> None:
        """Aborts all requests. Behind an interrupted call, the manager's `recover` ends their rows. Syncs: no."""
        self._drop(self._running)
        waiting = self._waiting
        self._waiting, self._events = deque(), []
        with suppress(Broken):
            self._cancel(waiting)

    def _cancel(self, waiting: Iterable[Waiting]) -> None:
        """Cancels what storage reads for requests that never start: host memory is kept for it."""
        for one in waiting:
            if one.fetch is not None and self.mem.tiers is not None:
                self.mem.tiers.cancel(one.fetch)

    def step(self) -> list[Event]:
        """Admits what fits, reads chunks of prompts, and computes one token of each running answer.

        Returns:
            The new tokens, and the requests that have ended.

        Raises:
            InvalidArgument: a step is running.
            Exception: what the forward raised, or a processor of logits, a stop string or an assistant. Its rows are
                gone; a note of the error names their request. Other requests go on in the next step, which also returns
                the events of this one. Several such errors are an ExceptionGroup.

        Syncs: yes, for the tokens.
        """
        if self._inside:
            raise InvalidArgument("a step is running: call step from one thread, and not from code that it calls")
        try:
            self._inside = True
            return self._step()
        except BaseException:
            self._drop([one for one in self._running if self._is_torn(one)])
            raise
        finally:
            self._inside = False

    def _is_torn(self, one: Running) -> bool:
        """Whether an exception left a row between two tokens, or has ended it."""
        try:
            if self.mem.length(one.row) != one.length or (one.logits is None and one.length == len(one.tokens)):
                return True
            return bool(one.answer) and one.sampler.reason(one.tokens, len(one.answer)) is not None
        except Exception:  # a row that has ended, or a stop string that raises
            return True

    def _step(self) -> list[Event]:
        self.mem.poll()
        self._start_samples()
        self.admit()
        budget, chunks = self._chunk, dict[Running, int]()
        singles, later = list[Running](), list[Running]()
        running = [one for one in self._running if one.logits is None]
        guesses = self._guesses(running)
        for one in running:
            if one in guesses:
                continue
            tokens = self._several(one)
            if tokens < 2:
                singles.append(one)
                continue
            if self._continues:
                tokens = min(tokens, budget)
            if tokens < 2 or budget < 1:
                later.append(one)
            else:  # a scan that starts from zeros reads all it can, whatever the budget
                chunks[one] = self.mem.chunk(one.row, tokens)
                budget -= chunks[one]
        if budget == 1:
            singles += later
        for batch in sharing(chunks, PADS if self._takes_pads else 0):
            self._forward(batch)
        # a window of tokens starts with a token of the model's own, and a slot with zeros
        for group in ([one for one in singles if not one.length], [one for one in singles if one.length]):
            if group:
                self._forward(dict.fromkeys(group, 1))
        for guessed in by_length(guesses):
            self._verify(guessed)
        events, self._events = self._events, []
        return events

    def _several(self, one: Running) -> int:
        """Returns how many tokens a row can read in one forward."""
        return len(one.tokens) - one.length if self._continues or not one.length else 1

    def admit(self) -> None:
        """Starts the requests that fit. `step` does it first. Syncs: no."""
        release_left(self.mem)
        while self._waiting and not any(one.logits is not None for one in self._running):
            one = self._waiting[0]
            if one.fetch is not None and self.mem.tiers is not None and not self.mem.tiers.ready(one.fetch):
                return
            prompt, tokens = one.prompt, list(one.prompt.tokens)
            request = Request(
                prompt.id, length=len(tokens) + one.samplers[0].most - 1, tokens=tokens, salt=prompt.salt,
                session=prompt.session, snapshot_at=prompt.snapshot_at, fetch=one.fetch,
            )  # fmt: skip
            try:
                (row,) = self.mem.admit([request])
            except (*BACK_PRESSURE, InvalidArgument, StaleHandle) as error:  # the session may be closed by now
                if isinstance(error, BACK_PRESSURE) and self._running:
                    return  # later: a row that ends makes room
                self._cancel([self._waiting.popleft()])
                self._events.append(Served(prompt.id, [], "refused", error=str(error)))
                continue
            started = Running(prompt, one.samplers, row, tokens, cached=0, length=0)
            self._running.append(started)
            self._waiting.popleft()
            started.cached = started.length = self.mem.length(row)
            started.draft = self._speculation.draft(prompt.id, started.sampler)

    def _start_samples(self) -> None:
        """Forks the rows that wait for room to do so. If nothing else runs that could make room, one must go."""
        while parked := [one for one in self._running if one.logits is not None]:
            one, logits = parked[0], parked[0].logits
            try:
                rows = forked(self.mem, self._batches.kv, one)
            except (*BACK_PRESSURE, InvalidArgument) as error:
                if isinstance(error, BACK_PRESSURE) and len(parked) < len(self._running):
                    return  # later: a row that ends makes room
                last = parked[-1]
                if last is one or isinstance(error, InvalidArgument):
                    self._drop([one])
                    self._events.append(one.served("refused", str(error)))
                else:  # it waits again, and what it has read goes to the prefix cache
                    self._release(last)
                    self._waiting.appendleft(Waiting(last.prompt, last.samplers))
                continue
            assert logits is not None
            self._running += rows[1:]
            one.samplers, one.logits = one.samplers[:1], None
            for other in rows[1:]:
                other.draft = self._speculation.draft(other.prompt.id, other.sampler)
            self._choose(rows, logits.expand(len(rows), -1))

    def _forward(self, chunks: Mapping[Running, int]) -> None:
        """Reads the next tokens of some rows, and chooses a token for each that has read all it had."""
        batch, starts = list(chunks), [one.length for one in chunks]
        given = [one.tokens[one.length : one.length + tokens] for one, tokens in chunks.items()]
        logits = self._batches.run([one.row for one in batch], given, starts)
        for one, tokens in chunks.items():
            one.length += tokens
        if self.mem.prefix is not None:  # other requests can start from what was read so far
            read = [one for one, start in zip(batch, starts, strict=True) if start < len(one.prompt.tokens)]
            if read:
                self.mem.publish([one.row for one in read], tokens=[one.tokens for one in read])
        due = [entry for entry, one in enumerate(batch) if one.length == len(one.tokens)]
        several = [entry for entry in due if len(batch[entry].samplers) > 1]
        for entry in several:
            batch[entry].logits = logits[entry].clone()
        due = [entry for entry in due if entry not in several]
        if len(due) == len(batch):
            self._choose(batch, logits)
        elif due:
            self._choose([batch[entry] for entry in due], logits[due])
        if several:
            self._start_samples()

    def _guesses(self, running: Sequence[Running]) -> dict[Running, list[int]]:
        """Returns guesses for the rows that have any. Rows whose assistant raises are gone."""
        found, errors = dict[Running, list[int]](), list[Exception]()
        for one in [one for one in running if one.draft is not None]:
            try:
                if tokens := self._speculation.guesses(one):
                    found[one] = tokens
            except Exception as error:
                errors.append(self._failed(one, error))
        _raise(errors)
        return found

    def _verify(self, guesses: dict[Running, list[int]]) -> None:
        """Reads guesses of some rows, the same number of tokens for each, and keeps those that are right."""
        batch, starts = list(guesses), [one.length for one in guesses]
        given = [one.tokens[one.length :] + found for one, found in guesses.items()]
        last = 1 + max(map(len, guesses.values()))
        logits, states = self._speculation.read([one.row for one in batch], given, starts, last)
        largest, ends, errors = logits.argmax(-1).tolist(), dict[Running, Reason | None](), list[Exception]()
        kept = list[int]()  # entries whose guesses were all right
        for entry, (one, found) in enumerate(guesses.items()):
            at, before = last - 1 - len(found), len(one.tokens)
            try:
                ends[one] = self._compare(one, found, largest[entry][at:], logits[entry, at:])
            except Exception as error:
                errors.append(self._failed(one, error))
            if one in ends and len(one.tokens) - before > len(found):
                kept.append(entry)
        if kept:
            self._speculation.keep([batch[entry].row for entry in kept], len(given[0]), states, kept)
        for entry in kept:
            batch[entry].length += len(given[0])
        for one, reason in ends.items():
            if reason is not None:
                self._end(one, reason)
        _raise(errors)

    def _compare(self, one: Running, guesses: Sequence[int], largest: Sequence[int], logits: Tensor) -> Reason | None:
        """Chooses tokens as long as they are those that were guessed, and the one behind. Returns why the row ended."""
        one.guessed += len(guesses)
        for guess, best, row in zip([*guesses, None], largest, logits, strict=True):
            token = best if one.sampler.plain else one.sampler.choose(one.tokens, row)
            event, reason = one.add(token)
            self._events.append(event)
            one.right += token == guess
            if reason is not None or token != guess:
                return reason
        return None

    def _choose(self, batch: Sequence[Running], logits: Tensor) -> None:
        """Chooses a token for each row. Rows whose own code raises are gone; the others have their tokens."""
        errors = list[Exception]()
        chosen = choose([one.sampler for one in batch], [one.tokens for one in batch], logits)
        for one, token in zip(batch, chosen, strict=True):
            try:
                self._add(one, token)
            except Exception as error:
                errors.append(self._failed(one, error))
        _raise(errors)

    def _add(self, one: Running, token: int | Exception) -> None:
        if isinstance(token, Exception):
            raise token
        event, reason = one.add(token)
        self._events.append(event)
        if reason is not None:
            self._end(one, reason)

    def _end(self, one: Running, reason: Reason) -> None:
        self._events.append(one.served(reason))
        self._release(one)

    def _release(self, one: Running) -> None:
        """Ends a row. What it has read stays for others, and for the next turn of its session."""
        cached = self.mem.prefix is not None or one.prompt.session is not None
        self.mem.release([one.row], tokens=[one.tokens] if cached else None)
        self._running.remove(one)


def _raise(errors: list[Exception]) -> None:
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("tokens of several rows", errors)


def stream(
    model: Any, mem: StateManager, requests: Iterable[Any], *, progress: Any = False, **settings: Any
) -> Iterator[Event]:
    """Runs requests and yields every token as it is chosen, and every request as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. It is read as there is room. None means that nothing has arrived yet.
        progress: whether to show on the terminal what is done, runs and waits; also a console of rich.
        **settings: those of `Server`.

    Raises:
        ConfigurationError: `progress` without rich; or as `Server`.
        Exception: as `Server` and `Server.step`; the requests that run are aborted then.

    Syncs: yes, for the tokens.
    """
    server, arrivals, number, more = Server(model, mem, **settings), iter(requests), 0, True
    arrived: Any
    with shown(server, progress) if progress else nullcontext() as line:
        try:
            while more or server.busy:
                while more and not server.waiting and not server._events:
                    arrived = next(arrivals, server)
                    more = arrived is not server
                    if arrived is None or not more:
                        break
                    prompt = arrived if isinstance(arrived, Prompt) else Prompt(arrived)
                    server.submit(replace(prompt, id=number) if prompt.id is None else prompt)
                    number += 1
                    server.admit()
                events = server.step()
                if line is not None:
                    line.add(events)
                yield from events
        finally:
            server.close()


def serve(
    model: Any, mem: StateManager, requests: Iterable[Any], *, progress: Any = False, **settings: Any
) -> Iterator[Served]:
    """Runs requests by continuous batching and yields each as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: prompts, or lists of tokens. It is read as there is room. None means that nothing has arrived yet.
        progress: as for `stream`.
        **settings: those of `Server`.

    Raises:
        Exception: as `stream`.

    Syncs: yes, for the tokens.
    """
    return (event for event in stream(model, mem, requests, progress=progress, **settings) if isinstance(event, Served))
