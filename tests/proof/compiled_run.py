"""Runs the tests of kernels, and random programs, on what several versions of Triton compile, without a GPU.

    python -m tests.proof.compiled_run                   with the oldest supported version, the installed and the newest
    python -m tests.proof.compiled_run installed         with the installed one; the same as `make compiled`

All tests of tests/kernels run with all warps in step, then random programs of a manager in four orders of warps. Bounds
and races are checked at every access. Ends with 1 if a test fails, a program differs from its model, or an op was never
launched. Versions that are not installed are first installed into build/triton/<version>.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from memstate.kernels.dispatch import OPS
from tests.proof.compile_matrix import VERSIONS, folder_of, versions_of
from tests.support.compiled_runs import Told, run

TESTS = "tests/kernels"
ORDERS = ("together", "warps", "backwards", "1")  # 1: a seed of a random order
OPERATIONS = 500  # of the random programs, in each order


def runs_of(version: str, workers: int, tests: Sequence[str], operations: int) -> list[tuple[str, Told]]:
    """Returns (order of warps, what was told) of each run with a version of Triton: first of the tests."""
    folder = folder_of(version)
    path = os.pathsep.join(filter(None, (str(folder or ""), os.environ.get("PYTHONPATH", ""))))
    runs = [(ORDERS[0], "tests", *tests), *((order, "programs", str(operations)) for order in ORDERS)]
    with ThreadPoolExecutor(workers) as pool:
        told = pool.map(lambda one: run(*one, variables={"PYTHONPATH": path}), runs)
        return [(one[0], each) for one, each in zip(runs, told, strict=True)]


def lines_of(runs: Sequence[tuple[str, Told]]) -> Iterator[str]:
    """Yields what to print about the runs with one version: each run, then all of them."""
    for number, (order, told) in enumerate(runs):
        what = f"operations, {len(told.failed)} differences" if number else (
            f"tests passed, {len(told.failed)} failed, {told.skipped} skipped"
        )  # fmt: skip
        counts = f"{sum(told.kernels.values())} launches of {len(told.kernels)} kernels, {told.seconds:.0f} CPU s"
        yield f"{order}: {told.passed} {what}, {counts}"
        yield from (f"{order}: {line}" for line in told.failed)
    launched = len(OPS) - len(missing(runs))
    yield f"{sum(told.seconds for _, told in runs):.0f} CPU s, {launched} of {len(OPS)} ops launched"
    yield from (f"never launched: {', '.join(ops)}" for ops in [missing(runs)] if ops)


def missing(runs: Sequence[tuple[str, Told]]) -> list[str]:
    """Returns the ops of which no run launched a kernel."""
    launched = {op for _, told in runs for op, calls in told.ops.items() if calls}
    return [op for op in OPS if op not in launched]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints lines for each version. Returns 1 if one of them fails, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.compiled_run", description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, metavar="VERSION",
        help=f"a version of Triton, `installed` or `newest`; without any: {' '.join(VERSIONS)}",
    )  # fmt: skip
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of random programs, in each order of warps")
    parser.add_argument("--tests", nargs="+", default=[TESTS], metavar="TEST", help="files or tests")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    given = parser.parse_args(arguments)

    bad = False
    for version in versions_of(given.versions):
        runs = runs_of(version, given.workers, given.tests, given.operations)
        print("\n".join(f"Triton {version}: {line}" for line in lines_of(runs)), flush=True)
        bad |= bool(missing(runs)) or any(told.failed or not told.passed for _, told in runs)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
