"""Tests that each request of a server has one result even if listeners, tokenizers or steps raise."""

from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers import steps
from tests.integrations.servers import (
    Interrupt,
    Raises,
    hooked,
    raising,
    require_free,
    rest,
    results,
    server_of,
    tokens,
)

WAITS = 60  # seconds to wait for a thread; only a defect takes so long


def prompt(id: Any, most: int = NEW, **settings: Any) -> mst.Prompt:
    return mst.Prompt(TEXT[:9], id, most=most, **settings)


def served(events: list[Any]) -> list[str]:
    return [one.reason for one in events if isinstance(one, mst.Served)]


class Letters:
    """A tokenizer with one letter for each token. While `busy` is set, it raises."""

    def __init__(self) -> None:
        self.added_tokens_decoder, self.busy = dict[int, Any](), False

    def decode(self, given: list[int], **_: Any) -> str:
        if self.busy:
            raise RuntimeError("already borrowed")
        return "".join(chr(97 + token % 26) for token in given)


@pytest.mark.parametrize("line", range(12))
def test_an_interrupt_while_events_are_handed_out_loses_none(line: int) -> None:
    server = server_of()
    for id in "abc":
        server.submit(prompt(id, most=2))
    events, tracer = server.step(), Interrupt(line, steps.__file__)
    deliver = server._steps.deliver

    def traced() -> int:
        with tracer.tracing():
            return deliver()
        raise KeyboardInterrupt

    server._steps.deliver = traced  # type: ignore[method-assign]
    with suppress(KeyboardInterrupt):
        events += server.step()
    assert tracer.where
    events += rest(server)
    assert {id: one.reason for id, one in results(events).items()} == dict.fromkeys("abc", "length")
    assert all(len(tokens(events, id)) == 2 for id in "abc")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_listener_that_ends_the_step_keeps_no_event_from_others(error: type[BaseException]) -> None:
    server = server_of(max_requests=3)

    def listens(event: mst.Event) -> None:
        if isinstance(event, mst.Served):
            raise error

    heard = list[Any]()
    server.submit(prompt("before", most=2))
    server.submit(prompt("raises", most=2), to=listens)
    server.submit(prompt("behind", most=2), to=heard.append)
    events = server.step()
    with pytest.raises(error):
        server.step()
    events += rest(server)
    assert len(tokens(events, "before")) == 2 and served(events) == served(heard) == ["length"]


@pytest.mark.parametrize("how", ["abort", "timeout", "close"])
def test_a_tokenizer_that_raises_while_requests_end_leaves_neither_them_nor_their_rows(how: str) -> None:
    model, clock, tokenizer, heard = tiny("qwen3_next"), ms.testing.Clock(), Letters(), list[Any]()
    server = mst.Server(model, managed(model, prefix=None), tokenizer=tokenizer, clock=clock)
    server.submit(prompt("a", timeout=1.0), to=heard.append)
    server.step()
    tokenizer.busy = True
    if how == "close":
        server.close()
    else:
        clock.advance(1.0) if how == "timeout" else server.abort("a")
        server.step()
    assert served(heard) == ["failed"] and heard[-1].error == "RuntimeError: already borrowed"
    assert (heard[-1].tokens, heard[-1].text) == ([heard[0].token], heard[0].text)
    require_free(server)


def test_a_close_that_fails_can_be_repeated() -> None:
    server, heard = server_of(), list[Any]()
    server.submit(prompt("a"), to=heard.append)
    server.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.mem, "end", raising(ArithmeticError))
        with pytest.raises(ArithmeticError):
            server.close()
    server.close()
    assert served(heard) == ["aborted"]
    require_free(server)


def test_steps_that_raise_for_ever_end_the_run_and_what_was_told_before_is_heard() -> None:
    server, heard, bad = server_of(max_requests=1), list[Any](), raising(ArithmeticError("always"))
    for id in "ab":
        server.submit(prompt(id), to=heard.append)
    errors = list[Exception]()

    def fails(**_: Any) -> None:
        patch.setattr(server.mem, "poll", bad)
        bad()

    def drives() -> None:
        try:
            server.run()
        except ArithmeticError as error:
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model, "forward", fails)
        (thread := Thread(target=drives, daemon=True)).start()
        thread.join(WAITS)
    assert not thread.is_alive() and len(errors) == 1
    assert served(heard) == ["failed", "failed"]
    require_free(server)


def test_a_run_inside_a_step_is_refused_and_closes_nothing() -> None:
    server, heard = server_of(), list[Any]()

    def listens(event: mst.Event) -> None:
        heard.append(event)
        with pytest.raises(ms.InvalidArgument, match="call run, step and admit from no code"):
            server.run()

    server.submit(prompt("a"), to=listens)
    rest(server)
    assert served(heard) == ["length"]
    server.submit(prompt("b"))


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception to which no note can be added."""


class Mute(Exception):
    """An exception whose repr and str raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


@pytest.mark.parametrize("error", [Frozen(), Mute()], ids=["frozen", "mute"])
def test_an_odd_exception_ends_its_own_request_only(error: Exception) -> None:
    server = server_of()
    server.submit(prompt("bad", processors=[Raises(9, error)]))
    server.submit(prompt("good"))
    with pytest.raises(type(error)):
        server.step()
    ended = results(events := rest(server))
    assert {id: one.reason for id, one in ended.items()} == {"bad": "failed", "good": "length"}
    assert type(error).__name__ in ended["bad"].error
    assert tokens(events, "good") == alone(server.model, TEXT[:9], {})
    require_free(server)


def test_a_forward_whose_exception_says_nothing_ends_its_requests() -> None:
    server = server_of()
    server.submit(prompt("a"))
    with hooked(server.model, raising(Mute())), pytest.raises(Mute):
        server.step()
    assert results(rest(server))["a"].reason == "failed"
    require_free(server)
