"""Runs a step of a server: chooses which tokens its rows read, reads them, chooses new tokens, and ends rows."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from torch import Tensor

from memstate.errors import Broken, InvalidArgument, StaleHandle
from memstate.integrations.transformers.batch import Batches
from memstate.integrations.transformers.line import Line
from memstate.integrations.transformers.prompts import Event, Reason, Served, Token, Top
from memstate.integrations.transformers.running import (
    BACK_PRESSURE,
    Running,
    Submission,
    alike,
    refusal,
    said,
    shares,
    sharing,
)
from memstate.integrations.transformers.sampling import choose, logprobs
from memstate.integrations.transformers.speculation import Speculation
from memstate.requests.handles import Row, Rows

LOG: Final = logging.getLogger("memstate.transformers")
PADS: Final = 256  # limit of the pads in a forward: up to here, pads cost less than another forward


class Steps:
    """Runs the rows of a server.

    Args:
        batches: object that runs the forwards.
        speculation: object that guesses tokens and checks guesses.
        line: the waiting requests.
        chunk: limit of the prompt tokens that a step reads.

    Attributes:
        running: the running rows.
        events: (request, event) for each event that no step has returned yet.
    """

    def __init__(self, batches: Batches, speculation: Speculation, line: Line, chunk: int) -> None:
        self.mem, self._batches, self._speculation = batches.mem, batches, speculation
        self._line, self._chunk = line, chunk
        self.running: list[Running] = []
        self.events: list[tuple[Submission, Event]] = []
        self._left: list[Row] = []  # rows to end, which a broken manager could not end yet

    def tell(self, one: Submission | Running, reason: Reason, error: str = "") -> None:
        """Adds results of a request or row to the events, unless they are there from an interrupted step."""
        asked = one if isinstance(one, Submission) else one.asked
        told = {event.sample for of, event in self.events if of is asked and isinstance(event, Served)}
        self.events.extend((asked, result) for result in one.results(reason, error) if result.sample not in told)

    def deliver(self) -> int:
        """Hands events to their listeners. A request whose listener raises is aborted.

        Returns:
            The number of events without a listener, which the step returns.
        """
        left = 0
        while left < len(self.events):
            asked, _ = self.events[left]
            if asked.to is None:
                left += 1
                continue
            try:
                asked.to(self.events.pop(left)[1])  # pop first: an interrupt in the listener loses only this event
            except Exception:
                LOG.exception("the listener of request %r has raised: the request is aborted", asked.prompt.id)
                asked.to = ignore
                self.end([one for one in self.running if one.asked is asked], "aborted")
        return left

    def end(self, rows: Collection[Running], reason: Reason, error: str = "") -> None:
        """Ends rows without keeping their states, and adds their results to the events.

        Args:
            rows: the rows.
            reason: why the rows end.
            error: what went wrong; "" if nothing did.
        """
        for one in rows:
            self.tell(one, reason, error)
        if rows:
            self.drop(rows)

    def drop(self, gone: Collection[Running] = ()) -> None:
        """Ends rows, but adds no results. Some may have ended already, by a `reset` or in a forward that failed."""
        rows = list(dict.fromkeys([*self._left, *(one.row for one in gone)]))
        try:
            try:
                self.mem.end(rows)
            except StaleHandle:
                for row in rows:
                    with suppress(StaleHandle):
                        self.mem.end([row])
            self._left = []
        # `recover` will end all rows; if a call of another thread was interrupted, a later step will end them
        except Broken as error:
            gone, self.running = self.running, []
            self._left = list(dict.fromkeys([*rows, *(one.row for one in gone)]))
            for one in gone:
                self.tell(one, "failed", str(error))
        self.running = [one for one in self.running if one not in gone]

    def drop_left(self) -> None:
        """Ends the rows that could not be ended before."""
        if self._left:
            self.drop()

    def mend(self, before: Rows, error: BaseException) -> None:
        """Ends rows that an exception left half done, or that are missing in `running`.

        Args:
            before: all rows of the manager before the call that raised.
            error: the exception.
        """
        torn = [one for one in self.running if self._is_torn(one)]
        known = {*before, *(one.row for one in self.running)}
        self._left += [row for row in self.mem.rows if row not in known]
        # requests for which a later step will fork rows, one for each other sample
        parked = {one.asked for one in self.running if one.logits is not None}
        for one in torn:
            if one.asked not in parked or one.logits is not None:
                self.tell(one, "failed", said(error))
        self.drop(torn)

    def _failed(self, one: Running, error: Exception) -> Exception:
        """Ends a row whose request's code has raised. Returns the error, with a note that names the request."""
        self.end([one], "failed", said(error))
        with suppress(Exception):  # some exceptions take no notes
            error.add_note(f"the request {one.prompt.id!r} has ended")
        return error

    def _is_torn(self, one: Running) -> bool:
        """Returns whether an exception has ended a row or left it between two tokens."""
        try:
            if self.mem.info(one.row).length != one.length or (one.logits is None and one.length == len(one.tokens)):
                return True
            new = len(one.answer)
            return new != one.told or (new > 0 and one.sampler.reason(one.tokens, new) is not None)
        except Exception:  # the row has ended, or a stop string raises
            return True

    def run(self) -> None:
        """Reads chunks of prompts, and computes one token of each running answer.

        Raises:
            Exception: a forward or code of a request raised it.

        Syncs: yes, for the tokens.
        """
        running = [one for one in self.running if one.logits is None]
        guesses = self._guesses(running)
        chunks, singles = self._chunks([one for one in running if one not in guesses])
        for batch in sharing(chunks, PADS if self._batches.layout.takes_pads else 0):
            self._forward(batch)
        # rows without a state run apart: only then the model fills their windows with its start token, not with zeros
        for group in ([one for one in singles if not one.length], [one for one in singles if one.length]):
            if group:
                self._forward(dict.fromkeys(group, 1))
        read = {one: one.unread + len(drafted) for one, drafted in guesses.items()}
        for together in alike(read, PADS if self._batches.states.verifies else 0):
            self._verify({one: guesses[one] for one in together})

    def _chunks(self, rows: Sequence[Running]) -> tuple[dict[Running, int], list[Running]]:
        """Returns row -> number of prompt tokens that it reads, and a list of the rows that read only one token."""
        continues, budget = self._batches.layout.continues, self._chunk
        reading = dict.fromkeys(one for one in rows if one.unread > 1 and (continues or not one.length))
        singles = [one for one in rows if one not in reading]
        later: list[Running] = []
        chunks: dict[Running, int] = {}
        for one, kept in shares(reading, budget):
            tokens = min(one.unread, budget - kept) if continues else one.unread
            if tokens < 2 or budget < 1:
                later.append(one)
            else:  # a scan that starts from zeros may exceed the budget
                chunks[one] = self.mem.chunk(one.row, tokens)
                budget -= chunks[one]
        return chunks, singles + later if budget == 1 else singles

    def start_samples(self) -> None:
        """Forks the rows that wait for room. If all running rows wait, one of them must end to make room."""
        while parked := [one for one in self.running if one.logits is not None]:
            one, logits = parked[0], parked[0].logits
            try:
                rows = self._fork(one)
            except (*BACK_PRESSURE, InvalidArgument) as error:
                if isinstance(error, BACK_PRESSURE) and len(parked) < len(self.running):
                    return  # try again when a row has ended
                last = parked[-1]
                if last is one or isinstance(error, InvalidArgument):
                    self.end([one], *refusal(error, one, self.mem))
                else:  # its request starts again later, from what the prefix cache keeps
                    self._line.waiting.appendleft(last.asked)
                    self._release(last)
                continue
            assert logits is not None
            self.running += rows
            one.logits = None
            one.samplers = one.samplers[:1]
            for other in rows:
                other.draft = self._speculation.draft(other.prompt.id, other.sampler)
            self._choose([one, *rows], logits.expand(1 + len(rows), -1))

    def _fork(self, one: Running) -> list[Running]:
        """Forks a row for all other samples of its request, or for none. Copies a partly filled KV page."""
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
        """Reads the next tokens of rows, and chooses a token for each row that has then read all its tokens."""
        batch, starts = list(chunks), [one.length for one in chunks]
        given = [one.tokens[one.length : one.length + tokens] for one, tokens in chunks.items()]
        logits = self._batches.run([one.row for one in batch], given, starts)
        for one, tokens in chunks.items():
            one.length += tokens
        if self.mem.prefix is not None:  # so that other requests can start from the tokens read so far
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
            self.start_samples()

    def _guesses(self, running: Sequence[Running]) -> dict[Running, list[int]]:
        """Returns row -> its guesses. Ends rows whose assistant raises.

        On slots, rows that answer without guesses can share the forward: for them the result has an empty list.
        """
        guesses: dict[Running, list[int]] = {}
        errors: list[Exception] = []
        for one in [one for one in running if one.draft is not None]:
            try:
                if tokens := self._speculation.guesses(one):
                    guesses[one] = tokens
            except Exception as error:
                errors.append(self._failed(one, error))
        _raise(errors)
        if guesses and self._batches.states.verifies:
            guesses |= {one: [] for one in running if one not in guesses and one.answer}
        return guesses

    def _verify(self, guesses: dict[Running, list[int]]) -> None:
        """Reads guesses of rows, and adds the right ones to the answers."""
        batch, starts = list(guesses), [one.length for one in guesses]
        given = [one.tokens[one.length :] + drafted for one, drafted in guesses.items()]
        columns, guessed = max(map(len, given)), [len(drafted) for drafted in guesses.values()]
        ends, failed = dict[Running, Reason | None](), dict[Running, Exception]()

        def real(logits: Tensor) -> list[int]:
            largest, first = logits.argmax(-1).tolist(), columns - logits.shape[1]
            for entry, (one, drafted) in enumerate(guesses.items()):
                end = len(given[entry]) - first
                at = slice(end - 1 - len(drafted), end)
                try:
                    ends[one] = self._compare(one, drafted, largest[entry][at], logits[entry, at])
                except Exception as error:
                    failed[one] = error
            # the last chosen token is not read yet, except a guess that ends the row
            return [max(len(one.tokens) - start - 1, 1) for one, start in zip(batch, starts, strict=True)]

        moved = self._speculation.verify([one.row for one in batch], given, starts, guessed, real)
        for one, tokens in zip(batch, moved, strict=True):
            one.length += tokens
        errors = [self._failed(one, error) for one, error in failed.items()]
        for one, reason in ends.items():
            try:
                if reason is not None:
                    self._end(one, reason)
            except Exception as error:  # raised by the forward of `_release`, which has ended the row
                errors.append(self._failed(one, error))
        _raise(errors)

    def _compare(self, one: Running, guesses: Sequence[int], largest: Sequence[int], logits: Tensor) -> Reason | None:
        """Chooses tokens, and stops after one that differs from its guess. Returns why the row ends, or None."""
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
        """Chooses a token for each row. A row ends if code of its request raises; the others keep their tokens."""
        errors: list[Exception] = []
        chosen = choose([one.sampler for one in batch], [one.tokens for one in batch], logits)
        said = logprobs([one.prompt.logprobs for one in batch], chosen, logits)
        for one, token, (logprob, top) in zip(batch, chosen, said, strict=True):
            if one not in self.running:  # it has its result: the end of a row before it was interrupted
                continue
            try:
                if isinstance(token, Exception):
                    raise token
                if (reason := self._add(one, token, logprob, top)) is not None:
                    self._end(one, reason)
            except Exception as error:
                errors.append(self._failed(one, error))
        _raise(errors)

    def _add(self, one: Running, token: int, logprob: float | None, top: Top) -> Reason | None:
        """Adds a token to a row. Returns why the row ends, or None."""
        one.tokens.append(token)
        asked, sampler = one.asked, one.sampler
        reason = sampler.reason(one.tokens, len(one.tokens) - len(asked.prompt.tokens))
        text = sampler.text.read(one.tokens, last=reason is not None)
        # at the end, so that an error above adds no event
        self.events.append((asked, Token(asked.prompt.id, token, one.sample, text, logprob, top)))
        one.told += 1
        self._line.charge(asked, 1)
        return reason if sampler.text.stop is None else "stop"

    def _end(self, one: Running, reason: Reason) -> None:
        """Adds a row's result to the events, and ends the row."""
        self.tell(one, reason)
        self._release(one)

    def _release(self, one: Running) -> None:
        """Ends a row. Its states stay in the prefix cache, or in its session for the next turn."""
        cached = self.mem.prefix is not None or one.prompt.session is not None
        if cached:
            self._batches.fold([one.row], ends=one.prompt.session is None)
        self.mem.end([one.row], keep="cache" if cached else None, tokens=[one.tokens] if cached else None)
        self.running.remove(one)


def _raise(errors: list[Exception]) -> None:
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("tokens of several rows", errors)


def ignore(event: Event) -> None:
    """Does nothing with an event. Replaces a listener that no longer exists."""
