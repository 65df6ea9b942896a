"""Tests the command line: keys of its JSON, one line for bad input, exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from memstate import __version__
from memstate.cli import app as cli
from memstate.cli.traces import form
from memstate_tools import compile as compiling
from memstate_tools.traces.make import make
from tests.support.command import memstate as here

ROOT = Path(__file__).parents[2]
DEMO_KEYS = """strategy backend requests generated_tokens identical_to_uncached leaked_slots double_owned_slots
    prefix_hit_tokens storage_hit_tokens host_hit_tokens prompt_tokens distinct_tokens logits_identical
    states_identical slots_held_mean slots_held_peak slots_held_by_kind snapshots_taken snapshot_bytes_copied
    device_launches_per_decode_step host_syncs_per_decode_step"""


def memstate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `memstate ...` in another process, without TRITON_INTERPRET."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "memstate", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_bench_launches_writes_json_to_stdout_and_nothing_else() -> None:
    done = memstate("bench", "launches", "--json", "-")
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)
    assert {"op", "case", "value", "unit", "peer", "peer_value", "ratio"} == set(entries[0])
    assert {e["op"] for e in entries} == {"admit", "publish", "release", "step", "plan", "settle", "copy", "hit"}
    assert {"R=1", "R=64", "R=256"} <= {e["case"] for e in entries}
    assert {e["unit"] for e in entries} == {"launches", "uploads", "syncs", "bytes"}


def test_demo_writes_the_keys_of_the_contract(tmp_path: Path) -> None:
    target = tmp_path / "demo.json"
    done = here("demo", "--requests", "3", "--strategy", "lazy", "--backend", "reference", "--json", target)
    assert done.status == 0, done.err
    report = json.loads(target.read_text())
    assert set(DEMO_KEYS.split()) <= set(report)
    assert report["identical_to_uncached"] and report["logits_identical"] and report["states_identical"]
    assert (report["strategy"], report["backend"], report["leaked_slots"]) == ("lazy", "reference", 0)
    assert set(report["device_launches_per_decode_step"]) == {"mean", "max"}
    said, hint = done.out.split("\n\n")  # JSON goes to a file, so stdout has the sentences
    assert "equals the uncached run" in said and hint == "All figures: --all, or --json PATH.\n"


def test_the_version_is_that_of_the_package() -> None:
    done = memstate("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"memstate {__version__}\n", "")


def test_a_target_that_triton_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = compiling.KernelReport("plan", "sm_90", 40, 0, 0, None, 20, True)
    for reports, status in (([known], 0), ([], 1)):
        monkeypatch.setattr(compiling, "compile_all", lambda *_, made=reports: made)
        done = CliRunner().invoke(cli.app, ["compile", "--targets", "sm_90,gfx950", "--json", "-"])
        left = "gfx950" if reports else "sm_90, gfx950"
        assert done.exit_code == status and f"does not know them: {left}" in done.stderr


def test_only_targets_that_compile_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_of(_: object, target: str) -> Mock:
        if target == "gfx950":
            raise RuntimeError("no such processor")
        return Mock()

    monkeypatch.setattr(sys.modules["memstate_tools.compile.build"], "launch_of", launch_of)
    assert compiling.known_targets(["sm_90", "gfx950", "sm_80"]) == ["sm_90", "sm_80"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("demo --strategy sometimes", "sometimes"),
        ("demo --fail-claims 2", "'--fail-claims': "),
        ("demo --speculate bush", "speculate 'bush': expected a number of tokens from 0 to 64, or tree"),
        ("demo --input no-such-file.jsonl", "'no-such-file.jsonl': No such file"),
        ("compile --targets sm_9", "sm_9"),
        ("bench nothing", "nothing"),
        ("tune --kernels copy,ssm", "kernel 'ssm': expected copy"),
        ("tune --limit 0", "limit 0"),
        ("replay {tmp}", "Is a directory"),
        ("replay {trace} --policy lru,fifo", "policy 'fifo': expected lru, "),
        ("replay {trace} --policy lru,no_such:Policy", "policy 'no_such:Policy': ModuleNotFoundError"),
        ("replay {trace} --policy memstate:Prefix", "expected a StatePolicy"),
        ("replay README.md", "README.md', line 1: not JSON: "),
        ("replay README.md", "a log? First make a trace of it: memstate trace vllm, sglang or openai --from LOG"),
        ("replay {trace} --states ,", "nothing to replay"),
        ("replay {trace} --states 1.5", "--states '1.5': expected whole numbers"),
        ("replay {trace} --from nan", "from nan: expected a fraction from 0 to below 1"),
        ("replay {trace} --limit 0", "limit=0: expected a whole number from 1 on"),
        ("replay {broken}", "', line 1: hash_ids missing"),
        ("trace novel --out {tmp}/a.jsonl", "'novel'"),
        ("trace chat --out {tmp}/a.jsonl --requests 0", "requests=0: expected a whole number from 1 on"),
        ("trace chat --out {tmp} --requests 1", "is no file"),
        ("trace vllm --out {tmp}/a.jsonl", "vllm needs --from FILE"),
        ("trace chat --out {tmp}/a.jsonl --from {trace}", "chat reads no log"),
        ("trace sglang --out {tmp}/a.jsonl --from {trace}", "no request with tokens in it: SGLang logs tokens with"),
        ("trace openai --out {tmp}/a.jsonl --from {trace} --tokenizer {tmp}/no", "/no"),
        ("trace chat --out {tmp}/a.jsonl --tail -1", "tail=-1: expected a whole number of tokens from 0 to 32768"),
        ("trace agent --out {tmp}/a.jsonl --thoughts 32769", "thoughts=32769: expected a whole number"),
        ("trace mixed --out {tmp}/a.jsonl --tail 1.5", "'--tail': Input should be a valid integer"),
        ("trace vllm --out {tmp}/a.jsonl --from {trace} --tail 5", "vllm reads a log, whose prompts are as they are"),
        ("trace openai --out {tmp}/a.jsonl --from {trace} --thoughts 5", "leave out --tail and --thoughts"),
        ("trace chat --out no/such/a.jsonl", "'no/such' is no directory"),
        # these arguments are refused before the work begins, so no other error comes first
        ("tune --kernels ssm --dry-run --json ", "'--json': '': expected a path"),
        ("compile --targets sm_9 --json tests", "'tests': is a directory"),
        ("demo --input no-such-file.jsonl --json no/x.json", "'no/x.json': no is no directory"),
        (f"replay no-such-file.jsonl --json {'x' * 300}/y", "File name too long"),
    ],
)
def test_bad_input_is_one_clear_line_and_a_non_zero_status(
    arguments: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    made = {"tmp": tmp_path, "trace": tmp_path / "trace.jsonl", "broken": tmp_path / "broken.jsonl"}
    form.write(made["trace"], make("shared-prompt", 2, 0))
    made["broken"].write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}')
    done = here(*arguments.format(**made).split(" "))
    assert (done.status, done.out) == (2, "")
    assert says in done.err and len(done.err.splitlines()) == 1, done.err
    assert len(list(tmp_path.iterdir())) == 2
