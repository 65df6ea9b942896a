"""Several samples of a request in `serve`, and requests whose own code raises while a token is chosen."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import FAMILIES, tiny
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig, LogitsProcessor

import memstate.integrations.transformers as mst

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

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        found = answers(model, mem, [mst.Prompt(TEXT[:19], "three", config=sampled(3), seed=7), other])
    finally:
        hook.remove()
    assert [found["three", n] for n in range(3)] == [expected[("alone", n), 0] for n in range(3)]
    assert len(set(map(tuple, found.values()))) == 4  # seeds differ
    assert found["other", 0] == alone(model, TEXT[:9], {})
    assert sum(read) == 2 * 19 + 4 * (NEW - 1)  # the shorter prompt is padded
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
    mem.close()  # looks for leaks


def test_samples_that_never_fit_are_refused_whole() -> None:
    model = tiny("lfm2")
    mem = managed(model, max_requests=3, prefix=None)
    prompts = [mst.Prompt(TEXT[:9], n, config=sampled(4), seed=1) for n in range(2)]
    found = list(mst.serve(model, mem, [*prompts, mst.Prompt(TEXT[:9], "other", most=NEW)]))
    assert sorted((str(one.id), one.reason, len(one.tokens)) for one in found) == [
        ("0", "refused", 0), ("1", "refused", 0), ("other", "length", NEW),
    ]  # fmt: skip
    assert all("rows" in one.error for one in found if one.reason == "refused")
    assert mem.free_slots == 16
    assert mem.free_pages == 60


def test_an_abort_ends_all_samples() -> None:
    model = tiny("bamba")
    mem = managed(model, max_requests=4, prefix=None)
    server = mst.Server(model, mem)
    server.submit(mst.Prompt(TEXT[:9], "three", config=sampled(3), seed=1))
    server.submit(mst.Prompt(TEXT[:5], "waits", config=sampled(3), seed=1))
    events = server.step() + server.step()
    assert sorted((event.id, event.sample) for event in events) == sorted([("three", n) for n in range(3)] * 2)
    ended = [(one.sample, one.reason, len(one.tokens)) for one in server.abort("three")]
    assert ended == [(n, "aborted", 2) for n in range(3)]
    server.step()
    assert [one.reason for one in server.abort("waits")] == ["aborted"] * 3
    assert not server.busy
    assert mem.free_slots == 16
    assert mem.free_pages == 60


def test_what_has_no_several_samples_is_refused_by_name() -> None:
    model = tiny("lfm2")
    mem = managed(model)
    greedy = GenerationConfig()
    greedy.num_return_sequences = 2  # in the constructor Transformers refuses it itself
    with pytest.raises(ms.InvalidArgument, match="Greedy methods"):
        list(mst.serve(model, mem, [mst.Prompt(TEXT, config=greedy)]))
    chat = mem.sessions.open("chat")
    with pytest.raises(ms.InvalidArgument, match="one answer"):
        list(mst.serve(model, mem, [mst.Prompt(TEXT, config=sampled(2), session=chat)]))


class Raises(LogitsProcessor):
    """Raises behind some tokens."""

    def __init__(self, length: int, error: BaseException) -> None:
        self._length, self._error = length, error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._length:
            raise self._error
        return scores


def steps(server: mst.Server) -> Iterator[mst.Event | BaseException]:
    """All events, and what steps raise between them."""
    while server.busy:
        try:
            yield from server.step()
        except (Exception, KeyboardInterrupt) as error:
            yield error


@pytest.mark.parametrize("samples", [1, 2])
def test_a_processor_that_raises_ends_its_own_rows_only(samples: int) -> None:
    model = tiny("lfm2")
    mem = managed(model, max_requests=6, prefix=None)
    server = mst.Server(model, mem)
    raising = [Raises(11, ArithmeticError("mine"))]
    server.submit(mst.Prompt(TEXT[:9], "first", most=NEW))
    server.submit(mst.Prompt(TEXT[:9], "raises", config=sampled(samples), processors=raising))
    server.submit(mst.Prompt(TEXT[:7], "last", most=NEW))
    events = list(steps(server))
    (error,) = [event for event in events if isinstance(event, BaseException)]
    assert isinstance(error, ArithmeticError if samples == 1 else ExceptionGroup)
    for name, text in (("first", TEXT[:9]), ("last", TEXT[:7])):
        tokens = [event.token for event in events if isinstance(event, mst.Token) and event.id == name]
        assert tokens == alone(model, text, {})  # no event is lost
    assert sum(isinstance(event, mst.Token) and event.id == "raises" for event in events) == 2 * samples
    assert [one.id for one in events if isinstance(one, mst.Served)] == ["first", "last"]
    mem.audit().raise_if_leaking()
    assert mem.free_slots == 16


def test_what_ends_text_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("lfm2")
    mem = managed(model, prefix=None)
    server = mst.Server(model, mem)
    for name in ("raises", "other"):
        server.submit(mst.Prompt(TEXT[:9], name, most=NEW))
    (one, _) = server._waiting

    def stop(*_: Any) -> Tensor:
        raise ArithmeticError("a stop string")

    monkeypatch.setattr(one.samplers[0], "_stop", stop)
    events = list(steps(server))
    assert [type(event) for event in events if not isinstance(event, mst.Token)] == [ArithmeticError, mst.Served]
    assert [event.token for event in events if isinstance(event, mst.Token)] == alone(model, TEXT[:9], {})
    assert mem.free_slots == 16


def test_an_interrupt_while_tokens_are_chosen_ends_the_rows_that_have_none() -> None:
    model = tiny("lfm2")
    mem = managed(model, prefix=None)
    server = mst.Server(model, mem)
    server.submit(mst.Prompt(TEXT[:9], "raises", most=NEW, processors=[Raises(9, KeyboardInterrupt())]))
    events = list(steps(server))
    assert [type(event) for event in events] == [KeyboardInterrupt]
    assert mem.free_slots == 16
    assert torch.is_grad_enabled()
