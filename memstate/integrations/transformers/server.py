"""Continuous batching: requests join and leave a running batch, and prompts are read in chunks."""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from math import inf
from threading import RLock, Thread, current_thread
from typing import Any, Final, TypeVar
from weakref import ref

from torch import Tensor

from memstate.checks import hashable, require_salt, whole
from memstate.engine.manager import StateManager
from memstate.errors import Broken, InvalidArgument, MemstateError, OutOfPages, OutOfRows, OutOfSlots, StaleHandle
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import bound_to, release_left
from memstate.integrations.transformers.progress import shown
from memstate.integrations.transformers.prompts import Event, Prompt, Reason, Served, Token, Top, checked
from memstate.integrations.transformers.running import Running, Waiting, alike, sharing
from memstate.integrations.transformers.sampling import Sampler, choose, logprobs
from memstate.integrations.transformers.speculation import Speculation
from memstate.integrations.transformers.states import Kernels
from memstate.requests.handles import Request, Row, Rows, Session
from memstate.tiers import Fetch

T = TypeVar("T")
AHEAD: Final = 64  # requests that are read while they wait for storage or for a turn, which others need not wait for
BACK_PRESSURE: Final = (OutOfSlots, OutOfRows, OutOfPages)
PADS: Final = 256  # in a forward at most: so few columns more cost less than another forward


class _Call:
    """A call that drives a server. It lives as long as the call, wherever an exception leaves it."""


def _none() -> None:
    """Stands for no call."""


class Server:
    """Runs requests over a model. Call `step` until `busy` is False; submit and abort at any time, from any thread.

    One thread at a time drives it: its calls of `step` and `admit` use the manager. What other threads ask for is
    noted, and the next step does it. The manager's own calls, such as `sessions.open`, belong to the driving thread.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`, so that there are KV pages.
        chunk: tokens of prompts that a step reads at most, beside one token of each running answer. Models whose scans
            start from zeros read more: the first chunk of a prompt goes to its end, or to the first mark in it.
        tokenizer: for the text of tokens, and stop strings.
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
        self.model, self.mem = model, mem
        self._batches = Batches(model, mem, bound_to(model, mem), kernels)
        self._speculation = Speculation(self._batches, assistant)
        self._continues, self._takes_pads = self._batches.found.continues, self._batches.found.takes_pads
        self._chunk, self._tokenizer = chunk, tokenizer
        self._asked: deque[Waiting | Callable[[], None]] = deque()  # by any thread; a step does it, in this order
        self._waiting: deque[Waiting] = deque()
        self._running: list[Running] = []
        self._left: list[Row] = []  # that could not be aborted yet
        self._full = False  # whether the first request that can start waits for room
        self._events: list[Event] = []  # that no step has returned
        self._lock = RLock()  # of the driving thread; a second one after an interrupt opens it again
        self._driver: Thread = current_thread()
        self._call: Callable[[], _Call | None] = _none  # that drives now

    @property
    def kernels(self) -> Kernels:
        """How one token of decode runs: "slots" or "gathered"."""
        return self._batches.states.kernels

    @property
    def busy(self) -> bool:
        """Whether a step has something to do: requests, results of a step that failed, calls of other threads."""
        return bool(self._asked or self._waiting or self._running or self._events)

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting) + sum(isinstance(one, Waiting) for one in list(self._asked))

    @property
    def running(self) -> int:
        """Rows that run: requests, and samples of requests."""
        return len(self._running)

    def submit(self, prompt: Prompt) -> None:
        """Adds a request. It starts in a later step, in the order of submission. Any thread and any code can call it.

        A turn of a session whose last turn has not ended waits for that; requests behind it go first.

        Args:
            prompt: the request.

        Raises:
            InvalidArgument: it is no `Prompt`, its tokens are not those of the model, or it asks for what `serve` does
                not do.

        Syncs: no.
        """
        self._asked.append(self._checked(prompt))
        if self._is_mine():
            with suppress(MemstateError):  # it comes again in the next step
                self._drive(self._take)

    def _checked(self, prompt: Prompt) -> Waiting:
        if not isinstance(prompt, Prompt):
            raise InvalidArgument(f"{prompt!r}: expected a Prompt")
        hashable("id", prompt.id)
        if not isinstance(prompt.session, Session | None):
            raise InvalidArgument(
                f"prompt {prompt.id!r}: session={prompt.session!r}: expected what sessions.open() returned"
            )
        prompt = replace(prompt, tokens=checked(self.model, prompt.tokens, f"prompt {prompt.id!r}"))
        if prompt.salt is not None:
            require_salt(prompt.salt)
        first = Sampler(self.model, prompt, self._tokenizer)
        self._speculation.draft(prompt.id, first)
        more = [Sampler(self.model, prompt, self._tokenizer, number) for number in range(1, first.samples)]
        return Waiting(prompt, [first, *more])

    def fork(self, session: Session, name: Hashable) -> Session:
        """Opens a second session that goes on from the last turn of another, as `mem.sessions.fork` does.

        The caller must drive the server. The KV that both fill up differently is copied.

        Args:
            session: the session to fork, without a running turn.
            name: the name of the new one.

        Raises:
            MemstateError: as `mem.sessions.fork`; or code that a step calls has called it.

        Syncs: no.
        """

        def forked() -> Session:
            twin, copies = self.mem.sessions.fork(session, name)
            if self._batches.kv is not None:
                self._batches.kv.copy(copies)
            return twin

        return self._drive(forked)

    def abort(self, id: Hashable) -> list[Served]:
        """Ends the requests of a name, with all their samples. Any thread and any code can call it.

        Args:
            id: of the requests.

        Returns:
            What they had so far. Nothing where another thread drives the server, or a step has called this code: the
            next step ends the requests then, and returns their results with its events.

        Raises:
            InvalidArgument: the name cannot be hashed.

        Syncs: no.
        """
        hashable("id", id)
        if not self._is_mine():
            self._asked.append(lambda: self._events.extend(self._abort(id)))
            return []
        self._drive(self._take)
        return self._drive(lambda: self._abort(id))

    def _abort(self, id: Hashable) -> list[Served]:
        running = [one for one in self._running if one.prompt.id == id]
        self._drop(running)
        gone = [one for one in self._waiting if one.prompt.id == id]
        self._waiting = deque(one for one in self._waiting if one.prompt.id != id)
        self._cancel(gone)
        return [Served(id, [], "aborted") for _ in gone] + [one.served("aborted") for one in running]

    def close(self) -> None:
        """Aborts all requests, without results. Behind an interrupted call, the manager's `recover` ends their rows.

        While a step runs, in another thread or because it has called this code, the next step does it. So end the loop
        first, then close.

        Syncs: no.
        """
        self._asked.append(self._close)
        if self._call() is None:
            self._drive(self._take)

    def _close(self) -> None:
        self._drop(self._running)
        waiting, self._waiting, self._events = self._waiting, deque(), []
        self._cancel(waiting)

    def _is_mine(self) -> bool:
        """Whether the caller can drive the server: no other thread does, and no code that a step calls."""
        driver = self._driver
        return self._call() is None if driver is current_thread() else not driver.is_alive()

    def _take(self) -> None:
        """Does what was asked for since the last step. After an interrupt, the last of it may come twice."""
        while self._asked:
            one = self._asked[0]
            if not isinstance(one, Waiting):
                try:
                    one()
                except Exception:  # it would end the next step, too
                    self._asked.popleft()
                    raise
            elif not self._waiting or self._waiting[-1] is not one:
                one.fetch = self._prefetch(one.prompt)
                self._waiting.append(one)
            self._asked.popleft()

    def _drop(self, gone: Collection[Running]) -> None:
        """Aborts rows. Some may have ended: by the manager's `reset`, or in a forward that failed."""
        rows = list(dict.fromkeys([*self._left, *(one.row for one in gone)]))
        try:
            try:
                self.mem.end(rows)
            except StaleHandle:
                for row in rows:
                    with suppress(StaleHandle):
                        self.mem.end([row])
            self._left = []
        except Broken:  # `recover` ends them all; if another thread's call was meant, a later step does
            gone = self._running
            self._left = list(dict.fromkeys([*rows, *(one.row for one in gone)]))
        self._running = [one for one in self._running if one not in gone]

    def _failed(self, one: Running, error: Exception) -> Exception:
        """Aborts a row whose own code has raised. Returns the error with a note of its request."""
        self._drop([one])
        error.add_note(f"the request {one.prompt.id!r} has ended")
        return error

    def _prefetch(self, prompt: Prompt) -> Fetch | None:
        """Starts to read what storage has of a prompt. None: nothing to ask, or the session's last turn still runs."""
        tiers = self.mem.tiers
        if tiers is None or tiers.settings.store is None or self._turn_runs(prompt):
            return None
        try:
            return self.mem.prefetch(list(prompt.tokens), prompt.salt, prompt.session)
        except MemstateError:  # what is wrong, admission and the next step say too; a closed manager has no storage
            return None

    def _turn_runs(self, prompt: Prompt) -> bool:
        """Whether the last turn of a request's session runs here."""
        return prompt.session is not None and any(one.prompt.session == prompt.session for one in self._running)

    def _cancel(self, waiting: Iterable[Waiting]) -> None:
        """Cancels what storage reads for requests that never start: host memory is kept for it."""
        for one in waiting:
            if one.fetch is not None and not one.fetch.done and self.mem.tiers is not None:
                with suppress(Broken):  # `recover` ends it
                    self.mem.tiers.cancel(one.fetch)

    def step(self) -> list[Event]:
        """Admits what fits, reads chunks of prompts, and computes one token of each running answer.

        Where nothing can run before storage has answered, it waits for that instead, at most a tenth of a second.

        Returns:
            The new tokens, and the requests that have ended.

        Raises:
            InvalidArgument: code that a step calls has called it.
            Exception: what the forward raised, or a processor of logits, a stop string or an assistant. Its rows are
                gone; a note of the error names their request. Other requests go on in the next step, which also returns
                the events of this one. Several such errors are an ExceptionGroup.

        Syncs: yes, for the tokens.
        """
        return self._drive(self._step)

    def admit(self) -> None:
        """Starts the requests that fit. `step` does it first.

        Raises:
            InvalidArgument: code that a step calls has called it.

        Syncs: no.
        """
        self._drive(self._admit)

    def _drive(self, work: Callable[[], T]) -> T:
        """Runs work that uses the manager, and puts right what an exception leaves half done."""
        if self._driver is current_thread() and self._call() is not None:
            raise InvalidArgument("a step is running: call step and admit from no code that a step calls")
        with self._lock:
            here, before = _Call(), self.mem.rows
            self._driver, self._call = current_thread(), ref(here)
            try:
                return work()
            except BaseException:
                self._mend(before)
                raise
            finally:
                self._call = _none

    def _mend(self, before: Rows) -> None:
        """Ends rows that an exception left between two tokens or kept from the list. Keeps each request in one list.

        Args:
            before: all rows of the manager before the exception.
        """
        torn = [one for one in self._running if self._is_torn(one)]
        known = {*before, *(one.row for one in self._running)}
        self._left += [row for row in self.mem.rows if row not in known]
        self._drop(torn)
        running = {id(one.prompt) for one in self._running}
        self._waiting = deque(one for one in self._waiting if id(one.prompt) not in running)

    def _is_torn(self, one: Running) -> bool:
        """Whether an exception left a row between two tokens, or has ended it."""
        try:
            if self.mem.info(one.row).length != one.length or (one.logits is None and one.length == len(one.tokens)):
                return True
            return bool(one.answer) and one.sampler.reason(one.tokens, len(one.answer)) is not None
        except Exception:  # a row that has ended, or a stop string that raises
            return True

    def _step(self) -> list[Event]:
        self.mem.poll()
        self._start_samples()
        self._admit()
        if not (self._running or self._events) and self._waiting and self._waiting[0].fetch and self.mem.tiers:
            self.mem.tiers.wait(self._waiting[0].fetch)  # of the first request that can run
        budget, chunks = self._chunk, dict[Running, int]()
        singles, later = list[Running](), list[Running]()
        running = [one for one in self._running if one.logits is None]
        guesses = self._guesses(running)
        for one in running:
            if one in guesses:
                continue
            tokens = len(one.tokens) - one.length if self._continues or not one.length else 1  # in one forward at most
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
        read = {one: len(one.tokens) - one.length + len(found) for one, found in guesses.items()}
        for together in alike(read, PADS if self._batches.states.verifies else 0):
            self._verify({one: guesses[one] for one in together})
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Does what was asked for, and starts the requests that fit."""
        self._full = False
        if self._left:
            self._drop([])
        release_left(self.mem)
        self._take()
        for one in list(self._waiting):
            prompt, tokens = one.prompt, list(one.prompt.tokens)
            if self._turn_runs(prompt):
                continue  # others go first
            if any(row.logits is not None for row in self._running):
                self._full = True
                return
            one.fetch = one.fetch or self._prefetch(prompt)
            if one.fetch is not None and not one.fetch.done and self.mem.tiers and not self.mem.tiers.ready(one.fetch):
                return
            request = Request(
                prompt.id, length=len(tokens) + one.samplers[0].most - 1, tokens=tokens, salt=prompt.salt,
                session=prompt.session, snapshot_at=prompt.snapshot_at, fetch=one.fetch,
            )  # fmt: skip
            try:
                (row,) = self.mem.admit([request])
            except (*BACK_PRESSURE, InvalidArgument, StaleHandle) as error:  # the session may be closed by now
                if isinstance(error, BACK_PRESSURE) and self._running:
                    self._full = True
                    return  # later: a row that ends makes room
                kind = self._refusal(error, one)
                self._waiting.remove(one)
                self._cancel([one])
                self._events.append(Served(prompt.id, [], kind, error=self._why(error)))
                continue
            info, draft = self.mem.info(row), self._speculation.draft(prompt.id, one.samplers[0])
            self._running.append(Running(
                prompt, one.samplers, row, tokens, info.length, info.length, one.fetch, draft=draft, missed=info.missed
            ))  # fmt: skip
            self._waiting.remove(one)

    def _refusal(self, error: MemstateError, one: Waiting | Running) -> Reason:
        """Returns the kind of a refusal.

        Args:
            error: what the manager raised.
            one: the request, or its row if other samples lack room. The row still runs.
        """
        pages, length = self.mem.pages, len(one.prompt.tokens) + one.samplers[0].most - 1
        if pages.count and length > min(pages.per_row, pages.count) * pages.size:
            return "too_large"
        row = self.mem.info(one.row) if isinstance(one, Running) else None
        if not isinstance(error, BACK_PRESSURE):
            return "no_room" if row else "invalid"  # samples lack a register for the state that they share
        has = {OutOfSlots: row.slots, OutOfRows: 1, OutOfPages: -(-length // pages.size)}[type(error)] if row else 0
        there = next((most for name in ("capacity", "rows", "pages") if (most := getattr(error, name, None))), inf)
        return "too_large" if error.requested + has > there else "no_room"

    def _why(self, error: MemstateError) -> str:
        """Returns why a request was refused while nothing runs here, and what to do where others have the room."""
        others = len(self.mem.rows)
        if not others or not isinstance(error, BACK_PRESSURE):
            return str(error)
        return (
            f"{error}; {others} rows of the manager are not this server's: close the caches and servers that they "
            "belong to, or call the manager's recover() if there are none"
        )

    def _start_samples(self) -> None:
        """Forks the rows that wait for room to do so. If nothing else runs that could make room, one must go."""
        while parked := [one for one in self._running if one.logits is not None]:
            one, logits = parked[0], parked[0].logits
            try:
                rows = self._fork(one)
            except (*BACK_PRESSURE, InvalidArgument) as error:
                if isinstance(error, BACK_PRESSURE) and len(parked) < len(self._running):
                    return  # later: a row that ends makes room
                last = parked[-1]
                if last is one or isinstance(error, InvalidArgument):
                    kind = self._refusal(error, one)
                    self._drop([one])
                    self._events.append(one.served(kind, str(error)))
                else:  # it waits again, and what it has read goes to the prefix cache
                    self._waiting.appendleft(Waiting(last.prompt, last.samplers))
                    self._release(last)
                continue
            assert logits is not None
            self._running += rows
            one.samplers, one.logits = one.samplers[:1], None
            for other in rows:
                other.draft = self._speculation.draft(other.prompt.id, other.sampler)
            self._choose([one, *rows], logits.expand(1 + len(rows), -1))

    def _fork(self, one: Running) -> list[Running]:
        """Forks a row for the other samples of its request, all or none. Full KV pages are shared, the last copied."""
        others, kv, fork = one.samplers[1:], self._batches.kv, None
        try:
            fork = self.mem.fork(one.row, [one.prompt.id] * len(others))
            if self.mem.device.page_table.numel():
                self.mem.extend(fork.rows, [len(one.tokens) + sampler.most - 1 for sampler in others])
            if kv is not None:
                kv.copy(fork.page_copies)
            return [
                replace(one, samplers=[sampler], row=row, tokens=list(one.tokens), sample=number, logits=None)
                for number, (sampler, row) in enumerate(zip(others, fork.rows, strict=True), 1)
            ]
        except BaseException:
            if fork is not None:
                self.mem.end(fork.rows)
            raise

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
                self.mem.publish([one.row for one in read], keep="cache", tokens=[one.tokens for one in read])
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
        """Returns guesses for the rows that have any. Rows whose assistant raises are gone.

        On slots, rows that answer without guesses can share the forward: they have none in the result.
        """
        found, errors = dict[Running, list[int]](), list[Exception]()
        for one in [one for one in running if one.draft is not None]:
            try:
                if tokens := self._speculation.guesses(one):
                    found[one] = tokens
            except Exception as error:
                errors.append(self._failed(one, error))
        _raise(errors)
        if found and self._batches.states.verifies:
            found |= {one: [] for one in running if one not in found and one.answer}
        return found

    def _verify(self, guesses: dict[Running, list[int]]) -> None:
        """Reads guesses of some rows, and keeps those that are right."""
        batch, starts = list(guesses), [one.length for one in guesses]
        given = [one.tokens[one.length :] + found for one, found in guesses.items()]
        columns, guessed = max(map(len, given)), [len(found) for found in guesses.values()]
        ends, failed = dict[Running, Reason | None](), dict[Running, Exception]()

        def real(logits: Tensor) -> list[int]:
            largest, first = logits.argmax(-1).tolist(), columns - logits.shape[1]
            for entry, (one, found) in enumerate(guesses.items()):
                end = len(given[entry]) - first
                at = slice(end - 1 - len(found), end)
                try:
                    ends[one] = self._compare(one, found, largest[entry][at], logits[entry, at])
                except Exception as error:
                    failed[one] = error
            # the token that was chosen last has not been read, unless it was guessed and ends the row
            return [max(len(one.tokens) - start - 1, 1) for one, start in zip(batch, starts, strict=True)]

        moved = self._speculation.verify([one.row for one in batch], given, starts, guessed, real)
        for one, tokens in zip(batch, moved, strict=True):
            one.length += tokens
        errors = [self._failed(one, error) for one, error in failed.items()]
        for one, reason in ends.items():
            try:
                self._end(one, reason)
            except Exception as error:  # its forward has ended the row
                error.add_note(f"the request {one.prompt.id!r} has ended")
                errors.append(error)
        _raise(errors)

    def _compare(self, one: Running, guesses: Sequence[int], largest: Sequence[int], logits: Tensor) -> Reason | None:
        """Chooses tokens as long as they are those that were guessed, and the one behind. Returns why the row ended."""
        one.guessed += len(guesses)
        for guess, best, row in zip([*guesses, None], largest, logits, strict=True):
            token = best if one.sampler.plain else one.sampler.choose(one.tokens, row)
            (said,) = logprobs([one.prompt.logprobs], [token], row[None])
            reason = self._add(one, token, *said)
            one.right += token == guess
            if reason is not None or token != guess:
                return reason
        return None

    def _choose(self, batch: Sequence[Running], logits: Tensor) -> None:
        """Chooses a token for each row. Rows whose own code raises are gone; the others have their tokens."""
        errors = list[Exception]()
        chosen = choose([one.sampler for one in batch], [one.tokens for one in batch], logits)
        said = logprobs([one.prompt.logprobs for one in batch], chosen, logits)
        for one, token, (logprob, top) in zip(batch, chosen, said, strict=True):
            try:
                if isinstance(token, Exception):
                    raise token
                self._end(one, self._add(one, token, logprob, top))
            except Exception as error:
                errors.append(self._failed(one, error))
        _raise(errors)

    def _add(self, one: Running, token: int, logprob: float | None, top: Top) -> Reason | None:
        """Adds a token to a row, and returns why the row has ended, or None."""
        one.tokens.append(token)
        new, sampler = len(one.tokens) - len(one.prompt.tokens), one.sampler
        text = sampler.text.read(one.tokens, last=sampler.reason(one.tokens, new) is not None)
        self._events.append(Token(one.prompt.id, token, one.sample, text, logprob, top))  # not if a tokenizer raises
        return sampler.reason(one.tokens, new)

    def _end(self, one: Running, reason: Reason | None) -> None:
        """Ends a row that has a reason to."""
        if reason is not None:
            self._events.append(one.served(reason))
            self._release(one)

    def _release(self, one: Running) -> None:
        """Ends a row. What it has read stays for others, and for the next turn of its session."""
        cached = self.mem.prefix is not None or one.prompt.session is not None
        if cached:
            self._batches.fold([one.row], ends=one.prompt.session is None)
        self.mem.end([one.row], keep="cache" if cached else None, tokens=[one.tokens] if cached else None)
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
        requests: prompts, or lists of tokens. A list or other collection is checked before any of it starts. Other
            iterables are read as there is room; None in them means that nothing has arrived yet.
        progress: whether to show on the terminal what is done, runs and waits; also a console of rich.
        **settings: those of `Server`.

    Raises:
        ConfigurationError: `progress` without rich; or as `Server`.
        InvalidArgument: a request is wrong, as for `Server.submit`; the error names its place. Of a collection nothing
            has started then. If another iterable yields it, the requests that run are aborted.
        Exception: as `Server` and `Server.step`; the requests that run are aborted then.

    Syncs: yes, for the tokens.
    """
    server, more = Server(model, mem, **settings), True
    arrivals = _arrivals(server, requests)
    with shown(server, progress) if progress else nullcontext() as line:
        try:
            while more or server.busy:
                while more and not (server._full or server._events) and server.waiting < AHEAD:
                    arrived = next(arrivals, server)
                    more = arrived is not server
                    if not isinstance(arrived, Waiting):
                        break
                    server._asked.append(arrived)
                    server.admit()
                events = server.step()
                if line is not None:
                    line.add(events)
                yield from events
        finally:
            server.close()


def _arrivals(server: Server, requests: Iterable[Any]) -> Iterator[Waiting | None]:
    """Returns requests that were checked: all of a list before the first one starts, others as they are read."""

    def made() -> Iterator[Waiting | None]:
        numbers = count()
        for place, given in enumerate(requests):
            if given is None:
                yield None
                continue
            number, prompt = next(numbers), given if isinstance(given, Prompt) else Prompt(given)
            try:
                found = server._checked(replace(prompt, id=number) if prompt.id is None else prompt)
            except InvalidArgument as error:
                raise InvalidArgument(f"requests[{place}]: {error}") from error
            yield found

    return iter(list(made())) if isinstance(requests, Collection) else made()


def serve(
    model: Any, mem: StateManager, requests: Iterable[Any], *, progress: Any = False, **settings: Any
) -> Iterator[Served]:
    """Runs requests by continuous batching and yields each as it ends.

    Args:
        model: the model, in evaluation mode.
        mem: its manager, made by `manager` with `tokens=` or `prefix=`.
        requests: as for `stream`.
        progress: as for `stream`.
        **settings: those of `Server`.

    Raises:
        Exception: as `stream`.

    Syncs: yes, for the tokens.
    """
    return (event for event in stream(model, mem, requests, progress=progress, **settings) if isinstance(event, Served))
