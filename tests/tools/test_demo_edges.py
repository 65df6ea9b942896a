"""Tests the demo at edges: lengths around multiples, pools that just suffice, and odd pages and chunks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memstate.errors import InvalidArgument
from memstate_tools.demo.config import STRATEGIES
from tests.support.demo_talks import demo, write_talks

MULTIPLES = (8, 16, 32)  # numbers of tokens: page and chunk have 8; 16 lie between boundaries; 32 are several pages
LEAST_SLOTS = {"none": 1, "ping-pong": 3, "lazy": 2, "redirect": 1}


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_B51_prompts_around_page_chunk_and_boundary_multiples(tmp_path: Path, strategy: str) -> None:
    lengths = [multiple + d for multiple in MULTIPLES for d in (-1, 0, 1)]
    talks = write_talks(tmp_path / "talks.jsonl", [*lengths, 7, *lengths])  # prompts that are repeated hit the cache
    report = demo(strategy=strategy, input=talks, requests=None, fail_claims=0.2)
    assert report.ok, report.failure()
    assert report.requests == 2 * (2 * len(lengths) + 1)
    assert report.meter.prefix_hit_tokens > 0


def test_B15_a_prompt_of_one_token_is_not_taken_for_padding(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"turns": ["?"]}\n{"turns": ["?", "!"]}\n')
    report = demo(input=path, requests=None)
    assert report.ok and report.meter.generated_tokens > 3, report.failure()


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slots_for_one_request_make_the_others_wait(strategy: str, overlap: bool) -> None:
    least = LEAST_SLOTS[strategy] - (strategy == "ping-pong" and not overlap)
    report = demo(strategy=strategy, overlap=overlap, slots=least, requests=8)
    assert report.ok, report.failure()
    assert report.meter.refused["slots"] > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["lazy", "redirect"])
def test_pages_for_one_conversation_make_the_others_wait_or_come_back(tmp_path: Path, strategy: str) -> None:
    talks = write_talks(tmp_path / "talks.jsonl", [30, 41, 25, 52, 33, 47, 28, 60])
    with pytest.raises(InvalidArgument, match="alone needs 16 pages"):
        demo(strategy=strategy, input=talks, requests=None, pages=15)
    refused, ended = Counter[str](), Counter[str]()
    for seed in range(4):  # requests arrive at other times with each seed
        report = demo(strategy=strategy, input=talks, requests=None, pages=16, seed=seed)
        assert report.ok and report.meter.prefix_hit_tokens > 0, report.failure()
        refused, ended = refused + report.meter.refused, ended + report.meter.ended
    assert refused["pages"] > 0 and refused["pages to go on"] > 0 and ended["retracted, pages ran out"] > 0


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "track_every": 1, "chunk": 3}, {"page_size": 16, "track_every": 16},
        {"page_size": 4, "track_every": 12, "chunk": 5}, {"chunk": 1}, {"chunk": 64}, {"batch": 2},
        {"batch": 9, "slots": 40}, {"track_every": 64}, {"fail_claims": 1.0},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_unusual_sizes_are_identical_too(strategy: str, settings: dict[str, Any]) -> None:
    report = demo(strategy=strategy, seed=3, requests=8, **settings)
    assert report.ok, report.failure()
