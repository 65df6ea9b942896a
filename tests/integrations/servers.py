"""Serves requests over tiny models, and judges each one by what its prompt gives alone, with the model's own cache."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Condition, Thread
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

import memstate as ms
import memstate.integrations.transformers as mst
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, Known, alone, managed

SPECULATING: dict[str, Any] = {"forward": ms.Forward(tail=16)}
OF_SERVER = ("chunk", "tokenizer", "kernels", "assistant", "clock")  # settings of a server; others are a manager's
WAITS = 60  # seconds to wait for a thread; only a defect takes so long
WHOLE = ("length", "end")  # reasons of answers that are as long as those of `generate`
REFUSED = ("too_large", "no_room", "invalid")
KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()  # model -> prefix -> logits


def ignore(event: mst.Event) -> None:
    """Does nothing with an event."""


def answer(model: Any, text: Sequence[int], length: int = NEW) -> list[int]:
    """Returns the first tokens of the answer to a prompt alone, with the model's own cache."""
    known, so_far = KNOWN.setdefault(model, {}), [*text]
    for left in range(length, 0, -1):
        if tuple(so_far) not in known:
            alone(model, so_far, known, left)
        so_far.append(int(known[tuple(so_far)].argmax()))
    return so_far[len(text) :]


def guessing(model: Any, wrong: int = 10**6) -> Callable[[Sequence[int], int], list[int]]:
    """Returns an assistant that guesses what the model will say. Token `wrong` of a guess is wrong, counted from 0."""

    def guess(tokens: Sequence[int], most: int) -> list[int]:
        guessed = answer(model, tokens, most)
        if wrong < most:
            guessed[wrong] = (guessed[wrong] + 1) % 97
        return guessed

    return guess


@dataclass(eq=False)
class Asked:
    """A request, and what was heard of it.

    Attributes:
        prompt: the request.
        to: function that gets its events; None: steps return them.
        events: its events so far.
        deaf: whether its listener has raised or its reader has left. Then no result comes.
        aborted: whether it was aborted by its id.
    """

    prompt: mst.Prompt
    to: Callable[[mst.Event], object] | None = None
    events: list[Any] = field(default_factory=list)
    deaf: bool = False
    aborted: bool = False

    @property
    def samples(self) -> int:
        return (self.prompt.config and self.prompt.config.num_return_sequences) or 1

    @property
    def results(self) -> list[mst.Served]:
        return [one for one in self.events if isinstance(one, mst.Served)]

    @property
    def ended(self) -> bool:
        return self.deaf or len(self.results) == self.samples


class Judged:
    """A server whose requests are judged at the end.

    Each sample of a request must have one result, with the right reason, behind its tokens. Its tokens must be those
    of the request alone: as many as `generate` gives, or the first of them if the request ended early. Text and
    logprobs must fit the tokens. After the last request, nothing may be held.

    Args:
        family: family of the tiny model.
        model: the model, if it is another one.
        mem: the manager, if another server has it too.
        settings: settings of the server (`OF_SERVER`) and of a new manager. The manager has a prefix cache only if the
            settings ask for one.
    """

    def __init__(self, family: str = "qwen3_next", model: Any = None, mem: Any = None, **settings: Any) -> None:
        own = {name: settings.pop(name) for name in OF_SERVER if name in settings}
        self.model = tiny(family) if model is None else model
        self.mem = mem or managed(self.model, **{"prefix": None, **settings})
        self.server, self.tokenizer = mst.Server(self.model, self.mem, **own), own.get("tokenizer")
        self.asked, self.news = list[Asked](), Condition()

    def ask(
        self, *ids: Any, text: Sequence[int] = TEXT[:9], most: int | None = NEW, to: Any = None, **more: Any
    ) -> Asked:
        """Submits equal requests with these ids; returns the last. `to` hears the events, and is called with them."""
        for id in ids:
            one = Asked(mst.Prompt(text, id, most=most, **more), to)
            self.asked.append(one)
            try:
                self.server.submit(one.prompt, to and (lambda event, one=one: self._hear(one, event)))
            except ms.InvalidArgument:
                self.asked.remove(one)
                raise
        return one

    def _hear(self, one: Asked, event: mst.Event) -> None:
        with self.news:
            one.events.append(event)
            self.news.notify_all()
        try:
            one.to and one.to(event)
        except Exception:
            one.deaf = True
            raise

    def abort(self, id: Any) -> None:
        """Aborts the requests with an id."""
        for one in self.asked:
            one.aborted |= one.prompt.id == id
        self.server.abort(id)

    async def stream(self, id: Any, reads: int = 10**6, most: int = NEW, **more: Any) -> Asked:
        """Reads the stream of a request, and leaves it after some events."""
        one = Asked(mst.Prompt(more.pop("text", TEXT[:9]), id, most=most, **more), ignore, deaf=True)
        self.asked.append(one)
        async with aclosing(self.server.stream(one.prompt)) as events:
            async for event in events:
                self._hear(one, event)
                if len(one.events) == reads:
                    return one
        one.deaf = False
        return one

    def step(self, steps: int = 1, raises: type[BaseException] | None = None) -> list[Any]:
        """Runs steps, and returns the events that the last one has returned."""
        events = list[Any]()
        for _ in range(steps):
            with pytest.raises(raises) if raises else nullcontext():
                events = self.server.step()
            for event in events:
                whose = (one for one in self.asked if one.prompt.id == event.id and not (one.to or one.ended))
                next(whose).events.append(event)
        return events

    def rest(self, most: int = 400) -> list[Exception]:
        """Steps until the server is not busy, and returns the exceptions of steps."""
        errors = list[Exception]()
        while self.server.busy and (most := most - 1):
            try:
                self.step()
            except Exception as error:
                errors.append(error)
        assert not self.server.busy
        return errors

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Drives the server in a thread during the block, and closes it when all requests have ended."""
        thread = Thread(target=self.server.run, daemon=True)
        thread.start()
        try:
            yield
            self.wait()
        finally:
            self.server.close()
            thread.join(WAITS)
        assert not thread.is_alive()

    def wait(self, *ids: Any, events: int = 0) -> None:
        """Waits until requests, or all of them, have ended or have so many events."""
        asked = [one for one in self.asked if one.prompt.id in ids or not ids]
        with self.news:
            assert self.news.wait_for(lambda: all(one.ended or 0 < events <= len(one.events) for one in asked), WAITS)

    def results(self, **reasons: Any) -> dict[Any, mst.Served]:
        """Runs all requests to their end and judges them.

        Args:
            reasons: id -> reason of its end, or a set of the reasons that it may have; "length" for other requests,
                unless `others` is given.

        Returns:
            id -> result of the first sample.
        """
        for error in self.rest():
            raise error
        others = reasons.pop("others", "length")
        for one in self.asked:
            reason = reasons.get(one.prompt.id, others)
            self._judge(one, {reason} if isinstance(reason, str) else reason)
        return {one.prompt.id: result for one in self.asked for result in one.results if not result.sample}

    def ends(self, **reasons: Any) -> dict[Any, mst.Served]:
        """Judges as `results` does. Then empties the cache, closes the sessions, and checks that nothing is held."""
        results, mem, server = self.results(**reasons), self.mem, self.server
        for info in mem.sessions.infos():
            mem.sessions.close(info.session)
        if mem.prefix is not None:
            mem.prefix.clear()
        stats = mem.stats()
        assert (server.busy, server.running, server.waiting, stats.rows_used) == (False, 0, 0, 0)
        assert (mem.free_slots, mem.free_pages, mem.audit().clean) == (stats.capacity, stats.pages, True)
        mem.close()  # with debug, this looks for leaks
        return results

    def _judge(self, one: Asked, reasons: set[str]) -> None:
        results = sorted(one.results, key=lambda result: result.sample)
        numbers = [result.sample for result in results]
        assert numbers == ([] if one.deaf else [*range(one.samples)]), f"{one.prompt.id!r} has results of {numbers}"
        for number in range(one.samples):
            mine = [event for event in one.events if event.sample == number]
            told = [event for event in mine if isinstance(event, mst.Token)]
            if one.deaf:
                self._compare(one.prompt, number, [event.token for event in told], whole=False)
                continue
            result = results[number]
            assert result.reason in reasons, result
            assert one.aborted or self.server._closed or result.reason != "aborted"
            assert one.prompt.timeout or result.reason != "timeout"
            assert mine[-1] is result, "no token is told behind a result"
            said = [event.token for event in told]
            assert said == result.tokens[: len(said)] and (len(said) == len(result.tokens) or result.reason == "failed")
            assert bool(result.error) == (result.reason in (*REFUSED, "failed")), result
            assert (result.stop is not None) == (result.reason in ("end", "stop")), result
            self._compare(one.prompt, number, result.tokens, result.reason in WHOLE)
            self._read(one.prompt, told, result)

    def _compare(self, prompt: mst.Prompt, sample: int, tokens: list[int], whole: bool) -> None:
        """Compares tokens with those of the request alone."""
        config, text = prompt.config, [*prompt.tokens]
        length = (prompt.most or config.max_new_tokens) if whole else len(tokens)
        changing = [one for one in prompt.processors if not isinstance(one, Raises)]
        drawn = config and ((config.do_sample and config.top_k != 1) or config.repetition_penalty not in (None, 1.0))
        if not (drawn or changing or (config and config.eos_token_id is not None)):
            assert tokens == answer(self.model, text, length), prompt.id
            return
        config = deepcopy(config or GenerationConfig())
        if not length or (config.do_sample and prompt.seed is None):
            return  # nobody knows what is drawn without a seed
        config.update(
            num_return_sequences=1,
            stop_strings=None,
            prompt_lookup_num_tokens=None,
            max_new_tokens=length,
            pad_token_id=0,
        )
        torch.manual_seed((prompt.seed or 0) + sample)
        out = self.model.generate(torch.tensor([text]), generation_config=config, logits_processor=changing)
        assert tokens == out[0, len(text) :].tolist(), prompt.id

    def _read(self, prompt: mst.Prompt, told: Sequence[mst.Token], result: mst.Served) -> None:
        """Compares text and logprobs with those of all tokens at once."""
        text, said = [*prompt.tokens], "".join(one.text for one in told)
        assert result.text.startswith(said)
        if self.tokenizer and result.reason not in ("failed", "stop"):
            before, both = (
                self.tokenizer.decode(part, skip_special_tokens=True) for part in (text, text + result.tokens)
            )
            assert result.text == both[len(before) :]
        assert said == result.text or result.reason not in (*WHOLE, "stop")
        assert all((one.logprob is None) == (prompt.logprobs is None) for one in told)
        if prompt.logprobs is not None and told:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([text + result.tokens])).logits[0]
            for one, expected in zip(told, logits[len(text) - 1 :].log_softmax(-1), strict=False):
                values, ids = expected.topk(min(prompt.logprobs, len(expected)))
                assert one.logprob == pytest.approx(float(expected[one.token]), abs=1e-3)
                assert [id for id, _ in one.top] == ids.tolist()
                assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-3)


class Crowd:
    """Draws random requests, and asks servers for them. Many share their first tokens.

    Args:
        random: what it draws from.
        name: the ids of its requests begin with it.
        longest: limit of the tokens of a prompt.
        samples: limit of the samples of a request.
        guesses: limit of the tokens that a request looks up in its own text.
        raises: share of the requests whose code raises.
    """

    def __init__(
        self, random: Random, name: str = "", longest: int = 14, samples: int = 1, guesses: int = 0, raises: float = 0
    ) -> None:
        self.random, self.name, self.longest, self.samples, self.guesses = random, name, longest, samples, guesses
        self.raises, self.ids = raises, list[str]()
        self.roots = [random.choices(range(3, 97), k=longest) for _ in range(3)]

    def ask(self, at: Judged, most: int = 12, **more: Any) -> None:
        """Asks for one request."""
        random, number = self.random, len(self.ids)
        tail = random.choices(range(3, 97), k=random.choice([1, 1, 2, 6]))
        shared = random.choice([0, 1, 2, 4, 7, 8, 12, 20, 33, 40])
        text = (random.choice(self.roots)[:shared] + tail)[-self.longest :]
        settings: dict[str, Any] = {"salt": random.choice([None, None, None, "tenant"]), "tenant": random.choice("ab"),
                                    "priority": random.randrange(2), "most": random.randint(1, most)}  # fmt: skip
        config = dict[str, Any]()
        if self.samples and random.random() < 0.2:
            config |= {"do_sample": True, "num_return_sequences": random.randint(1, self.samples)}
        if self.guesses and random.random() < 0.7:
            config["prompt_lookup_num_tokens"] = random.randint(1, self.guesses)
        if random.random() < self.raises:
            settings["processors"] = [Raises(len(text) + random.randrange(12), ArithmeticError("in a processor"))]
        self.ids.append(f"{self.name}{number}")
        at.ask(self.ids[-1], text=text, config=GenerationConfig(**config), seed=number, **settings, **more)

    def play(self, *servers: Judged, rounds: int = 8, aborts: float = 0.1, around: Any = nullcontext) -> None:
        """Asks, aborts and steps, then steps to the end. Each step of a server runs in the context `around(server)`."""
        number = 0
        while number < rounds or any(at.server.busy for at in servers):
            for _ in range(self.random.randrange(3) if number < rounds else 0):
                self.ask(self.random.choice(servers))
            if number < rounds and self.ids and self.random.random() < aborts:
                self.random.choice(servers).abort(self.random.choice(self.ids))
            for at in servers:
                with around(at):
                    at.step()
            number += 1
            assert number < 400


def run(*works: Callable[[], object], here: Callable[[], object] = lambda: None) -> None:
    """Runs each of `works` in its own thread and `here` in this thread; raises the first exception of a thread."""
    threads = ThreadPoolExecutor(len(works))
    jobs = [threads.submit(work) for work in works]
    here()
    for job in jobs:
        job.result(WAITS)
    threads.shutdown()


def stored(folder: Path, **prefetch: Any) -> ms.Tiers:
    """Returns tiers that keep records in a folder."""
    prefetching = ms.Prefetch(threshold=4, **prefetch)
    return ms.Tiers("tiny", host_slots=16, store=ms.FileStore(str(folder)), prefetch=prefetching)


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Returns a function that raises the error for any arguments."""

    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@contextmanager
def hooked(module: Any, call: Callable[..., Any]) -> Iterator[None]:
    """During the block, calls a function before each forward of a module."""
    hook = module.register_forward_pre_hook(call, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class Raises(LogitsProcessor):
    """A logits processor that overwrites its arguments, and raises when the tokens have a given length."""

    def __init__(self, length: int, error: BaseException) -> None:
        self._length, self._error = length, error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._length:
            raise self._error
        scored = scores.clone()
        input_ids.zero_()
        scores.zero_()
        return scored
