"""Tests that each request of a server has one result, whatever raises: its code, listeners, tokenizers, forwards."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_served import TEXT

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import steps
from tests.integrations.servers import Judged, Raises, hooked, ignore, raising
from tests.proof.injection.points import Tracer

TWO = GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=6)


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception to which no note can be added."""


class Mute(Exception):
    """An exception whose repr and str raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


class Letters:
    """A tokenizer with one letter for each token. While `busy` is set, it raises."""

    def __init__(self) -> None:
        self.added_tokens_decoder, self.busy = dict[int, Any](), False

    def decode(self, given: list[int], **_: Any) -> str:
        if self.busy:
            raise RuntimeError("already borrowed")
        return "".join(chr(97 + token % 26) for token in given)


@pytest.mark.parametrize("driven", [False, True], ids=["stepped", "driven"])
@pytest.mark.parametrize(("processor", "settings", "error", "tokens", "why"), [
    (Raises(9, Frozen()), {}, Frozen, 0, "Frozen"), (Raises(9, Mute()), {}, Mute, 0, "Mute"),
    (Raises(11, ArithmeticError("mine")), {}, ArithmeticError, 2, "mine"),
    (Raises(11, ArithmeticError("mine")), {"config": TWO, "seed": 1}, ExceptionGroup, 2, "mine"),
    *[(lambda ids, scores, axis=axis: torch.cat([scores, scores + 1], axis), {"logprobs": 2}, ms.InvalidArgument, 0,
       "expected (1, 97)") for axis in (0, 1)],
])  # fmt: skip
def test_code_of_a_request_that_raises_ends_its_own_rows_only(
    processor: Any, settings: Any, error: Any, tokens: int, why: str, driven: bool, caplog: pytest.LogCaptureFixture
) -> None:
    at, to = Judged("lfm2", max_requests=6), ignore if driven else None
    at.ask("first", to=to)
    at.ask("bad", to=to, processors=[processor], **settings)
    at.ask("last", to=to, text=TEXT[:7])
    if driven:
        with at.driven():
            pass
        assert "a step has raised" in caplog.text
    else:
        (raised,) = at.rest()
        assert isinstance(raised, error)
        notes = {note for one in getattr(raised, "exceptions", [raised]) for note in getattr(one, "__notes__", [])}
        assert notes == (set() if error is Frozen else {"the request 'bad' has ended"})
    result = at.ends(bad="failed")["bad"]
    assert len(result.tokens) == tokens and why in result.error


def test_what_ends_text_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Judged("lfm2")
    bad = at.ask("raises")
    at.ask("other")
    monkeypatch.setattr(at.server._asked[0].samplers[0].text, "read", raising(ArithmeticError("a stop string")))
    assert [type(error) for error in at.rest()] == [ArithmeticError]
    at.ends(raises="failed")
    assert len(bad.events) == 1


@pytest.mark.parametrize("error", [ArithmeticError("in a prompt"), Mute()], ids=["told", "mute"])
@pytest.mark.parametrize("call", ["forward", "plan"])
def test_a_forward_or_a_plan_that_raises_ends_its_rows_only(
    call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Judged(chunk=32)
    at.ask("running")
    at.step()
    owner: Any = at.model if call == "forward" else at.mem
    real = getattr(owner, call)

    def broken(*given: Any, **named: Any) -> Any:
        if (named["input_ids"].shape[1] if call == "forward" else given[1]) != 1:
            raise error
        return real(*given, **named)

    at.ask("reads", text=TEXT[:19])
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, broken)
        at.step(raises=type(error))
    failed = at.ends(reads="failed")["reads"]
    assert not failed.tokens and type(error).__name__ in failed.error


def test_a_server_that_is_driven_goes_on_however_many_forwards_fail(caplog: pytest.LogCaptureFixture) -> None:
    at = Judged()
    with at.driven():
        with hooked(at.model, raising(ArithmeticError("in a forward"))):
            for id in ("one", "two", "three", "four"):
                at.ask(id, to=ignore)
                at.wait(id)
        at.ask("other", to=ignore)
    at.ends(**dict.fromkeys(("one", "two", "three", "four"), "failed"))
    assert "in a forward" in caplog.text


@pytest.mark.parametrize("point", range(1, 24))
def test_an_interrupt_while_events_are_handed_out_loses_none(point: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at, tracer = Judged(), Tracer(point, KeyboardInterrupt, steps.__file__)
    at.ask(*"abc", most=2)
    at.step()
    monkeypatch.setattr(at.server._steps, "deliver", partial(tracer.run, at.server._steps.deliver))
    with suppress(KeyboardInterrupt):
        at.step()
    at.ends()
    assert tracer.place


@pytest.mark.parametrize("call", ["end", "token"])
def test_a_row_that_is_interrupted_before_a_token_or_its_end_is_told_ends(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Judged()
    at.ask(*"ab", most=2 if call == "end" else 3)
    at.step()

    def interrupted(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(*((at.mem, "end") if call == "end" else (steps, "Token")), interrupted)
    at.step(raises=KeyboardInterrupt)
    at.ends(a="length" if call == "end" else "failed", b="failed")


def at_the_end(error: BaseException) -> Callable[[Any], None]:
    return lambda event: raising(error)() if isinstance(event, mst.Served) else None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=["interrupt", "exit"])
def test_a_listener_that_ends_the_step_keeps_no_event_from_others(error: BaseException) -> None:
    at = Judged(max_requests=3)
    for id, to in (("before", None), ("raises", at_the_end(error)), ("behind", ignore)):
        at.ask(id, most=2, to=to)
    at.step()
    at.step(raises=type(error))
    at.ends()


@pytest.mark.parametrize("driven", [False, True], ids=["stepped", "driven"])
def test_a_listener_that_raises_is_called_no_more_and_its_request_ends(
    driven: bool, caplog: pytest.LogCaptureFixture
) -> None:
    at = Judged()
    deaf = at.ask("deaf", most=40, to=raising(ConnectionError("gone")))
    at.ask("other", to=ignore)
    if driven:
        with at.driven():
            pass
    else:
        at.step()
        assert at.server.running == 1
    at.ends()
    assert len(deaf.events) == 1 and "the listener of request 'deaf' has raised" in caplog.text


@pytest.mark.parametrize("how", ["abort", "timeout", "close"])
def test_a_tokenizer_that_raises_while_requests_end_leaves_neither_them_nor_their_rows(how: str) -> None:
    clock, tokenizer = ms.testing.Clock(), Letters()
    at = Judged(tokenizer=tokenizer, clock=clock)
    heard = at.ask("a", timeout=1.0, to=ignore).events
    at.step()
    tokenizer.busy = True
    if how == "timeout":
        clock.advance(1.0)
    else:
        at.server.close() if how == "close" else at.server.abort("a")
    result = at.ends(a="failed")["a"]
    assert result.error == "RuntimeError: already borrowed"
    assert (result.tokens, result.text) == ([heard[0].token], heard[0].text)


def test_a_close_that_fails_can_be_repeated() -> None:
    at = Judged()
    at.ask("a", to=ignore)
    at.step()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError):
        patch.setattr(at.mem, "end", raising(ArithmeticError))
        at.server.close()
    at.server.close()
    at.ends(a="aborted")


@pytest.mark.parametrize("told", [False, True])
def test_steps_that_raise_for_ever_end_the_run_and_what_was_told_before_is_heard(told: bool) -> None:
    at, bad = Judged(max_requests=1), raising(ArithmeticError("always"))
    at.ask(*"ab", to=ignore)

    def fails(**_: Any) -> None:
        patch.setattr(at.mem, "poll", bad)
        bad()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ArithmeticError, match="always"):
        patch.setattr(*((at.model, "forward", fails) if told else (at.mem, "poll", bad)))
        at.server.run()
    assert at.ends(others="failed")["b"].error == "ArithmeticError: always"


def test_a_run_inside_a_step_is_refused_and_closes_nothing() -> None:
    at = Judged()

    def listens(event: mst.Event) -> None:
        with pytest.raises(ms.InvalidArgument, match="call run, step and admit from no code"):
            at.server.run()

    at.ask("a", to=listens)
    at.rest()
    at.ask("b")
    at.ends()
