"""The proof for a GPU, gone through on a CPU at toy sizes; parts that fail; what its checks notice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import OPS, Backend
from tests.proof import gpu_proof
from tests.proof.gpu import collecting, determinism, graphs, sanitizer, streams
from tests.proof.gpu import tests as marked
from tests.proof.gpu.machine import Machine
from tests.proof.gpu_proof import MOST_BYTES, PARTS, Part, Proof

ROOT = Path(__file__).parents[2]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels, at toy sizes")
PROGRAM = """
import json, os, signal, subprocess, sys
kind, folder = sys.argv[1:3]
def leave(**found):
    with open(f"{folder}/{kind}.json", "w") as file:
        json.dump({"failures": []} | found, file)
print("this is", kind)
if kind == "good": leave(figure=1)
if kind == "fails": leave(failures=["x is not y", "z"]); sys.exit(1)
if kind == "raises": raise ValueError("no such thing")
if kind == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
if kind == "hangs": leave(figure=2); subprocess.run([sys.executable, "-c", "import signal; signal.pause()"])
if kind == "silent": sys.exit(0)
if kind == "broken": open(f"{folder}/{kind}.json", "w").write('{"failures": [')
if kind == "wordy": leave(); open(f"{folder}/big.bin", "wb").write(bytes(20 * 2**20)); print("w" * 5 * 2**20)
if kind == "absent": leave(unavailable="no such tool")
"""


def parts(tmp_path: Path, *kinds: str, seconds: float = 60) -> list[Part]:
    program = tmp_path / "part.py"
    program.write_text(PROGRAM)
    command = f"{{python}} {program} {{name}} {{folder}}"
    return [Part(kind, 1 if kind == "hangs" else seconds, command, (("big.bin", "big.bin"),)) for kind in kinds]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_parts_that_fail_crash_or_hang_are_told_and_the_others_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kinds = ("fails", "raises", "crashes", "silent", "broken", "absent", "good")
    proof = Proof(out)
    assert not proof.run(parts(tmp_path, *kinds)) and list(proof.summary["parts"]) == list(kinds)
    summary = read(out / "summary.json")
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        "fails": "failed", "raises": "failed", "crashes": "crashed", "silent": "failed", "broken": "failed",
        "absent": "unavailable", "good": "ok",
    }  # fmt: skip
    why = {name: part["why"] for name, part in summary["parts"].items()}
    assert why["fails"] == "2 failures, first: x is not y" and why["raises"] == "ValueError: no such thing"
    assert why["crashes"] == f"signal {signal.SIGSEGV:d}" and why["absent"] == "no such tool"
    assert read(out / "proofs.json")["good"]["figure"] == 1
    assert summary["ok"] is False and summary["commit"] and summary["date"] and summary["versions"]["torch"]
    log = (out / "log.txt").read_text()
    assert all(f"==== {kind}," in log and f"this is {kind}" in log for kind in kinds)


def test_a_part_over_its_limit_is_ended_with_its_children_and_what_it_found_is_kept(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out", seconds=12)
    hanging, good = parts(tmp_path, "hangs", "good", seconds=8)
    assert not proof.run([hanging, good])
    assert {name: part["status"] for name, part in proof.summary["parts"].items()} == {
        "hangs": "over time", "good": "ok",
    }  # fmt: skip
    assert proof._proofs["hangs"]["figure"] == 2


def test_what_is_left_out_for_want_of_time_is_said(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out", seconds=0.5)
    assert not proof.run(parts(tmp_path, "good"))
    assert read(tmp_path / "out" / "summary.json")["parts"]["good"]["status"] == "left out"


def test_files_stay_within_their_limits(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out")
    assert proof.run(parts(tmp_path, "wordy", "good"))
    files = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert set(files) == {"summary.json", "proofs.json", "log.txt"} and max(files.values()) < MOST_BYTES
    proof._write("large.json", "x" * (MOST_BYTES + 1))
    assert "left out" in (tmp_path / "out" / "large.json").read_text()


def test_the_parts_fit_into_nine_minutes_and_six_files() -> None:
    assert sum(part.seconds for part in PARTS) <= gpu_proof.SECONDS <= 530
    files = {target for part in PARTS for _, target in part.files} | {"summary.json", "proofs.json", "log.txt", "tuned"}
    assert len(files) <= 6
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.mark.parametrize(
    ("devices", "status", "said"),
    [([], 0, "nothing to prove here (no CUDA)"), ([{"name": "a card"}], 1, "a card is here")],
)
def test_a_machine_without_a_gpu_has_nothing_to_prove(
    devices: list[Any], status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_proof", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(gpu_proof, "find_gpu", lambda: (None, "no CUDA"))
    monkeypatch.setattr(gpu_proof, "nvidia_smi", lambda: devices)
    assert gpu_proof.main() == status
    assert said in capsys.readouterr().out and not (tmp_path / "out").exists()


@pytest.mark.proof
@on_cpu
def test_no_gpu_is_found_where_there_is_none() -> None:
    gpu, why = gpu_proof.find_gpu()
    assert gpu is None and why


@pytest.mark.proof
@on_cpu
def test_the_whole_proof_goes_through_at_toy_sizes(tmp_path: Path) -> None:
    """In an environment that lacks the packages of the command line and of the notebooks."""
    out, site = tmp_path / "out", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys; sys.modules.update(typer=None, rich=None, matplotlib=None)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(site))), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.proof.gpu_proof", "--toy", "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()[-3000:]
    summary, proofs = read(out / "summary.json"), read(out / "proofs.json")
    assert summary["ok"] and summary["toy"]
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        part.name: "unavailable" if part.name == "sanitizer" else "ok" for part in PARTS
    }
    assert proofs["tests"]["passed"] > 3 and (out / "gpu-tests.xml").stat().st_size > 100
    assert proofs["graphs"]["replays"] == {"Redirect, batch 2": 5}
    assert len(proofs["determinism"]["repeated"]) == len(determinism.CASES) + 5
    assert proofs["streams"]["compared"] > 10 and proofs["sanitizer"]["touched"] == sorted(OPS)
    entries = read(out / "bench.json")
    assert entries and all(entry["case"].startswith("toy ") for entry in entries)
    assert read(out / "toy-cpu.json")["timed"] is False
    assert len(list(out.iterdir())) <= 6


# -- what the checks notice ------------------------------------------------------------------------


class Forgetful(Machine):
    """Its graphs do nothing, or what the first one did."""

    def __init__(self, stale: bool) -> None:
        super().__init__(toy=True)
        self.stale, self.first = stale, None

    def capture(self, act: Any) -> Any:
        self.first = self.first or act
        return self.first if self.stale else (lambda: None)


@on_cpu
@pytest.mark.sample(1)
@pytest.mark.parametrize("stale", [False, True])
def test_a_replay_of_something_else_is_noticed(stale: bool) -> None:
    made, _, wrong = graphs.course(Forgetful(stale), ms.NoTracking(2), 1, seed=1, replays=4)
    assert wrong.startswith(f"step {made}: ") and "differ" in wrong


@on_cpu
def test_launches_that_differ_are_noticed() -> None:
    backend = Backend("interpreter")
    case = determinism.CASES["mamba1"](backend, torch.Generator().manual_seed(3))
    turns = []

    def changing(**given: Any) -> torch.Tensor:
        out = backend.selective_step(**given)
        turns.append(1)
        if len(turns) == 3:
            given["state"][given["write"][0]].view(-1)[0] += 1
        return out

    assert "launch 2 of 4" in determinism.repeated(case, SimpleNamespace(selective_step=changing), 4)  # type: ignore[arg-type]


@on_cpu
def test_a_row_that_depends_on_its_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = determinism.Forward.layer

    def layer(forward: Any, number: int, record: Any) -> None:
        true(forward, number, record)
        forward.out += len(record.read) * 1e-2

    monkeypatch.setattr(determinism.Forward, "layer", layer)
    failures = determinism.beside_others(Machine(toy=True))
    assert [line.split(":")[0] for line in failures] == ["one row", "another", "half"]  # others are as many as all


@on_cpu
def test_streams_that_leave_other_bytes_are_noticed() -> None:
    machine = Machine(toy=True)
    one, other = (streams.Run(machine, seed, False).go(2) for seed in (1, 2))
    assert streams.differing(one, one) == [] and "output 0" in streams.differing(one, other)
    assert streams.differing(one, {**one, "more": one["owners"]}) == ["more"]


MEMCHECK = """
========= Invalid __global__ read of size 16 bytes
=========     at {where}+0x1f0 in somewhere.py:60
=========     by thread (0,0,0) in block (0,0,0)
{{"failures": [], "touched": []}}
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(
    ("log", "finished", "word"),
    [
        (MEMCHECK.format(where="_move"), True, "failed"),
        (MEMCHECK.format(where="_move"), False, "failed"),
        (MEMCHECK.format(where="at_native_fill"), True, "ok"),
        ("========= COMPUTE-SANITIZER\n========= Device not supported.", True, "unavailable"),
        ('{"failures": []}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)', True, "ok"),
        ('{"failures": []}\n', True, "unavailable"),
        ("Traceback\n========= ERROR SUMMARY: 0 errors", True, "failed"),
        ("========= COMPUTE-SANITIZER\n", False, "unfinished"),
    ],
)
def test_what_a_checker_says_is_understood(log: str, finished: bool, word: str) -> None:
    names = sanitizer.kernel_names()
    assert {"_move", "_plan", "_settle", "_claim", "_gated_delta_step"} <= names
    assert sanitizer.verdict(log, finished, names)[0] == word


def test_files_whose_packages_are_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("typer", "rich", "nowhere")
    monkeypatch.setattr(collecting, "missing", lambda package: package in absent)
    assert collecting.lacking("import os, nowhere.inside\nfrom memstate import tuning") == ["nowhere"]
    assert collecting.lacking("from memstate.cli import app") == ["rich", "typer"]
    assert collecting.lacking("import memstate.cli.app") == ["rich", "typer"]
    assert collecting.lacking("def f():\n    import nowhere") == []


def test_outcomes_are_summed_up_test_by_test() -> None:
    lines: list[dict[str, object]] = [
        {"test": "a", "outcome": "passed", "why": ""},
        {"test": "b", "outcome": "passed", "why": ""},
        {"test": "b", "outcome": "failed", "why": "teardown"},
        {"test": "c", "outcome": "skipped", "why": ""},
        {"test": "d.py", "outcome": "error", "why": "import"},
        {"left_out": "e.py", "needs": ["typer"]},
    ]
    assert marked.summed_up(lines) == {
        "passed": 1, "failed": 1, "skipped": 1, "error": 1, "failures": ["b: teardown", "d.py: import"],
        "left_out": {"e.py": ["typer"]},
    }  # fmt: skip


def test_a_report_is_cut_to_its_limit(tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    report.write_text("<a>" + "".join(f"<f>{'y' * 5000}end</f>" for _ in range(20)) + "</a>")
    marked.cut(report, 50_000)
    text = report.read_text()
    assert len(text) <= 50_000 and text.count("end</f>") == 20
