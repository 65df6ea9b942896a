"""Tests `memstate capacity`, `trace` and `replay`: output, files and JSON, and the examples of docs/capacity.md."""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

import memstate as ms
from memstate.cli import layouts
from memstate.cli import replay as replaying
from memstate.cli.replay import NAMES, Loop, Replayed, rated
from memstate.cli.traces import form
from memstate.state.presets import CHECKPOINTS, from_config, kv_from_config
from memstate_tools.traces.make import KINDS, make
from tests.support.command import Done, memstate, report

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "capacity.md").read_text()
TABLED = ("qwen3_next", "nemotron_h", "falcon_h1", "kimi_linear", "lfm2", "falcon_mamba")  # presets in two tables
PLANNED = "bytes_per_slot slots arena_bytes max_requests_by_strategy recommendation"
SMALL = ("qwen3_next", "--memory", "8GiB", "--context", "20k", "--concurrency", "3", "--every", "512")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file of conversations whose prompts have at most 30 blocks."""
    path = tmp_path / "talks.jsonl"
    form.write(path, [one for one in make("chat", 60, 1) if len(one.hash_ids) <= 30])
    return path


def test_capacity_writes_the_keys_of_the_contract_and_nothing_else_to_stdout(tmp_path: Path) -> None:
    told = report("capacity", *SMALL)
    assert set(PLANNED.split()) <= set(told)
    plan = ms.capacity("qwen3_next", "8GiB", context="20k", concurrency=3, every=512)
    assert told == plan.to_json()
    assert memstate("capacity", *SMALL, "--json", tmp_path / "a.json") == Done(0, f"{plan}\n", "")
    assert json.loads((tmp_path / "a.json").read_text()) == told


def test_capacity_passes_every_option_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINTS["qwen3_5"]))
    options = """--memory 100GB --context 16k --concurrency 5 --tp 4 --every 128 --page-size 128 --dtype bfloat16
        --kv-dtype float8 --overlap 0 --in-place --prefills 2 --tokens-per-second 4000 --host-memory 64GiB"""
    import torch

    plan = ms.capacity(
        tmp_path, "100GB", context=16384, concurrency=5, ranks=4, every=128, page_size=128, ssm_dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn, overlap=False, in_place=True, prefills=2, tokens_per_second=4000.0,
        host_memory="64GiB",
    )  # fmt: skip
    assert report("capacity", tmp_path, *options.split()) == plan.to_json()
    assert report("capacity", tmp_path, *options.split(), "--kv-bytes", "0")["pages"] == 0
    few = ("capacity", tmp_path, "--memory", "40GiB", "--context", "16k")
    drafts = ms.capacity(tmp_path, "40GiB", context=16384, speculate=3).to_json()
    assert report(*few, "--speculate", 3) == drafts and drafts["speculation"]["tokens"] == 3
    stage = ms.capacity(tmp_path, "40GiB", context=16384, conv_dtype=torch.float32, layers=range(16, 48))
    assert report(*few, "--conv-dtype", "float32", "--layers", "16:48") == stage.to_json()
    assert stage.layout.planes[0].dtype == torch.float32
    few_bits = ms.capacity(tmp_path, "40GiB", context=16384, ssm_dtype=torch.int8)
    assert report(*few, "--dtype", "int8") == few_bits.to_json()
    assert few_bits.layout.bytes_per_slot == 48 * (10240 * 3 * 2 + 48 * 128 * (128 + 4))


def test_a_layout_of_ones_own_comes_from_a_file(tmp_path: Path) -> None:
    import torch

    own = ms.StateLayout(
        (
            ms.Plane("ssm", (4, 8), torch.float32, parts=(ms.Part("heads", 4),)),
            ms.Plane("m", (4,), torch.float32, fill=-0.5, layers=2),
        ),
        layers=6,
        order="slot_major",
        rows=ms.StateLayout((ms.Plane("last", (3,), torch.bfloat16),), layers=1),
    )
    ssm = '{"name": "ssm", "shape": [4, 8], "dtype": "float32", "parts": [{"name": "heads", "units": 4}]}'
    m = '{"name": "m", "shape": [4], "dtype": "float32", "fill": -0.5, "layers": 2}'
    rows = '{"layers": 1, "planes": [{"name": "last", "shape": [3], "dtype": "bfloat16"}]}'
    (file := tmp_path / "own.json").write_text(
        f'{{"layers": 6, "order": "slot_major", "rows": {rows}, "planes": [{ssm}, {m}]}}'
    )
    assert layouts.read(file) == own
    options = "--memory 1MiB --context 1k --kv-bytes 64 --concurrency 2 --tp 2"
    plan = ms.capacity(own, "1MiB", context="1k", kv_bytes_per_token=64, concurrency=2, ranks=2)
    assert report("capacity", "--layout", file, *options.split()) == plan.to_json()


def test_C5_hit_rates_are_those_of_the_replay(trace: Path) -> None:
    told = report("capacity", *SMALL, "--trace", trace, "--from", "0.2")
    assert len(told["splits"]) > 3
    for split in told["splits"]:
        pages = split["pages"] * told["page_size"] // 512
        options = f"--states {split['cached_states']} --pages {pages} --every 512 --running 3 --from 0.2"
        replayed = report("replay", trace, *options.split())
        assert split["hit_rate"] == replayed["block_hit_rate"] > 0
    rates = [split["hit_rate"] for split in told["splits"]]
    assert told["best"]["hit_rate"] == max(rates) and f"{max(rates):.3f}" in told["recommendation"]


def test_C5_a_split_without_cached_states_has_no_hits_and_a_model_without_kv_needs_no_pages(trace: Path) -> None:
    requests = form.read(trace)
    full = rated(ms.capacity("qwen3_next", "3GiB", context="20k"), requests)
    assert [split.hit_rate for split in full.splits if not split.cached_states] == [0.0]
    plan = rated(ms.capacity("mamba", "1GiB", context="20k", concurrency=2), requests)
    ((states, rate),) = [(split.cached_states, split.hit_rate) for split in plan.splits]
    loop = replaying.Loop(running=2)
    assert rate == replaying.replay(requests, states, 10_000, "return-rate", loop=loop).block_hit_rate > 0


# -- the page --------------------------------------------------------------------------------------


def test_the_commands_of_the_page_print_what_it_says() -> None:
    blocks = re.findall(r"```console\n\$ memstate (capacity .*)\n((?:.*\n)*?)```", PAGE)
    assert blocks
    for command, output in blocks:
        assert memstate(*command.split()) == Done(0, output, ""), command


def test_the_layout_of_the_page_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (content,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (command,) = re.findall(r"`memstate (capacity --layout own.json [^`]*)`", PAGE)
    monkeypatch.chdir(tmp_path)
    Path("own.json").write_text(content)
    plan = ms.capacity(layouts.read(Path("own.json")), "40GiB", context="32k", kv_bytes_per_token=24576)
    assert memstate(*command.split()) == Done(0, f"{plan}\n", "")
    assert plan.layout.bytes_per_slot == from_config(CHECKPOINTS["qwen3_next"]).bytes_per_slot


def test_the_table_of_kv_is_that_of_the_configurations() -> None:
    table = re.findall(r"^\| `(\w+)` \| (\d+) \| [^|]*\| (\d+) \|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in table] == list(CHECKPOINTS)
    for name, layers, nbytes in table:
        page = kv_from_config(CHECKPOINTS[name], page_size=1)
        assert (int(layers), int(nbytes)) == ((page.layers, page.payload_bytes_per_slot) if page else (0, 0))


def test_the_table_of_speculation_is_made_by_the_command() -> None:
    rows = []
    for name in TABLED:
        given = "capacity", name, "--memory", "40GiB", "--context", "32k"
        plain, tails = (report(*given, "--speculate", tail) for tail in ("0", "4"))
        cost, most = tails["speculation"], [one["max_requests_by_strategy"]["redirect"] for one in (plain, tails)]
        sizes = (f"{cost[key] / 2**20:.1f}" for key in ("tail_bytes_per_request", "state_bytes_per_request"))
        rows.append(f"| `{name}` | {' | '.join(sizes)} | {most[0]} | {most[1]} | {cost['max_requests_with_states']} |")
    table = "\n".join(rows)
    assert table in PAGE, f"docs/capacity.md should have these rows:\n{table}"


def test_the_table_of_residency_is_made_by_the_command() -> None:
    rows = []
    for name in TABLED:
        counts = []
        for context in ("4k", "32k"):
            most = report("capacity", name, "--memory", "40GiB", "--context", context)["max_requests_by_strategy"]
            counts += [str(most[strategy]) for strategy in ("ping-pong", "lazy", "redirect")]
        rows.append(f"| `{name}` | {' | '.join(counts)} |")
    assert (table := "\n".join(rows)) in PAGE, f"docs/capacity.md should have these rows:\n{table}"


def test_the_table_of_fewer_bits_is_made_by_the_command() -> None:
    rows = []
    for name in ("qwen3_next", "kimi_linear", "nemotron_h", "falcon_h1"):
        given = "capacity", name, "--memory", "40GiB", "--context", "4k"
        plans = [report(*given, "--dtype", dtype) for dtype in ("float32", "bfloat16", "int16", "int8")]
        sizes = (f"{plan['bytes_per_slot'] / 2**20:.2f}" for plan in plans)
        most = (str(plan["max_requests_by_strategy"]["redirect"]) for plan in plans)
        rows.append(f"| `{name}` | {' | '.join((*sizes, *most))} |")
    assert (table := "\n".join(rows)) in PAGE, f"docs/capacity.md should have these rows:\n{table}"


# -- traces and replays ---------------------------------------------------------------------------


REPLAYED = """requests block_hit_rate ideal_hit_rate policy states pages us_per_match us_per_insert evicted_states
    leaked_slots misses_by_reason placement chunk every forwards_per_prompt states_filed_per_request
    recomputed_tokens_per_turn longest_wait"""


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if not name.startswith("us_")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_trace_writes_what_replay_reads(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert memstate("trace", kind, "--out", path, "--requests", "25", "--seed", "4") == Done(
        0, "", f"{path}: 25 requests\n"
    )
    assert form.read(path) == make(kind, 25, 4)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert report("replay", path, "--states", 3, "--pages", 600)["requests"] == 25


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_trace_makes_chats_that_part_from_their_prompts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    options = ("--requests", "25", "--seed", "4", "--tail", "5", "--thoughts", "300")
    assert memstate("trace", kind, "--out", path, *options) == Done(0, "", f"{path}: 25 requests\n")
    assert form.read(path) == make(kind, 25, 4, tail=5, thoughts=300)
    assert all(one.parts is not None and one.output_length > 300 for one in form.read(path))


def test_replay_writes_json_to_stdout_and_nothing_else(trace: Path) -> None:
    told = report("replay", trace, "--states", 4)
    assert set(told) == {field.name for field in fields(Replayed)} and set(REPLAYED.split()) <= set(told)
    requests = form.read(trace)
    assert (told["policy"], told["states"], told["pages"]) == ("return-rate", 4, 50_000)
    assert (told["requests"], told["leaked_slots"]) == (len(requests), 0)
    asked = sum(len(one.hash_ids) for one in requests)
    rate = told["block_hit_rate"] + told["answer_hit_rate"]
    assert rate * asked + sum(told["misses_by_reason"].values()) == pytest.approx(asked)
    assert untimed(told) == untimed(asdict(replaying.replay(requests, 4, 50_000, "return-rate")))


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
    few = ("replay", trace, "--limit", 9)
    runs = [(one["policy"], one["states"]) for one in report(*few, "--states", "2, 6,2", "--policy", "lru,bound")]
    assert runs == [("lru", 2), ("lru", 6), ("bound", 2), ("bound", 6)]
    for policies, all_of_them in (("all", [*NAMES]), ("lru,all,bound", [*dict.fromkeys(("lru", *NAMES)), "bound"])):
        assert [one["policy"] for one in report(*few, "--states", 2, "--policy", policies)] == all_of_them
    shown = memstate(*few, "--states", "2,6", "--policy", "all")
    assert shown.status == 0 and shown.err == "" and "room for everything" in shown.out
    assert all(policy in shown.out for policy in NAMES)


def test_a_policy_in_the_current_folder(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (trace.parent / "mine_of_replay.py").write_text(
        "from memstate.prefix.policies import Lru\n\nclass Mine(Lru): ...\n"
    )
    monkeypatch.chdir(trace.parent)
    given = ("--limit", "9", "--states", "2", "--policy", "mine_of_replay:Mine,lru-tombstones")
    mine, named = map(untimed, report("replay", trace, *given))
    assert mine == named | {"policy": "mine_of_replay:Mine"}
