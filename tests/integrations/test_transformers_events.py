"""Tests the fields of tokens and results: probabilities, text, and reasons of ends, refusals and misses."""

from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT, Known, alone, managed

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from transformers import GenerationConfig

import memstate.integrations.transformers as mst
from tests.integrations.servers import SPECULATING, require_free, rest, results, server_of
from tests.support.tiny_tokenizers import byte_level

FAMILY = "lfm2"


@pytest.fixture(scope="module")
def known() -> Known:
    """The logits after each prefix of the answer."""
    logits = Known()
    alone(tiny(FAMILY), TEXT[:9], logits)
    return logits


def of(events: list[Any], id: Any, sample: int = 0) -> list[mst.Token]:
    return [one for one in events if isinstance(one, mst.Token) and (one.id, one.sample) == (id, sample)]


def require_logprobs(tokens: list[mst.Token], known: Known, most: int) -> None:
    """Checks the probabilities of tokens against the model's own logits after the same tokens."""
    so_far = TEXT[:9]
    for one in tokens:
        if (logits := known.get(tuple(so_far))) is not None:
            expected = logits.log_softmax(-1)
            values, ids = expected.topk(most)
            assert one.logprob == pytest.approx(float(expected[one.token]), abs=1e-3)
            assert [id for id, _ in one.top] == ids.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-3)
        so_far = [*so_far, one.token]


def test_logprobs_are_those_of_the_model_for_the_requests_that_ask(known: Known) -> None:
    server = server_of(FAMILY, max_requests=5)
    cold = GenerationConfig(do_sample=True, temperature=0.01, top_k=1, max_new_tokens=NEW)  # in effect greedy
    server.submit(mst.Prompt(TEXT[:9], "three", most=NEW, logprobs=3))
    server.submit(mst.Prompt(TEXT[:9], "none", most=NEW, logprobs=0))
    server.submit(mst.Prompt(TEXT[:9], "all", most=1, logprobs=1000))
    server.submit(mst.Prompt(TEXT[:9], "silent", most=NEW))
    server.submit(mst.Prompt(TEXT[:9], "cold", config=cold, seed=1, logprobs=1))
    events = rest(server)
    require_logprobs(of(events, "three"), known, 3)
    require_logprobs(of(events, "none"), known, 0)
    require_logprobs(of(events, "cold"), known, 1)
    assert {len(of(events, id)) for id in ("three", "none", "silent", "cold")} == {NEW}
    assert {(one.logprob, one.top) for one in of(events, "silent")} == {(None, ())}
    assert len(of(events, "all")[0].top) == 97
    three = of(events, "three")
    assert all(one.top[0] == (one.token, one.logprob) for one in three)  # each token is the likeliest one


def test_samples_and_guesses_have_logprobs_as_well(known: Known) -> None:
    hot = GenerationConfig(do_sample=True, temperature=2.0, num_return_sequences=3, max_new_tokens=NEW)
    server = server_of(FAMILY, max_requests=3)
    server.submit(mst.Prompt(TEXT[:9], "s", config=hot, seed=4, logprobs=2))
    events = rest(server)
    samples = [of(events, "s", n) for n in range(3)]
    for one in samples:
        require_logprobs(one[:1], known, 2)
    assert len({one[0].token for one in samples}) > 1
    assert all(one.logprob is not None and len(one.top) == 2 for sample in samples for one in sample)

    model = tiny(FAMILY)
    answer = alone(model, TEXT[:9], {})

    def half_right(tokens: Any, room: int) -> list[int]:
        return [*answer[len(tokens) - 9 :][:2], 5]

    guessing = mst.Server(model, managed(model, prefix=None, **SPECULATING), assistant=half_right)
    guessing.submit(mst.Prompt(TEXT[:9], "guessed", most=NEW, logprobs=3))
    events = rest(guessing)
    assert results(events)["guessed"].right > 0
    require_logprobs(of(events, "guessed"), known, 3)


@pytest.mark.parametrize("logprobs", [-1, 1.0, True])
def test_logprobs_that_are_no_number_are_refused(logprobs: Any) -> None:
    with pytest.raises(ms.InvalidArgument, match=r"^prompt 'a': logprobs .*: expected 0 or more"):
        server_of(FAMILY).submit(mst.Prompt(TEXT, "a", logprobs=logprobs))


def test_tokens_have_text_and_results_say_what_ended_them() -> None:
    model, tokenizer = tiny(FAMILY), byte_level()
    answer = alone(model, TEXT[:9], {})
    text = tokenizer.decode(answer)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    configs = {
        "length": GenerationConfig(),
        "end": GenerationConfig(eos_token_id=[96, answer[2]]),
        "stop": GenerationConfig(stop_strings=["never", text[2:4]]),
        "special": GenerationConfig(stop_strings="<|end|>"),
    }
    forced = {"special": [Forced(end)]}
    for settings in ({}, {"assistant": lambda tokens, room: answer[len(tokens) - 9 :][:room], **SPECULATING}):
        assistant = {"assistant": settings.pop("assistant")} if settings else {}
        mem = managed(model, max_requests=4, prefix=None, **settings)
        server = mst.Server(model, mem, tokenizer=tokenizer, **assistant)
        for id, config in configs.items():
            server.submit(mst.Prompt(TEXT[:9], id, config=config, most=NEW, processors=forced.get(id, [])))
        events = rest(server)
        ends = {id: (one.reason, one.stop, one.text) for id, one in results(events).items()}
        assert ends == {
            "length": ("length", None, text),
            "end": ("end", answer[2], tokenizer.decode(answer[:3])),
            "stop": ("stop", text[2:4], text[:2]),
            "special": ("stop", "<|end|>", ""),
        }
        for id, (_, _, said) in ends.items():
            assert "".join(one.text for one in of(events, id)) == said
        require_free(server)


class Forced:
    """A logits processor that allows one token only."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, torch.arange(scores.shape[1]) != self._token] = -torch.inf
        return scores


def test_an_aborted_request_has_the_text_that_was_held_back() -> None:
    model, tokenizer = tiny(FAMILY), byte_level()
    text = tokenizer.decode(alone(model, TEXT[:9], {}))
    server = mst.Server(model, managed(model), tokenizer=tokenizer)
    server.submit(mst.Prompt(TEXT[:9], "a", config=GenerationConfig(stop_strings=[text[0] + "never"]), most=NEW))
    events = server.step() + server.step()  # two chunks of the prompt
    (token,) = of(events, "a")
    server.abort("a")
    (one,) = server.step()
    assert (token.text, one.text, one.stop) == ("", tokenizer.decode([token.token]), None)


def test_samples_have_text_each_of_its_own() -> None:
    model, tokenizer = tiny(FAMILY), byte_level()
    hot = GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=NEW)
    server = mst.Server(model, managed(model), tokenizer=tokenizer)
    server.submit(mst.Prompt(TEXT[:9], "s", config=hot, seed=1))
    events = rest(server)
    for one in events:
        if isinstance(one, mst.Served):
            before, both = (tokenizer.decode([*TEXT[:9], *more]) for more in ([], one.tokens))
            assert one.text == both[len(before) :] == "".join(each.text for each in of(events, "s", one.sample))


def refused(server: mst.Server, prompt: mst.Prompt) -> str:
    server.submit(prompt)
    return results([one for one in rest(server) if isinstance(one, mst.Served) and one.sample == 0])[prompt.id].reason


def test_a_refusal_says_whether_it_is_the_request_or_the_room_or_a_mistake() -> None:
    sampled = GenerationConfig(do_sample=True, num_return_sequences=3, max_new_tokens=NEW)
    pages = ms.Pages(size=4, count=6, per_row=16)
    server = server_of(FAMILY, slots=3, pages=pages)
    closed, most = server.mem.sessions.open("closed"), {"most": NEW}
    server.mem.sessions.close(closed)
    assert refused(server, mst.Prompt(TEXT, "pages of all", most=NEW)) == "too_large"
    assert refused(server, mst.Prompt(TEXT[:9], "samples, by pages", config=sampled)) == "too_large"
    assert refused(server, mst.Prompt(TEXT[:9], "turn", session=closed, **most)) == "invalid"
    assert refused(server, mst.Prompt(TEXT[:9], "below zero", snapshot_at=[-1], **most)) == "invalid"
    held = server.mem.admit([ms.Request("held", length=16)])
    assert refused(server, mst.Prompt(TEXT[:9], "room", **most)) == "no_room"
    server.mem.end(held)
    assert refused(server, mst.Prompt(TEXT[:9], "fits", **most)) == "length"
    server = server_of(FAMILY, slots=2, max_requests=4)
    assert refused(server, mst.Prompt(TEXT[:9], "samples, by slots", config=sampled)) == "too_large"
    server = server_of(FAMILY, max_requests=3, slots=8)
    held = server.mem.admit([ms.Request("held", length=4)])
    assert refused(server, mst.Prompt(TEXT[:9], "samples, by rows", config=sampled)) == "no_room"
    server.mem.end(held)
    assert refused(server, mst.Prompt(TEXT[:9], "samples that fit", config=sampled)) == "length"


def test_a_result_says_why_no_more_of_its_prompt_was_cached() -> None:
    model = tiny(FAMILY)
    mem = managed(model, slots=4, max_requests=2, pages=ms.Pages(size=4, count=24, per_row=16))

    def cached(tokens: list[int], **settings: Any) -> tuple[int, str]:
        (one,) = mst.serve(model, mem, [mst.Prompt(tokens, most=2, **settings)])
        return one.cached, one.missed

    assert cached(TEXT[:19]) == (0, "no_sharing")
    assert cached(TEXT[:19]) == (16, "")  # this request hits all whole pages of the prompt
    assert cached([*TEXT[:10], *TEXT[20:27]]) == (0, "no_snapshot")  # two pages have KV, but no state
    assert cached([*TEXT[:19], *TEXT[:9]])[1] == "no_sharing"
    for shift in range(1, 6):  # more prompts than slots and pages
        cached([*TEXT[shift:], *TEXT[:shift]])
    assert cached(TEXT[:19]) == (0, "evicted")
    without = managed(model, prefix=None)
    (one,) = mst.serve(model, without, [mst.Prompt(TEXT[:9], most=2)])
    assert (one.cached, one.missed) == (0, "")


@pytest.mark.parametrize(("slots", "together"), [(16, True), (16, False), (3, False)])
def test_a_conversation_goes_on_in_two_ways_from_one_turn(slots: int, together: bool) -> None:
    model = tiny(FAMILY)
    server = mst.Server(model, managed(model, slots=slots))
    chat = server.mem.sessions.open("chat")
    server.submit(mst.Prompt(TEXT[:9], "first", most=NEW, session=chat))
    said = [*TEXT[:9], *results(rest(server))["first"].tokens]
    sessions, events = {"chat": chat, "other": server.fork(chat, "other")}, []
    turns = {"chat": [*said, 7], "other": [*said, 8, 9]}
    for id, session in sessions.items():
        server.submit(mst.Prompt(turns[id], id, most=NEW, session=session))
        events += [] if together else rest(server)
    served = results(events + rest(server))
    for id, session in sessions.items():
        assert served[id].tokens == alone(model, turns[id], {})
        assert slots < 16 or served[id].cached == len(said) - 1
        server.mem.sessions.close(session)
    server.mem.audit().raise_if_leaking()


def test_the_next_turn_of_a_session_misses_nothing() -> None:
    model = tiny(FAMILY)
    mem = managed(model)
    chat = mem.sessions.open("chat")
    (first,) = mst.serve(model, mem, [mst.Prompt(TEXT[:9], most=NEW, session=chat)])
    (second,) = mst.serve(model, mem, [mst.Prompt([*TEXT[:9], *first.tokens, 7], most=2, session=chat)])
    assert (first.missed, second.missed) == ("no_sharing", "")
