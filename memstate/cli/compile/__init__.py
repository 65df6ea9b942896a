"""Compiles every kernel for every target without a GPU, and reports registers, spills and access widths.

Kernels that are interpreted in this process cannot be compiled in it: then a second process compiles them.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from memstate.cli.compile.build import TARGETS, build
from memstate.cli.compile.report import KernelReport
from memstate.errors import CompileFailed, ConfigurationError, InvalidArgument
from memstate.kernels.catalog import CompileCase, all_cases

__all__ = ["TARGETS", "KernelReport", "compile_all", "compile_cases", "compile_elsewhere"]

Progress = Callable[[int, int], None]


def compile_all(targets: Sequence[str] = tuple(TARGETS), progress: Progress | None = None) -> list[KernelReport]:
    """Compiles every kernel of the library for every target: one report each, kernel by kernel.

    progress: called with (done, total) after each. Syncs: no.
    Raises: InvalidArgument for an unknown target, ConfigurationError without Triton, CompileFailed.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise InvalidArgument(f"targets {', '.join(unknown) or 'missing'}: choose from {', '.join(TARGETS)}")
    if find_spec("triton") is None:
        raise ConfigurationError("compiling kernels needs Triton, which is not installed; it exists for Linux only")
    from triton import knobs

    if knobs.runtime.interpret:
        return compile_elsewhere(targets, progress)
    return compile_cases(all_cases(), targets, progress)


def compile_cases(
    cases: Sequence[CompileCase], targets: Sequence[str], progress: Progress | None = None
) -> list[KernelReport]:
    """Compiles given cases in this process, whose kernels must not be interpreted. Raises: CompileFailed."""
    reports: list[KernelReport] = []
    for case in cases:
        for target in targets:
            reports.append(build(case, target))
            if progress is not None:
                progress(len(reports), len(cases) * len(targets))
    return reports


def compile_elsewhere(
    targets: Sequence[str], progress: Progress | None = None, triton: Path | None = None
) -> list[KernelReport]:
    """Compiles every kernel of the library in a process of its own, `python -m memstate.cli.compile`.

    triton: a folder with the Triton to use instead of the installed one, as `pip install --target` makes it.
    progress: called with (done, total) after each. Syncs: no. Raises: CompileFailed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(triton or ""), str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", "memstate.cli.compile", *targets]
    reports: list[KernelReport] = []
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment) as child,
    ):
        assert child.stdout is not None  # for the type checker: it is a pipe
        for line in child.stdout:
            message = json.loads(line)
            if "failed" in message:
                raise CompileFailed(**message["failed"])
            reports.append(KernelReport(**message["report"]))
            if progress is not None:
                progress(message["done"], message["total"])
        if child.wait():
            complaints.seek(0)
            reason = complaints.read().strip().rpartition("\n")[2] or f"exit status {child.returncode}"
            raise CompileFailed("every kernel", ", ".join(targets), reason)
    return reports
