"""Tests the demo with the prefix cache and sessions, and at edges of lengths and of pools."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memstate.errors import InvalidArgument, LeakFound
from memstate.requests.page_table import PageTable
from memstate.slots.audit import audit
from memstate.slots.inspect import Inspection
from memstate_tools.demo.config import STRATEGIES
from tests.support.demo_talks import demo, right, write_talks

EVERYBODY = 1000  # a number of sessions above the number of conversations


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_B73_turns_of_sessions_are_identical_to_uncached(strategy: str, overlap: bool) -> None:
    settings = {"sessions": 2, "requests": 16, "slots": 14, "track_every": 8, "fail_claims": 0.3, "seed": 2}
    report = right(strategy=strategy, overlap=overlap, **settings)
    assert report.meter.session_hit_tokens > 0 and report.meter.session_turns["finished"] > 0


@pytest.mark.proof
def test_turns_of_sessions_end_in_every_way() -> None:
    """Turns are aborted, retracted, cancelled and resumed: first and later turns, before and after steps, at random and
    for lack of pages.
    """
    turns, kept = Counter[str](), 0
    for seed, strategy in enumerate(STRATEGIES * 2, 42):
        report = right(strategy=strategy, seed=seed, sessions=EVERYBODY, requests=14, overlap=seed % 3 > 0)
        assert report.meter.session_turns.total() == report.meter.admissions  # each admission is a turn of a session
        turns += report.meter.session_turns
        kept += report.meter.session_hit_tokens
    assert kept > 100
    aborted = {f"aborted, {which} turn{when}" for which in ("first", "later") for when in ("", " before any step")}
    assert aborted | {"finished", "cancelled", "retracted, at random", "retracted, pages ran out"} <= set(turns), turns


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["swap", "stale"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sabotage_of_a_state_that_a_session_kept_is_noticed(tmp_path: Path, strategy: str, kind: str) -> None:
    """Conversations share nothing and all their ends are known, so sessions keep more states than the cache."""
    lines = [{"turns": [letter * 21, "And then?"]} for letter in "abcd"]
    talks = tmp_path / "talks.jsonl"
    talks.write_text("\n".join(map(json.dumps, lines)))
    report = demo(strategy=strategy, input=talks, requests=None, sessions=EVERYBODY, sabotage=kind, overlap=False)
    assert report.strikes and report.strikes_at_sessions and report.comparison.wrong_logits > 0
    assert report.ok and not report.identical and report.failure() == ""


def test_pages_that_are_not_given_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageTable, "end", lambda self, rows: [self._rows.__setitem__(row, []) for row in rows])
    with pytest.raises(LeakFound, match=r"page 1 is counted for \d+ holders and has"):
        demo(requests=2, pages=400)


def test_what_is_kept_gives_way_where_nobody_could_go_on() -> None:
    """Idle sessions hold all slots. To let a request start, they give up states and pages."""
    report = right(strategy="lazy", slots=2, sessions=EVERYBODY, requests=10)
    assert report.meter.admissions > 10 and report.to_json()["gave_way"] == dict(report.meter.gave_way)


def test_a_snapshot_of_all_owners_can_be_read_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    demo(requests=6, sessions=2, inspect=path)
    picture = Inspection.load(path)
    assert audit(picture).clean and set(picture.kinds.values()) <= {"cached", "session"}
    assert len(picture.prefix) >= len(picture.kinds) and picture.stats["rows_used"] == 0


# -- edges ----------------------------------------------------------------------------------------


MULTIPLES = (8, 16, 32)  # numbers of tokens: page and chunk have 8; 16 lie between boundaries; 32 are several pages
LEAST_SLOTS = {"none": 1, "ping-pong": 3, "lazy": 2, "redirect": 1}


@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_B51_prompts_around_page_chunk_and_boundary_multiples(tmp_path: Path, strategy: str) -> None:
    lengths = [multiple + d for multiple in MULTIPLES for d in (-1, 0, 1)]
    talks = write_talks(tmp_path / "talks.jsonl", [*lengths, 7, *lengths])  # prompts that are repeated hit the cache
    report = right(strategy=strategy, input=talks, requests=None, fail_claims=0.2)
    assert report.requests == 2 * (2 * len(lengths) + 1)
    assert report.meter.prefix_hit_tokens > 0


def test_B15_a_prompt_of_one_token_is_not_taken_for_padding(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"turns": ["?"]}\n{"turns": ["?", "!"]}\n')
    assert right(input=path, requests=None).meter.generated_tokens > 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_slots_for_one_request_make_the_others_wait(strategy: str, overlap: bool) -> None:
    least = LEAST_SLOTS[strategy] - (strategy == "ping-pong" and not overlap)
    report = right(strategy=strategy, overlap=overlap, slots=least, requests=8)
    assert report.meter.refused["slots"] > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))  # requests arrive at other times with each seed
@pytest.mark.parametrize("strategy", ["lazy", "redirect"])
def test_pages_for_one_conversation_make_the_others_wait_or_come_back(tmp_path: Path, strategy: str, seed: int) -> None:
    talks = write_talks(tmp_path / "talks.jsonl", [30, 41, 25, 52, 33, 47, 28, 60])
    given: dict[str, Any] = {"strategy": strategy, "input": talks, "requests": None, "seed": seed}
    with pytest.raises(InvalidArgument, match="alone needs 16 pages"):
        demo(pages=15, **given)
    meter = right(pages=16, **given).meter
    assert meter.refused["pages"] > 0 and meter.refused["pages to go on"] > 0 and meter.prefix_hit_tokens > 0
    assert meter.ended["retracted, pages ran out"] > 0


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
    right(strategy=strategy, seed=3, requests=8, **settings)
