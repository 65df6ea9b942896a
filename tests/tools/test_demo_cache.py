"""Tests the demo with the prefix cache and sessions: hits, evictions, and all ends of turns."""

import json
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from memstate.errors import LeakFound
from memstate.requests.page_table import PageTable
from memstate.slots.audit import audit
from memstate.slots.inspect import Inspection
from memstate_tools.demo.config import STRATEGIES
from tests.support.demo_talks import REQUESTS, demo
from tests.support.sampling import PROOF

EVERYBODY = 1000  # a number of sessions above the number of conversations


@pytest.mark.sample(1)
@pytest.mark.parametrize("sessions", [0, 2, EVERYBODY])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_loop_counts_is_what_the_cache_counts(strategy: str, sessions: int) -> None:
    report = demo(strategy=strategy, sessions=sessions, fail_claims=0.3)
    assert report.ok, report.failure()
    figures, prefix = report.to_json(), report.stats.prefix
    assert prefix.lookups == figures["admissions"] and prefix.prompt_tokens == figures["prompt_tokens"]
    assert prefix.hit_tokens == figures["prefix_hit_tokens"] >= figures["session_hit_tokens"]
    if sessions != 2:  # with 2 sessions, both may have given up their states
        assert (figures["session_hit_tokens"] > 0) == (sessions > 0)
    assert set(figures["hit_tokens_lost_by_reason"]) == {"no_sharing", "evicted", "no_snapshot"}
    assert sum(figures["hit_tokens_lost_by_reason"].values()) == figures["prompt_tokens"] - figures["prefix_hit_tokens"]
    assert figures["sessions"] == min(sessions, figures["conversations"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_B73_turns_of_sessions_are_identical_to_uncached(strategy: str, overlap: bool) -> None:
    settings = {"sessions": 2, "requests": 16, "slots": 14, "track_every": 8, "fail_claims": 0.3, "seed": 2}
    report = demo(strategy=strategy, overlap=overlap, **settings)
    assert report.ok, report.failure()
    assert report.meter.session_hit_tokens > 0 and report.meter.session_turns["finished"] > 0


def test_B36_sessions_change_no_answer() -> None:
    """Every strategy runs with sessions; one strategy, or with MEMSTATE_PROOF=1 every one, also runs without."""
    ways = [(STRATEGIES[0], 0), *((strategy, 2) for strategy in STRATEGIES)]
    ways = list(product(STRATEGIES, (0, 2))) if PROOF else ways
    answers = [demo(strategy=strategy, sessions=sessions).answers for strategy, sessions in ways]
    assert all(given == answers[0] for given in answers) and sum(map(len, answers[0])) > 5 * REQUESTS


@pytest.mark.proof
def test_turns_of_sessions_end_in_every_way() -> None:
    """Turns are aborted, retracted, cancelled and resumed: first and later turns, before and after steps, at random and
    for lack of pages.
    """
    turns, kept = Counter[str](), 0
    for seed, strategy in enumerate(STRATEGIES * 2, 42):
        report = demo(strategy=strategy, seed=seed, sessions=EVERYBODY, requests=14, overlap=seed % 3 > 0)
        assert report.ok, report.failure()
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
    report = demo(strategy="lazy", slots=2, sessions=EVERYBODY, requests=10)
    assert report.ok and report.meter.admissions > 10, report.failure()
    assert report.to_json()["gave_way"] == dict(report.meter.gave_way)


def test_a_snapshot_of_all_owners_can_be_read_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "owners.json"
    demo(requests=6, sessions=2, inspect=path)
    picture = Inspection.load(path)
    assert audit(picture).clean and set(picture.kinds.values()) <= {"cached", "session"}
    assert len(picture.prefix) >= len(picture.kinds) and picture.stats["rows_used"] == 0
