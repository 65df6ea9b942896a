"""Tests counts of `bench launches` against limits, and `bench transformers` at toy sizes beside its peers."""

import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch

from memstate.kernels.dispatch import Backend
from memstate_tools.bench import NAMES, Measured, by_unit, launches, run, suite
from memstate_tools.bench.task import Setting, Task
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

OPS = {"admit", "publish", "release", "step", "plan", "settle", "copy", "hit"}
UNITS = ("launches", "uploads", "syncs", "bytes")


@lru_cache
def measured(backend: str, device: str) -> dict[tuple[str, str, str], float]:
    """Returns (operation, case, unit) -> value; counts are equal in all runs, so the benchmark runs once."""
    return {(e.op, e.case, e.unit): e.value for e in launches(backend, device)}


@pytest.fixture
def counted(backend: Backend) -> dict[tuple[str, str, str], float]:
    return measured(backend.name, str(backend.device))


def test_G2_counts_meet_the_bars_for_1_64_and_256_requests(counted: dict[tuple[str, str, str], float]) -> None:
    # (launches, uploads); a settle that frees lanes sends a packet of releases
    most = {
        "admit": (2, 1), "publish": (1, 1), "release": (1, 1), "step": (2, 1), "hit": (1, 1),
        "plan": (1, 0), "settle": (1, 1), "copy": (1, 0),
    }  # fmt: skip
    for size in (1, 64, 256):
        for op, (launched, uploaded) in most.items():
            case = f"R={size}"
            assert counted[op, case, "launches"] <= launched, (op, case)
            assert counted[op, case, "uploads"] <= uploaded, (op, case)
            assert counted[op, case, "syncs"] == 0, (op, case)
            for unit in ("launches", "uploads"):
                assert counted[op, case, unit] == counted[op, "R=1", unit], (op, case)
        assert counted["step", f"R={size}", "launches"] > 0


@pytest.mark.parametrize("strategy", ["none", "ping-pong", "lazy", "redirect"])
def test_B32_a_boundary_copies_nothing(counted: dict[tuple[str, str, str], float], strategy: str) -> None:
    for op in ("plan", "settle"):
        assert counted[op, f"R=256 {strategy}", "bytes"] == 0
    assert counted["plan", f"R=256 {strategy}", "launches"] == 1
    assert counted["settle", f"R=256 {strategy}", "launches"] == (strategy == "lazy")
    assert counted["copy", "R=256", "bytes"] == 256 * counted["copy", "R=1", "bytes"] > 0


def test_the_command_writes_json_to_stdout_and_nothing_else() -> None:
    entries = not_interpreted("-m", "memstate", "bench", "launches", "--json", "-")
    assert {"op", "case", "value", "unit", "peer", "peer_value", "ratio"} == set(entries[0])
    assert ({e["op"] for e in entries}, {e["unit"] for e in entries}) == (OPS, set(UNITS))
    assert {"R=1", "R=64", "R=256"} <= {e["case"] for e in entries}


def test_table_has_one_line_per_operation_and_case() -> None:
    entries = [Measured("admit", "R=1", value, unit) for value, unit in enumerate(UNITS)]
    row = {"op": "admit", "case": "R=1", "launches": "0", "uploads": "1", "syncs": "2", "bytes": "3 B"}
    assert by_unit(entries) == [row]


CASES = {
    "launches": "R=64 redirect", "host": "R=3 lazy, drafts, 3 due", "alloc": "claim, R=3", "track": "plan, R=2 lazy",
    "copy": "copy, 1 slots of qwen3_next", "state": "gather, R=2", "prefix": "100 nodes, 8 tokens, pages of 1",
    "tiers": "file, 1 x 4 KiB", "transformers": "step, R=2",
}  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes")
@pytest.mark.parametrize("name", NAMES)
def test_one_case_of_every_benchmark_runs_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "transformers":
        pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)  # no process is started
    outcome, case = run([name], "reference", toy=True, peer="device-copy", case=CASES[name]), CASES[name]
    assert outcome.unmeasured == []
    assert all(case.rpartition(", ")[2] in entry.case for entry in outcome.entries)


@pytest.mark.parametrize("case", ["", "one case"])
def test_what_tasks_hold_is_open_until_the_last_has_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = list[str]()

    def course(setting: Setting) -> Iterator[Task]:
        setting.held.callback(happened.append, "closed")
        for name in ("first, one case", "second, one case"):
            yield Task(name, lambda: ", ".join(happened), lambda: [Measured("op", "one case", 1.0, "us")])

    monkeypatch.setitem(suite.COURSES, "tiers", (course,))
    assert run(["tiers"], "reference", toy=True, case=case).unmeasured == []
    assert happened == ["closed"]


# -- beside Transformers --------------------------------------------------------------------------


SIZES = ("", ", 32 M parameters")


@pytest.fixture
def serve() -> Any:
    """The benchmarks beside Transformers, where it is installed."""
    pytest.importorskip("transformers")
    return import_module("memstate_tools.bench.transformers_serve")


def test_steps_and_batches_stand_beside_the_own_cache_and_generate(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not PROOF:  # a tiny model stands in for that of 32 M parameters
        monkeypatch.setattr(serve, "model_on", lambda device, larger, made=serve.model_on: made(device, False))
    outcome = run(["transformers"], "reference", toy=True)
    assert outcome.wrong == []
    compared = {(one.op, one.case, one.peer) for one in outcome.entries if one.peer}
    assert compared == {
        *(("step", f"toy R=2{size}{mode}", "own-cache") for size in SIZES for mode in ("", ", both in inference mode")),
        *(("batch", f"toy R=2, {kind} lengths{size}", "generate") for size in SIZES for kind in ("equal", "mixed")),
    }  # fmt: skip
    for one in outcome.entries:
        assert one.value > 0 and (one.peer is None) == (one.ratio is None), one


def test_other_tokens_are_not_measured(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.ServedSides, "generate", lambda self: [[0] * self.new] * 2)
    checks = {task.name: task.check() for task in serve.tasks(Setting("reference", torch.device("cpu"), toy=True))}
    assert set(checks.values()) == {"serve and generate choose other tokens"}
