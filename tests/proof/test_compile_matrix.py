"""Tests that memstate's kernels compile without faults and as recorded, and tests the comparison itself.

The test process interprets kernels, and cannot compile them. So the tests run this file as a program, which compiles
the first call of each op for one target, and writes the reports as JSON.
"""

import json
import os
import random
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from memstate.errors import CompileFailed
from memstate_tools.calls import CALLS, Call, all_calls
from memstate_tools.compile import TARGETS, KernelReport, compile_all, compile_calls
from tests.proof import compile_matrix
from tests.proof.compile_matrix import (
    FIGURES,
    INSTALLED,
    RECORDS,
    advice,
    differences,
    faults,
    figures,
    main,
    path_of,
    read,
    text_of,
)
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

KEYS = (
    "kernel", "target", "registers", "spill_bytes", "shared_bytes", "narrowest_bulk_access_bits", "barriers", "ok",
    "source_barriers", "dependent_loads", "instructions", "bytes_in_flight",
    "instructions_folded", "instructions_verified",
)  # fmt: skip
MOVERS = {
    "copy_slots", "zero_slots", "run_data", "run_rows", "conv_step", "gated_delta_step", "selective_step",
    "conv_delta_step", "mamba3_step", "gather_slots", "scatter_slots", "scatter_states",
    "pack_slots", "unpack_slots", "pack_int8", "unpack_int8", "keep_path",
}  # fmt: skip

SHAPES = 200  # number of rare shapes that one run compiles

# kernel -> number of barriers in its source. A kernel needs barriers if one of its phases reads what another has
# written, or stores words by which warps decide. Kernels that are not named have none. On AMD, a program of one warp
# needs no barrier.
SOURCE_BARRIERS = {
    "ownership": 9, "claim": 2, "audit": 2,
    **{f"plan[{how}]": 3 for how in ("ping-pong", "lazy", "redirect")},
    **{f"plan_tails[{how}]": 5 for how in ("ping-pong", "lazy", "redirect")},
    "plan[none]": 1, "plan_tails[none]": 3,
    **{f"mamba3_step_{how}": 1 for how in ("fp32", "fp32_marks", "bf16")},
    **{call.name: 1 for call in all_calls() if call.name.startswith("gated_delta") and call.name.endswith("_tree")},
}  # fmt: skip


# -- memstate's kernels -------------------------------------------------------------------------


def barriers_of(report: KernelReport) -> int:
    """Returns the number of barriers that a compiled kernel must have because of its source."""
    name, _, lanes = report.kernel.partition(" ")
    return 0 if report.target.startswith("gfx") and lanes == "32" else SOURCE_BARRIERS.get(name, 0)


def one_of_each() -> list[Call]:
    """Returns the first call of every op. Of plans, returns the first one of each strategy."""
    first: dict[tuple[str, str], Call] = {}
    for op, calls in CALLS.items():
        for call in calls():
            if not call.rare:
                first.setdefault((op, call.name.partition("[")[2].partition("]")[0]), call)
    return list(first.values())


@pytest.mark.slow
def test_every_kernel_is_ok_and_as_recorded() -> None:
    """One test compiles all kernels, because this takes long. Only full runs compile all calls for all targets."""
    told: list[tuple[int, int]] = []
    before, calls, targets = dict(os.environ), all_calls(), tuple(TARGETS)
    if PROOF:
        reports = compile_all(targets, lambda done, total: told.append((done, total)))
        assert told == [(number + 1, len(reports)) for number in range(len(reports))]
    else:
        calls, targets = one_of_each(), ("sm_90",)
        reports = [KernelReport(**report) for report in not_interpreted(__file__)]
    assert [(report.kernel, report.target) for report in reports] == [(c.name, t) for c in calls for t in targets]
    assert len({call.name for call in all_calls()}) == len(all_calls()), "a record has one line per name and target"
    assert [field.name for field in fields(KernelReport)] == list(KEYS)
    for call in all_calls():
        moves = any(call.name.startswith(mover) for mover in MOVERS)
        narrow = "_int8" in call.name and "step" in call.name  # a lane may move 4 or 8 bytes of int8
        assert bool(call.planes) == moves or narrow, call.name
    assert dict(os.environ) == before

    assert faults(INSTALLED, reports) == []
    assert [
        (report.kernel, report.target, report.source_barriers)
        for report in reports
        if report.source_barriers != barriers_of(report)
    ] == []
    recorded = read(INSTALLED)
    if recorded is None:
        pytest.skip(
            f"nothing is recorded for Triton {INSTALLED}: python -m tests.proof.compile_matrix installed --record"
        )
    if not PROOF:
        compiled = {(report.kernel, report.target) for report in reports}
        recorded = {key: row for key, row in recorded.items() if key in compiled}
    lines = differences(INSTALLED, recorded, figures(reports))
    assert not lines, "\n".join([f"{len(lines)} differences", *lines, advice(INSTALLED)])


@pytest.mark.slow
@pytest.mark.proof
def test_no_shape_that_can_be_launched_spills() -> None:
    """Compiles random shapes for a random target. All shapes, more than two thousand, would take hours."""
    reports = [KernelReport(**report) for report in not_interpreted(__file__, str(random.randrange(10**6)))]
    assert len(reports) == SHAPES
    assert faults(INSTALLED, reports) == []


def shapes(seed: str) -> list[KernelReport]:
    """Returns reports on random rare shapes, compiled for a random target."""
    chance = random.Random(seed)
    rare = [call for call in all_calls(every_shape=True) if call.rare]
    return compile_calls(chance.sample(rare, SHAPES), [chance.choice(list(TARGETS))])


def test_records_are_written_as_the_program_writes_them() -> None:
    paths = sorted(RECORDS.glob("*"))
    records = {path.stem.removeprefix("triton-"): read(path.stem.removeprefix("triton-")) for path in paths}
    assert set(records) >= {"3.6.0", "3.7.1", "3.9.0"} and None not in records.values()
    for version, record in records.items():
        assert record is not None
        assert path_of(version).read_text() == text_of(record)
        assert list(record) == sorted(record, key=lambda key: (key[0], list(TARGETS).index(key[1])))
        assert all(tuple(row) == tuple(FIGURES) for row in record.values())
        assert {target for _, target in record} == set(TARGETS)


# -- records with a changed figure -------------------------------------------------------------------

SOUND = KernelReport("copy_slots", "sm_90", 72, 0, 32, 128, 8, True, 1, 2, 700, 8192)
OTHER = KernelReport("plan", "sm_90", 40, 0, 0, None, 20, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"registers": 64}, None),
        ({"registers": 81}, "registers 81, recorded 72"),
        ({"spill_bytes": 8}, "spill_bytes 8, recorded 0"),
        ({"narrowest_bulk_access_bits": None}, "narrowest_bulk_access_bits none, recorded 128"),
        ({"barriers": 7}, "barriers 7, recorded 8"),
        ({"instructions": 708}, None),
        ({"instructions": 709}, "instructions 709, recorded 700"),
        ({"bytes_in_flight": 8064}, "bytes_in_flight 8064, recorded 8192"),
    ],
)
def test_a_figure_that_changed_is_a_line(changes: dict[str, Any], said: str | None) -> None:
    compiled = figures([replace(SOUND, **changes), OTHER])
    lines = [f"Triton 3.7.1: copy_slots on sm_90: {said}"] if said else []
    assert differences("3.7.1", figures([SOUND, OTHER]), compiled) == lines


def test_kernels_that_are_on_one_side_only_are_lines() -> None:
    new = replace(OTHER, target="gfx942")
    assert differences("3.7.1", figures([SOUND, OTHER]), figures([SOUND, new])) == [
        "Triton 3.7.1: plan on sm_90: recorded, but there is no such kernel any more",
        "Triton 3.7.1: plan on gfx942: a new kernel, which is not recorded",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spill_bytes": 8}, ["spill_bytes 8, must be 0"]),
        ({"narrowest_bulk_access_bits": None}, ["narrowest_bulk_access_bits none, must be 128"]),
        (
            {"spill_bytes": 8, "narrowest_bulk_access_bits": 64},
            ["spill_bytes 8, must be 0", "narrowest_bulk_access_bits 64, must be 128"],
        ),
    ],
)
def test_faults_are_lines(changes: dict[str, Any], said: list[str]) -> None:
    bad = replace(SOUND, **changes, ok=False)
    assert faults("3.9.0", [bad, OTHER]) == [f"Triton 3.9.0: copy_slots on sm_90: {line}" for line in said]
    assert faults("3.9.0", [SOUND, OTHER]) == []


# -- the program -----------------------------------------------------------------------------------


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[KernelReport]:
    """Made-up reports in place of those of compiled kernels."""
    stand_ins = [SOUND, OTHER]
    monkeypatch.setattr(compile_matrix, "RECORDS", tmp_path)
    monkeypatch.setattr(compile_matrix, "compile_elsewhere", lambda targets, progress, triton, only: list(stand_ins))
    return stand_ins


def test_program_records_and_compares(reports: list[KernelReport], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["installed"]) == 1
    assert capsys.readouterr().out == f"Triton {INSTALLED}: nothing is recorded. {advice(INSTALLED)}\n"
    assert main([INSTALLED, "installed", "--record"]) == 0
    assert capsys.readouterr().out == f"Triton {INSTALLED}: recorded\n"
    assert main(["installed"]) == 0
    assert capsys.readouterr().out == f"Triton {INSTALLED}: as recorded\n"
    reports[:] = [replace(SOUND, barriers=7)]
    assert main(["installed"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"Triton {INSTALLED}: copy_slots on sm_90: barriers 7, recorded 8",
        f"Triton {INSTALLED}: plan on sm_90: recorded, but there is no such kernel any more",
        advice(INSTALLED),
    ]


def test_recording_a_fault_does_not_excuse_it(
    reports: list[KernelReport], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports[:] = [replace(SOUND, spill_bytes=8, ok=False)]
    for arguments in (["installed", "--record"], ["installed"]):
        assert main(arguments) == 1
        assert capsys.readouterr().out == f"Triton {INSTALLED}: copy_slots on sm_90: spill_bytes 8, must be 0\n"
    failed = Mock(side_effect=CompileFailed("plan", "sm_80", "no such thing"))
    monkeypatch.setattr(compile_matrix, "compile_elsewhere", failed)
    assert main(["installed", "--record"]) == 1
    assert capsys.readouterr().out == f"Triton {INSTALLED}: plan for sm_80: no such thing\n"


if __name__ == "__main__":
    made = shapes(*sys.argv[1:]) if sys.argv[1:] else compile_calls(one_of_each(), ["sm_90"])
    json.dump(list(map(asdict, made)), sys.stdout)
