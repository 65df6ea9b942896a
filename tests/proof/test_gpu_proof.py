"""The proof for a GPU, gone through on a CPU at toy sizes; parts that fail; what its checks notice."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import OPS, Backend
from tests.proof import gpu_proof
from tests.proof.gpu import collecting, determinism, graphs, sanitizer, serving, streams, stress
from tests.proof.gpu import machine as machine_module
from tests.proof.gpu import tests as marked
from tests.proof.gpu.compilations import Compilations
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
if kind == "late": leave(incomplete="3 of 5 cases", figure=3)
if kind == "late and wrong": leave(incomplete="3 of 5 cases", failures=["x is not y"])
"""


def parts(tmp_path: Path, *kinds: str, seconds: float = 60) -> list[Part]:
    program = tmp_path / "part.py"
    program.write_text(PROGRAM)
    command = f"{{python}} {program} {{name}} {{folder}}"
    files = (("big.bin", "big.bin"),)
    return [Part(kind, 1 if kind == "hangs" else seconds, command, files) for kind in kinds]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_parts_that_fail_crash_or_hang_are_told_and_the_others_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kinds = ("fails", "raises", "crashes", "silent", "broken", "absent", "late", "good")
    proof = Proof(out)
    assert not proof.run(parts(tmp_path, *kinds)) and list(proof.summary["parts"]) == list(kinds)
    summary = read(out / "summary.json")
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        "fails": "failed", "raises": "failed", "crashes": "crashed", "silent": "failed", "broken": "failed",
        "absent": "unavailable", "late": "incomplete", "good": "ok",
    }  # fmt: skip
    why = {name: part["why"] for name, part in summary["parts"].items()}
    assert why["fails"] == "2 failures, first: x is not y" and why["raises"] == "ValueError: no such thing"
    assert why["late"] == "3 of 5 cases" and read(out / "proofs.json")["late"]["figure"] == 3
    assert why["crashes"] == f"signal {signal.SIGSEGV:d}" and why["absent"] == "no such tool"
    assert read(out / "proofs.json")["good"]["figure"] == 1
    assert summary["ok"] is False and summary["commit"] and summary["date"] and summary["versions"]["torch"]
    log = (out / "log.txt").read_text()
    assert all(f"==== {kind}," in log and f"this is {kind}" in log for kind in kinds)


def test_a_part_over_its_limit_is_incomplete_and_what_it_found_is_kept(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out", seconds=11)
    hanging, good = parts(tmp_path, "hangs", "good", seconds=9)
    assert proof.run([hanging, good]), "no time is no failure"
    assert {name: part["status"] for name, part in proof.summary["parts"].items()} == {
        "hangs": "incomplete", "good": "ok",
    }  # fmt: skip
    assert proof._proofs["hangs"]["figure"] == 2 and proof.summary["ok"] and not proof.summary["complete"]


def test_what_is_wrong_before_time_is_up_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = [None, "x is not y"]

    class Noting(Proof):
        def _note(self, part: Part, status: str, why: str, *more: Any) -> None:
            self.summary["parts"][part.name] = {"status": status, "why": why}

    def ended(command: Any, seconds: float, environment: Any, output: Any) -> None:
        failures = [found[0]] if found[0] else []
        (proof._folder / "a.json").write_text(json.dumps({"failures": failures, "incomplete": "3 of 5"}))

    monkeypatch.setattr(gpu_proof, "limited", ended)
    proof = Noting(tmp_path / "out")
    assert proof.run([Part("a", 1)]) and proof.summary["parts"]["a"]["status"] == "incomplete"
    found.pop(0)
    assert not proof.run([Part("a", 1)]) and proof.summary["parts"]["a"]["status"] == "failed"


CHILD = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
PART = f"""
import sys
from tests.proof.gpu.machine import main
from tests.proof.gpu_proof import limited

def prove(machine, result):
    result["figure"] = 1
    limited([sys.executable, "-c", {CHILD!r}, {{child!r}}], 600, None, None)

main(prove)
"""


def test_a_part_that_is_ended_keeps_what_it_found_and_ends_what_it_began(tmp_path: Path) -> None:
    program, child, found = tmp_path / "part.py", tmp_path / "child", tmp_path / "found.json"
    program.write_text(PART.format(child=str(child)))
    command = [sys.executable, str(program), "--json", str(found), "--toy"]
    with (tmp_path / "log").open("wb") as log:
        process = gpu_proof.begin(command, os.environ | {"PYTHONPATH": str(ROOT)}, log)
        while process.poll() is None and not (child.exists() and child.read_text()):
            time.sleep(0.05)
        gpu_proof.end(process)
    assert read(found)["figure"] == 1, (tmp_path / "log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_the_tests_of_a_proof_that_is_ended_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(command: Any, seconds: float, environment: dict[str, str], output: Any) -> int:
        Path(environment["PROOF_RESULTS"]).write_text('{"test": "a", "outcome": "failed", "why": "x"}\n')
        raise SystemExit(143)

    monkeypatch.setattr(marked, "limited", ended)
    result: dict[str, Any] = {"failures": []}
    with pytest.raises(SystemExit):
        marked.prove(Machine(toy=True, file=tmp_path / "tests.json"), result)
    assert result["failures"] == ["a: x"]


def test_a_hash_says_which_files_ran_where_there_is_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernels/a.py", "memstate/b.py", "tests/proof/c.json", "docs/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "memstate" / "kernels").symlink_to("../kernels")
    first = gpu_proof.tree(tmp_path)
    (tmp_path / "docs" / "d.md").write_text("what does not run")
    (tmp_path / "kernels" / "__pycache__").mkdir()
    (tmp_path / "kernels" / "__pycache__" / "a.cpython-312.pyc").write_bytes(b"made while it ran")
    assert gpu_proof.tree(tmp_path) == first
    (tmp_path / "tests" / "proof" / "c.json").write_text("another")
    assert gpu_proof.tree(tmp_path) != first
    monkeypatch.setattr(gpu_proof, "ROOT", tmp_path)
    assert gpu_proof.commit() == "unknown"


def test_make_keeps_the_path_that_python_has_on_this_machine(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH $@"\n')
    python.chmod(0o755)
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-s", "gpu-proof", f"PROOF_PYTHON={python}", "OUT=somewhere", "ARGS="], cwd=ROOT,  # not of `make test`
        capture_output=True, text=True, check=False, env=others | {"PYTHONPATH": "/packages/of/the/machine"},
    )  # fmt: skip
    assert done.stdout == "/packages/of/the/machine -m tests.proof.gpu_proof --out somewhere\n", done.stderr


def test_what_is_not_begun_for_want_of_time_is_said(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out", seconds=0.5)
    assert proof.run(parts(tmp_path, "good"))
    part = read(tmp_path / "out" / "summary.json")["parts"]["good"]
    assert part["status"] == "incomplete" and part["why"].startswith("not begun: ")


def test_a_part_whose_time_is_up_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "part.json"

    def part(machine: Machine, result: dict[str, Any]) -> None:
        result["figure"] = list(machine.mine(range(5)))
        machine.go_on("before the last case", needed=100)

    monkeypatch.setattr(sys, "argv", ["part", "--json", str(target), "--seconds", "9", "--toy", "--share", "1/2"])
    monkeypatch.setattr(machine_module.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        machine_module.main(part)
    assert left.value.code == 0
    assert read(target) == {
        "failures": [], "figure": [1, 3], "incomplete": "before the last case", "kernels": {"compiled": 0, "loaded": 0},
    }  # fmt: skip


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
    assert summary["complete"] and proofs["compiling"]["processes"]["stress 1 of 1"]["status"] == "ended"
    assert proofs["stress"]["plans"] >= stress.TOY_PLANS and proofs["stress"]["audits"] > 5
    assert proofs["serving"]["compiled_after_warm_up"] == {"redirect": {}}
    assert proofs["serving"]["latency"]["states_out"] == proofs["serving"]["latency"]["states_going_down"]
    assert {entry["unit"] for entry in read(out / "bench.json")} == {"us", "host us", "bytes/s"}
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
    """Its graphs do what they hold once, and then nothing."""

    def __init__(self) -> None:
        super().__init__(toy=True)

    def capture(self, act: Any) -> Any:
        left = [act]
        return lambda: left.pop()() if left else None


@on_cpu
def test_a_replay_that_does_nothing_is_noticed() -> None:
    made, _, wrong = graphs.course(Forgetful(), ms.NoTracking(2), 1, seed=1, replays=4)
    assert made == 1 and wrong.startswith("step 1: ") and "differ" in wrong


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


@on_cpu
def test_an_audit_of_the_stress_notices_what_a_race_leaves() -> None:
    made = stress.Stress(Machine(toy=True), ms.LazyPingPong(1), 1)
    made.audit()
    assert made.found() == ""
    table = made.rows.file.table
    table.labels[made.live] -= 1
    made.audit()
    assert made.found() == "lengths in 1 audits"
    table.labels[made.live] += 1
    table.slots[1] = table.slots[3]  # a register that nothing uses owns the row's slot as well
    made.audit()
    table.slots[1] = 0
    table.counters[0] -= 1
    made.audit()
    assert made.found() == "owners in 1 audits, lengths in 1 audits, counts in 1 audits"


def test_kernels_that_are_compiled_and_loaded_are_counted() -> None:
    compilations = Compilations()
    assert compilations.install()
    from triton import knobs

    listener = knobs.compilation.listener
    try:
        for hit in (False, True, True):
            listener(src=SimpleNamespace(name="_plan"), metadata={}, metadata_group={}, times=None, cache_hit=hit)
    finally:
        knobs.compilation.listener = None
    assert (compilations.compiled, compilations.loaded) == ({"_plan": 1}, {"_plan": 2})
    assert compilations.all == {"_plan": 3}


@on_cpu
def test_a_kernel_that_serving_compiles_is_told_with_what_needed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, result = Machine(toy=True), {"failures": []}

    def scenario(server: Any) -> Any:
        yield "one thing"
        yield "another"
        machine.compilations(src=SimpleNamespace(name="_pack"), cache_hit=True)

    monkeypatch.setattr(serving, "scenario", scenario)
    serving.compiled_after_warm_up(machine, result)
    assert result["failures"] == ["redirect: compiled after warm_up: another: _pack"]


@on_cpu
@pytest.mark.parametrize("lost", [0, 1])
def test_the_states_of_a_burst_are_all_on_their_way(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """A state that finds no staging on a device is lost at once, and burdens no step that is timed."""
    result: dict[str, Any] = {"failures": []}
    asked, stats = ms.Tiers, ms.StateManager.stats
    staged: list[int] = []

    def tiers(*args: Any, **settings: Any) -> ms.Tiers:
        staged.append(settings["staging"])
        return asked(*args, **settings)

    def told(mem: ms.StateManager) -> Any:
        found = stats(mem)
        return replace(found, tiers=replace(found.tiers, states_out=max(0, found.tiers.states_out - lost)))

    monkeypatch.setattr(ms, "Tiers", tiers)
    monkeypatch.setattr(ms.StateManager, "stats", told)
    serving.latency(Machine(toy=True), result)
    assert staged == [serving.TOY_CACHED]
    said = [f"{serving.TOY_CACHED - lost} of {serving.TOY_CACHED} states reached host memory: few were on their way"]
    assert result["failures"] == (said if lost else [])


def test_latencies_are_percentiles() -> None:
    found = serving.spread_of([1e-3] * 99 + [5e-3])
    assert found["p50_us"] == 1000 and 1000 < found["p99_us"] <= 5000 and found["steps"] == 100


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid: str, gpu: bool = True, **params: object) -> None:
        self.nodeid, self._gpu = nodeid, gpu
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> object:
        return True if self._gpu and name == "gpu" else None


def test_a_set_of_the_gpu_tests_is_chosen_by_a_rule() -> None:
    def cases(name: str, **given: object) -> list[Any]:
        return [Item(f"{name}[{a}-{b}]", a=a, b=b, **given) for a in range(3) for b in range(5)]

    items = [
        *cases("tests/engine/test_a.py::test_a"), *cases("tests/requests/test_b.py::test_b"),
        *cases("tests/kernels/test_c.py::test_c"), Item("tests/kernels/test_c.py::test_d"),
        Item("tests/kernels/test_c.py::test_e", gpu=False),
    ]  # fmt: skip
    names = [item.nodeid.partition("::")[2] for item in collecting.chosen(items)]
    counts = {name: sum(each.startswith(name) for each in names) for name in ("test_a", "test_b", "test_c", "test_d")}
    assert counts == {"test_a": 1, "test_b": 4, "test_c": 5, "test_d": 1} and len(names) == 11
    assert names[0].startswith("test_c") and not names[-1].startswith(("test_c", "test_d")), "kernels come first"
    shown = [item.callspec.params for item in collecting.chosen(items) if "test_c[" in item.nodeid]
    assert {one["a"] for one in shown} == {0, 1, 2} and {one["b"] for one in shown} == set(range(5))


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
    assert {"_move", "_plan", "_claim", "_gated_delta_step"} <= names
    assert sanitizer.verdict(log, finished, names)[0] == word


@pytest.mark.parametrize(
    ("log", "finished", "word"),
    [
        ("kernel.py:3: Read after write race detected\nTraceback", True, "failed"),
        ('{"failures": [], "touched": []}', True, "ok"),
        ("", False, "unfinished"),
        ("Traceback\nRuntimeError: gsan needs a newer driver", True, "unavailable"),
    ],
)
def test_what_gsan_says_is_understood(log: str, finished: bool, word: str) -> None:
    assert sanitizer.gsan_verdict(log, finished)[0] == word


def test_a_triton_without_gsan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find_spec", lambda name: None)
    assert re.match(r"Triton [\d.]+ has no GSan", sanitizer.no_gsan())
    monkeypatch.setattr(sanitizer, "find_spec", lambda name: name)
    assert sanitizer.no_gsan() == ""


OURS = "cannot import name 'gone'"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'zmq'", name="zmq"), "No module named 'zmq'"),
        (ImportError("cannot import name 'New' from 'transformers'", name="transformers"), "cannot import name 'New'"),
        (ImportError("Transformers 5.17.0: 5.23 is the first"), "Transformers 5.17.0: 5.23 is the first"),
        (ImportError(f"{OURS} from 'memstate.engine'", name="memstate.engine"), ""),
        (ModuleNotFoundError("No module named 'tests.gone'", name="tests.gone"), ""),
        (ImportError(f"{OURS} from 'triton.language'", name="triton.language"), ""),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_file_is_left_out_only_for_what_its_machine_lacks(error: Exception, why: str, wrapped: bool) -> None:
    """Wrapped: a module of ours has caught the error, and says what it needs."""
    collected = pytest.Module.CollectError("pytest says")
    collected.__cause__ = ImportError("events need zmq") if wrapped else error
    if wrapped:
        collected.__cause__.__cause__ = error
        why = why and "events need zmq"
    assert collecting.lacking(collected).startswith(why) and bool(collecting.lacking(collected)) == bool(why)
    assert collecting.lacking(ValueError("no error of an import")) == ""


FILES = {
    "test_good.py": "def test_a(): pass",
    "test_lacks.py": "import nowhere\ndef test_b(): pass",
    "test_ends.py": """
try:
    import nowhere
except ImportError as error:
    raise SystemExit("the command line needs nowhere") from error
""",
    "test_skips.py": "import pytest\npytest.importorskip('nowhere', reason='no nowhere here')",
    "test_broken.py": "from memstate import gone",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_files_that_cannot_be_imported_are_left_out_with_why(tmp_path: Path, workers: int) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.proof.gpu.collecting"]
    command += [
        "--import-mode=importlib",
        "--continue-on-collection-errors",
        *(["-n", str(workers)] if workers else []),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PROOF_RESULTS": str(results)}
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)], env=environment, capture_output=True, text=True,
        check=False, cwd=tmp_path,
    )  # fmt: skip
    found = marked.summed_up([json.loads(line) for line in results.read_text().splitlines()])
    assert found["left_out"] == {
        "test_lacks.py": "No module named 'nowhere'", "test_ends.py": "No module named 'nowhere'",
        "test_skips.py": "no nowhere here",
    }, done.stdout  # fmt: skip
    (failure,) = found["failures"]
    assert failure.startswith("test_broken.py: ") and OURS in failure
    assert found["passed"] == 1 and done.returncode == 1


@pytest.mark.proof
@pytest.mark.slow
@on_cpu
def test_the_tests_marked_gpu_are_collected_with_the_packages_of_such_a_machine(tmp_path: Path) -> None:
    """As if it were here: a device, and no package but those of `packages.txt`. Only whole files are left out."""
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.proof.gpu.seeming"]
    command += ["-p", "tests.proof.gpu.collecting", "-m", "gpu", "--collect-only", "tests"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "PROOF_RESULTS": str(results), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    left_out = {line["left_out"]: line["why"] for line in map(json.loads, results.read_text().splitlines())}
    assert "msgspec" in left_out["tests/events/test_index.py"]
    assert "Transformers 5.17" in left_out["tests/integrations/test_transformers_serve.py"]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert len(collected) > 60 and not collected & left_out.keys()
    assert {"tests/kernels/test_marks.py", "tests/engine/test_graphs.py", "tests/tiers/test_tiers_hits.py"} <= collected


def test_outcomes_are_summed_up_test_by_test() -> None:
    lines: list[dict[str, object]] = [
        {"test": "a", "outcome": "passed", "why": ""},
        {"test": "b", "outcome": "passed", "why": ""},
        {"test": "b", "outcome": "failed", "why": "teardown"},
        {"test": "c", "outcome": "skipped", "why": ""},
        {"test": "d.py", "outcome": "error", "why": "import"},
        {"left_out": "e.py", "why": "No module named 'typer'"},
    ]
    assert marked.summed_up(lines) == {
        "passed": 1, "failed": 1, "skipped": 1, "error": 1, "failures": ["b: teardown", "d.py: import"],
        "left_out": {"e.py": "No module named 'typer'"},
    }  # fmt: skip
    told = marked.summed_up([*lines, {"chosen": 9, "marked": 30}, {"time_is_up": True}])
    assert told["incomplete"] == "4 of 9 tests" and (told["chosen"], told["marked"]) == (9, 30)


def test_a_report_is_cut_to_its_limit(tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    report.write_text("<a>" + "".join(f"<f>{'y' * 5000}end</f>" for _ in range(20)) + "</a>")
    marked.cut(report, 50_000)
    text = report.read_text()
    assert len(text) <= 50_000 and text.count("end</f>") == 20
