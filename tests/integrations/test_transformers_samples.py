"""Tests several samples of a request in `serve`, and requests whose own code raises in the choice of a token."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from tests.integrations.servers import Raises, hooked, raising, require_free, results, server_of, tokens

Answers = dict[tuple[Any, int], list[int]]


def sampled(samples: int = 1, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=0.9, top_k=30, max_new_tokens=NEW, num_return_sequences=samples, **more
    )


def answers(model: Any, mem: ms.StateManager, prompts: Sequence[mst.Prompt], **settings: Any) -> Answers:
    return {(one.id, one.sample): one.tokens for one in mst.serve(model, mem, prompts, **settings)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_single_requests_and_their_prompt_is_read_once(family: str) -> None:
    model, read = tiny(family), []
    alike = [mst.Prompt(TEXT[:19], ("alone", n), config=sampled(), seed=7 + n) for n in range(3)]
    expected = answers(model, managed(model, prefix=None), alike)
    mem = managed(model, prefix=None, max_requests=4)
    other = mst.Prompt(TEXT[:9], "other", most=NEW)

    def count(_: Any, args: Any, kwargs: Any) -> None:
        read.append(kwargs["input_ids"].numel())

    with hooked(model, count):
        served = answers(model, mem, [mst.Prompt(TEXT[:19], "three", config=sampled(3), seed=7), other])
    assert [served["three", n] for n in range(3)] == [expected[("alone", n), 0] for n in range(3)]
    assert len(set(map(tuple, served.values()))) == 4  # each sample has its own seed
    assert served["other", 0] == alone(model, TEXT[:9], {})
    assert sum(read) == 2 * 19 + 4 * (NEW - 1)  # prompts padded to 19 tokens, then 4 tokens per step
    mem.audit().raise_if_leaking()
    assert mem.free_slots == 16


@pytest.mark.sample(1)
@pytest.mark.parametrize("tracking", [ms.Redirect(every=4), ms.PingPong(every=4)], ids=str)
@pytest.mark.parametrize("settings", [
    {"max_requests": 3}, {"slots": 10, "max_requests": 8},
    {"max_requests": 8, "pages": ms.Pages(size=4, count=16, per_row=16)},
    {"max_requests": 5, "prefix": None, "overlap": False},
], ids=str)  # fmt: skip
def test_samples_wait_for_rows_slots_and_pages_and_none_is_lost(
    tracking: ms.Tracking, settings: dict[str, Any]
) -> None:
    model = tiny("lfm2")
    prompts = [mst.Prompt(TEXT[n : n + 5 + n], n, config=sampled(1 + n % 3), seed=10 * n) for n in range(6)]
    roomy = {"slots": 60, "max_requests": 16, "pages": ms.Pages(size=4, count=200, per_row=16)}
    expected = answers(model, managed(model, tracking=tracking, **roomy), prompts)
    assert len(expected) == 12
    mem = managed(model, tracking=tracking, debug=True, **settings)
    assert answers(model, mem, prompts, chunk=6) == expected
    mem.close()  # with debug, close looks for leaks


def test_samples_that_never_fit_are_refused_whole() -> None:
    model = tiny("lfm2")
    mem = managed(model, slots=3, max_requests=4, prefix=None)
    prompts = [mst.Prompt(TEXT[:9], n, config=sampled(4), seed=1) for n in range(2)]
    served = list(mst.serve(model, mem, [*prompts, mst.Prompt(TEXT[:9], "other", most=NEW)]))
    assert sorted((str(one.id), one.reason, len(one.tokens)) for one in served) == [
        *[("0", "too_large", 0)] * 4, *[("1", "too_large", 0)] * 4, ("other", "length", NEW),
    ]  # fmt: skip
    too_large = {one.error for one in served if one.reason == "too_large"}
    assert too_large == {"5 slots needed at once, there are 3: ask for less"}  # a wait would not help
    assert mem.free_slots == 3
    assert mem.free_pages == 60


def test_an_abort_ends_all_samples_of_what_runs_and_what_waits() -> None:
    server = server_of("bamba", max_requests=4)
    for name in ("three", "waits"):
        server.submit(mst.Prompt(TEXT[:9], name, config=sampled(3), seed=1))
    events = server.step() + server.step()
    assert sorted((event.id, event.sample) for event in events) == sorted([("three", n) for n in range(3)] * 2)
    server.abort("three")
    events = server.step()
    assert [(one.sample, one.reason, len(one.tokens)) for one in ended(events)] == [(n, "aborted", 2) for n in range(3)]
    server.abort("waits")
    assert [(one.sample, one.reason) for one in ended(server.step())] == [(n, "aborted") for n in range(3)]
    server.submit(mst.Prompt(TEXT[:9], "last", config=sampled(3), seed=1))
    assert server.waiting == 1
    server.abort("last")
    assert [(one.reason, one.tokens) for one in server.step()] == [("aborted", [])] * 3
    require_free(server)


def ended(events: Sequence[Any]) -> list[mst.Served]:
    return [one for one in events if isinstance(one, mst.Served)]


def steps(server: mst.Server) -> Iterator[mst.Event | BaseException]:
    """Steps a server to the end; yields its events and the exceptions of its steps."""
    while server.busy:
        try:
            yield from server.step()
        except (Exception, KeyboardInterrupt) as error:
            yield error


@pytest.mark.parametrize("samples", [1, 2])
def test_a_processor_that_raises_ends_its_own_rows_only(samples: int) -> None:
    server = server_of("lfm2", max_requests=6)
    processors = [Raises(11, ArithmeticError("mine"))]
    server.submit(mst.Prompt(TEXT[:9], "first", most=NEW))
    server.submit(mst.Prompt(TEXT[:9], "raises", config=sampled(samples), processors=processors))
    server.submit(mst.Prompt(TEXT[:7], "last", most=NEW))
    events = list(steps(server))
    (error,) = [event for event in events if isinstance(event, BaseException)]
    assert isinstance(error, ArithmeticError if samples == 1 else ExceptionGroup)
    for name, text in (("first", TEXT[:9]), ("last", TEXT[:7])):
        assert tokens(events, name) == alone(server.model, text, {})  # the exception loses no event of others
    assert len(tokens(events, "raises")) == 2 * samples
    failed = [(one.sample, len(one.tokens)) for one in ended(events) if one.reason == "failed"]
    assert failed == [(n, 2) for n in range(samples)]
    assert [one.id for one in ended(events) if one.reason != "failed"] == ["first", "last"]
    require_free(server)


def test_what_ends_text_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of("lfm2")
    for name in ("raises", "other"):
        server.submit(mst.Prompt(TEXT[:9], name, most=NEW))
    monkeypatch.setattr(server._asked[0].samplers[0].text, "read", raising(ArithmeticError("a stop string")))
    events = list(steps(server))
    assert [type(event) for event in events if isinstance(event, Exception)] == [ArithmeticError]
    assert {id: one.reason for id, one in results(events).items()} == {"raises": "failed", "other": "length"}
    assert tokens(events, "other") == alone(server.model, TEXT[:9], {}) and not tokens(events, "raises")
    require_free(server)
