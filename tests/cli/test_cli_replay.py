"""Tests the files and output of `memstate trace` and `memstate replay`."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from memstate.cli import replay as replaying
from memstate.cli.replay import NAMES, Loop, Replayed
from memstate.cli.traces import form
from memstate_tools.traces.make import KINDS, make
from tests.support.command import Done, memstate

CONTRACT = """requests block_hit_rate ideal_hit_rate policy states pages us_per_match us_per_insert evicted_states
    leaked_slots misses_by_reason placement chunk every forwards_per_prompt states_filed_per_request
    recomputed_tokens_per_turn longest_wait"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file of conversations whose prompts have at most 40 blocks."""
    path = tmp_path / "talks.jsonl"
    form.write(path, [one for one in make("chat", 60, 1) if len(one.hash_ids) <= 40])
    return path


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if not name.startswith("us_")}


# -- files and output ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_trace_writes_what_replay_reads(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert memstate("trace", kind, "--out", path, "--requests", "25", "--seed", "4") == Done(
        0, "", f"{path}: 25 requests\n"
    )
    assert form.read(path) == make(kind, 25, 4)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    done = memstate("replay", path, "--states", "3", "--pages", "600", "--json", "-")
    assert done.status == 0 and json.loads(done.out)["requests"] == 25


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_trace_makes_chats_that_part_from_their_prompts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    options = ("--requests", "25", "--seed", "4", "--tail", "5", "--thoughts", "300")
    assert memstate("trace", kind, "--out", path, *options) == Done(0, "", f"{path}: 25 requests\n")
    assert form.read(path) == make(kind, 25, 4, tail=5, thoughts=300)
    assert all(one.parts is not None and one.output_length > 300 for one in form.read(path))


def test_replay_writes_json_to_stdout_and_nothing_else(trace: Path) -> None:
    done = memstate("replay", trace, "--states", "4", "--json", "-")
    assert (done.status, done.err) == (0, "")
    report = json.loads(done.out)
    assert set(report) == {field.name for field in fields(Replayed)} and set(CONTRACT.split()) <= set(report)
    requests = form.read(trace)
    assert (report["policy"], report["states"], report["pages"]) == ("return-rate", 4, 50_000)
    assert (report["requests"], report["leaked_slots"]) == (len(requests), 0)
    asked = sum(len(one.hash_ids) for one in requests)
    rate = report["block_hit_rate"] + report["answer_hit_rate"]
    assert rate * asked + sum(report["misses_by_reason"].values()) == pytest.approx(asked)
    assert untimed(report) == untimed(asdict(replaying.replay(requests, 4, 50_000, "return-rate")))


def test_options_reach_the_replay(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    given = ("--states", "2", "--pages", "45", "--policy", "flop-aware", "--from", "0.5", "--limit", "30")
    of_loop = ("--chunk", "1000", "--every", "1024", "--running", "2", "--placement", "every-512")
    done = memstate("replay", trace, *given, *of_loop, "--json", target)
    assert done.status == 0 and done.err == ""
    loop = Loop(chunk=1000, every=1024, running=2, placement="every-512")
    expected = asdict(replaying.replay(form.read(trace, 30), 2, 45, "flop-aware", 0.5, loop=loop))
    assert untimed(json.loads(target.read_text())) == untimed(expected)
    assert "flop-aware" in done.out and f"{expected['block_hit_rate']:.3f}" in done.out  # stdout has the table too
    assert "talks.jsonl: block hit rate, 45 pages, 15 requests" in done.out


def test_several_policies_and_sizes_are_a_list_and_a_table(trace: Path) -> None:
    done = memstate("replay", trace, "--limit", "9", "--states", "2, 6,2", "--policy", "lru,bound", "--json", "-")
    runs = [(one["policy"], one["states"]) for one in json.loads(done.out)]
    assert runs == [("lru", 2), ("lru", 6), ("bound", 2), ("bound", 6)]
    done = memstate("replay", trace, "--limit", "9", "--states", "2", "--policy", "all", "--json", "-")
    assert [one["policy"] for one in json.loads(done.out)] == list(NAMES)
    done = memstate("replay", trace, "--limit", "9", "--states", "2", "--policy", "lru,all,bound", "--json", "-")
    assert [one["policy"] for one in json.loads(done.out)] == [*dict.fromkeys(("lru", *NAMES)), "bound"]
    shown = memstate("replay", trace, "--limit", "9", "--states", "2,6", "--policy", "all")
    assert shown.status == 0 and shown.err == "" and "room for everything" in shown.out
    assert all(policy in shown.out for policy in NAMES)


def test_a_policy_in_the_current_folder(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trace.parent / "mine_of_replay.py").write_text(
        "from memstate.prefix.policies import Lru\n\nclass Mine(Lru): ...\n"
    )
    monkeypatch.chdir(trace.parent)
    given = ("--limit", "9", "--states", "2", "--policy", "mine_of_replay:Mine,lru-tombstones", "--json", "-")
    mine, named = map(untimed, json.loads(memstate("replay", trace, *given).out))
    assert mine == named | {"policy": "mine_of_replay:Mine"}
