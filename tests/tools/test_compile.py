"""Tests the inspector of compiled kernels on samples; test_compile_matrix.py has the library's own kernels.

The process of the tests interprets kernels and cannot compile them. Run as a program, this file compiles the samples
below and writes their reports as JSON.
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton
import triton.language as tl

from memstate.errors import CompileFailed, ConfigurationError
from memstate.kernels.dispatch import OPS
from memstate.kernels.warps import limit
from memstate_tools import compile as compiling
from memstate_tools.arguments import ints
from memstate_tools.calls import CALLS, Call
from memstate_tools.compile import KernelReport, compile_all, compile_elsewhere, known_targets
from memstate_tools.compile.build import build
from tests.support.command import memstate
from tests.support.kernel_runs import not_interpreted

ROOT = Path(__file__).parents[2]
SAMPLED = ("sm_80", "sm_90", "sm_100", "gfx942")


# -- samples ---------------------------------------------------------------------------------------


@triton.jit
def _copy(to_ptr, from_ptr, n):
    for start in range(0, n, 1024):
        index = start + tl.arange(0, 1024)
        tl.store(to_ptr + index, tl.load(from_ptr + index, mask=index < n), mask=index < n)


@triton.jit
def _copy_by_table(table_ptr, out_ptr, ALIGNED: tl.constexpr):
    source = tl.load(table_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    index = tl.arange(0, 1024)
    tl.store(out_ptr + tl.program_id(0) * 1024 + index, tl.load(source + index))


@triton.jit
def _scale(plane_ptr, slot_ptr, factor_ptr):
    index = tl.load(slot_ptr).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(plane_ptr + index, tl.load(plane_ptr + index) * tl.load(factor_ptr + tl.program_id(0)))


@triton.jit
def _lost_trail(plane_ptr):
    lane = tl.arange(0, 256)
    address = tl.sum(tl.where(lane == 7, plane_ptr.to(tl.int64), 0), 0)  # the sum goes through shared memory
    narrow = tl.load(address.to(tl.pointer_type(tl.int32)))
    index = tl.arange(0, 1024)
    tl.store(plane_ptr + index, tl.load(plane_ptr + index) + narrow)


@triton.jit
def _two_phases(data_ptr, BARRIER: tl.constexpr):
    lane = tl.arange(0, 256)
    tl.store(data_ptr + lane, lane)
    if BARRIER:
        tl.debug_barrier()
    tl.store(data_ptr + 256 + lane, tl.load(data_ptr + 255 - lane))


@triton.jit
def _hoard(plane_ptr):
    index = tl.arange(0, 4096)
    held = tl.load(plane_ptr + index)
    tl.store(plane_ptr + index, held / tl.sum(held, 0))  # registers hold all elements until the sum is known


@triton.jit
def _broken(out_ptr, N: tl.constexpr):
    for _ in tl.static_range(2):
        N = N + 1  # only the interpreter accepts this
    tl.store(out_ptr, undefined)  # noqa: F821


def samples() -> list[Call]:
    """Returns launches of the kernels above; the name of a call says what is wrong with it."""
    to, of, n = ints(1024), ints(1024), 1024
    table, out = torch.zeros(16, dtype=torch.int64), ints(1024)
    plane, factor = torch.zeros(1024), torch.zeros(4)

    def few_registers() -> dict[str, int]:
        return limit({"maxnreg": 64}) or {"waves_per_eu": 8}

    return [
        Call("copy", lambda _: _copy[(1,)](to, of, n), (to, of)),
        Call("copy: nothing aligned", lambda _: _copy[(1,)](to[1:], of[1:], n), (to, of)),
        Call("copy: length of any size", lambda _: _copy[(1,)](to, of, n - 1), (to, of)),
        Call("table", lambda _: _copy_by_table[(1,)](table, out, True), (table,)),
        Call("table: not aligned", lambda _: _copy_by_table[(1,)](table, out, False), (table,)),
        Call("scale", lambda _: _scale[(1,)](plane, ints(1), factor), (plane,)),
        Call("scale: factors are planes", lambda _: _scale[(1,)](plane, ints(1), factor), (plane, factor)),
        Call("scale: no such plane", lambda _: _scale[(1,)](plane, ints(1), factor), (table,)),
        Call("lost trail", lambda _: _lost_trail[(1,)](to), (to,)),
        Call("phases", lambda _: _two_phases[(1,)](to, True)),
        Call("phases: barrier lost", lambda _: _two_phases[(1,)](to, False)),
        Call("hoard", lambda _: _hoard[(1,)](plane, num_warps=1), (plane,)),
        Call("hoard on four warps", lambda _: _hoard[(1,)](plane), (plane,)),
        Call("hoard: few registers", lambda _: _hoard[(1,)](plane, num_warps=1, **few_registers()), (plane,)),
    ]


def main() -> None:
    """Writes the reports of the samples, and the failure of the broken kernel."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr):
        reports = [asdict(build(call, target)) for call in samples() for target in SAMPLED]
        try:
            build(Call("broken", lambda _: _broken[(1,)](ints(4), 1)), "sm_90")
            failure = {}
        except CompileFailed as error:
            failure = {"kernel": error.kernel, "target": error.target, "reason": error.reason}
    json.dump({"reports": reports, "failure": failure}, lines)


def test_every_operation_has_calls() -> None:
    assert list(CALLS) == list(OPS), "a new operation needs its calls in tools/memstate_tools/calls.py"


# -- faults that the inspector notices -------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    results: dict[str, Any] = not_interpreted(__file__)
    results["reports"] = {(report["kernel"], report["target"]): KernelReport(**report) for report in results["reports"]}
    return results


each_target = pytest.mark.parametrize("target", SAMPLED)


@each_target
def test_wide_copies_are_ok(compiled: dict[str, Any], target: str) -> None:
    for name in ("copy", "table", "scale", "hoard"):
        report = compiled["reports"][name, target]
        assert (report.narrowest_bulk_access_bits, report.spill_bytes, report.ok) == (128, 0, True), report
        assert 0 < report.registers < 256


@each_target
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("copy: nothing aligned", 32), ("copy: length of any size", 32), ("table: not aligned", 32),
        ("scale: factors are planes", 32), ("lost trail", 32),
        ("scale: no such plane", None),  # a plane that is never accessed is no evidence
    ],
)  # fmt: skip
def test_lost_width_is_noticed(compiled: dict[str, Any], name: str, bits: int | None, target: str) -> None:
    report = compiled["reports"][name, target]
    assert (report.narrowest_bulk_access_bits, report.ok) == (bits, False), report


@each_target
def test_a_lost_barrier_is_noticed(compiled: dict[str, Any], target: str) -> None:
    kept, lost = (compiled["reports"][name, target] for name in ("phases", "phases: barrier lost"))
    assert (kept.barriers, lost.barriers) == (1, 0)
    assert (kept.source_barriers, lost.source_barriers) == (1, 0)
    assert kept.narrowest_bulk_access_bits is None and kept.ok


@each_target
def test_barriers_of_the_compiler_are_not_of_the_source(compiled: dict[str, Any], target: str) -> None:
    report = compiled["reports"]["hoard on four warps", target]  # the sum in this kernel goes through shared memory
    assert report.barriers > 0 and report.source_barriers == 0, report


@each_target
def test_spills_are_noticed(compiled: dict[str, Any], target: str) -> None:
    report = compiled["reports"]["hoard: few registers", target]
    assert report.spill_bytes > 0 and not report.ok, report
    assert report.narrowest_bulk_access_bits == 128  # spills do not count as accesses of the plane


def test_a_kernel_that_does_not_compile_is_named(compiled: dict[str, Any]) -> None:
    assert compiled["failure"]["kernel"] == "broken" and compiled["failure"]["target"] == "sm_90"
    assert len(compiled["failure"]["reason"].splitlines()) == 1


# -- failures --------------------------------------------------------------------------------------


def test_a_target_that_triton_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KernelReport("plan", "sm_90", 40, 0, 0, None, 20, True)
    for reports, status, left in (([known], 0, "gfx950"), ([], 1, "sm_90, gfx950")):
        monkeypatch.setattr(compiling, "compile_all", lambda *_, made=reports: made)
        done = memstate("compile", "--targets", "sm_90,gfx950", "--json", "-")
        assert done.status == status and f"does not know them: {left}" in done.err


def test_only_targets_that_compile_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_of(_: object, target: str) -> Mock:
        if target == "gfx950":
            raise RuntimeError("no such processor")
        return Mock()

    monkeypatch.setattr(sys.modules["memstate_tools.compile.build"], "launch_of", launch_of)
    assert known_targets(["sm_90", "gfx950", "sm_80"]) == ["sm_90", "sm_80"]


def test_a_failure_in_the_other_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/no/folder")
    with pytest.raises(ConfigurationError, match=r"Triton cannot .*/dev/null.*; TRITON_CACHE_DIR names another folder"):
        compile_all(["sm_90"])

    failed = {"failed": {"kernel": "claim 32", "target": "sm_90", "reason": "too large"}}
    with monkeypatch.context() as patch, pytest.raises(CompileFailed, match=r"^claim 32 for sm_90: too large$"):
        patch.setattr("memstate_tools.compile.run_module", lambda *given, **more: iter([failed]))
        compile_all(["sm_90"])

    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CompileFailed, match="every kernel for sm_90: exit status 1"):
        compile_all(["sm_90"])


def test_another_triton_is_the_one_that_compiles(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('the other Triton')")
    with pytest.raises(CompileFailed, match=r"for sm_90: .*the other Triton"):
        compile_elsewhere(["sm_90"], triton=tmp_path)


if __name__ == "__main__":
    main()
