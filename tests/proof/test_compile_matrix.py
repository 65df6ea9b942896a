"""The library's kernels as the installed Triton compiles them: in order, and as recorded. What the comparison says."""

import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from memstate.cli.compile import TARGETS, KernelReport, compile_all
from memstate.errors import CompileFailed
from memstate.kernels.catalog import all_cases
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
from tests.support.sampling import PROOF

KEYS = (
    "kernel", "target", "registers", "spill_bytes", "shared_bytes", "narrowest_bulk_access_bits", "barriers", "ok",
    "source_barriers", "dependent_loads",
)  # fmt: skip
MOVERS = {
    "copy_slots", "zero_slots", "run_data", "conv_step", "gated_delta_step", "selective_step",
    "gather_slots", "scatter_slots", "scatter_accepted", "scatter_inputs", "scatter_states",
    "pack_slots", "unpack_slots", "pack_int8", "unpack_int8",
}  # fmt: skip

# Barriers that stand in the source: one phase reads what another wrote, or stores what warps decide by. Every other
# kernel has none; nor does gfx942 need them where the program is one warp.
SOURCE_BARRIERS = {
    "ownership": 8, "claim": 2, "audit": 2,
    **{f"{op}[{how}]": 3 for op in ("plan", "accept") for how in ("ping-pong", "lazy", "redirect")},
    "plan[none]": 1, "accept[none]": 1, "plan[window]": 1,
}  # fmt: skip


# -- the library's kernels -------------------------------------------------------------------------


def barriers_of(report: KernelReport) -> int:
    """Barriers of the source that its compiled text has to have."""
    name, _, lanes = report.kernel.partition(" ")
    return 0 if report.target == "gfx942" and lanes == "32" else SOURCE_BARRIERS.get(name, 0)


@pytest.mark.slow
def test_every_kernel_is_ok_and_as_recorded() -> None:
    """One test, because all kernels are compiled for it; for one target outside of full runs."""
    calls: list[tuple[int, int]] = []
    before, targets = dict(os.environ), tuple(TARGETS) if PROOF else ("sm_90",)
    reports = compile_all(targets, lambda done, total: calls.append((done, total)))

    cases = all_cases()
    assert [(report.kernel, report.target) for report in reports] == [(c.name, t) for c in cases for t in targets]
    assert len({case.name for case in cases}) == len(cases), "a record has one line per name and target"
    assert [field.name for field in fields(KernelReport)] == list(KEYS)
    for case in cases:
        moves = any(case.name.startswith(mover) for mover in MOVERS)
        assert bool(case.plane_args) == moves, case.name
    assert calls == [(number + 1, len(reports)) for number in range(len(reports))]
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
    recorded = {(kernel, target): row for (kernel, target), row in recorded.items() if target in targets}
    found = differences(INSTALLED, recorded, figures(reports))
    assert not found, "\n".join([f"{len(found)} differences", *found, advice(INSTALLED)])


@pytest.mark.slow
@pytest.mark.proof
def test_no_shape_that_can_be_launched_spills() -> None:
    """All of them, for all targets: more than a thousand cases."""
    reports = compile_all(every_shape=True)
    assert len(reports) == len(all_cases(every_shape=True)) * len(TARGETS)
    assert faults(INSTALLED, reports) == []


def test_a_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in all_cases(every_shape=True)]
    assert len(set(names)) == len(names)


def test_records_are_written_as_the_program_writes_them() -> None:
    """Sorted, a line for each kernel and target."""
    paths = sorted(RECORDS.glob("*"))
    records = {path.stem.removeprefix("triton-"): read(path.stem.removeprefix("triton-")) for path in paths}
    assert set(records) >= {"3.6.0", "3.7.1", "3.9.0"} and None not in records.values()
    for version, record in records.items():
        assert record is not None
        assert path_of(version).read_text() == text_of(record)
        assert list(record) == sorted(record, key=lambda key: (key[0], list(TARGETS).index(key[1])))
        assert all(tuple(row) == tuple(FIGURES) for row in record.values())
        assert {target for _, target in record} == set(TARGETS)


# -- what a doctored record says -------------------------------------------------------------------

SOUND = KernelReport("copy_slots", "sm_90", 72, 0, 32, 128, 8, True, 1, 2)
OTHER = KernelReport("plan", "sm_90", 40, 0, 0, None, 20, True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"registers": 80}, None),
        ({"registers": 64}, None),
        ({"registers": 81}, "registers 81, recorded 72"),
        ({"registers": 63}, "registers 63, recorded 72"),
        ({"spill_bytes": 8}, "spill_bytes 8, recorded 0"),
        ({"shared_bytes": 33}, "shared_bytes 33, recorded 32"),
        ({"narrowest_bulk_access_bits": 64}, "narrowest_bulk_access_bits 64, recorded 128"),
        ({"narrowest_bulk_access_bits": 256}, "narrowest_bulk_access_bits 256, recorded 128"),
        ({"narrowest_bulk_access_bits": None}, "narrowest_bulk_access_bits none, recorded 128"),
        ({"barriers": 7}, "barriers 7, recorded 8"),
        ({"barriers": 9}, "barriers 9, recorded 8"),
        ({"source_barriers": 0}, "source_barriers 0, recorded 1"),
        ({"dependent_loads": 3}, "dependent_loads 3, recorded 2"),
    ],
)
def test_a_figure_that_changed_is_a_line(changes: dict[str, Any], said: str | None) -> None:
    found = figures([replace(SOUND, **changes), OTHER])
    lines = [f"Triton 3.7.1: copy_slots on sm_90: {said}"] if said else []
    assert differences("3.7.1", figures([SOUND, OTHER]), found) == lines


def test_kernels_that_are_on_one_side_only_are_lines() -> None:
    new = replace(OTHER, target="gfx942")
    assert differences("3.7.1", figures([SOUND, OTHER]), figures([SOUND, new])) == [
        "Triton 3.7.1: plan on sm_90: recorded, but there is no such kernel any more",
        "Triton 3.7.1: plan on gfx942: a new kernel, which is not recorded",
    ]


def test_planes_that_appear_where_none_were_are_a_line() -> None:
    found = figures([replace(OTHER, narrowest_bulk_access_bits=128)])
    assert differences("3.7.1", figures([OTHER]), found) == [
        "Triton 3.7.1: plan on sm_90: narrowest_bulk_access_bits 128, recorded none"
    ]


def test_a_figure_that_a_record_lacks_is_a_line() -> None:
    recorded = figures([OTHER])
    del recorded["plan", "sm_90"]["source_barriers"]
    assert differences("3.7.1", recorded, figures([OTHER])) == [
        "Triton 3.7.1: plan on sm_90: source_barriers 0, recorded none"
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spill_bytes": 8}, ["spill_bytes 8, must be 0"]),
        ({"narrowest_bulk_access_bits": 32}, ["narrowest_bulk_access_bits 32, must be 128"]),
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


class Compiler:
    """In place of compiling: what comes out for a version, or does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.reports: list[KernelReport] | CompileFailed = [SOUND, OTHER]
        monkeypatch.setattr(compile_matrix, "RECORDS", folder / "compiled")
        monkeypatch.setattr(compile_matrix, "TRITONS", folder / "triton")
        monkeypatch.setattr(compile_matrix, "compile_elsewhere", self)

    def __call__(self, targets: Sequence[str], progress: Any, triton: Path | None) -> list[KernelReport]:
        assert tuple(targets) == tuple(TARGETS) and (triton is None or triton.is_dir())
        if isinstance(self.reports, CompileFailed):
            raise self.reports
        for done in range(len(self.reports)):
            progress(done + 1, len(self.reports))
        return self.reports


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    return Compiler(monkeypatch, tmp_path)


def test_program_records_and_compares(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["installed"]) == 1
    assert capsys.readouterr().out == f"Triton {INSTALLED}: nothing is recorded. {advice(INSTALLED)}\n"
    assert main([INSTALLED, "installed", "--record"]) == 0
    assert capsys.readouterr().out == f"Triton {INSTALLED}: recorded\n"
    assert path_of(INSTALLED).read_text().count("\n") == 4
    assert main(["installed"]) == 0
    said = capsys.readouterr()
    assert said.out == f"Triton {INSTALLED}: as recorded\n" and said.err.endswith("2 of 2 compiled\n")

    compiler.reports = [replace(SOUND, barriers=7)]
    assert main(["installed"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"Triton {INSTALLED}: copy_slots on sm_90: barriers 7, recorded 8",
        f"Triton {INSTALLED}: plan on sm_90: recorded, but there is no such kernel any more",
        advice(INSTALLED),
    ]


def test_recording_a_fault_does_not_excuse_it(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    compiler.reports = [replace(SOUND, spill_bytes=8, ok=False)]
    for arguments in (["installed", "--record"], ["installed"]):
        assert main(arguments) == 1
        assert capsys.readouterr().out == f"Triton {INSTALLED}: copy_slots on sm_90: spill_bytes 8, must be 0\n"


def test_what_does_not_compile_is_a_line(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    compiler.reports = CompileFailed("plan", "sm_80", "no such thing")
    assert main(["installed"]) == 1
    assert capsys.readouterr().out == f"Triton {INSTALLED}: plan for sm_80: no such thing\n"


def test_other_versions_come_from_their_folder(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def pip(*arguments: str, failing: str) -> str:
        asked.append(arguments[0])
        if arguments[0] == "install":
            Path(arguments[arguments.index("--target") + 1]).mkdir()
        return "triton (99.1)\nAvailable versions: 99.1, 3.6.0\n"

    monkeypatch.setattr(compile_matrix, "_pip", pip)
    assert main(["newest", "--record"]) == 0 and main(["newest"]) == 0
    assert asked == ["index", "install", "index"]  # installed once
    assert [path.name for path in compile_matrix.TRITONS.iterdir()] == ["99.1"]
    assert capsys.readouterr().out == "Triton 99.1: recorded\nTriton 99.1: as recorded\n"


def test_without_pip_the_program_says_so(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for version, said in (("newest", "ask for the newest Triton"), ("99.1", "install Triton 99.1")):
        with pytest.raises(SystemExit, match=f"^cannot {said}: exit status 1$"):
            main([version])
    assert list(compile_matrix.TRITONS.iterdir()) == []
