"""Compiles every kernel for every target without a GPU, and reports registers, spills and access widths.

If this process interprets kernels, a second process compiles them.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from memstate.errors import CompileFailed, ConfigurationError, InvalidArgument
from memstate_tools.calls import Call, all_calls
from memstate_tools.compile.build import KernelReport, build, known_targets
from memstate_tools.launches import TARGETS
from memstate_tools.worker import WorkerFailed, run_module

__all__ = ["TARGETS", "KernelReport", "compile_all", "compile_calls", "compile_elsewhere"]

Progress = Callable[[int, int], None]


def compile_all(
    targets: Sequence[str] = tuple(TARGETS), progress: Progress | None = None, every_shape: bool = False
) -> list[KernelReport]:
    """Compiles every kernel of the library for every target.

    Args:
        targets: Names in `TARGETS`. Names that the installed Triton does not know are left out.
        progress: Called with (done, total) after each report.
        every_shape: Whether to compile every shape that can be launched; otherwise only the common ones.

    Returns:
        One report for each kernel and target, kernel by kernel.

    Raises:
        InvalidArgument: A target is unknown.
        ConfigurationError: Triton is not installed.
        CompileFailed: A kernel does not compile.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise InvalidArgument(f"targets {', '.join(unknown) or 'missing'}: choose from {', '.join(TARGETS)}")
    if find_spec("triton") is None:
        raise ConfigurationError("compiling kernels needs Triton, which is not installed; it exists for Linux only")
    from triton import knobs

    if knobs.runtime.interpret:
        return compile_elsewhere(targets, progress, every_shape=every_shape)
    return compile_calls(all_calls(every_shape), known_targets(targets), progress)


def compile_calls(
    calls: Sequence[Call], targets: Sequence[str], progress: Progress | None = None
) -> list[KernelReport]:  # fmt: skip
    """Compiles the launches of calls in this process, which must not interpret kernels.

    Raises:
        CompileFailed: A kernel does not compile.
    """
    reports: list[KernelReport] = []
    for call in calls:
        for target in targets:
            reports.append(build(call, target))
            if progress is not None:
                progress(len(reports), len(calls) * len(targets))
    return reports


def compile_elsewhere(
    targets: Sequence[str],
    progress: Progress | None = None,
    triton: Path | None = None,
    every_shape: bool = False,
    only: str = "",
) -> list[KernelReport]:
    """Compiles every kernel of the library in a second process, `python -m memstate_tools.compile`.

    Args:
        targets: Names in `TARGETS`.
        progress: Called with (done, total) after each report.
        triton: A folder with the Triton to use, as `pip install --target` makes it. Default: the installed one.
        every_shape: Whether to compile every shape that can be launched; otherwise only the common ones.
        only: Compile only kernels whose names contain this text.

    Raises:
        CompileFailed: A kernel does not compile, or the process failed.
        ConfigurationError: Triton cannot write its cache.
    """
    reports: list[KernelReport] = []
    shapes = (f"--only={only}", *(("--every-shape",) if every_shape else ()))
    try:
        for message in run_module("memstate_tools.compile", *targets, *shapes, interpret=False, path=triton):
            if "failed" in message:
                raise CompileFailed(**message["failed"])
            if "refused" in message:
                raise ConfigurationError(message["refused"])
            reports.append(KernelReport(**message["report"]))
            if progress is not None:
                progress(len(reports), message["total"])
    except WorkerFailed as error:
        raise CompileFailed("every kernel", ", ".join(targets), str(error)) from error
    return reports
