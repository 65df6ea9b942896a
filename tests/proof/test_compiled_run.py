"""Tests what `make compiled` prints and when it fails. No kernel runs here."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memstate.kernels.dispatch import OPS
from tests.proof import compiled_run
from tests.proof.compiled_run import ORDERS, main
from tests.support.compiled_runs import Told, count_ops

CALLS = [("together", "tests", "tests/kernels"), *((order, "programs", "500") for order in ORDERS)]
EACH = {"kernels": {"_claim": 7, "_plan": 2}, "ops": Counter(list(OPS)), "seconds": 9.6}


def told(monkeypatch: pytest.MonkeyPatch, first: Told, others: Told) -> list[tuple[object, ...]]:
    """Lets the run of tests tell `first`, and those of random programs `others`. Returns the list of their calls."""
    calls: list[tuple[object, ...]] = []

    def run(*arguments: str, variables: dict[str, str]) -> Told:
        calls.append((*arguments, variables["PYTHONPATH"]))
        return first if arguments[1] == "tests" else others

    monkeypatch.setattr(compiled_run, "run", run)
    return calls


def test_each_version_runs_the_tests_and_programs_in_every_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", "there")
    monkeypatch.setattr(compiled_run, "folder_of", lambda version: Path("/3.6") if version == "3.6.0" else None)
    calls = told(monkeypatch, Told(800, skipped=3, **EACH), Told(500, **EACH))
    assert main(["3.6.0", "3.7.1", "3.6.0", "--workers", "1"]) == 0
    assert calls == [(*call, "/3.6:there") for call in CALLS] + [(*call, "there") for call in CALLS]
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "Triton 3.6.0: together: 800 tests passed, 0 failed, 3 skipped, 9 launches of 2 kernels, 10 CPU s",
        "Triton 3.6.0: together: 500 operations, 0 differences, 9 launches of 2 kernels, 10 CPU s",
    ]
    assert lines[5] == f"Triton 3.6.0: 48 CPU s, {len(OPS)} of {len(OPS)} ops launched" and len(lines) == 12


@pytest.mark.parametrize(
    ("tests", "programs", "line"),
    [
        ({"failed": ["test_plan (call)"]}, {}, "together: test_plan (call)"),
        ({}, {"failed": ["seed 3: no slot"]}, "backwards: seed 3: no slot"),
        ({"passed": 0}, {}, "together: 0 tests passed, 0 failed"),
        ({}, {"passed": 0}, "warps: 0 operations, 0 differences"),
        ({"ops": Counter(["plan"])}, {"ops": Counter([*OPS][:-2])}, f"never launched: {', '.join([*OPS][-2:])}"),
    ],
    ids=["a test fails", "a program differs", "no test", "no program", "an op is missing"],
)
def test_what_fails_is_named_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tests: dict[str, Any], programs: dict[str, Any], line: str,
) -> None:  # fmt: skip
    told(monkeypatch, Told(**{"passed": 800, **EACH, **tests}), Told(**{"passed": 500, **EACH, **programs}))
    assert main(["installed"]) == 1
    assert line in capsys.readouterr().out


def test_an_op_counts_only_if_a_kernel_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty batch launches nothing, so a call alone proves nothing."""
    from memstate.kernels.reference import gather, scatter

    launched, ops = Counter[str](), Counter[str]()
    for module, name in ((gather, "gather_slots"), (scatter, "scatter_slots")):
        monkeypatch.setattr(module, name, lambda name: launched.update([name] if name else []))
    monkeypatch.setattr(
        "tests.support.compiled_runs.OPS", {"gather_slots": "reference.gather", "scatter_slots": "reference.scatter"}
    )
    count_ops(ops, launched)
    gather.gather_slots("_gather_slots"), gather.gather_slots(""), scatter.scatter_slots("")
    assert +ops == {"gather_slots": 1}
