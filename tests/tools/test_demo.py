"""Tests the demo: answers equal an uncached run, nothing leaks, and the comparison notices faults."""

import dataclasses
import json
import os
import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from memstate.engine.manager import StateManager
from memstate.kernels.dispatch import Backend
from memstate_tools.demo import DemoConfig, DemoReport, meter, run, sentences
from memstate_tools.demo.compare import Compared
from memstate_tools.demo.config import STRATEGIES
from memstate_tools.demo.meter import Meter, held_by_kind
from tests.support.command import memstate
from tests.support.demo_talks import REQUESTS, TINY, demo, right, write_talks
from tests.support.sampling import PROOF

# Limit of the slots of one row: those in its registers, and one for the state at the end of its prompt, until this
# state is published. With ping-pong, both lanes may be full before that.
MOST_SLOTS = {"none": 1, "ping-pong": 4, "lazy": 3, "redirect": 2}


@pytest.mark.sample(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_identical_to_uncached_with_failing_claims(backend: Backend, strategy: str, overlap: bool) -> None:
    report = right(
        strategy=strategy, overlap=overlap, fail_claims=0.3, sessions=1, requests=6, slots=7, track_every=8,
        backend=backend.name, device=str(backend.device),
    )  # fmt: skip
    figures = report.to_json()
    assert (figures["strategy"], figures["backend"]) == (strategy, backend.name)
    assert figures["compared"]["logits"] == figures["generated_tokens"] > 20
    assert figures["compared"]["states"] >= figures["requests"] == 6
    assert figures["sessions"] == 1 < figures["conversations"] and figures["session_hit_tokens"] > 0
    assert figures["slots_held_peak"] <= MOST_SLOTS[strategy]
    assert figures["snapshot_bytes_copied"] == 0  # a snapshot is never copied
    assert figures["host_syncs_per_decode_step"] == {"mean": 0, "max": 0}
    replayed = {0} if backend.device.type == "cuda" else set()  # a graph launches the plan of every other step
    launches = {asked.step for asked in report.meter.decode} - replayed
    assert launches and launches <= {1, 2}  # one plan, and at most one settle


def test_B36_strategies_and_sessions_change_no_answer() -> None:
    """Each way runs with or without overlap, by chance; with MEMSTATE_PROOF=1 it runs with both."""
    seed = int(os.environ.get("MEMSTATE_SEED", random.SystemRandom().randrange(2**31)))
    print(f"MEMSTATE_SEED={seed}")
    chance = random.Random(seed)
    ways = product(STRATEGIES, (0, 2))
    first, *others = (
        right(strategy=strategy, sessions=sessions, overlap=overlap).answers
        for strategy, sessions in ways
        for overlap in ((True, False) if PROOF else [chance.random() < 0.5])
    )
    assert others == [first] * len(others) and sum(map(len, first)) > 5 * REQUESTS


@pytest.fixture(scope="module")
def default_run() -> DemoReport:
    """The report of `memstate demo --backend reference`."""
    return run(DemoConfig(backend="reference"))


def test_a_default_run_shows_everything(default_run: DemoReport) -> None:
    report = default_run
    assert report.ok, report.failure()
    figures = report.to_json()
    assert figures["distinct_tokens"] >= 100
    assert 0 < figures["prefix_hit_tokens"] < figures["prompt_tokens"]
    assert figures["host_hit_tokens"] == figures["storage_hit_tokens"] == 0
    assert figures["snapshots_taken"] > 5 and figures["snapshots_dropped"] > 0 and figures["resumed"] > 5
    assert figures["cached_states_evicted"] > 0 and figures["cached_pages_evicted"] > 0  # the cache is small
    assert figures["snapshots_unseen"] < figures["snapshots_published"] / 2 < figures["compared"]["states"]
    assert (figures["sessions"], figures["session_hit_tokens"], figures["session_turns"]) == (0, 0, {})
    ended = figures["ended"]
    assert ended["finished"] + ended["aborted"] == figures["requests"]
    assert ended["aborted"] > 0 and ended["retracted, at random"] + ended.get("cancelled", 0) > 0
    assert figures["refused"]["rows"] > 0
    assert figures["dead_entries"] > 0 and figures["decode_steps"] > 0 and figures["mixed_steps"] > 0
    assert figures["slots_held_peak"] == 3  # slots of one row under Redirect: live, lane, state of the prompt
    decode = report.meter.decode  # each step: a plan, and ownership and data launches if owners changed
    assert {asked.step for asked in decode} == {1} and {asked.ownership for asked in decode} <= {0, 1, 2, 3}


def test_the_table_says_what_the_json_says(default_run: DemoReport) -> None:
    table, figures = default_run.table(), default_run.to_json()
    assert (table["identical to uncached"], table["expectation met"], default_run.failure()) == ("yes", "yes", "")
    assert table["generated tokens"] == str(figures["generated_tokens"]) and table["differences"] == "none"


SERVED, EQUAL, SPARED, CLEAN = range(4)


def test_four_sentences_say_what_the_json_says(default_run: DemoReport) -> None:
    told, stats = default_run.to_json(), default_run.stats
    assert sentences(default_run) == [
        f"memstate served {told['requests']} requests of {told['conversations']} conversations, and generated "
        f"{told['generated_tokens']} tokens.",
        f"It equals the uncached run bit for bit: {told['compared']['tokens']} tokens, their logits and "
        f"{told['compared']['states']} states.",
        f"{told['prefix_hit_tokens']:,} of {told['prompt_tokens']:,} prompt tokens were not computed: memstate had "
        f"their states; nothing was copied to keep {told['snapshots_published']} states.",
        f"Nothing leaked: each of 12 slots, {stats.pages} KV pages and {stats.rows} rows has an owner or is free.",
    ]


LIVE = "row 1 (request 'planted leak') live"
FOUND: dict[str, Any] = {"planted": 4, "leaked": [4]}
OTHER = "one live register of the planted request"
NOT = "It does NOT end clean: "


@pytest.mark.parametrize(
    ("which", "fields", "says", "failure"),
    [
        (SERVED, {"requests": 1, "conversations": 1}, "memstate served 1 request of 1 conversation, and", ""),
        (SERVED, {"park": True, "host_slots": 9}, "tokens; it parked NO request.", ""),
        (EQUAL, {"comparison": Compared(9, 8, 7, wrong_logits=2, wrong_states=1)},
         "It does NOT equal the uncached run: 0 of 9 tokens, 2 of 8 logits and 1 of 7 states differ.", "not identical"),
        (EQUAL, {"comparison": Compared()}, "It was NOT compared with the uncached run: there is no token", "not"),
        (EQUAL, {"sabotage": "swap", "strikes": 3}, "although sabotage replaced 3 states.", "swap went unnoticed"),
        (EQUAL, {"sabotage": "swap", "strikes": 1, "comparison": Compared(9, 9, 9, wrong_tokens=2)},
         "It does NOT equal the uncached run: 2 of 9 tokens, 0 of 9 logits and 0 of 9 states differ, as sabotage", ""),
        (SPARED, {"meter": Meter(prompt_tokens=70)}, "It computed all 70 prompt tokens; nothing was copied", ""),
        (SPARED, {"snapshot_bytes_copied": 2048}, "their states; 2.00 KiB were copied to keep ", ""),
        (CLEAN, {"leaked": [3]}, NOT, "leaked slots [3]"),
        (CLEAN, {"leaked_pages": 2}, NOT, "2 KV pages and 0 rows are still taken after the last request"),
        (CLEAN, {"leaked_rows": 2}, NOT, "0 KV pages and 2 rows are still taken after the last request"),
        (CLEAN, {"double_owned": [5]}, NOT, "slots with two owners: [5]"),
        (CLEAN, {"astray": ["x"]}, NOT, "['x']"),
        (CLEAN, FOUND | {"leak_named": [LIVE]},
         "Slot 4 leaked, as planted, and the audit names its owner; nothing else leaked.", ""),
        (CLEAN, {"planted": 4}, NOT, "planted a leak of slot 4, the audit names []"),
        (CLEAN, FOUND | {"leak_named": []}, NOT, OTHER),
        (CLEAN, FOUND | {"leak_named": [LIVE, "cached prefix of 8 tokens in register 40"]}, NOT, OTHER),
        (CLEAN, FOUND | {"leak_named": [LIVE.replace("live", "lane 0")]}, NOT, OTHER),
        (CLEAN, {"leak_named": ["row 2 (request '0.0') live"]}, NOT, "(request '0.0') live\"], expected none"),
    ],
)  # fmt: skip
def test_a_sentence_says_the_opposite_where_it_is_so_and_what_is_wrong_fails_the_run(
    default_run: DemoReport, which: int, fields: dict[str, Any], says: str, failure: str
) -> None:
    given = {name: fields.pop(name) for name in ("sabotage", "park", "host_slots") if name in fields}
    config = dataclasses.replace(default_run.config, **given)
    report = dataclasses.replace(default_run, config=config, **fields)
    report.meter.generated_tokens = default_run.meter.generated_tokens
    same, said = (sentences(each) for each in (default_run, report))
    changed = said.pop(which)
    assert says in changed and same.pop(which) and said == same
    assert report.ok == (not failure) and failure in report.failure()
    assert says != NOT or changed == f"{NOT}{report.failure()}."


KEYS = """strategy backend requests generated_tokens identical_to_uncached leaked_slots double_owned_slots
    prefix_hit_tokens storage_hit_tokens host_hit_tokens prompt_tokens distinct_tokens logits_identical
    states_identical slots_held_mean slots_held_peak slots_held_by_kind snapshots_taken snapshot_bytes_copied
    device_launches_per_decode_step host_syncs_per_decode_step"""


def test_the_command_writes_the_keys_of_the_contract(
    default_run: DemoReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DemoConfig] = []
    monkeypatch.setattr("memstate_tools.demo.run", lambda config, report: asked.append(config) or default_run)
    target = tmp_path / "demo.json"
    done = memstate("demo", "--requests", 3, "--strategy", "lazy", "--backend", "reference", "--json", target)
    assert asked == [DemoConfig(requests=3, strategy="lazy", backend="reference")] and not done.err
    report = json.loads(target.read_text())
    assert report == default_run.to_json() and set(KEYS.split()) <= set(report)
    assert report["identical_to_uncached"] and report["logits_identical"] and report["states_identical"]
    assert set(report["device_launches_per_decode_step"]) == {"mean", "max"}
    said, hint = done.out.split("\n\n")  # JSON goes to a file, so stdout has the sentences
    assert "equals the uncached run" in said and hint == "All figures: --all, or --json PATH.\n"


@pytest.mark.parametrize("everything", [False, True])
def test_the_command_fails_and_still_says_what_came_of_it(
    default_run: DemoReport, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = dataclasses.replace(default_run, leaked=[3])
    monkeypatch.setattr("memstate_tools.demo.run", lambda *given: bad)
    status, out, err = memstate("demo", "--backend", "reference", *["--all"] * everything)
    assert status == 1 and err == "leaked slots [3]\n"
    assert "\nIt does NOT end clean: leaked slots [3].\n" in out
    assert ("\nleaked slots  " in out) == everything == ("--all" not in out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("settings", [{}, {"sessions": 3}, {"strategy": "lazy", "host_slots": 4, "sessions": 1}])
def test_slots_held_by_kind_counts_each_slot_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the demo counts slots by kind, the counts are those of an inspection, and each used slot has
    one owner.
    """
    seen: list[dict[str, int]] = []

    def look(mem: StateManager) -> dict[str, int]:
        counts, inspection = held_by_kind(mem), mem.inspect()
        kinds = ("snapshot" if kind == "mark" else kind for kind in inspection.kinds.values())
        assert +Counter(counts) == Counter(kinds)
        assert sum(counts.values()) == inspection.capacity - sum(inspection.free[1:])
        seen.append(counts)
        return counts

    monkeypatch.setattr(meter, "held_by_kind", look)
    report = right(requests=None, **settings)
    means = report.to_json()["slots_held_by_kind"]
    assert set(means) == {"live", "lane", "snapshot", "cached", "session"} and len(seen) == report.meter.looks
    assert means == {kind: sum(each[kind] for each in seen) / len(seen) for kind in means}
    assert (means["session"] > 0) == bool(settings.get("sessions"))


def test_a_run_repeats() -> None:
    first, again = (demo(requests=8, sessions=2, fail_claims=0.2) for _ in range(2))
    said, told = first.to_json(), again.to_json()
    said.pop("seconds"), told.pop("seconds")
    assert said == told and again.answers == first.answers


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["swap", "stale"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sabotage_is_noticed(tmp_path: Path, strategy: str, kind: str) -> None:
    talks = write_talks(tmp_path / "talks.jsonl", [20, 31, 40, 24, 52, 17, 36, 45, 28, 60])
    report = demo(strategy=strategy, input=talks, sabotage=kind, requests=None)
    assert report.strikes > 0
    assert not report.to_json()["identical_to_uncached"]
    assert report.comparison.wrong_logits > 0 and report.comparison.differences
    assert report.ok and report.failure() == ""  # a run with sabotage counts as right if the comparison notices it


def test_sabotage_that_finds_nothing_to_strike_fails(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"turns": ["?"]}')
    report = demo(input=path, sabotage="swap", page_size=64, track_every=64, requests=None)
    assert not report.ok and "no snapshot was resumed" in report.failure()


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_planted_leak_is_named_and_nothing_else(strategy: str) -> None:
    report = demo(strategy=strategy, requests=4, plant_leak=True, sessions=1)
    assert report.planted and report.leaked == [report.planted]
    assert report.ok and report.identical, report.failure()
    assert f"slot {report.planted} leaked" in report.audit_text and "planted leak" in report.audit_text
    assert report.to_json()["leak_named"] == ["row 1 (request 'planted leak') live"]


@pytest.mark.parametrize(("chunk", "fewest"), [(2**31 - 1, 1), (16, 2)])
def test_a_prompt_takes_at_least_one_forward_and_no_chunk_is_padded_beyond_it(chunk: int, fewest: int) -> None:
    report = right(requests=3, chunk=chunk)
    assert report.to_json()["chunk"] == chunk
    assert report.meter.prompt_chunks >= report.meter.prompts_read > 0
    assert report.forwards_per_prompt == 1 if fewest == 1 else report.forwards_per_prompt >= fewest


def test_progress_counts_both_runs() -> None:
    seen: list[tuple[int, int]] = []
    report = run(DemoConfig(backend="reference", requests=4, size=TINY), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {2 * report.requests} and seen[-1] == (8, 8)
