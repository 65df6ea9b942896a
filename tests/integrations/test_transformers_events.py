"""Tests the fields of tokens and results: probabilities, text, and reasons of ends, refusals and misses."""

from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import NEW, TEXT

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from transformers import GenerationConfig, SuppressTokensLogitsProcessor

from tests.integrations.servers import SPECULATING, Judged, answer, guessing
from tests.support.tiny_tokenizers import byte_level

FAMILY = "lfm2"


def hot(samples: int) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=2.0, num_return_sequences=samples)


def test_logprobs_are_those_of_the_model_for_the_requests_that_ask() -> None:
    at = Judged(FAMILY, max_requests=6)
    cold = GenerationConfig(do_sample=True, temperature=0.01, top_k=1)  # in effect greedy
    three = at.ask("three", logprobs=3)
    at.ask("none", logprobs=0)
    at.ask("all", most=1, logprobs=1000)
    at.ask("silent")
    at.ask("cold", config=cold, seed=1, logprobs=1)
    samples = at.ask("samples", config=hot(3), seed=4, logprobs=2)
    at.ends()
    assert all(one.top[0] == (one.token, one.logprob) for one in three.events[:-1])  # each token is the likeliest one
    assert len({one.tokens[0] for one in samples.results}) > 1


def test_guesses_have_logprobs_as_well() -> None:
    at = Judged(FAMILY, **SPECULATING, assistant=guessing(tiny(FAMILY), 2))
    at.ask("guessed", logprobs=3)
    assert at.ends()["guessed"].right > 0


@pytest.mark.parametrize("guesses", [False, True])
def test_tokens_have_text_and_results_say_what_ended_them(guesses: bool) -> None:
    tokenizer, said = byte_level(), answer(tiny(FAMILY), TEXT[:9])
    text, end = tokenizer.decode(said), tokenizer.convert_tokens_to_ids("<|end|>")
    given: Any = {"assistant": guessing(tiny(FAMILY)), **SPECULATING} if guesses else {}
    at = Judged(FAMILY, tokenizer=tokenizer, max_requests=7, **given)
    for id, config in {
        "length": GenerationConfig(),
        "end": GenerationConfig(eos_token_id=[96, said[2]]),
        "last": GenerationConfig(eos_token_id=said[2]),
        "stop": GenerationConfig(stop_strings=["never", text[2:4]]),
        "special": GenerationConfig(stop_strings="<|end|>"),
        "samples": hot(2),
    }.items():
        forced = [SuppressTokensLogitsProcessor([n for n in range(97) if n != end])] if id == "special" else []
        at.ask(id, config=config, seed=1, processors=forced, most=3 if id == "last" else NEW)
    ended = at.ends(end="end", last="end", stop="stop", special="stop")
    assert {id: (one.stop, one.text) for id, one in ended.items() if id != "samples"} == {
        "length": (None, text),
        "end": (said[2], tokenizer.decode(said[:3])),
        "last": (said[2], tokenizer.decode(said[:3])),
        "stop": (text[2:4], text[:2]),
        "special": ("<|end|>", ""),
    }


def test_an_aborted_request_has_the_text_that_was_held_back() -> None:
    tokenizer = byte_level()
    at = Judged(FAMILY, tokenizer=tokenizer)
    stops = GenerationConfig(stop_strings=[tokenizer.decode(answer(tiny(FAMILY), TEXT[:9]))[0] + "never"])
    held = at.ask("a", config=stops)
    at.step()
    at.abort("a")
    assert at.ends(a="aborted")["a"].text and held.events[0].text == ""


def test_a_refusal_says_whether_it_is_the_request_or_the_room_or_a_mistake() -> None:
    at = Judged(FAMILY, slots=3, pages=ms.Pages(size=4, count=6, per_row=16))
    closed = at.mem.sessions.open("closed")
    at.mem.sessions.close(closed)
    at.ask("pages of all", text=TEXT)
    at.ask("pages of one", text=[5] * 70)
    at.ask("samples, by pages", config=hot(3))
    at.ask("turn", session=closed)
    at.ask("below zero", snapshot_at=[-1])
    never = {**dict.fromkeys(("turn", "below zero"), "invalid"), "fits": "length"}
    assert "per_row" in at.results(others="too_large", **never)["pages of one"].error
    held = at.mem.admit([ms.Request("held", length=16)])
    at.ask("room")
    at.rest()
    at.mem.end(held)
    at.ask("fits")
    at.ends(others="too_large", room="no_room", **never)


def test_a_refusal_of_samples_says_whether_slots_or_rows_of_others_are_missing() -> None:
    few = Judged(FAMILY, slots=2, max_requests=4)
    few.ask("by slots", config=hot(3))
    few.ends(others="too_large")
    at = Judged(FAMILY, slots=8)
    held = at.mem.admit([ms.Request("held", length=4)])
    at.ask("by rows", config=hot(3))
    at.rest()
    at.mem.end(held)
    at.ask("fit", config=hot(3))
    at.ends(**{"by rows": "no_room"})


def test_a_result_says_why_no_more_of_its_prompt_was_cached() -> None:
    at = Judged(FAMILY, slots=4, max_requests=2, pages=ms.Pages(size=4, count=24, per_row=16), prefix=ms.Prefix())

    def cached(tokens: list[int]) -> tuple[int, str]:
        at.ask(len(at.asked), text=tokens, most=2)
        one = at.results()[len(at.asked) - 1]
        return one.cached, one.missed

    assert cached(TEXT[:19]) == (0, "no_sharing")
    assert cached(TEXT[:19]) == (16, "")  # this request hits all whole pages of the prompt
    assert cached([*TEXT[:10], *TEXT[20:27]]) == (0, "no_snapshot")  # two pages have KV, but no state
    assert cached([*TEXT[:19], *TEXT[:9]])[1] == "no_sharing"
    for shift in range(1, 6):  # more prompts than slots and pages
        cached([*TEXT[shift:], *TEXT[:shift]])
    assert cached(TEXT[:19]) == (0, "evicted")
    at.ends()
    without = Judged(FAMILY)
    without.ask("a")
    assert without.ends()["a"].missed == ""


@pytest.mark.parametrize(("slots", "together"), [(16, True), (16, False), (3, False)])
def test_a_conversation_goes_on_in_two_ways_from_one_turn(slots: int, together: bool) -> None:
    at = Judged(FAMILY, slots=slots, prefix=ms.Prefix())
    chat, said = at.mem.sessions.open("chat"), [*TEXT[:9], *answer(tiny(FAMILY), TEXT[:9])]
    at.ask("first", session=chat)
    assert at.results()["first"].missed == "no_sharing"
    twin = at.server.fork(chat, "other")
    for id, session, more in (("chat", chat, [7]), ("other", twin, [8, 9])):
        at.ask(id, text=[*said, *more], session=session)
        assert together or at.rest() == []
    served = at.ends()
    assert slots < 16 or [served[id].cached for id in ("chat", "other")] == [len(said) - 1] * 2
    assert slots < 16 or served["chat"].missed == ""
