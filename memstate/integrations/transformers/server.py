"""Continuous batching: requests join and leave a running batch. Any thread submits requests; one thread runs them."""

import logging
import time
from asyncio import Queue, get_running_loop
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from inspect import iscoroutinefunction
from itertools import count
from math import inf
from threading import Condition, Thread, current_thread
from typing import Any, Final, TypeVar
from weakref import ref

from memstate.checks import hashable, is_whole, items, require_kind, require_salt, shown, whole
from memstate.engine.manager import StateManager
from memstate.errors import Broken, InvalidArgument, MemstateError, StaleHandle
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.binding import bound_to, release_left
from memstate.integrations.transformers.line import Line, waits_for_reader
from memstate.integrations.transformers.prompts import Event, Prompt, Reason, Served, checked, require
from memstate.integrations.transformers.running import BACK_PRESSURE, Running, Submission, refusal, said
from memstate.integrations.transformers.sampling import Sampler
from memstate.integrations.transformers.speculation import Speculation
from memstate.integrations.transformers.states import Kernels
from memstate.integrations.transformers.steps import Steps, ignore
from memstate.requests.handles import Request, Session
from memstate.tiers import Fetch

T = TypeVar("T")
LOG: Final = logging.getLogger("memstate.transformers")
AHEAD: Final = 64  # limit of the waiting requests up to which `wants_more` is True: some may wait for storage or a turn


class _Call:
    """Stands for a running call that drives a server. The server holds a weak reference, which dies with the call."""


class Server:
    """Runs requests over a model. Any thread, asyncio loop, or code that a step calls can submit and abort requests.

    One thread at a time drives the server: it calls `run`, which returns after `close`, or `step` until `busy` is
    False. Calls of other threads are queued for the next step. Only the driving thread may use the manager (for example
    `sessions.open`) and other servers of the manager.

    Args:
        model: the model, in evaluation mode.
        mem: the model's manager, made by `manager` with `tokens=` or `prefix=`, so that there are KV pages.
        chunk: limit of the prompt tokens that a step reads, in addition to one token for each running answer. Models
            whose scans start from zeros can read more: their first chunk goes to the end or the first mark of a prompt.
        tokenizer: tokenizer that decodes tokens, for events and stop strings.
        kernels: how one token of decode runs, as for `StateCache`.
        assistant: guesses the next tokens for every request that does not look them up in its own text. It is a smaller
            model with the same vocabulary, or a function: it gets all tokens and a number, and returns at most that
            many tokens.
        clock: function that returns seconds; tests replace time.monotonic by it.

    Raises:
        LayoutMismatch: the manager was made for another model.
        ConfigurationError: the manager was made for other weights; the model is in training mode; there are no KV
            pages, or a layer keeps KV in a way that pages cannot hold; or the assistant, the model or the manager
            cannot speculate.
        InvalidArgument: `chunk` is below 1, or `tokenizer` is not a tokenizer of Transformers.
    """

    def __init__(
        self, model: Any, mem: StateManager, *, chunk: int = 256, tokenizer: Any = None, kernels: Kernels = "auto",
        assistant: Any = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        whole("chunk", chunk)
        self.model, self.mem = model, mem
        if tokenizer is not None and not hasattr(tokenizer, "added_tokens_decoder"):
            how = "wrap one of `tokenizers` in PreTrainedTokenizerFast(tokenizer_object=...)"
            raise InvalidArgument(f"tokenizer={shown(tokenizer)}: expected a tokenizer of Transformers; {how}")
        self._bound = bound_to(model, mem)
        self._batches = Batches(model, mem, self._bound, kernels)
        self._speculation = Speculation(self._batches, assistant)
        # True: a prompt can go on from any cached state, so it can wait for a row that reads the same beginning
        self._shares = mem.prefix is not None and self._batches.layout.continues
        self._line = Line()
        self._steps = Steps(self._batches, self._speculation, self._line, chunk)
        self._tokenizer, self._clock, self._numbers, self._rows = tokenizer, clock, count(), mem.stats().rows
        # any thread appends; a step works through them in order
        self._asked: deque[Submission | Callable[[], None]] = deque()
        self._full = False  # whether the first request that could start waits for room
        self._late: Fetch | None = None  # the prefetch for which this first request waits, or None
        # wakes `run` when there is work; also guards `_asked`: after `close`, nothing is added
        self._wake = Condition()
        self._closed = self._runs = False
        self._error = ""  # text of the error that ended `run`
        self._driver: Thread = current_thread()
        self._call = ref(_Call())  # the running call that drives this server; none yet

    @property
    def kernels(self) -> Kernels:
        """How one token of decode runs: "slots" or "gathered"."""
        return self._batches.states.kernels

    @property
    def busy(self) -> bool:
        """Whether a step has work: queued calls, requests, or events of a step that failed."""
        return bool(self._asked or self._line.waiting or self._steps.running or self._steps.events)

    @property
    def waiting(self) -> int:
        """Number of requests that have not started."""
        return len(self._line.waiting) + sum(isinstance(one, Submission) for one in list(self._asked))

    @property
    def running(self) -> int:
        """Number of running rows: one for each sample of a request."""
        return len(self._steps.running)

    @property
    def wants_more(self) -> bool:
        """Whether a caller that gets requests one by one should get and submit the next one now."""
        return not (self._full or self._steps.events) and self.waiting < AHEAD

    def submit(self, prompt: Prompt, to: Callable[[Event], object] | None = None) -> Hashable:
        """Adds a request, which starts in a later step. Any thread can call this.

        A turn of a session waits until the turn before has ended; meanwhile later requests can start.

        Args:
            prompt: the request.
            to: function that gets the request's events, in the driving thread, at the end of each step. It must return
                at once, like the `put` of a queue. If it raises, the request is aborted. None: `step` returns the
                events.

        Returns:
            The id of the request.

        Raises:
            InvalidArgument: `prompt` is not a `Prompt`; its tokens are not tokens of the model; it asks for something
                that a server cannot do; or the server is closed.

        Syncs: no.
        """
        asked = self.checked(prompt, to)
        self.ask(asked)
        return asked.prompt.id

    async def stream(self, prompt: Prompt) -> AsyncIterator[Event]:
        """Submits a request and yields its events, in any asyncio loop, while another thread drives the server.

        The request is aborted if the task is cancelled or the generator is closed. Use `contextlib.aclosing` if your
        loop over the events may end early. A slow reader delays only itself: its events wait.

        Args:
            prompt: the request.

        Raises:
            InvalidArgument: for the reasons of `submit`.

        Syncs: no.
        """
        events, loop = Queue[Event](), get_running_loop()
        asked = self.checked(prompt, lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        left = len(asked.samplers)
        self.ask(asked)
        try:
            while left:
                event = await events.get()
                left -= isinstance(event, Served)
                yield event
        finally:
            if left:
                asked.to = ignore  # the asyncio loop may be closed before the next event
                self.ask(lambda: self._end(lambda one: one is asked, "aborted"))

    def checked(self, prompt: Prompt, to: Callable[[Event], object] | None = None) -> Submission:
        """Checks a prompt, and returns its request for `ask`. See `submit`."""
        if not isinstance(prompt, Prompt):
            raise InvalidArgument(f"{prompt!r}: expected a Prompt")
        hashable("id", prompt.id)
        hashable("tenant", prompt.tenant)
        require(prompt, "session", isinstance(prompt.session, Session | None), "what sessions.open() returned")
        require(prompt, "priority", is_whole(prompt.priority), "a whole number")
        limit = inf if prompt.timeout is None else prompt.timeout
        require(prompt, "timeout", (is_whole(limit) or isinstance(limit, float)) and limit > 0, "seconds above 0")
        if prompt.id is None:
            prompt = replace(prompt, id=f"request {next(self._numbers)}")
        of = f"prompt {prompt.id!r}"
        if to is not None and (not callable(to) or iscoroutinefunction(to)):
            raise InvalidArgument(f"{of}: to={shown(to)}: expected a function that is not async")
        tokens, more = checked(self.model, prompt.tokens, of), items(f"{of}: processors", prompt.processors, object)
        prompt = replace(prompt, tokens=tokens, priority=int(prompt.priority), processors=more)
        require_salt(prompt.salt)
        require_kind(prompt.kind)
        first = Sampler(self.model, prompt, self._tokenizer)
        self._speculation.draft(prompt.id, first)
        if first.samples > self._rows:
            raise InvalidArgument(f"{of}: num_return_sequences={first.samples} is above max_requests={self._rows}")
        others = [Sampler(self.model, prompt, self._tokenizer, number) for number in range(1, first.samples)]
        return Submission(prompt, [first, *others], to, self._clock() + limit)

    def ask(self, what: Submission | Callable[[], None]) -> None:
        """Queues work for the start of the next step: a checked request to start, or a function to call.

        Raises:
            InvalidArgument: `what` is a request, and the server is closed.
        """
        with self._wake:
            if not self._closed:
                self._asked.append(what)
                self._wake.notify()
            elif isinstance(what, Submission):
                raise InvalidArgument(f"prompt {what.prompt.id!r}: the server is closed: make another one")

    def fork(self, session: Session, name: Hashable) -> Session:
        """Opens a second session that goes on from the last turn of another session, as `mem.sessions.fork` does.

        Call it in the driving thread, between two steps or in a function given to `call`. If the last KV page is partly
        filled, it is copied, because both sessions will write to it.

        Args:
            session: the session to fork, which has no running turn.
            name: the name of the new session.

        Raises:
            MemstateError: for the reasons of `mem.sessions.fork`.

        Syncs: no.
        """
        twin, copies = self.mem.sessions.fork(session, name)
        if self._batches.kv is not None:
            self._batches.kv.copy(copies)
        return twin

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Runs a function in the driving thread at the start of the next step. Any thread can call this.

        The function can use the manager, for example `mem.sessions.open`, and call `fork`.

        Args:
            work: the function.

        Returns:
            The result or exception of the function; in asyncio, `await asyncio.wrap_future(server.call(work))`.

        Raises:
            InvalidArgument: the server is closed.

        Syncs: no.
        """
        done = Future[T]()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        with self._wake:
            if self._closed:
                raise InvalidArgument("the server is closed: make another one")
            self.ask(run)
        return done

    def abort(self, id: Hashable) -> None:
        """Ends, in the next step, all requests with an id and all their samples. Any thread can call this.

        Args:
            id: the requests' id.

        Raises:
            InvalidArgument: the id cannot be hashed.

        Syncs: no.
        """
        hashable("id", id)
        self.ask(lambda: self._end(lambda one: one.prompt.id == id, "aborted"))

    def close(self) -> None:
        """Aborts all requests, accepts no more, and ends `run`. Only requests with `to=` get an event for it.

        If a step is running (in another thread, or because it made this call), only the next step closes the server. So
        if you call `step` in a loop, end the loop first. After an interrupted call, the manager's `recover` ends the
        rows.

        Syncs: no.
        """
        with self._wake:
            self._closed = True
            self._asked.append(self._close)
            self._wake.notify()
        if not self._runs and self._call() is None:
            self._drive(self._take)

    def _close(self) -> None:
        self._end(lambda one: True, "failed" if self._error else "aborted", self._error)
        self._tell()

    def _tell(self) -> bool:
        """Hands events to their listeners. Drops events without one. Returns whether there were any events."""
        some = bool(self._steps.events)
        self._steps.deliver()
        self._steps.events.clear()
        return some

    def _end(self, gone: Callable[[Submission], bool], reason: Reason, error: str = "") -> None:
        """Ends those waiting and running requests for which `gone` returns True."""
        waiting = [one for one in self._line.waiting if gone(one)]
        for one in waiting:
            self._steps.tell(one, reason, error)
        if waiting:
            self._line.leave(waiting)
            self._cancel(waiting)
        self._steps.end([one for one in self._steps.running if gone(one.asked)], reason, error)

    def _take(self) -> None:
        """Does the queued work. After an interrupt, the interrupted piece of work may be done twice."""
        while self._asked:
            one = self._asked[0]
            if not isinstance(one, Submission):
                try:
                    one()
                except Exception:  # remove the function, so that the next step does not call it again
                    self._asked.popleft()
                    raise
            elif not self._line.waiting or self._line.waiting[-1] is not one:
                one.fetch = self._prefetch(one.prompt)
                self._line.waiting.append(one)
            self._asked.popleft()

    def _prefetch(self, prompt: Prompt) -> Fetch | None:
        """Starts a prefetch for a prompt. Returns None without storage, or if the session's last turn still runs."""
        tiers = self.mem.tiers
        if tiers is None or tiers.settings.store is None or self._turn_runs(prompt):
            return None
        try:
            return self.mem.prefetch(list(prompt.tokens), prompt.salt, prompt.session)
        except MemstateError:  # the error is reported at admission or in the next step
            return None

    def _turn_runs(self, prompt: Prompt) -> bool:
        """Returns whether a turn of the request's session is running on this server."""
        return prompt.session is not None and any(one.prompt.session == prompt.session for one in self._steps.running)

    def _cancel(self, waiting: Iterable[Submission]) -> None:
        """Cancels the prefetches of requests that will never start, because prefetches take host memory."""
        for one in waiting:
            if one.fetch is not None and not one.fetch.done and self.mem.tiers is not None:
                with suppress(Broken):  # `recover` ends the prefetch
                    self.mem.tiers.cancel(one.fetch)

    def run(self) -> None:
        """Drives the server until `close`. Call it in a thread of its own. Sleeps while there are no requests.

        If a step raises, `run` goes on: requests whose rows have ended get "failed", and the error is logged by
        `memstate.transformers`. If a call of the manager was interrupted, `run` calls `recover`, which ends all rows of
        the manager.

        Raises:
            InvalidArgument: a step has called `run`, or another thread drives this server or another one of the same
                manager.
            Exception: three steps in a row raised an error and sent no event; this is the third error. The server is
                closed, and its requests have failed.

        Syncs: yes, for the tokens.
        """
        with self._bound.lock:  # waits until no step runs
            self._require_driver()
            self._drive(lambda: None)
            self._bound.runs, self._runs, lost = current_thread(), True, 0
        try:
            while not self._closed or self.busy:
                try:
                    self.step()
                    lost = 0
                except Exception as error:
                    if isinstance(error, Broken):
                        self._drive(self.mem.recover)
                    lost = 0 if self._drive(self._tell) else lost + 1
                    if lost > 2:
                        raise
                    LOG.exception("a step has raised: its requests have ended")
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self.busy)
        except Exception as error:
            self._error = said(error)
            raise
        finally:
            self._bound.runs, self._runs = None, False
            self.close()

    def _require_driver(self) -> None:
        """Raises InvalidArgument if `run` drives the manager in another thread."""
        if self._bound.runs not in (None, current_thread()):
            what = "this server: submit to it" if self._runs else "another server of this manager: step both from there"
            raise InvalidArgument(f"another thread drives {what}, or make a server with a manager of its own")

    def step(self) -> list[Event]:
        """Admits requests that fit, reads chunks of prompts, and computes one token of each running answer.

        If no row can run before storage answers, it waits for storage instead, but at most 0.1 s.

        Returns:
            The events of the step: new tokens, and requests that have ended.

        Raises:
            InvalidArgument: a step has called `step`, or `run` drives the manager in another thread.
            Exception: a forward, a processor of logits, a stop string or an assistant raised it. The rows for which it
                was called have ended; a note in the error names the request. Other requests go on in the next step,
                which also returns the events of this step. Several such errors come as an ExceptionGroup.

        Syncs: yes, for the tokens.
        """
        self._require_driver()
        told = self._drive(self._step)
        try:
            return [event for _, event in self._steps.events[:told]]
        finally:  # if an interrupt comes before this line, the next step returns the events
            del self._steps.events[:told]

    def admit(self) -> None:
        """Starts the requests that fit. `step` begins with this as well.

        Raises:
            InvalidArgument: a step has called `admit`, or `run` drives the manager in another thread.

        Syncs: no.
        """
        self._require_driver()
        self._drive(self._admit)

    def _drive(self, work: Callable[[], T]) -> T:
        """Calls a function that uses the manager. After an exception, ends the rows that are left half done."""
        if self._driver is current_thread() and self._call() is not None:
            raise InvalidArgument("a step is running: call run, step and admit from no code that a step calls")
        with self._bound.lock:
            here, before = _Call(), self.mem.rows
            self._driver, self._call = current_thread(), ref(here)
            try:
                return work()
            except BaseException as error:
                self._line.leave({one.asked for one in self._steps.running})
                self._steps.mend(before, error)
                raise
            finally:
                del here  # otherwise a traceback could keep `here` alive

    def _step(self) -> int:
        self.mem.poll()
        self._steps.start_samples()
        self._admit()
        if self._late is not None and self.mem.tiers and not (self._steps.running or self._steps.events):
            self.mem.tiers.wait(self._late)
        self._steps.run()
        return self._steps.deliver()

    def _admit(self) -> None:
        """Does the queued work, ends requests at their deadline, and starts the requests that fit."""
        self._full, self._late = False, None
        self._steps.drop_left()
        release_left(self.mem)
        self._take()
        now = self._clock()
        self._end(lambda one: one.deadline <= now, "timeout")
        while self._start_next():
            pass

    def _start_next(self) -> bool:
        """Starts or refuses the first request that need not wait. Returns False if there is none."""
        running = self._steps.running
        for one in self._line.order(running):
            prompt = one.prompt
            if self._turn_runs(prompt):
                continue  # until that turn has ended, other requests can start
            if any(row.logits is not None for row in running):  # such rows wait for room to fork their samples
                self._full = True
                return False
            one.fetch = one.fetch or self._prefetch(prompt)
            if one.fetch is not None and not one.fetch.done and self.mem.tiers and not self.mem.tiers.ready(one.fetch):
                self._late = one.fetch
                return False
            if self._shares and waits_for_reader(one, running, self.mem):
                continue
            tokens = list(prompt.tokens)
            request = Request(
                prompt.id, length=len(tokens) + one.samplers[0].most - 1, tokens=tokens, salt=prompt.salt,
                session=prompt.session, snapshot_at=prompt.snapshot_at, fetch=one.fetch, kind=prompt.kind,
            )  # fmt: skip
            try:
                (row,) = self.mem.admit([request])
            # StaleHandle: the session was closed after the request was submitted
            except (*BACK_PRESSURE, InvalidArgument, StaleHandle) as error:
                if isinstance(error, BACK_PRESSURE) and running:
                    self._full = True
                    return False  # try again when a row has ended
                self._steps.tell(one, *refusal(error, one, self.mem))
                self._line.leave([one])
                self._cancel([one])
                return True
            info, draft = self.mem.info(row), self._speculation.draft(prompt.id, one.samplers[0])
            running.append(
                Running(one, one.samplers, row, tokens, info.length, info.length, draft=draft, missed=info.missed)
            )
            self._line.start(one, len(tokens) - info.length)
            return True
        return False
