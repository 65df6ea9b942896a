"""Tests several samples of a request in `serve`, and samples that wait for room."""

from typing import Any

import pytest

import memstate as ms
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_served import NEW, TEXT

pytest.importorskip("transformers")
from transformers import GenerationConfig

from tests.integrations.servers import Judged, hooked


def sampled(samples: int = 1, **more: Any) -> GenerationConfig:
    return GenerationConfig(do_sample=True, temperature=0.9, top_k=30, num_return_sequences=samples, **more)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_single_requests_and_their_prompt_is_read_once(family: str) -> None:
    at, read = Judged(family, max_requests=4), list[int]()
    three = at.ask("three", text=TEXT[:19], config=sampled(3, repetition_penalty=1.3), seed=7)
    at.ask("other")
    with hooked(at.model, lambda _, args, given: read.append(given["input_ids"].numel())):
        at.rest()
    at.ends()
    assert len({tuple(one.tokens) for one in three.results}) == 3  # each sample has its own seed
    assert sum(read) == 2 * 19 + 4 * (NEW - 1)  # prompts padded to 19 tokens, then 4 tokens per step


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
    at = Judged("lfm2", tracking=tracking, debug=True, chunk=6, **{"prefix": ms.Prefix(), **settings})
    for n in range(6):
        at.ask(n, text=TEXT[n : n + 5 + n], config=sampled(1 + n % 3), seed=10 * n)
    at.ends()


def test_samples_that_never_fit_are_refused_whole() -> None:
    at = Judged("lfm2", slots=3, max_requests=4)
    at.ask(*"ab", config=sampled(4), seed=1)
    at.ask("other")
    at.ends(a="too_large", b="too_large")
    errors = {one.error for asked in at.asked[:2] for one in asked.results}
    assert errors == {"5 slots needed at once, there are 3: ask for less"}  # a wait would not help


def test_an_abort_ends_all_samples_of_what_runs_and_what_waits() -> None:
    at = Judged("bamba", max_requests=4)
    at.ask("three", "waits", config=sampled(3), seed=1)
    at.step(2)
    at.abort("three")
    at.step()
    at.abort("waits")
    at.step()
    at.ask("last", config=sampled(3), seed=1)
    assert at.server.waiting == 1
    at.abort("last")
    ended = at.ends(others="aborted")
    assert (len(ended["three"].tokens), ended["last"].tokens) == (2, [])
