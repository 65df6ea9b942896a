"""Tests the GPU proof on a CPU at toy sizes: parts that fail, too little time, and faults that checks must notice."""

import json
import os
import signal
import sys
import time
from inspect import signature
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels import tuned
from memstate.kernels.configs import DeltaConfig
from memstate.kernels.dispatch import OPS, Backend
from memstate.kernels.reference.scaled import loaded, stored
from tests.kernels.test_decode_steps import KINDS
from tests.proof import gpu_proof
from tests.proof.gpu import (
    collecting,
    decode,
    decode_cases,
    determinism,
    graphs,
    proved,
    sanitizer,
    serving,
    streams,
    stress,
    touch,
)
from tests.proof.gpu import tests as marked
from tests.proof.gpu.decode_inputs import Inputs, wrong_bytes
from tests.proof.gpu.decode_run import Run
from tests.proof.gpu.machine import Machine, TimeIsUp
from tests.proof.gpu_proof import PARTS, Part, Proof
from tests.support import one_order, op_cases
from tests.support.op_case import every
from tests.support.processes import bare, ran

ROOT = Path(__file__).parents[2]
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels, at toy sizes")
PROGRAM = """
import json, os, signal, subprocess, sys
kind, folder = sys.argv[1:3]
def leave(**more):
    with open(f"{folder}/{kind}.json", "w") as file:
        json.dump({"failures": []} | more, file)
print("this is", kind)
if kind == "good": leave(figure=1)
if kind == "fails": leave(failures=["x is not y", "z"]); sys.exit(1)
if kind == "raises": raise ValueError("no such thing")
if kind == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
if kind == "hangs": leave(figure=2); subprocess.run([sys.executable, "-c", "import signal; signal.pause()"])
if kind == "silent": sys.exit(0)
if kind == "broken": open(f"{folder}/{kind}.json", "w").write('{"failures": [')
if kind == "absent": leave(unavailable="no such tool")
if kind == "late": leave(incomplete="3 of 5 cases", figure=3)
if kind == "late-and-wrong": leave(incomplete="3 of 5 cases", failures=["x is not y"])
"""


ENDS = {  # kind of part -> (status, reason) in the summary
    "hangs": ("incomplete", "ended after 1 s"),
    "fails": ("failed", "2 failures, first: x is not y"),
    "raises": ("failed", "ValueError: no such thing"),
    "crashes": ("crashed", f"signal {signal.SIGSEGV:d}"),
    "silent": ("failed", "this is silent"),
    "broken": ("failed", "this is broken"),
    "absent": ("unavailable", "no such tool"),
    "late": ("incomplete", "3 of 5 cases"),
    "late-and-wrong": ("failed", "1 failures, first: x is not y"),
    "good": ("ok", ""),
}


def parts(tmp_path: Path, *kinds: str) -> list[Part]:
    (tmp_path / "part.py").write_text(PROGRAM)
    command = f"{{python}} {tmp_path / 'part.py'} {{name}} {{folder}}"
    return [Part(kind, 1 if kind == "hangs" else 60, command) for kind in kinds]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_parts_that_fail_crash_or_hang_are_told_and_the_others_run(tmp_path: Path) -> None:
    """A part that runs out of time counts as incomplete; as failed only if it found a fault. Its results are kept."""
    out, given = tmp_path / "out", parts(tmp_path, *ENDS)
    assert not Proof(out, seconds=sum(part.seconds for part in given)).run(given)
    summary, proofs, log = read(out / "summary.json"), read(out / "proofs.json"), (out / "log.txt").read_text()
    assert {kind: (part["status"], part["why"]) for kind, part in summary["parts"].items()} == ENDS
    assert [proofs[name]["figure"] for name in ("hangs", "late", "good")] == [2, 3, 1]
    assert summary["ok"] is False and summary["commit"] and summary["date"] and summary["versions"]["torch"]
    assert all(f"==== {name}," in log and f"this is {name}" in log for name in ENDS)


@pytest.mark.parametrize(("kinds", "complete"), [(("good", "absent"), True), (("good", "late"), False)])
def test_a_proof_without_failures_is_ok(kinds: tuple[str, ...], complete: bool, tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out")
    assert proof.run(parts(tmp_path, *kinds)) and proof.summary["complete"] == complete


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
    program, child, result = tmp_path / "part.py", tmp_path / "child", tmp_path / "result.json"
    program.write_text(PART.format(child=str(child)))
    command = [sys.executable, str(program), "--json", str(result), "--toy"]
    with (tmp_path / "log").open("wb") as log:
        process = gpu_proof.begin(command, os.environ | {"PYTHONPATH": str(ROOT)}, log)
        while process.poll() is None and not (child.exists() and child.read_text()):
            time.sleep(0.05)
        gpu_proof.end(process)
    assert read(result)["figure"] == 1, (tmp_path / "log").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_what_is_not_begun_for_want_of_time_is_said(tmp_path: Path) -> None:
    proof = Proof(tmp_path / "out", seconds=0.5)
    assert proof.run(parts(tmp_path, "good"))
    part = read(tmp_path / "out" / "summary.json")["parts"]["good"]
    assert part["status"] == "incomplete" and part["why"].startswith("not begun: ")


class Spending(Proof):
    """A proof with a fake clock, whose parts use all of their time."""

    now = 0.0

    def _run(self, part: Part, seconds: float) -> None:
        Spending.now += seconds
        self._note(part, "ok", "", seconds)


@pytest.mark.parametrize("seconds", [gpu_proof.SECONDS, 420.0, 240.0])
def test_every_part_begins_however_much_time_there_is(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of all parts shrinks by the same factor, even if no part ends early."""
    monkeypatch.setattr(Spending, "now", 0.0)
    monkeypatch.setattr(gpu_proof.time, "monotonic", lambda: Spending.now)
    proof = Spending(tmp_path / "out", seconds=seconds)
    assert proof.run(PARTS) and proof.summary["complete"]
    given = {name: part["seconds"] for name, part in proof.summary["parts"].items()}
    share = min(1.0, seconds / sum(part.seconds for part in PARTS))
    assert list(given) == [part.name for part in PARTS] and sum(given.values()) == pytest.approx(seconds, abs=0.5)
    assert all(given[part.name] == pytest.approx(share * part.seconds, abs=0.06) for part in PARTS[1:])


def test_what_no_committed_run_has_proved_comes_first(tmp_path: Path) -> None:
    """Benchmarks count as proofs, although they name operations in words, such as "gated delta"."""
    assert proved.newest_first(tmp_path) == every()
    run = tmp_path / "a-gpu"
    run.mkdir()
    (run / "bench.json").write_text(json.dumps([{"op": "claim"}, {"op": "copy"}, {"op": "gated delta"}]))
    proofs = {"sanitizer": {"touched": ["resolve"]}, "determinism": {"repeated": ["mamba3_step", "conv"]}}
    (run / "proofs.json").write_text(json.dumps(proofs))
    known = [op for op in every() if op in (
        "claim", "copy_slots", "gated_delta_step", "resolve", "mamba3_step", "conv_step",
    )]  # fmt: skip
    assert proved.newest_first(tmp_path) == [op for op in every() if op not in known] + known


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
def test_the_whole_proof_goes_through_at_toy_sizes(tmp_path: Path) -> None:
    """The proof runs in an environment without this project, and without the packages of command line and notebooks."""
    out, site = tmp_path / "out", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys; sys.modules.update(typer=None, rich=None, matplotlib=None)\n")
    command = bare(tmp_path / "bare"), "-m", "tests.proof.gpu_proof", "--toy", "--out", out
    done = ran(*command, PYTHONPATH=site, TRITON_INTERPRET=0)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "log.txt").read_text()[-3000:]
    summary, proofs = read(out / "summary.json"), read(out / "proofs.json")
    assert summary["ok"] and summary["toy"] and "recurrent-memstate" not in summary["versions"]
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        part.name: "unavailable" if part.name == "sanitizer" else "ok" for part in PARTS
    }
    assert summary["complete"] and proofs["compiling"]["processes"]["stress 1 of 1"]["status"] == "ended"
    assert len(proofs["decode"]["lines"]) > 40 and len(proofs["decode"]["bars"]) == 4
    assert proofs["stress"]["plans"] >= stress.TOY_PLANS and proofs["stress"]["audits"] > 5
    assert proofs["serving"]["compiled_after_warm_up"] == {"redirect": {}}
    assert proofs["serving"]["latency"]["states_out"] == proofs["serving"]["latency"]["states_going_down"]
    assert {entry["unit"] for entry in read(out / "bench.json")} == {"us", "host us", "bytes/s"}
    assert proofs["tests"]["passed"] > 3 and (out / "gpu-tests.xml").stat().st_size > 100
    assert proofs["graphs"]["replays"] == {"Redirect, batch 2": 5}
    assert len(proofs["determinism"]["repeated"]) == len(every()) + len(determinism.CASES) + 6
    assert proofs["streams"]["compared"] > 10 and proofs["sanitizer"]["touched"] == sorted(every())
    entries = read(out / "bench.json")
    assert entries and all(entry["case"].startswith("toy ") for entry in entries)
    assert read(out / "toy-cpu.json")["timed"] is False
    assert len(list(out.iterdir())) <= 6


BARE = f"""import sys
from importlib import import_module
from importlib.metadata import entry_points, packages_distributions

sys.modules.update(typer=None, rich=None, matplotlib=None)
for name in {[part.name for part in PARTS]}:
    import_module(f"tests.proof.gpu.{{name}}")
import memstate, memstate_tools
print(memstate.__file__, memstate_tools.__file__)
print([*entry_points(group="memstate.commands")], [name for name in packages_distributions() if "memstate" in name])
"""


@pytest.mark.proof
@on_cpu
def test_the_proof_starts_in_a_checkout_where_nothing_of_it_is_installed(tmp_path: Path) -> None:
    done = ran(bare(tmp_path / "bare"), "-c", BARE, PYTHONPATH="", TRITON_INTERPRET=1)
    packages = f"{ROOT / 'memstate' / '__init__.py'} {ROOT / 'tools' / 'memstate_tools' / '__init__.py'}"
    assert done.stdout.splitlines() == [packages, "[] []"], done.stderr


# -- every operation is in every part ---------------------------------------------------------------

NO_CASE = {  # op -> parameters that no small launch passes
    "plan": {"tails"}, "conv_step": {"activation"}, "gated_delta_step": {"a", "b", "scale"},
    "gather_slots": {"pattern"}, "scatter_slots": {"trusted"},
}  # fmt: skip


class Referring(Machine):
    """A machine that launches references in place of kernels."""

    backend = "reference"  # type: ignore[assignment]

    def __init__(self, seconds: float = 600.0) -> None:
        super().__init__(toy=True, seconds=seconds)


def test_checkers_of_memory_accesses_see_every_operation() -> None:
    result: dict[str, Any] = {"failures": []}
    touch.prove(Referring(), result)
    assert result["failures"] == [] and result["touched"] == sorted(every())


def test_every_operation_and_kind_of_step_is_repeated() -> None:
    result: dict[str, Any] = {"failures": []}
    determinism.prove(Referring(), result)
    assert result["failures"] == []
    assert {*every(), *KINDS, one_order.name_of(one_order.OFTEN[0])} <= set(result["repeated"])


def test_decode_steps_are_timed_in_every_form_and_each_bar_is_judged() -> None:
    """Each thing has a line with a time. What is late, failed or left out has a note instead."""
    result: dict[str, Any] = {"failures": []}
    decode.prove(Referring(), result)
    assert result["failures"] == []
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in result["lines"]:
        lines.setdefault(line["what"], []).append(line)

    def seen(what: str, *names: str) -> set[Any]:
        return {tuple(line[name] for name in names) for line in lines[what] if line.get("us", 0) > 0}

    floats = ("float32", "bfloat16", "float16")
    assert seen("delta", "dtype", "block", "fastest") == set(product(floats, (16, 32, 64), ("value", "key")))
    assert seen("evict_first", "dtype", "block") == set(product(floats, (16, 32, 64)))
    assert seen("verified step", "dtype") == seen("verified tree", "dtype") == seen("selective", "dtype")
    assert seen("selective", "dtype") == {("float32",), ("bfloat16",)}
    assert {line["block"] for line in lines["int8 records, bf16"]} == {4096, 8192}
    assert len(lines["floor"]) == 1 and len(lines["host of a replay"]) == 2
    assert {line["call"] for line in lines["host"]} == {"conv", "delta", "pair"} and seen("pair", "rows") == {(1,)}
    forms = product(("gated_delta_step", "selective_step"), ("int16", "int8"), ("nearest", "by chance"))
    assert seen("whole numbers", "op", "dtype", "rounds") == set(forms)
    assert all(line["equal"] for line in lines["replays of the pair"])
    assert not [line for line in result["lines"] if "note" in line]
    bars = list(result["bars"].values())
    assert all(bar.startswith(("held: ", "missed: ")) for bar in bars) and len(bars) == 4


def test_decode_steps_without_time_are_late() -> None:
    machine, result = Referring(seconds=1.0), {"failures": []}
    with pytest.raises(TimeIsUp, match="cases were late"):
        decode.prove(machine, result)
    assert all(line["note"] == "late: not measured" for line in result["lines"]) and len(result["lines"]) > 20
    assert set(result["bars"].values()) == {"not measured"}


def test_a_pair_that_reads_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution comes behind the step that needs it."""

    def early(made: Any) -> None:
        made.delta()
        made.conv()

    monkeypatch.setattr(decode_cases.Pair, "one", early)
    result: dict[str, Any] = {"failures": [], "lines": []}
    decode_cases.replays(Run(Referring(), result, Path()), rows=1)
    assert result["failures"] == ["pair of 1 rows, replay 10: out, state differ from two launches"]


@pytest.mark.parametrize("fault", ["", "numbers", "scales"])
def test_other_bytes_than_those_of_the_definition_are_noticed(fault: str) -> None:
    def step(**given: Any) -> torch.Tensor:
        state, scales, to = given["state"], given.get("scales"), given["write"].long()
        if scales is None:
            state[to] = state[given["read"].long()]
        else:
            exact = loaded(state[1], scales[1], 1)
            state[2], scales[2] = stored(exact, torch.int8, 1)
            (state if fault == "numbers" else scales)[2].view(-1)[0] += bool(fault)
        return given["out"].zero_()

    given = Inputs(torch.device("cpu"), toy=True).delta(1, torch.int8)
    says = wrong_bytes("gated_delta_step", step, given, 1)
    assert says == (f"gated_delta_step, torch.int8: {fault} of row 0 differ from the definition" if fault else "")


@pytest.mark.parametrize("op", OPS)
def test_small_launches_give_every_argument(op: str) -> None:
    given: set[str] = set()
    for case in op_cases.several(op):
        given |= {name for name, value in case.arguments.items() if value is not None}
    assert given == set(signature(getattr(Backend, op)).parameters) - NO_CASE.get(op, set())


@on_cpu
@pytest.mark.sample(len(every()))
@pytest.mark.parametrize("op", every())
def test_a_launch_in_other_memory_does_the_same_there(backend: Backend, op: str) -> None:
    """A launch whose tensors were copied elsewhere gives the same bytes, and does not touch the original memory."""
    case = op_cases.made(op, 1)
    other = op_cases.moved(case, torch.device("cpu"))
    tables = {getattr(given, op_cases.TABLES[type(given)]).untyped_storage().data_ptr()
              for given in case.arguments.values() if type(given) in op_cases.TABLES}  # fmt: skip
    expected, made = case.run(backend), case.memory
    for whole in made:
        whole.fill_(0xFF)
    outputs = other.run(backend)
    assert all(bool((whole == 0xFF).all()) for whole in made)
    with_addresses = [whole.data_ptr() in tables for whole in made] + [False] * (len(outputs) - len(made))
    assert all(a or torch.equal(b, c) for a, b, c in zip(with_addresses, expected, outputs, strict=True))


# -- what the checks notice ------------------------------------------------------------------------


class Forgetful(Machine):
    """A machine whose captured graphs run only once. Later replays do nothing."""

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

    assert "launch 2 of 4" in determinism.repeated_step(case, SimpleNamespace(selective_step=changing), 4)  # type: ignore[arg-type]


def test_a_tile_with_other_bits_is_noticed() -> None:
    backend = Backend("reference")
    true = backend.gated_delta_step

    def step(**given: Any) -> torch.Tensor:
        out = true(**given)
        out.view(-1)[0] += tuned.look_up(DeltaConfig, "", "").config.block_value == 64  # type: ignore[attr-defined]
        return out

    backend.gated_delta_step = step  # type: ignore[method-assign]
    said = [one_order.differing(backend, one_order.OFTEN[3], 5, blocks) for blocks in ((16, 32), (32, 64, 128))]
    assert said == ["", "tiles of 64 values differ from those of 16"]


@on_cpu
def test_a_row_that_depends_on_its_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    true = determinism.BenchForward.layer

    def layer(forward: Any, number: int, record: Any) -> None:
        true(forward, number, record)
        forward.out += len(record.read) * 1e-2

    monkeypatch.setattr(determinism.BenchForward, "layer", layer)
    failures = determinism.beside_others(Machine(toy=True))
    # At toy size, the other two parts have all rows of the batch.
    assert [line.split(":")[0] for line in failures] == ["one row", "another", "half"]


@on_cpu
def test_streams_that_leave_other_bytes_are_noticed() -> None:
    machine = Machine(toy=True)
    one, again, other = (streams.Run(machine, seed, False).go(2) for seed in (1, 1, 2))
    assert streams.differing(one, again) == [] and "output 0" in streams.differing(one, other)
    assert streams.differing(one, {**one, "more": one["owners"]}) == ["more"]


@on_cpu
def test_an_audit_of_the_stress_notices_what_a_race_leaves() -> None:
    made = stress.Stress(Machine(toy=True), ms.LazyPingPong(1), 1)
    made.audit()
    assert made.faults() == ""
    table = made.rows.file.table
    table.labels[made.live] -= 1
    made.audit()
    assert made.faults() == "lengths in 1 audits"
    table.labels[made.live] += 1
    table.slots[1] = table.slots[3]  # an unused register gets the slot of the row, too
    made.audit()
    table.slots[1] = 0
    table.counters[0] -= 1
    made.audit()
    assert made.faults() == "owners in 1 audits, lengths in 1 audits, counts in 1 audits"


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


class Item:
    """A stand-in for a test that pytest has collected."""

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
        ("kernel.py:3: Read after write race detected\nTraceback", True, "gsan: failed"),
        ('{"failures": [], "touched": []}', True, "gsan: ok"),
        ("", False, "gsan: unfinished"),
        ("Traceback\nRuntimeError: gsan needs a newer driver", True, "gsan: unavailable"),
    ],
)
def test_what_a_checker_says_is_understood(log: str, finished: bool, word: str) -> None:
    names = sanitizer.kernel_names()
    assert {"_move", "_plan", "_claim", "_gated_delta_step"} <= names
    gsan = f"gsan: {sanitizer.gsan_verdict(log, finished)[0]}"
    assert word in (gsan, sanitizer.verdict(log, finished, names)[0])


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


@pytest.mark.proof
def test_files_that_cannot_be_imported_are_left_out_with_why(tmp_path: Path) -> None:
    """A file is left out if a package is missing. If memstate lacks a name, the file has failed."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.proof.gpu.collecting"]
    command += ["--import-mode=importlib", "--continue-on-collection-errors", "-n", "1"]
    done = ran(*command, "--rootdir", tmp_path, tmp_path, cwd=tmp_path, PYTHONPATH=ROOT, PROOF_RESULTS=results)
    summary = marked.summed_up([json.loads(line) for line in results.read_text().splitlines()])
    assert summary["left_out"] == {
        "test_lacks.py": "No module named 'nowhere'", "test_ends.py": "No module named 'nowhere'",
        "test_skips.py": "no nowhere here",
    }, done.stdout  # fmt: skip
    (failure,) = summary["failures"]
    assert failure.startswith("test_broken.py: ") and "cannot import name 'gone'" in failure
    assert summary["passed"] == 1 and done.returncode == 1


@pytest.mark.proof
@pytest.mark.slow
@on_cpu
def test_the_tests_marked_gpu_are_collected_with_the_packages_of_such_a_machine(tmp_path: Path) -> None:
    """The process seems to have a device, and only the packages of `packages.txt`. Only whole files are left out."""
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.proof.gpu.seeming"]
    command += ["-p", "tests.proof.gpu.collecting", "-m", "gpu", "--collect-only", "tests"]
    given = {"PROOF_RESULTS": results, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1, "PYTEST_ADDOPTS": ""}
    done = ran(*command, without=["TRITON_INTERPRET"], PYTHONPATH=ROOT, **given)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    left_out = {line["left_out"]: line["why"] for line in map(json.loads, results.read_text().splitlines())}
    assert "msgspec" in left_out["tests/events/test_index.py"]
    assert "Transformers 5.17" in left_out["tests/integrations/test_transformers_serve.py"]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert len(collected) > 60 and not collected & left_out.keys()
    assert {"tests/kernels/test_marks.py", "tests/engine/test_graphs.py", "tests/tiers/test_tiers.py"} <= collected


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
